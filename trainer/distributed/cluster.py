"""Ray cluster of the trainer: a private one on this machine, or a connection to an existing one, and placement groups in it.

In: trainer.workers.per_node, trainer.workers.nodes, trainer.workers.ray_address. Out: one placement group per node, with a CPU and, where
there are GPUs, a GPU per worker. Invariant: a private cluster listens on loopback alone, requires a token that only this process knows,
sends no statistics, and ends with the object that began it, or with this process however that ends.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import shutil
import tempfile
from collections.abc import Generator
from pathlib import Path
from typing import Any

from spangrad.errors import TrainerError
from spangrad.ray_connection import connect_to_ray, first_line, signals_kept
from spangrad.settings import TrainerSettings

logger = logging.getLogger(__name__)

_SHORT = "/tmp"
"""Short parent directory: Ray's sockets are 80 characters deeper, and a socket's path has at most 107."""
_OBJECT_STORE_BYTES = 2**28
"""Shared memory of a cluster that is started here: for the rows of a batch, not for weights."""
_STARTS = 3
"""Largest number of attempts to start a cluster."""
_PLACE_SECONDS = 60.0
"""Longest wait for workers' resources that other processes hold, in seconds."""
_TOKEN = secrets.token_hex(32)
"""Token of private clusters. Ray reads it once per process, and writes one under the home directory where it finds none."""
_OWN_CLUSTER_VARIABLES = {
    "RAY_AUTH_TOKEN": _TOKEN,
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # on any system: listen on loopback, not on every interface
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_enable_metrics_collection": "0",
    "RAY_enable_worker_prestart": "0",  # workers have environments of their own: prestarted ones would never be used
    "RAY_prestart_worker_first_driver": "0",
    "RAY_worker_niceness": "0",  # ranks have this process's priority: at Ray's 15, what runs beside them on the machine would starve them
}


