"""The processes that hold the model, as the engine sees them: one here, or several under Ray (`trainer.optim.ray_workers`).

In: a model directory, settings. Out: calls of `trainer.optim.rank.Rank`'s methods. Invariant: the engine cannot tell the two apart but by
their size.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from spangrad.settings import TrainerSettings
from trainer.optim.process import prepare_process, quiet
from trainer.optim.ray_workers import RayWorkers
from trainer.sft.objective import Objective


class Workers(Protocol):
    """Ranks that do the same at the same time."""

    device: str
    """What they compute on: cuda or cpu."""

    @property
    def size(self) -> int:
        """Among how many rows are shared out."""
        ...

    def everywhere(self, method: str, *arguments: object) -> Any:
        """Call a method on every rank; the first rank's answer."""
        ...

    def by_rows(self, method: str, rows: Any) -> Any:
        """Call a method on every rank with its part of the rows; the answers, one after the other."""
        ...

    def weights(self) -> Iterator[tuple[str, NDArray[np.float32]]]:
        """The policy's parameters by name."""
        ...

    def close(self) -> None:
        """End them; nothing may be called after that."""
        ...


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
        """One."""
        return 1

    def everywhere(self, method: str, *arguments: object) -> Any:
        """Call a method of the rank."""
        return getattr(self._rank, method)(*arguments)

    def by_rows(self, method: str, rows: Any) -> Any:
        """Call a method of the rank with all rows."""
        return getattr(self._rank, method)(rows.copy())

    def weights(self) -> Iterator[tuple[str, NDArray[np.float32]]]:
        """The policy's parameters by name."""
        return self._rank.weights()

    def close(self) -> None:
        """Nothing runs elsewhere; memory goes with the last reference."""


def begin(model: Path, settings: TrainerSettings, objective: Objective | None = None) -> Workers:
    """The workers that trainer.workers asks for, with the model loaded.

    Args:
        model: a Hugging Face model directory.
        settings: of the trainer.
        objective: of a run over files. None: the trainer's own.

    Raises:
        SettingsError: what the settings ask for cannot be done.
        TrainerError: Ray has no place for them.
    """
    return RayWorkers(model, settings, objective) if settings.workers else LocalWorkers(model, settings, objective)
