"""Passes of a batch's rows through the workers' models, as the phases of a step see them.

Invariant: outputs are row by row those of the batch that was passed, whichever ranks computed them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from trainer.data.batch import Batch


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


class Phases(Protocol):
    """Phases of a step, in the order of verl's trainer."""

    def compute_old_logprobs(self) -> None:
        """Pass the rows forward through the policy, where the step needs that before its first update, and check them."""
        ...

    def compute_reference_logprobs(self) -> None:
        """Pass the rows forward through the reference, where the loss has a term against it."""
        ...

    def compute_values(self) -> None:
        """Pass the rows forward through the critic, where there is one."""
        ...

    def compute_advantages(self) -> None:
        """Derive advantages and weights that depend on passes."""
        ...

    def update_policy(self) -> None:
        """Take the optimizer steps of the policy."""
        ...

    def update_critic(self) -> None:
        """Take the optimizer steps of the critic, where there is one."""
        ...


class Workers(Protocol):
    """Processes that hold the models: one here, or several under Ray (`trainer.distributed`)."""

    device: str

    @property
    def size(self) -> int:
        """Return the number that a batch's rows must be divisible by."""
        ...

    def run(self, phases: Phases, batch: Batch) -> None:
        """Do the phases of a step; passes over rows of the batch are made within.

        Raises:
            BadRowsError: rows fail a check.
            LedgerError: a phase raised it.
            TrainerError: a process died, or failed.
        """
        ...

    def pass_batch(self, kind: PassKind, batch: Batch, role: str, *outputs: str, **flags: bool | int) -> Passed:
        """Pass rows of the batch of `run` through a model.

        Args:
            kind: of the pass.
            batch: the rows, with no-op rows up to a multiple of `size`.
            role: model of a rank.
            outputs: names of the outputs that are returned, by verl's names.
            flags: of the pass (`trainer.optim.rows.flags_of`).
        """
        ...

    def everywhere(self, method: str, *arguments: object) -> Any:
        """Call a method on every rank; return the first rank's result."""
        ...

    def by_rows(self, method: str, rows: Any) -> Any:
        """Call a method on every rank with its part of rows in verl's layout; return the concatenated results."""
        ...

    def write(self, directory: Path) -> None:
        """Write what the first rank has collected, beside other calls; from any thread."""
        ...

    def weights(self) -> Iterator[tuple[str, NDArray[np.float32]]]:
        """Yield the policy's parameters by name."""
        ...

    def close(self) -> None:
        """End the processes; nothing may be called after that."""
        ...


BeforeUpdate = Callable[[], None]
"""Function that is called once, before weights, moments or critic change."""
