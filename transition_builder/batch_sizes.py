"""Sizes of build batches: rollouts that are built together.

Invariant: each rollout is whole and in one batch; a batch exceeds the bounds by its last rollout at most.
"""

from __future__ import annotations

from collections.abc import Iterator

import polars as pl

from transition_builder.frames import Frames

ROLLOUTS_A_READ = 1024
"""Rollouts whose spans without attributes are read at a time; bounds memory."""
CALLS_A_BUILD = 16384
"""Calls built at a time, at most."""
BYTES_A_BUILD = 256 * 2**20
"""Approximate memory of a build's rows, in bytes; the build itself needs a small multiple of it."""
_BYTES_A_CALL = 20 * 2**10
"""Initial estimate of a call's memory, in bytes: a prompt of 4,000 tokens and five spans."""
_SIZE = pl.col("Calls").cast(pl.Int64).fill_null(16) + 1
"""Size of a rollout, in calls: the calls that its root counted, else a guess, plus one for the rollout itself."""


class BuildBatches:
    """Splits rollouts into batches by the measured memory per call."""

    def __init__(self) -> None:
        self._bytes_a_call = _BYTES_A_CALL

    def of(self, rollouts: pl.DataFrame) -> Iterator[pl.DataFrame]:
        """Yield ROLLOUTS in as few batches as the bounds allow, of similar size, oldest first."""
        if rollouts.is_empty():
            return
        max_calls = max(1, min(CALLS_A_BUILD, BYTES_A_BUILD // self._bytes_a_call))
        total = int(rollouts.select(_SIZE.sum()).item())
        before = _SIZE.cum_sum() - _SIZE
        numbered = rollouts.sort("IngestedAt", "RunId", "RolloutId").with_columns(portion=before * -(-total // max_calls) // total)
        yield from (batch.drop("portion") for batch in numbered.partition_by("portion", maintain_order=True))

    def record(self, frames: Frames) -> None:
        """Update the estimated memory per call from the frames read for a batch."""
        weight = sum(frame.estimated_size() for frame in (frames.spans, frames.calls, frames.answers))
        self._bytes_a_call = int(weight) // int(frames.rollouts.select(_SIZE.sum()).item()) + 1
