"""The demo's processes, started, checked and stopped together: store, optional collector, engine, gateway, builder and trainer.

In: a run directory and settings. Out: running services. Invariant: when the context ends, no process runs and no port is in use.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import cast

from pydantic import SecretStr

from collector.otelcol import VARIABLE
from spangrad.errors import SpangradError
from spangrad.processes import Child, answers, die_with_parent, free_ports, own_command, wait_until
from spangrad.settings import Settings
from spangrad.settings.sources import Origin
from trainer.publish.publisher import Publisher

CHECKOUT = Path(__file__).resolve().parents[2]
"""Root of the checkout, in which `make setup` installs vLLM's virtual environment."""
MARKER = ".spangrad-run"
SETTINGS = "spangrad.toml"
"""Name of the settings file that every service of a run reads, in the run directory."""
MODEL_TIMEOUT_SECONDS = 900
STEP_TIMEOUT_SECONDS = 120
_POLL_SECONDS = 0.05


def clean_directory(directory: Path) -> None:
    """Create a run directory, or empty one that an earlier run created.

    Raises:
        SpangradError: the directory is not empty, and no earlier run created it.
    """
    if directory.exists() and any(directory.iterdir()):
        if not (directory / MARKER).exists():
            raise SpangradError(f"{directory} is not empty and no earlier run made it. Name another --directory.")
        shutil.rmtree(directory)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / MARKER).touch()


def store_and_gateway(directory: Path, ports: Sequence[int]) -> dict[str, object]:
    """Return settings of a store and a gateway, by dotted key: on the four given ports, with all files under `directory`."""
    grpc, http, sql, gateway = ports
    return {
        "store.path": str(directory / "store"),
        "store.otlp_grpc_port": grpc,
        "store.otlp_http_port": http,
        "store.clickhouse_port": sql,
        "store.url": f"http://127.0.0.1:{sql}",
        "store.otlp_endpoint": f"http://127.0.0.1:{http}",
        "gateway.port": gateway,
        "gateway.url": f"http://127.0.0.1:{gateway}",
        "gateway.spill_path": str(directory / "gateway-spill"),
    }


def demo_settings(directory: Path, *, seed: int, group_size: int) -> dict[str, object]:
    """Return the demo's settings, by dotted key: free ports, all files under `directory`, and the task's hyperparameters."""
    *ports, engine = free_ports(5)
    return {
        **store_and_gateway(directory, ports),
        "gateway.engine_url": f"http://127.0.0.1:{engine}",
        "engine.port": engine,
        "engine.python": str(CHECKOUT / ".venv-vllm" / "bin" / "python"),
        "engine.model": str(directory / "model"),
        "engine.dtype": "float32",
        "engine.max_model_len": 128,
        "engine.kv_cache_bytes": 64 * 2**20,
        "engine.enforce_eager": True,
        "engine.cache_dir": str(directory.parent / ".vllm-cache"),
        "engine.extra_args": ["--seed", str(seed)],
        "builder.poll_seconds": 0.1,
        "builder.selection": {"policies": "policy"},
        "builder.rules": [{"name": "tool_error", "kind": "tool_error", "reward": -0.2, "tools": ["weather", "clock"]}],
        "trainer.run_id": "demo",
        "trainer.model": str(directory / "model"),
        "trainer.directory": str(directory / "policies"),
        "trainer.groups_per_batch": 4,
        "trainer.credit": "reward_to_go",
        "trainer.baseline": "turn",
        "trainer.learning_rate": 1e-3,
        "trainer.poll_seconds": 0.05,
        "runner.run_id": "demo",
        "runner.directory": str(directory / "runner"),
        "runner.group_size": group_size,
        "runner.workers": 1,
        "runner.concurrency": 64,
    }


def collector_settings(directory: Path) -> dict[str, object]:
    """Return the settings that put the real Collector in front of the store, by dotted key: every exporter of spans sends to it."""
    grpc, http, health, zpages = free_ports(4)
    return {
        "collector.otlp_grpc_port": grpc,
        "collector.otlp_http_port": http,
        "collector.health_port": health,
        "collector.zpages_port": zpages,
        "collector.queue_path": str(directory / "collector"),
        "store.otlp_endpoint": f"http://127.0.0.1:{http}",
    }


def direct_mode_settings(*, otelcol: bool) -> dict[str, object]:
    """Return the settings of direct mode, by dotted key: the agent calls vLLM without the gateway.

    No gateway counts the calls then, so a rollout is complete once no span of it has arrived for a while. An attempt's spans are accepted
    before its root span is sent: the store inserts them at once, the Collector forwards them in batches.
    """
    return {"runner.gateway": False, "builder.quiet_seconds": 3 if otelcol else 0.5}


def write_settings(path: Path, origins: Iterable[Origin]) -> None:
    """Write the settings that are not defaults as a TOML file that any command can read; None is written as the text `null`."""
    sections: dict[str, list[str]] = {}
    for origin in origins:
        if origin.source != "default":
            section, name = origin.key.split(".", 1)
            sections.setdefault(section, []).append(f"{name} = {_toml('null' if origin.value is None else origin.value)}")
    path.touch(mode=0o600)  # it may hold tokens
    path.write_text("\n".join(f"[{section}]\n" + "\n".join(lines) + "\n" for section, lines in sections.items()))


