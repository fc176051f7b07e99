"""Counts and progress of a pass of the builder; rows count when their revision is written."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import polars as pl

from transition_builder.source.sink import Written

ProgressCallback = Callable[[int, int], None]
"""Function called with the number of concluded rollouts and the number of all known ones."""


def no_progress(done: int, total: int) -> None:
    """Report nothing."""


@dataclass(slots=True)
class Summary:
    """Counts of one pass of the builder."""

    rollouts: int = 0
    """Rollouts that got a revision."""
    revised: int = 0
    """Rollouts among them that had been built before."""
    transitions: int = 0
    drops: Counter[str] = field(default_factory=Counter[str])
    """Drops by reason."""
    rewards: int = 0
    waiting: int = 0
    """Rollouts that ended and are not complete yet."""
    seconds: float = 0.0

    def add(self, written: Written) -> None:
        """Add rows that were written."""
        self.rollouts += written.rollouts.height
        self.revised += written.rollouts.filter(pl.col("Revision") > 0).height
        self.transitions += written.rows.transitions.height
        self.drops.update(written.rows.drops["Reason"])
        self.rewards += written.rows.rewards.height

    def __str__(self) -> str:
        reasons = ", ".join(f"{reason} {count}" for reason, count in sorted(self.drops.items()))
        again, why = f" ({self.revised} again)" if self.revised else "", f" ({reasons})" if reasons else ""
        return (
            f"{self.rollouts} rollouts{again}: {self.transitions} transitions, {self.drops.total()} drops{why}, "
            f"{self.rewards} rewards in {self.seconds:.3f} s; {self.waiting} wait"
        )
