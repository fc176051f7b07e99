"""Workers as processes under Ray: verl's RayWorkerGroup of `trainer.optim.rank.Rank`, and the handling of their failures.

In: calls of the optimizer. Out: the ranks' results. Invariant: every call ends. An error that all ranks raise (the logprob check, a state
that cannot be read) is raised here once, and they stay as before; where one died, or failed alone, while the others wait for it in a
collective, all of them are ended, and the error names the rank and the cause.

Rows go through Ray's object store, by verl's own dispatch; weights and states do not: workers read and write them as files, which are where
every node sees them.
"""

from __future__ import annotations

import logging
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spangrad.errors import SpangradError, TrainerError
from spangrad.settings import TrainerSettings
from trainer.optim.process import prepare_process, quiet, worker_environment
from trainer.optim.ray_cluster import Cluster
from trainer.publish.lora import weights_file
from trainer.sft.objective import Objective

logger = logging.getLogger(__name__)

_LOOK_SECONDS = 1.0
"""Longest uninterrupted wait of a call, in seconds, so that signals are handled."""
_FILES = "files"
"""Ray's name of the threads that write files."""
_SETTLE_SECONDS = 20.0
"""Time after one rank's failure in which the others must end the call, in seconds; after it they count as stuck."""


class RayWorkers:
    """Workers of trainer.workers.per_node ranks on each of trainer.workers.nodes nodes."""

    def __init__(self, model: Path, settings: TrainerSettings, objective: Objective | None = None) -> None:
        """Start the ranks and load their models.

        Raises:
            TrainerError: Ray has no resources for them, or one died or failed.
        """
        self._settings, self._group, self._failed = settings, None, False
        with quiet():
            prepare_process()
            self._cluster = Cluster(settings)
        try:
            with quiet():
                placement_groups, self.device = self._cluster.reserve()
                self._group = _group(model.absolute(), settings, objective, placement_groups, self.device, self._cluster.own)
            self.everywhere("join", self.device, self._rendezvous())
            self.everywhere("load", self.device)
            self.size = self._learn_dispatch()
        except BaseException:
            self.close()
            raise

    def everywhere(self, method: str, *arguments: object) -> Any:
        """Call a method on every rank; return the first rank's result."""
        from verl.single_controller.base.decorator import dispatch_one_to_all

        partitioned, _ = dispatch_one_to_all(self._alive_workers(), *arguments)
        return self._call(method, partitioned)[0]

    def by_rows(self, method: str, rows: Any) -> Any:
        """Call a method on every rank with its part of the rows; return the concatenated results."""
        from verl.single_controller.base.decorator import collect_lazy_compute_data_proto, dispatch_lazy_compute_data_proto

        from trainer.optim.rank import MESH

        group = self._alive_workers()
        partitioned, _ = dispatch_lazy_compute_data_proto(MESH, group, rows)
        return collect_lazy_compute_data_proto(MESH, group, self._call(method, partitioned))

    def write(self, directory: Path) -> None:
        """Have the first rank write what it has collected, beside other calls; from any thread.

        Raises:
            OSError, SafetensorError: it could not.
            TrainerError: it died, or failed.
        """
        import ray
        from ray.exceptions import RayTaskError
        from safetensors import SafetensorError

        call = self._alive_workers().execute_rank_zero_async("write", directory)
        while not ray.wait([call], timeout=_LOOK_SECONDS)[0]:
            pass
        error = _failure(call)
        if isinstance(error, RayTaskError) and isinstance(error.cause, OSError | SafetensorError):
            raise error.cause
        if error:
            raise TrainerError(
                f"worker 0 could not write a checkpoint to {directory} ({type(error).__name__}: {error}). The batch is trained again at "
                "the next start."
            ) from error

    def weights(self) -> Iterator[tuple[str, NDArray[np.float32]]]:
        """Yield the policy's parameters by name; they are transferred through a file."""
        from safetensors.numpy import load_file

        shared = None if self._cluster.own else self._settings.directory.absolute()
        if shared:
            shared.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".weights-", dir=shared) as directory:
            self.everywhere("save_weights", Path(directory))
            yield from load_file(Path(directory) / weights_file(self._settings)).items()

    def close(self) -> None:
        """End the ranks, and Ray if it was started for them."""
        import ray

        if self._group and ray.is_initialized():
            for actor in self._group.workers:
                ray.kill(actor)
        self._group = None
        self._cluster.close(keep_logs=self._failed)

    def _alive_workers(self) -> Any:
        if self._group is None:
            raise TrainerError("the trainer's workers have ended: the call is not done. Start `spangrad train` again.")
        return self._group

    def _learn_dispatch(self) -> int:
        """Set verl's mapping of ranks to parts of the rows; return the number of parts. Verl's own query would not handle signals."""
        from verl.single_controller.base.decorator import dispatch_one_to_all

        from trainer.optim.rank import MESH

        group = self._alive_workers()
        partitioned, _ = dispatch_one_to_all(group, MESH)
        group._dispatch_info[MESH] = self._call("_query_dispatch_info", partitioned)
        group._collect_info[MESH] = self._call("_query_collect_info", partitioned)
        return max(group._dispatch_info[MESH]) + 1

    def _rendezvous(self) -> str:
        """Return the URL at which ranks meet: a file where all of them are on this machine, else a port of the first one's node."""
        if self._cluster.directory:
            return f"file://{self._cluster.directory}/meeting-{uuid.uuid4().hex}"
        return str(self.everywhere("rendezvous_address"))

    def _call(self, method: str, partitioned: Any) -> list[Any]:
        """Start a call on every rank and wait for all.

        Raises:
            TrainerError: a rank died, or failed.
            SpangradError: the ranks raised it.
            OSError: the same.
        """
        import ray

        calls = self._alive_workers().execute_all_async(method, *partitioned)
        pending = list(calls)
        while pending:
            done, pending = ray.wait(pending, num_returns=1, timeout=_LOOK_SECONDS)
            if any(_failure(call) for call in done):
                _, pending = ray.wait(calls, num_returns=len(calls), timeout=_SETTLE_SECONDS)
                self._raise(method, calls, stuck=pending)
        return ray.get(calls)

    def _raise(self, method: str, calls: list[Any], *, stuck: list[Any]) -> None:
        from ray.exceptions import RayTaskError

        failures = {rank: _failure(call) for rank, call in enumerate(calls) if call not in stuck}
        failures = {rank: error for rank, error in failures.items() if error}
        dead = {rank: error for rank, error in failures.items() if not isinstance(error, RayTaskError)}
        causes = {rank: error.cause for rank, error in failures.items() if isinstance(error, RayTaskError)}
        known = next((cause for cause in causes.values() if isinstance(cause, SpangradError | OSError)), None)
        if known and not dead:
            if stuck:
                self.close()
            raise known
        self._failed = True
        rank, error = next(iter((dead or causes).items()))
        outcome = "died" if dead else f"failed ({type(error).__name__}: {error})"
        logs = f" Its log lies in {self._cluster.directory}." if self._cluster.directory else ""
        self.close()
        raise TrainerError(
            f"worker {rank} of {len(calls)} {outcome} in `{method}`, and the others were ended. The batch is trained again at the next "
            f"start.{logs} Where memory was short, lower trainer.max_tokens_per_device."
        ) from error


