"""Services of a demo or an example under the supervisor, and the policy version that they serve.

Invariant: when the context ends, no process runs and no port is in use; nothing is restarted, since figures of a run would hide a crash.
"""

from __future__ import annotations

import asyncio
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from collector.otelcol import VARIABLE
from commands.demo.settings import SETTINGS
from spangrad.errors import SpangradError
from spangrad.processes import dying_with_parent, own_command
from spangrad.settings import Settings
from spangrad.supervisor.launcher import launch_without_settings
from spangrad.supervisor.service import ServiceSpec
from spangrad.supervisor.supervisor import Supervisor
from spangrad.supervisor.training_services import training_services
from trainer.publish.publisher import Publisher

MODEL_TIMEOUT_SECONDS = 900
STEP_TIMEOUT_SECONDS = 120
_POLL_SECONDS = 0.05


def make_model(command: Sequence[str], directory: Path) -> None:
    """Run the command that makes a model, with its log in a run directory.

    Raises:
        SpangradError: the command failed.
    """
    file = directory / "logs" / "model.log"
    file.parent.mkdir(exist_ok=True)
    with file.open("wb") as log:
        try:
            subprocess.run(dying_with_parent(command), stdout=log, stderr=subprocess.STDOUT, timeout=MODEL_TIMEOUT_SECONDS, check=True)
        except subprocess.SubprocessError as error:
            raise SpangradError(f"the model could not be made ({error}); see {file}") from None


class TrainingSupervisor(Supervisor):
    """Supervisor of a run's services, which knows the policy version that they serve."""

    def __init__(
        self,
        directory: Path,
        settings: Settings,
        on_event: Callable[[str], None],
        otelcol: str | None = None,
        further_engines: Mapping[str, str] | None = None,
        model: Sequence[str] = (),
        further_trainers: Sequence[str] = (),
    ) -> None:
        """Store the services of a run, which read the settings file in its directory; `start` starts them.

        Args:
            directory: run directory.
            settings: the settings in its file.
            on_event: called with a line of text about each change.
            otelcol: path of the Collector's program. None: spans are sent to the store directly.
            further_engines: engines beside the policy's, to which the trainer publishes nothing: name of a settings file in `directory` ->
                URL of the engine.
            model: command that makes the model, beside what does not need one. Empty: it is made already.
            further_trainers: names of the settings files of those among them whose policies are trained as well.
        """
        logs = directory / "logs"
        services = list(training_services(settings, logs, ["--config", str(directory / SETTINGS)]))
        for file, url in (further_engines or {}).items():
            name = f"engine-{Path(file).stem}"
            command = tuple(own_command("engine", "--config", str(directory / file)))
            services.append(ServiceSpec(name, command, logs / f"{name}.log", f"{url}/health", ("store",)))
        for file in further_trainers:
            name = f"train-{Path(file).stem}"
            command = tuple(own_command("train", "--follow", "--config", str(directory / file)))
            services.append(ServiceSpec(name, command, logs / f"{name}.log", None, ("store",), may_finish=True))
        one_thread = {"OMP_NUM_THREADS": "1"}
        services = [replace(service, env=one_thread) if service.name.startswith("train") else service for service in services]
        if model:
            maker = ServiceSpec("model", tuple(model), logs / "model.log", ends=True)
            # The engine's start is the longest of all; it needs no store.
            needs = {"engine": ("model",), "train": ("store", "model")}
            services = [maker, *(replace(service, needs=needs.get(service.name, service.needs)) for service in services)]
        if otelcol is not None:
            services = [replace(service, needs=("collector",)) if service.needs == ("store",) else service for service in services]
            health = f"http://127.0.0.1:{settings.collector.health_port}"
            command = tuple(own_command("collector", "--config", str(directory / SETTINGS)))
            services.append(ServiceSpec("collector", command, logs / "collector.log", health, ("store",), {VARIABLE: otelcol}))
        super().__init__(services, on_event, launch=launch_without_settings)
        self.directory = directory
        self._gateway = settings.gateway

    def served(self, policy: str | None = None) -> int:
        """Return the version of a policy (None: the gateway's own) that the gateway serves, or -1 while it serves none.

        Raises:
            SpangradError: a service died.
        """
        self.check()
        version = Publisher(self._gateway).served(policy or self._gateway.policy)
        return -1 if version is None else version

    async def wait_for_version(self, version: int, policy: str | None = None) -> None:
        """Wait until the gateway serves this version of a policy (None: its own), or a newer one.

        Raises:
            SpangradError: a service died, or the version is not served after STEP_TIMEOUT_SECONDS.
        """
        end = time.monotonic() + STEP_TIMEOUT_SECONDS
        while self.served(policy) < version:
            if time.monotonic() > end:
                logs = self.directory / "logs"
                raise SpangradError(
                    f"version {version} was not served within {STEP_TIMEOUT_SECONDS} s. Look into {logs}/build.log and train.log."
                )
            await asyncio.sleep(_POLL_SECONDS)