class Cluster:
    """Ray cluster, connected to this process until `close`."""

    def __init__(self, settings: TrainerSettings) -> None:
        """Connect to trainer.workers.ray_address, or to the cluster that this process has started already, or start one.

        Raises:
            TrainerError: Ray cannot be started, or none answers at the address, or it refuses this process without its token.
        """
        import ray

        self._settings = settings
        self._groups: list[Any] = []
        self.own = settings.workers.ray_address is None
        """True if its workers are all on this machine."""
        self._began = not ray.is_initialized()
        self.directory: Path | None = Path(tempfile.mkdtemp(prefix="ray-", dir=_SHORT)) if self._began and self.own else None
        """Directory of the logs of a cluster that was started here, until it is closed. None: no cluster was started here."""
        if not self._began:
            return
        try:
            with _environment(self.own):
                self._begin(_STARTS if self.own else 1)
        except Exception as error:  # Ray has no family of errors for this
            self.close()
            raise TrainerError(_refused(settings.workers.ray_address, error)) from error
        except BaseException:
            self.close()
            raise

    def _begin(self, attempts: int) -> None:
        """Connect; restart a private cluster where a busy machine took longer than Ray's limit of 30 s."""
        import ray

        own: dict[str, Any] = {
            "include_dashboard": False,
            "num_cpus": self._settings.workers.per_node,
            "object_store_memory": _OBJECT_STORE_BYTES,
            "_temp_dir": str(self.directory),
        }
        address = self._settings.workers.ray_address
        try:
            if address is None:
                with signals_kept():
                    ray.init(address="local", log_to_driver=False, logging_level=logging.ERROR, **own)
            else:
                connect_to_ray(address)
        except Exception as error:
            self._kill_remains()
            if attempts == 1:
                raise
            logger.warning("Ray did not start (%s): once more", first_line(error))
            self._begin(attempts - 1)

    def _kill_remains(self) -> None:
        """Kill the processes of a failed start, which Ray would end only with this process."""
        import psutil

        begun = list[psutil.Process]()
        for child in psutil.Process().children():
            with contextlib.suppress(psutil.NoSuchProcess):  # it has ended
                if self.directory and any(str(self.directory) in word for word in child.cmdline()):
                    begun += [*child.children(recursive=True), child]
        for process in begun:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()

    @property
    def device(self) -> str:
        """Return the ranks' device: cuda where a node has a GPU, else cpu."""
        return "cuda" if self._kind == "GPU" else "cpu"

    @property
    def _nodes(self) -> list[dict[str, float]]:
        import ray

        return [node["Resources"] for node in ray.nodes() if node["Alive"]]

    @property
    def _kind(self) -> str:
        return "GPU" if any(node.get("GPU", 0) for node in self._nodes) else "CPU"

    def require_room(self) -> None:
        """Raise where the cluster is too small for the workers, even with all of its resources free.

        Raises:
            TrainerError: it is.
        """
        settings, kind = self._settings, self._kind
        counts = [node.get(kind, 0) for node in self._nodes]
        if sum(count >= settings.workers.per_node for count in counts) < settings.workers.nodes:
            raise TrainerError(
                f"trainer.workers.nodes = {settings.workers.nodes} with trainer.workers.per_node = {settings.workers.per_node} needs as "
                f"many nodes with that many {kind}s each, and the {kind}s of this Ray cluster's nodes are "
                f"{', '.join(f'{count:g}' for count in counts)}. Lower the two, or add nodes (docs/start/scaling.md)."
            )

    def reserve(self) -> list[Any]:
        """Reserve resources for each worker; return placement groups, one per node, in the order of the nodes' addresses.

        Raises:
            TrainerError: the cluster does not have enough resources.
        """
        from ray.util.placement_group import placement_group
        from verl.single_controller.ray.base import sort_placement_group_by_node_ip

        settings = self._settings
        bundle = {"CPU": 1.0, **({"GPU": 1.0} if self._kind == "GPU" else {})}
        for _ in range(settings.workers.nodes):
            self._groups.append(placement_group([dict(bundle) for _ in range(settings.workers.per_node)], strategy="STRICT_PACK"))
        for group in self._groups:
            if not group.wait(_PLACE_SECONDS):
                raise TrainerError(
                    f"the Ray cluster had no place for {settings.workers.per_node} workers a node on {settings.workers.nodes} nodes for "
                    f"{_PLACE_SECONDS:g} "
                    "s: other processes hold it (`ray status` lists them). Wait for their end, or lower trainer.workers.per_node."
                )
        return sort_placement_group_by_node_ip(self._groups)

    def close(self, *, keep_logs: bool = False) -> None:
        """Release the resources, and stop the cluster if it was started here; with `keep_logs` its directory stays."""
        import ray
        from ray.util.placement_group import remove_placement_group

        if ray.is_initialized():
            while self._groups:
                with contextlib.suppress(Exception):  # a cluster that is gone holds no resources
                    remove_placement_group(self._groups.pop())
            if self._began:
                ray.shutdown()
                self._began = False  # another one may be begun before this is closed again
        if self.directory and not keep_logs:
            shutil.rmtree(self.directory, ignore_errors=True)


def _refused(address: str | None, error: Exception) -> str:
    reason = first_line(error)
    if address is None:
        return f"Ray did not start on this machine ({reason}). trainer.workers.per_node = 0 trains without it."
    return (
        f"no Ray cluster let this trainer in at trainer.workers.ray_address = {address!r} ({reason}). Start one with `ray start --head`, "
        "and give this process its token (RAY_AUTH_TOKEN_PATH or ~/.ray/auth_token, docs/start/scaling.md)."
    )


@contextlib.contextmanager
def _environment(own: bool) -> Generator[None]:
    """Set the environment variables for Ray's processes, and restore it afterwards, so that later processes do not inherit them."""
    if not own:
        yield
        return
    from ray._private import ray_constants

    before = {name: os.environ.get(name) for name in (*_OWN_CLUSTER_VARIABLES, "RAY_AUTH_MODE")}
    os.environ.update(_OWN_CLUSTER_VARIABLES)
    everywhere, ray_constants.ENABLE_RAY_CLUSTER = ray_constants.ENABLE_RAY_CLUSTER, False  # verl may have imported Ray before
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = everywhere
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
