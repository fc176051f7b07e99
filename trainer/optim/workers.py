"""Workers of one rank in this process, without Ray; and the choice between them and those under Ray (`trainer.distributed`).

Invariant: the two kinds differ for the optimizer only in their size.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spangrad.settings import TrainerSettings
from trainer.data.batch import Batch
from trainer.optim.passes import Passed, PassKind, Phases, Workers
from trainer.optim.process import prepare_process, quiet
from trainer.optim.rows import by_response, scalars, tensordict
from trainer.sft.objective import Objective


class LocalWorkers:
    """One rank in this process, without Ray."""

    def __init__(self, model: Path, settings: TrainerSettings, objective: Objective | None = None) -> None:
        """Load the models.

        Raises:
            SettingsError: the settings cannot be carried out.
        """
        with quiet():
            self.device = prepare_process()
            from trainer.optim.verl_worker import local_rank

            self._rank = local_rank(model, settings, self.device, objective)

    @property
    def size(self) -> int:
        """Return 1."""
        return 1

    def run(self, phases: Phases, batch: Batch) -> None:
        """Do the phases of a step, in the order of verl's trainer."""
        phases.compute_old_logprobs()
        phases.compute_reference_logprobs()
        phases.compute_values()
        phases.compute_advantages()
        phases.update_policy()
        phases.update_critic()

    def pass_batch(self, kind: PassKind, batch: Batch, role: str, *outputs: str, **flags: bool | int) -> Passed:
        """Pass rows through a model of the rank."""
        output = self.by_rows(kind, tensordict(batch, role=role, **flags))
        return Passed(scalars(output), {name: by_response(output[name], batch) for name in outputs})

    def everywhere(self, method: str, *arguments: object) -> Any:
        """Call a method of the rank."""
        return getattr(self._rank, method)(*arguments)

    def by_rows(self, method: str, rows: Any) -> Any:
        """Call a method of the rank with all rows."""
        return getattr(self._rank, method)(rows.copy())

    def write(self, directory: Path) -> None:
        """Write what the rank has collected, from any thread."""
        self._rank.write(directory)

    def weights(self) -> Iterator[tuple[str, NDArray[np.float32]]]:
        """Yield the policy's parameters by name."""
        return self._rank.weights()

    def close(self) -> None:
        """Do nothing: no process runs elsewhere, and memory is freed with the last reference."""


def begin(model: Path, settings: TrainerSettings, objective: Objective | None = None) -> Workers:
    """Start the workers of trainer.workers.per_node, with the model loaded.

    Args:
        model: a Hugging Face model directory.
        settings: of the trainer.
        objective: objective of a run over files. None: the trainer's own.

    Raises:
        SettingsError: the settings cannot be carried out.
        TrainerError: Ray has no resources for them.
    """
    if not settings.workers.per_node:
        return LocalWorkers(model, settings, objective)
    from trainer.distributed.workers import DistributedWorkers

    return DistributedWorkers(model, settings, objective)
