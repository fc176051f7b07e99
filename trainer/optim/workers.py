"""Processes that hold the model, as the optimizer sees them: one here, or several under Ray (`trainer.optim.ray_workers`).

Invariant: the two kinds differ for the optimizer only in their size.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spangrad.settings import TrainerSettings
from trainer.optim.process import prepare_process, quiet
from trainer.optim.ray_workers import RayWorkers
from trainer.sft.objective import Objective


class LocalWorkers:
    """One rank in this process, without Ray."""

    def __init__(self, model: Path, settings: TrainerSettings, objective: Objective | None = None) -> None:
        with quiet():
            self.device = prepare_process()
            from trainer.optim.rank import Rank

            self._rank = Rank(model, settings, objective)
        self._rank.load(self.device)

    @property
    def size(self) -> int:
        """Return 1."""
        return 1

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


def begin(model: Path, settings: TrainerSettings, objective: Objective | None = None) -> LocalWorkers | RayWorkers:
    """Start the workers of trainer.workers.per_node, with the model loaded.

    Args:
        model: a Hugging Face model directory.
        settings: of the trainer.
        objective: objective of a run over files. None: the trainer's own.

    Raises:
        SettingsError: the settings cannot be carried out.
        TrainerError: Ray has no resources for them.
    """
    return RayWorkers(model, settings, objective) if settings.workers.per_node else LocalWorkers(model, settings, objective)
