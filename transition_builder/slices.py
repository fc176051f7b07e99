"""Slices of production and trials: how many rollouts are built between two looks for training.

Invariant: no rollout is in two slices, the oldest come first, and a backlog is built at nearly the cost of the largest slices.

A slice costs much and each rollout in it little: ten times as much a rollout in slices of 32 as in those of 1,024. Slices that only
follow a time would be small where traffic or other work makes them slow, and a builder that falls behind would fall behind for ever.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import polars as pl

SLICE_SECONDS, LONG_SLICE_SECONDS = 0.25, 1.0
"""Time that a slice should take, in seconds, while rollouts of training end, and while none does: training waits for one slice at most."""
BACKLOG_SLICE_SECONDS = 2.0
"""Time that a slice of a backlog should take at most, in seconds."""
SPANS_OF_BACKLOG = 4096
"""Spans that a slice of a backlog may have whatever time it takes: it takes two to three times as long as a slice of a single rollout."""
SLICES_A_BACKLOG = 4
"""Number of slices that a backlog is divided into, as far as their time and their size allow."""
FIRST_SLICE, SMALLEST_SLICE, LARGEST_SLICE = 128, 32, 1024
"""Numbers of rollouts. The largest bounds memory; a slice is smaller than the smallest where fewer are left, or a larger one failed."""
_BUSY_SECONDS = 10.0
"""Time after a rollout of training has ended for which another one is expected."""


def slice_seconds(since_training: float) -> float:
    """Return the time that a slice should take, in seconds, so long after the last rollout of training has ended."""
    return SLICE_SECONDS if since_training < _BUSY_SECONDS else LONG_SLICE_SECONDS


class SlicePace:
    """Sizes of slices by the time that they take, by the backlog and by failures, from pass to pass."""

    def __init__(self) -> None:
        """Begin with an estimate; nothing has been measured yet."""
        self._most = FIRST_SLICE
        self._a_second = self._backlog_a_second = float("inf")
        self._begun, self._seconds = 0, SLICE_SECONDS
        self._is_full = False
        self._built = self._spans = 0
        self._spans_a_rollout = float("inf")

    def begin(self, left: int, backlog: int, seconds: float) -> int:
        """Return the number of rollouts in the next slice; after one that was begun and is not done, half as many as in that.

        Args:
            left: number of rollouts of the backlog that are left, one or more.
            backlog: number of rollouts that there were at first.
            seconds: time that the slice should take where they are few.
        """
        if self._begun:
            self._most = max(1, self._begun // 2)
        of_backlog = max(self._backlog_a_second * BACKLOG_SLICE_SECONDS, SPANS_OF_BACKLOG / self._spans_a_rollout)
        size = min(max(_bounded(self._a_second * seconds), backlog // SLICES_A_BACKLOG), _bounded(of_backlog), self._most)
        self._seconds, self._built, self._spans = seconds, 0, 0
        self._begun = min(size, left)
        self._is_full = self._begun == size
        return self._begun

    def count(self, rollouts: int, spans: int) -> None:
        """Count rollouts of the slice that no longer wait, and the spans that were read to build them."""
        self._built += rollouts
        self._spans += spans

    def done(self, seconds: float) -> None:
        """Record that the slice is built, and the time that it took, in seconds."""
        # Few rollouts take nearly as long as many, so that their time tells nothing, unless it is too long.
        a_second = self._begun / max(seconds, 1e-3)
        if self._is_full or seconds > self._seconds:
            self._a_second = a_second
        if self._is_full or seconds > BACKLOG_SLICE_SECONDS:
            self._backlog_a_second = a_second
        if self._is_full:
            self._most = min(LARGEST_SLICE, 2 * self._begun)
        if self._spans:
            self._spans_a_rollout = self._spans / self._built
        self._begun = 0

    def slices(self, rows: pl.DataFrame, key: str, seconds: Callable[[], float], between: Callable[[], object]) -> Iterator[pl.DataFrame]:
        """Yield the rows of some rollouts at a time, the oldest first.

        Args:
            rows: rows with IngestedAt.
            key: column that names their rollouts.
            seconds: returns the time that the next slice should take where few are left.
            between: called after each slice, outside its time.
        """
        if rows.is_empty():
            return
        # What has arrived since the last pass may be much larger.
        self._most = min(self._most, FIRST_SLICE)
        oldest = rows.group_by(key).agg(Oldest=pl.col("IngestedAt").min()).sort("Oldest", key)
        begin, backlog = 0, oldest.height
        while begin < backlog:
            size, began = self.begin(backlog - begin, backlog, seconds()), time.monotonic()
            yield rows.join(oldest[begin : begin + size], on=key, how="semi", maintain_order="left")
            self.done(time.monotonic() - began)
            between()
            begin += size


def _bounded(size: float) -> int:
    return round(max(SMALLEST_SLICE, min(LARGEST_SLICE, size)))
