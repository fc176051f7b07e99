"""Rollouts that ended: the verdict on each, and the frames of those that are built, without rows that are visible in part.

Invariant: a gateway's span is read only with its calls: an insert appears in one table before the other.
"""

from __future__ import annotations

from datetime import datetime

import polars as pl

from spangrad.settings import BuilderSettings
from transition_builder.completeness.complete import decide, facts
from transition_builder.dialects.conventions.gateway import IS_GATEWAY
from transition_builder.frames import Frames, Verdict
from transition_builder.schemas import ROLLOUT, SPAN
from transition_builder.source.discovery import OVERLAP
from transition_builder.source.rollouts import RolloutReader


class EndedRollouts:
    """Judges and reads rollouts."""

    def __init__(self, source: RolloutReader, spec: BuilderSettings) -> None:
        self._source = source
        self._spec = spec

    def judged(self, rollouts: pl.DataFrame, arrivals: pl.DataFrame, owners: pl.DataFrame, now: datetime) -> pl.DataFrame:
        """Return ROLLOUTS for the given rollouts that have a final root."""
        return decide(facts(arrivals, owners), now, self._spec).join(rollouts, on=ROLLOUT, how="semi")

    def frames(self, rollouts: pl.DataFrame, arrivals: pl.DataFrame, owners: pl.DataFrame, now: datetime) -> Frames:
        """Read the frames of ended rollouts, restricted to spans whose calls are visible as well."""
        frames = self._source.frames(rollouts, arrivals, owners)
        unseen = _unseen(frames)
        if unseen.is_empty():
            return frames
        seen = arrivals.join(unseen, on=SPAN, how="anti")
        return self._source.frames(ended(self.judged(rollouts, seen, owners, now)), seen, owners)

    def claimed_frames(self, rollouts: pl.DataFrame, rootless: pl.DataFrame, now: datetime) -> Frames:
        """Read the frames of silent rollouts, except those with calls not yet visible; `rootless`: rows of their calls, with TraceId."""
        frames = self._source.claimed_frames(rollouts, rootless.join(rollouts, on=ROLLOUT, how="semi")["TraceId"])
        incomplete = _unseen(frames).select(RolloutId="RolloutKey").unique()
        # Later than any insert ends, there is nothing to wait for.
        waiting = rollouts.filter(now - pl.col("LastArrival") < OVERLAP).join(incomplete, on="RolloutId", how="semi")
        return self.claimed_frames(rollouts.join(waiting, on=ROLLOUT, how="anti"), rootless, now) if waiting.height else frames


def ended(judged: pl.DataFrame) -> pl.DataFrame:
    """Return those of ROLLOUTS that no longer wait."""
    return judged.filter(pl.col("Verdict") != Verdict.WAITING.value)


def _unseen(frames: Frames) -> pl.DataFrame:
    """Return gateway spans whose calls are not visible yet."""
    return frames.spans.filter(IS_GATEWAY & (pl.col("RowKind") == "span")).join(frames.calls, on=SPAN, how="anti")