def _toml(value: object) -> str:
    """Return a value in TOML syntax: strings, numbers, booleans and paths as JSON, tables inline without the fields that are None."""
    if isinstance(value, Mapping):
        table = cast("Mapping[str, object]", value)
        return "{" + ", ".join(f"{json.dumps(name)} = {_toml(item)}" for name, item in table.items() if item is not None) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_toml, cast("Iterable[object]", value))) + "]"
    return json.dumps(value, default=_plain)


def _plain(value: object) -> str:
    return value.get_secret_value() if isinstance(value, SecretStr) else str(value)


class DemoServices:
    """The running services of one demo."""

    def __init__(
        self,
        directory: Path,
        settings: Settings,
        on_progress: Callable[[str], None],
        otelcol: str | None,
        further_engines: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """Store the arguments; `start` starts the services.

        Args:
            directory: run directory, which already holds `spangrad.toml`.
            settings: the settings in that file.
            on_progress: called with a line of text about the service that is being started.
            otelcol: path of the Collector's program. None: spans are sent to the store directly.
            further_engines: engines beside the policy's, to which the trainer publishes nothing: name of a settings file in `directory` ->
                URL of the engine.
        """
        self.further_engines = further_engines
        self.directory = directory
        self.settings = settings
        self.on_progress = on_progress
        self.otelcol = otelcol
        self.children: list[Child] = []

    def __enter__(self) -> DemoServices:
        """Start nothing yet, so that `__exit__` stops the services even if `start` fails halfway."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Stop all services, the last started first."""
        for child in reversed(self.children):
            child.stop()

    def start(self, make_model: list[str]) -> None:
        """Make the model, start every service and wait until the gateway has admitted the engine."""
        self.on_progress("starting the span store")
        store = self._spawn("store")
        wait_until(lambda: answers(f"{self.settings.store.url}/ping"), 60, "the span store", [store])
        if self.otelcol:
            self.on_progress("starting the OpenTelemetry Collector")
            self._spawn("collector", env={VARIABLE: self.otelcol})
            wait_until(lambda: answers(f"http://127.0.0.1:{self.settings.collector.health_port}"), 60, "the collector", self.children)
        self.on_progress("making the tiny model")
        with (self.directory / "logs" / "model.log").open("wb") as log:
            try:
                subprocess.run(
                    make_model, stdout=log, stderr=subprocess.STDOUT, timeout=MODEL_TIMEOUT_SECONDS, preexec_fn=die_with_parent, check=True
                )
            except subprocess.SubprocessError as error:
                log_file = self.directory / "logs" / "model.log"
                raise SpangradError(f"the model could not be made ({error}); see {log_file}") from None
        self.on_progress("starting vLLM, the gateway, the builder and the trainer")
        self._spawn("engine")
        for config in self.further_engines:
            self._spawn("engine", config=config)
        self._spawn("gateway")
        self._spawn("build", "--follow")
        self._spawn("train", "--follow", env={"OMP_NUM_THREADS": "1"})
        for engine in self.further_engines.values():
            wait_until(lambda url=engine: answers(f"{url}/health"), self.settings.engine.start_timeout_seconds, engine, self.children)
        url = f"{self.settings.gateway.url}/readyz"
        wait_until(lambda: answers(url), self.settings.engine.start_timeout_seconds, "the gateway's engine", self.children)

    def check(self) -> None:
        """Raise if a service has died.

        Raises:
            SpangradError: a service died.
        """
        for child in self.children:
            child.check()

    def stop(self, name: str) -> None:
        """Stop the service that runs `spangrad NAME`, and wait until it has ended."""
        for child in self.children:
            if child.name == f"spangrad {name}":
                child.stop()

    def served(self) -> int:
        """Return the policy version that the gateway serves, or -1 while it serves none.

        Raises:
            SpangradError: a service died.
        """
        self.check()
        version = Publisher(self.settings.gateway).served(self.settings.gateway.policy)
        return -1 if version is None else version

    async def wait_for_version(self, version: int) -> None:
        """Wait until the gateway serves this policy version or a newer one.

        Raises:
            SpangradError: a service died, or the version is not served after STEP_TIMEOUT_SECONDS.
        """
        end = time.monotonic() + STEP_TIMEOUT_SECONDS
        while self.served() < version:
            if time.monotonic() > end:
                logs = self.directory / "logs"
                raise SpangradError(
                    f"version {version} was not served within {STEP_TIMEOUT_SECONDS} s. Look into {logs}/build.log and train.log."
                )
            await asyncio.sleep(_POLL_SECONDS)

    def _spawn(self, name: str, *arguments: str, env: Mapping[str, str] | None = None, config: str = SETTINGS) -> Child:
        log = f"{name}.log" if config == SETTINGS else f"{name}-{Path(config).stem}.log"
        child = Child(
            f"spangrad {name}",
            own_command(name, "--config", str(self.directory / config), *arguments),
            self.directory / "logs" / log,
            env,
            inherit_settings=False,
        )
        self.children.append(child)
        return child
