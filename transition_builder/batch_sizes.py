"""Sizes of build batches: rollouts that are built together.

Invariant: each rollout is whole and in one batch; a batch exceeds the bounds by its last rollout at most.
"""

from __future__ import annotations

from collections.abc import Iterator

import polars as pl

from transition_builder.frames import Frames

ROLLOUTS_A_READ = 1024
"""Rollouts that are decided on at a time, at most."""
ROWS_A_BUILD = 2**16
"""Rows of spans that are read, and that are built, at a time; bounds memory."""
BYTES_A_BUILD = 256 * 2**20
"""Approximate memory of a build's rows and calls, in bytes; the build itself needs a small multiple of it."""
_BYTES_A_ROW = 4 * 2**10
"""Initial estimate of a row's memory, in bytes: one in five is of a call, with a prompt of 4,000 tokens."""
_SIZE = pl.col("Rows").cast(pl.Int64).fill_null(0) + 1
"""Size of a rollout, in rows of spans, plus one for the rollout itself."""


class BuildBatches:
    """Splits rollouts into batches by the measured memory per row."""

    def __init__(self) -> None:
        self._bytes_a_row = _BYTES_A_ROW

    def of(self, rollouts: pl.DataFrame) -> Iterator[pl.DataFrame]:
        """Yield ROLLOUTS in as few batches as the bounds allow, of similar size, oldest first."""
        most = max(1, min(ROWS_A_BUILD, BYTES_A_BUILD // self._bytes_a_row))
        return portions(rollouts.sort("IngestedAt", "RunId", "RolloutId"), most)

    def record(self, frames: Frames) -> None:
        """Update the estimated memory per row from the frames read for a batch."""
        weight = sum(frame.estimated_size() for frame in (frames.spans, frames.calls, frames.answers))
        self._bytes_a_row = int(weight) // int(frames.rollouts.select(_SIZE.sum()).item()) + 1


def portions(rollouts: pl.DataFrame, most: int) -> Iterator[pl.DataFrame]:
    """Yield rollouts, with their Rows, in as few portions of similar size as have about so many rows, in their order."""
    if rollouts.is_empty():
        return
    total = int(rollouts.select(_SIZE.sum()).item())
    before = _SIZE.cum_sum() - _SIZE
    numbered = rollouts.with_columns(portion=before * -(-total // most) // total)
    yield from (portion.drop("portion") for portion in numbered.partition_by("portion", maintain_order=True))
