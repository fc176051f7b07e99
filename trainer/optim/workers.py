"""Processes that hold the models, as the optimizer sees them: one here, or several under Ray (`trainer.distributed`).

Invariant: the two kinds differ for the optimizer only in their size; outputs of a pass are row by row those of the batch that was passed,
whichever ranks computed them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from spangrad.settings import TrainerSettings
from spangrad.weights.shards import TensorSums
from trainer.data.batch import Batch
from trainer.optim.process import import_worker, prepare_process, quiet
from trainer.optim.rows import by_response, scalars, tensordict
from trainer.sft.objective import Objective

if TYPE_CHECKING:
    from trainer.distributed.workers import DistributedWorkers
    from trainer.optim.phases import StepPhases


class PassKind(StrEnum):
    """Kind of a pass, by the method of a rank that does it."""

    INFER = "infer"
    """Forward; with a loss unless `compute_loss` is False."""
    ACCUMULATE = "accumulate"
    """Forward and backward; gradients are kept for `apply`."""
    TRAIN = "train"
    """Forward, backward and an optimizer step."""


@dataclass(frozen=True, slots=True)
class Passed:
    """Results of a pass."""

    metrics: dict[str, float]
    """verl's metrics, by verl's names."""
    outputs: dict[str, NDArray[np.float32]] = field(default_factory=dict[str, NDArray[np.float32]])
    """Outputs for the sampled tokens, by verl's names, of the batch's shape [rows, response]; 0 elsewhere."""


class LocalWorkers:
    """One rank in this process, without Ray."""

    size = 1
    """Number that a batch's rows must be divisible by."""

    def __init__(self, model: Path, settings: TrainerSettings, objective: Objective | None = None) -> None:
        """Load the models.

        Raises:
            SettingsError: the settings cannot be carried out.
        """
        with quiet():
            self.device = prepare_process()
            self._rank = import_worker().local_rank(model, settings, self.device, objective)

    def run(self, phases: StepPhases) -> None:
        """Do the phases of a step, in the order of verl's trainer."""
        phases.compute_old_logprobs()
        phases.compute_reference_logprobs()
        phases.compute_values()
        phases.compute_advantages()
        phases.update_policy()
        phases.update_critic()

    def pass_batch(self, kind: PassKind, batch: Batch, role: str, *outputs: str, **flags: bool | int) -> Passed:
        """Pass rows of the batch of `run`, with no-op rows up to a multiple of `size`, through a model.

        Outputs are returned by verl's names; flags are those of `trainer.optim.rows.flags_of`.
        """
        output = self.by_rows(kind, tensordict(batch, role=role, **flags))
        return Passed(scalars(output), {name: by_response(output[name], batch) for name in outputs})

    def everywhere(self, method: str, *arguments: object) -> Any:
        """Call a method of the rank."""
        return getattr(self._rank, method)(*arguments)

    def by_rows(self, method: str, rows: Any) -> Any:
        """Call a method of the rank with all rows."""
        return getattr(self._rank, method)(rows.copy())

    def write(self, directory: Path) -> dict[str, TensorSums]:
        """Write what the rank has collected, from any thread; return the sums of the weights."""
        return self._rank.write(directory)

    def weight_sums(self) -> dict[str, TensorSums]:
        """Return the sums of the policy's parameters."""
        return self._rank.weight_sums()

    def weights(self) -> Iterator[tuple[str, NDArray[np.float32]]]:
        """Yield the policy's parameters by name."""
        return self._rank.weights()

    def close(self) -> None:
        """Stop the sender of weights; no process runs elsewhere, and memory is freed with the last reference."""
        self._rank.stop_serving()


def begin(model: Path, settings: TrainerSettings, objective: Objective | None = None) -> LocalWorkers | DistributedWorkers:
    """Start the workers of trainer.workers.per_node, with the model loaded, for training or the objective of a run over files.

    Raises:
        SettingsError: the settings cannot be carried out.
        TrainerError: Ray has no resources for them.
    """
    if not settings.workers.per_node:
        return LocalWorkers(model, settings, objective)
    from trainer.distributed.workers import DistributedWorkers

    return DistributedWorkers(model, settings, objective)
