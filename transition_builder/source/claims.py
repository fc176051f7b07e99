"""Claims that divide rollouts among several builders.

Invariant: among builders that know of each other, a rollout that another one holds is left to it until it is built, or for
`builder.lease_seconds`.

Builders of a specification write that they are at work, and ask who else is when they begin to look for what ended. A builder that is
alone claims nothing. Among several, a builder writes its claims, waits for the claims of others to become visible, and reads which came
first. A claim is done when its rollout has been built since, and expires with its lease. Claims save work and nothing else: two builders
that build the same rollout write the same rows, or one of them the next revision.
"""

from __future__ import annotations

import os
import socket
import time
import uuid
from concurrent.futures import Future, ThreadPoolExecutor

import polars as pl

from spangrad.store.clickhouse import constant
from transition_builder.frames import concat
from transition_builder.schemas import MICROSECONDS, ROLLOUT
from transition_builder.source.queries import StoreReader, batches

SETTLE_SECONDS = 0.02
"""Wait after a claim, in seconds; longer than a claim usually takes to become visible."""
_ALONE_SECONDS = 5.0
"""Time for which a builder that found no other at work counts as alone, in seconds: one that begins meanwhile builds some rollouts too."""
_RENEWED = 3
"""Number of times within a lease that a builder writes that it is at work."""
_CLAIMS = {"RunId": pl.String(), "RolloutId": pl.String(), "Builder": pl.String(), "ClaimedAt": MICROSECONDS}
_AT_WORK = {"RunId": [""], "RolloutId": [""]}
"""Claim of no rollout: its builder is at work."""
_OTHERS = """
SELECT countIf(c.Builder != %(own)s) AS others
FROM spangrad_internal.claims AS c
WHERE BuildSpec = %(spec)s AND RunId = '' AND RolloutId = '' AND c.IngestedAt > now64(6) - toIntervalMillisecond(%(lease)s)
"""
_LIVE = """
SELECT RunId, RolloutId, Builder, toUnixTimestamp64Micro(max(c.IngestedAt)) AS ClaimedAt
FROM spangrad_internal.claims AS c
WHERE BuildSpec = %(spec)s AND c.IngestedAt > now64(6) - toIntervalMillisecond(%(lease)s) AND RolloutId IN {keys}
GROUP BY RunId, RolloutId, Builder
"""


def new_builder_name() -> str:
    """Return a name that no other builder has."""
    return f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"


class Claims:
    """Claims of one builder."""

    def __init__(self, reader: StoreReader, builder: str, lease_seconds: float) -> None:
        """Claim in a builder's name; this does not query the store yet."""
        self._reader = reader
        self._builder = builder
        self._lease = round(lease_seconds * 1000)
        self._renewed = float("-inf")
        self._beside = ThreadPoolExecutor(1, "claims")
        self._others: Future[bool] | None = None
        self._asked = self._alone_until = float("-inf")
        self.alone = False
        """True if no other builder of the specification was at work when that was last asked."""

    def renew(self) -> None:
        """Write that this builder is at work, unless that was written lately.

        Raises:
            StoreError: the store failed.
        """
        if (time.monotonic() - self._renewed) * 1000 < self._lease / _RENEWED:
            return
        self._write(pl.DataFrame(_AT_WORK))
        if self._renewed == float("-inf"):
            time.sleep(SETTLE_SECONDS)
        self._renewed = time.monotonic()

    def begin(self) -> None:
        """Ask whether other builders are at work, unless none was lately, beside the caller's statements; `take` waits for the response."""
        self.renew()
        if time.monotonic() >= self._alone_until:
            self._others, self._asked = self._beside.submit(self._are_others), time.monotonic()

    def _are_others(self) -> bool:
        parameters = {"spec": self._reader.spec, "lease": self._lease, "own": self._builder}
        return self._reader.frame(_OTHERS, parameters)["others"].item() > 0

    def take(self, rollouts: pl.DataFrame, built: pl.DataFrame) -> pl.DataFrame:
        """Claim rollouts; return those that this builder holds now.

        Args:
            rollouts: any frame with RunId and RolloutId.
            built: BUILT of them.

        Raises:
            StoreError: the store failed.
        """
        if rollouts.is_empty():
            return rollouts
        self.renew()
        # A look that finds nothing to build leaves its response untaken: in a later one, others may have begun.
        is_recent = time.monotonic() - self._asked < _ALONE_SECONDS
        others, self._others = self._others if is_recent else None, None
        if others or time.monotonic() >= self._alone_until:
            self.alone = not (others.result() if others else self._are_others())
            self._alone_until = time.monotonic() + _ALONE_SECONDS if self.alone else float("-inf")
        if self.alone:
            return rollouts
        live = self._live(rollouts, built)
        free = rollouts.join(live.filter(pl.col("Builder") != self._builder), on=ROLLOUT, how="anti", maintain_order="left")
        unclaimed = free.join(live, on=ROLLOUT, how="anti", maintain_order="left")[ROLLOUT].unique()
        if unclaimed.is_empty():
            return free
        self._write(unclaimed)
        time.sleep(SETTLE_SECONDS)
        first = self._live(free, built).sort("ClaimedAt", "Builder").unique(ROLLOUT, keep="first", maintain_order=True)
        return free.join(first.filter(pl.col("Builder") != self._builder), on=ROLLOUT, how="anti", maintain_order="left")

    def _write(self, rollouts: pl.DataFrame) -> None:
        self._reader.insert(
            "claims", rollouts.select(pl.lit(self._reader.spec).alias("BuildSpec"), *ROLLOUT, pl.lit(self._builder).alias("Builder"))
        )

    def _live(self, rollouts: pl.DataFrame, built: pl.DataFrame) -> pl.DataFrame:
        """Return live claims on the rollouts."""
        parameters = {"spec": self._reader.spec, "lease": self._lease}
        claims = concat(
            (self._reader.frame(_LIVE.format(keys=constant(some)), parameters) for some in batches(rollouts["RolloutId"])), _CLAIMS
        )
        done = built.select(*ROLLOUT, BuiltAt="IngestedAt")
        return claims.join(done, on=ROLLOUT, how="left").filter(pl.col("BuiltAt").is_null() | (pl.col("ClaimedAt") > pl.col("BuiltAt")))
