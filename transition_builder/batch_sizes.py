"""How many rollouts are built at a time.

In: rollouts that are to be built, and what those before them weighed in memory. Out: portions. Invariant: each rollout is whole and in one
portion; a portion holds as many calls as fit the bounds, or a single rollout.
"""

from __future__ import annotations

from collections.abc import Iterator

import polars as pl

from transition_builder.frames import Frames

CALLS_A_BUILD = 16384
"""Calls built at a time, at most."""
BYTES_A_BUILD = 256 * 2**20
"""What their rows weigh in memory, about; a build needs some times as much."""
_BYTES_A_CALL = 20 * 2**10
"""Before any was seen: of a prompt of 4,000 tokens and five spans."""
_SIZE = pl.col("Calls").cast(pl.Int64).fill_null(16) + 1
"""Of a rollout, in calls: those that its root counted, else a guess, and one for what it weighs itself."""


class Portions:
    """Cuts rollouts into portions, by what calls weighed so far."""

    def __init__(self) -> None:
        """Nothing was weighed yet."""
        self._bytes_a_call = _BYTES_A_CALL

    def of(self, rollouts: pl.DataFrame) -> Iterator[pl.DataFrame]:
        """ROLLOUTS in as few portions as the bounds allow, alike in size, oldest first."""
        if rollouts.is_empty():
            return
        most = max(1, min(CALLS_A_BUILD, BYTES_A_BUILD // self._bytes_a_call))
        total = int(rollouts.select(_SIZE.sum()).item())
        before = _SIZE.cum_sum() - _SIZE
        numbered = rollouts.sort("IngestedAt", "RunId", "RolloutId").with_columns(portion=before * -(-total // most) // total)
        yield from (portion.drop("portion") for portion in numbered.partition_by("portion", maintain_order=True))

    def weigh(self, frames: Frames) -> None:
        """Learn from what was read of a portion."""
        weight = sum(frame.estimated_size() for frame in (frames.spans, frames.calls, frames.answers))
        self._bytes_a_call = int(weight) // int(frames.rollouts.select(_SIZE.sum()).item()) + 1
