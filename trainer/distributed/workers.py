"""Workers of trainer.workers.per_node ranks on each of trainer.workers.nodes nodes, under Ray and verl's trainer.

In: calls of the optimizer. Out: the ranks' results. Invariant: rows of a step go through TransferQueue; weights and states do not: ranks
read and write them as files, which are where every node sees them. A failure ends all ranks.
"""

from __future__ import annotations

import tempfile
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spangrad.errors import BadRowsError, SpangradError, TrainerError
from spangrad.processes import make_private
from spangrad.ray_connection import first_line
from spangrad.settings import TrainerSettings
from spangrad.weights.shards import TensorSums, added
from trainer.data.batch import Batch
from trainer.distributed.cluster import Cluster
from trainer.optim.phases import StepPhases
from trainer.optim.process import RENDEZVOUS, check_device, choose_platform, quiet, worker_environment
from trainer.optim.verl_config import compose
from trainer.optim.workers import Passed, PassKind
from trainer.publish.lora import weights_file
from trainer.sft.objective import Objective


class DistributedWorkers:
    """Ranks under Ray, with the models of the settings."""

    def __init__(self, model: Path, settings: TrainerSettings, objective: Objective | None = None) -> None:
        """Start the ranks and load their models.

        Raises:
            SettingsError: the settings cannot be carried out.
            TrainerError: Ray has no resources for them, or one died or failed.
        """
        self._settings = settings
        self._trainer: Any = None
        self._has_queue = False
        with quiet():
            choose_platform()
            self._cluster = Cluster(settings)
        try:
            with quiet():
                self._start(model.absolute(), settings, objective)
        except BaseException:
            self.close()
            raise

    def _start(self, model: Path, settings: TrainerSettings, objective: Objective | None) -> None:
        from omegaconf import OmegaConf

        from trainer.distributed.row_queue import RowQueue
        from trainer.distributed.store_trainer import StoreTrainer
        from trainer.distributed.worker_group import RankCalls, worker_group

        self.device = self._cluster.device
        check_device(settings, self.device)
        self._cluster.require_room()  # before the queue's processes and the ranks are started
        environment = worker_environment(self.device, own=self._cluster.own)
        if self._cluster.directory:
            environment[RENDEZVOUS] = f"file://{self._cluster.directory}/meeting-{uuid.uuid4().hex}"
        self._calls = RankCalls(self._cluster.directory, self._end, RowQueue.look)
        controller = None
        if objective is None:
            controller = RowQueue.open(settings.workers.nodes)
            self._has_queue = True
        config = compose(model, _everywhere(settings), self.device, objective)
        OmegaConf.resolve(config)  # verl's trainer takes sections out of it
        self._trainer = StoreTrainer(config, self._cluster, worker_group(self._calls, environment, self.device))
        self._trainer.init()
        self.everywhere("take_charge", controller)
        self.size = self._trainer.data_parallel_size

    def run(self, phases: StepPhases) -> None:
        """Do the phases of a step in verl's trainer.

        Raises:
            BadRowsError: rows fail a check.
            TrainerError: a rank, or the queue of the rows, died or failed.
            SpangradError: a phase raised it.
        """
        trainer = self._alive()
        try:
            trainer.train(phases)
            trainer.replay_buffer.clear()
        except SpangradError as error:
            if isinstance(error, TrainerError) and not isinstance(error, BadRowsError):  # of a rank, or the queue of the rows
                self._end(True)
            elif self._trainer:  # else ranks that were stuck have been ended, and the queue with them
                trainer.replay_buffer.clear()
            raise
        except Exception as error:  # verl and TransferQueue have no family of errors
            self._end(True)
            raise TrainerError(
                f"the step failed between this process and its workers ({type(error).__name__}: {first_line(error)}), and they "
                "were ended. The batch is trained again at the next start."
            ) from error

    def pass_batch(self, kind: PassKind, batch: Batch, role: str, *outputs: str, **flags: bool | int) -> Passed:
        """Pass rows of the batch of `run` through a model."""
        return self._alive().pass_batch(kind, batch, role, *outputs, **flags)

    def everywhere(self, method: str, *arguments: object) -> Any:
        """Call a method on every rank; return the first rank's result."""
        return getattr(self._alive().actor_rollout_wg, method)(*arguments)[0]

    def by_rows(self, method: str, rows: Any) -> Any:
        """Call a method on every rank with its part of the rows; return the concatenated results."""
        return getattr(self._alive().actor_rollout_wg, method)(rows)

    def write(self, directory: Path) -> dict[str, TensorSums]:
        """Have each rank write what it has collected, beside other calls, from any thread; return the sums of the weights.

        Raises:
            OSError: one could not.
            TrainerError: one died, or failed.
        """
        group = self._alive().actor_rollout_wg
        return _all_ranks(self._calls.wait_for_writes(group.execute_all_async("actor_write", directory), directory))

    def weight_sums(self) -> dict[str, TensorSums]:
        """Return the sums of the policy's parameters."""
        return _all_ranks(self._alive().actor_rollout_wg.weight_sums())

    def weights(self) -> Iterator[tuple[str, NDArray[np.float32]]]:
        """Yield the policy's parameters by name, one at a time; they are transferred through a file."""
        from safetensors import safe_open

        shared = None if self._cluster.own else self._settings.directory.absolute()
        if shared:
            make_private(shared)
        with tempfile.TemporaryDirectory(prefix=".weights-", dir=shared) as directory:
            self.everywhere("save_weights", Path(directory))
            with safe_open(Path(directory) / weights_file(self._settings), "numpy") as file:
                for name in file.keys():  # noqa: SIM118
                    yield name, file.get_tensor(name)

    def close(self) -> None:
        """End the ranks, and Ray if it was started for them."""
        self._end(False)

    def _end(self, keep_logs: bool) -> None:
        import ray

        trainer, self._trainer = self._trainer, None
        group = getattr(trainer, "actor_rollout_wg", None)
        if group and ray.is_initialized():
            for actor in group.workers:
                ray.kill(actor)
        if self._has_queue:
            from trainer.distributed.row_queue import RowQueue

            self._has_queue = False
            RowQueue.close()
        self._cluster.close(keep_logs=keep_logs)

    def _alive(self) -> Any:
        if self._trainer is None:
            raise TrainerError("the trainer's workers have ended: the call is not done. Start `spangrad train` again.")
        return self._trainer


def _all_ranks(sums: Iterable[dict[str, TensorSums]]) -> dict[str, TensorSums]:
    return added(item for rank in sums for item in rank.items())


def _everywhere(settings: TrainerSettings) -> TrainerSettings:
    """Return the settings with the paths of models as every process finds them."""
    reference = settings.loss.reference
    return settings.model_copy(
        update={
            "model": settings.model and settings.model.absolute(),
            "loss": settings.loss.model_copy(update={"reference": reference and reference.absolute()}),
        }
    )