def _failure(call: Any) -> BaseException | None:
    """Return Ray's error of a finished call. None: it succeeded."""
    import ray
    from ray.exceptions import RayError

    try:
        ray.get(call)
    except RayError as error:
        return error
    return None


def _group(model: Path, settings: TrainerSettings, objective: Objective | None, placement_groups: list[Any], device: str, own: bool) -> Any:
    """Return verl's worker group, one rank per reserved place."""
    import ray
    from verl.single_controller.ray.base import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup, sort_placement_group_by_node_ip

    from trainer.optim.rank import Rank

    class Group(RayWorkerGroup):
        """Worker group whose ranks meet by `Rank.join`: verl would start a process of Ray's to find a port."""

        def _get_master_addr_port(self, *_: object, **__: object) -> None:
            self._master_addr, self._master_port = "127.0.0.1", "0"

    reference = settings.loss.reference
    everywhere = {
        "model": settings.model and settings.model.absolute(),
        "loss": settings.loss.model_copy(update={"reference": reference and reference.absolute()}),
    }
    # Files are written in a thread of their own, beside the passes of the next step.
    ray.method(concurrency_group=_FILES)(Rank.write)
    pool = RayResourcePool([settings.workers.per_node] * settings.workers.nodes, use_gpu=False, max_colocate_count=1)
    pool.pgs = sort_placement_group_by_node_ip(placement_groups)
    rank = RayClassWithInitArgs(ray.remote(concurrency_groups={_FILES: 1})(Rank), model, settings.model_copy(update=everywhere), objective)
    rank.update_options({"num_cpus": 1, "num_gpus": 1 if device == "cuda" else 0})  # verl would ask the platform of this process
    return Group(pool, rank, device_name=device, worker_env=worker_environment(device, own=own))
