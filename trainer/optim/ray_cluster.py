"""Ray as the trainer needs it: a cluster of its own on this machine, or a connection to one that others started, and places in it.

In: trainer.workers, trainer.nodes, trainer.ray_address. Out: one placement group a node, with a CPU and, where there are GPUs, a GPU a
worker. Invariant: a cluster of its own listens on loopback alone, asks for a token that nobody else knows, sends no statistics, and ends
with the object that began it, or with this process however that ends.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import shutil
import signal
import tempfile
import threading
from collections.abc import Generator
from pathlib import Path
from typing import Any

from spangrad.errors import TrainerError
from spangrad.settings import TrainerSettings

logger = logging.getLogger(__name__)

_SHORT = "/tmp"
"""Ray's sockets lie 80 characters deeper, and their paths may have 107."""
_STARTS = 3
"""How often a cluster is begun before it is given up."""
_PLACE_SECONDS = 60.0
"""How long workers' places may be taken by somebody else's."""
_TOKEN = secrets.token_hex(32)
"""Ray reads its token once a process, and writes one under the home directory where it finds none."""
_OWN = {
    "RAY_AUTH_TOKEN": _TOKEN,
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # on any system: listen on loopback, not on every interface
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_enable_metrics_collection": "0",
    "RAY_enable_worker_prestart": "0",  # workers have environments of their own: those that stand by would serve nobody
    "RAY_prestart_worker_first_driver": "0",
}


class Cluster:
    """Ray, initialised in this process until `close`."""

    def __init__(self, settings: TrainerSettings) -> None:
        """Connect to trainer.ray_address, or to the Ray that this process has begun already, or begin one.

        Raises:
            TrainerError: Ray cannot be begun, or there is none at the address, or it lets nobody in without its token.
        """
        import ray

        self._settings = settings
        self._groups: list[Any] = []
        self.own = settings.ray_address is None
        """Whether its workers are all on this machine."""
        self._began = not ray.is_initialized()
        self.directory: Path | None = Path(tempfile.mkdtemp(prefix="ray-", dir=_SHORT)) if self._began and self.own else None
        """Where the logs of a cluster that was begun here lie, until it is closed. None: nothing was begun here."""
        if not self._began:
            return
        try:
            with _signals_kept(), _environment(self.own):
                self._begin(_STARTS if self.own else 1)
        except Exception as error:  # Ray has no family of errors for this
            self.close()
            raise TrainerError(_refused(settings.ray_address, error)) from error
        except BaseException:
            self.close()
            raise

    def _begin(self, tries: int) -> None:
        """Connect; a cluster of its own is begun again where a busy machine took longer than the 30 s that Ray gives it."""
        import ray

        own = {
            "include_dashboard": False,
            "num_cpus": self._settings.workers,
            "object_store_memory": self._settings.ray_object_store_bytes,
            "_temp_dir": str(self.directory),
        }
        address = self._settings.ray_address or "local"
        try:
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, **(own if self.own else {}))
        except Exception as error:
            self._end_rest()
            if tries == 1:
                raise
            logger.warning("Ray did not start (%s): once more", _first_line(error))
            self._begin(tries - 1)

    def _end_rest(self) -> None:
        """End what a failed start has left: Ray would only when this process ends."""
        import psutil

        begun = [
            one for one in psutil.Process().children() if self.directory and any(str(self.directory) in word for word in one.cmdline())
        ]
        for one in [inner for top in begun for inner in (*top.children(recursive=True), top)]:
            one.kill()

    def place(self) -> tuple[list[Any], str]:
        """Reserve a place for each worker: placement groups, one a node; and what workers compute on, cuda or cpu.

        Raises:
            TrainerError: the cluster does not have as many.
        """
        import ray
        from ray.util.placement_group import placement_group

        settings, nodes = self._settings, [one["Resources"] for one in ray.nodes() if one["Alive"]]
        kind = "GPU" if any(one.get("GPU", 0) for one in nodes) else "CPU"
        fitting = [one for one in nodes if one.get(kind, 0) >= settings.workers]
        if len(fitting) < settings.nodes:
            found = ", ".join(f"{one.get(kind, 0):g}" for one in nodes)
            raise TrainerError(
                f"trainer.nodes = {settings.nodes} with trainer.workers = {settings.workers} needs as many nodes with that many {kind}s "
                f"each, and the {kind}s of this Ray cluster's nodes are {found}. Lower the two, or add nodes (docs/cluster.md)."
            )
        bundle = {"CPU": 1.0, **({"GPU": 1.0} if kind == "GPU" else {})}
        for _ in range(settings.nodes):
            self._groups.append(placement_group([dict(bundle) for _ in range(settings.workers)], strategy="STRICT_PACK"))
        for group in self._groups:
            if not group.wait(_PLACE_SECONDS):
                raise TrainerError(
                    f"the Ray cluster had no place for {settings.workers} workers a node on {settings.nodes} nodes for {_PLACE_SECONDS:g} "
                    "s: somebody else holds it (`ray status` says who). Wait for their end, or lower trainer.workers."
                )
        return self._groups, "cuda" if kind == "GPU" else "cpu"

    def close(self, *, keep_logs: bool = False) -> None:
        """Give the places back, and end what was begun here.

        Args:
            keep_logs: leave `directory` where it is.
        """
        import ray
        from ray.util.placement_group import remove_placement_group

        if ray.is_initialized():
            while self._groups:
                with contextlib.suppress(Exception):  # a cluster that is gone holds no places
                    remove_placement_group(self._groups.pop())
            if self._began:
                ray.shutdown()
                self._began = False  # another one may be begun before this is closed again
        if self.directory and not keep_logs:
            shutil.rmtree(self.directory, ignore_errors=True)


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0]


def _refused(address: str | None, error: Exception) -> str:
    told = _first_line(error)
    if address is None:
        return f"Ray did not start on this machine ({told}). trainer.workers = 0 trains without it."
    return (
        f"no Ray cluster let this trainer in at trainer.ray_address = {address!r} ({told}). Start one with `ray start --head`, and give "
        "this process its token (RAY_AUTH_TOKEN_PATH or ~/.ray/auth_token, docs/cluster.md)."
    )


@contextlib.contextmanager
def _environment(own: bool) -> Generator[None]:
    """What Ray's processes read as they start; what this process starts later is not to inherit it."""
    if not own:
        yield
        return
    from ray._private import ray_constants

    before = {name: os.environ.get(name) for name in (*_OWN, "RAY_AUTH_MODE")}
    os.environ.update(_OWN)
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


@contextlib.contextmanager
def _signals_kept() -> Generator[None]:
    """Ray takes SIGTERM for itself: give it back."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = signal.getsignal(signal.SIGTERM)
    try:
        yield
    except SystemExit:  # by Ray's handler, of a signal that was meant for ours
        signal.signal(signal.SIGTERM, handler)
        signal.raise_signal(signal.SIGTERM)
        raise
    finally:
        signal.signal(signal.SIGTERM, handler)
