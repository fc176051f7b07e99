"""Claims that divide rollouts among several builders.

Invariant: among builders that know of each other, a rollout that another one holds is left to it until it is built, or for
`builder.lease_seconds`.

Builders of a specification write that they are at work, and look a few times a lease who else is. A builder that is alone claims nothing.
Among several, a builder writes its claims, waits for the claims of others to become visible, and reads which came first. A claim is done
when its rollout has been built since, and expires with its lease. Claims save work and nothing else: two builders that build the same
rollout write the same rows, or one of them the next revision.
"""

from __future__ import annotations

import time

import polars as pl

from spangrad.store.clickhouse import constant
from transition_builder.frames import concat
from transition_builder.schemas import MICROSECONDS, ROLLOUT
from transition_builder.source.queries import StoreReader, batches

SETTLE_SECONDS = 0.02
"""Wait after a claim, in seconds; longer than a claim usually takes to become visible."""
_LOOKS = 6
"""Number of times within a lease that a builder writes that it is at work, and sees who else is."""
_CLAIMS = {"RunId": pl.String(), "RolloutId": pl.String(), "Builder": pl.String(), "ClaimedAt": MICROSECONDS}
_AT_WORK = {"RunId": [""], "RolloutId": [""]}
"""Claim of no rollout: its builder is at work."""
_LOOK = """
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


class Claims:
    """Claims of one builder."""

    def __init__(self, reader: StoreReader, builder: str, lease_seconds: float) -> None:
        """Claim in a builder's name; this does not query the store yet."""
        self._reader = reader
        self._builder = builder
        self._lease = round(lease_seconds * 1000)
        self._looked = float("-inf")
        self.alone = False
        """True if no other builder of the specification was at work at the last look."""

    def look(self) -> None:
        """See whether other builders are at work, unless that was seen lately.

        Raises:
            StoreError: the store failed.
        """
        if (time.monotonic() - self._looked) * 1000 < self._lease / _LOOKS:
            return
        self._write(pl.DataFrame(_AT_WORK))
        if self._looked == float("-inf"):
            time.sleep(SETTLE_SECONDS)
        seen = self._reader.frame(_LOOK, {"spec": self._reader.spec, "lease": self._lease, "own": self._builder})
        self.alone = seen["others"].item() == 0
        self._looked = time.monotonic()

    def take(self, rollouts: pl.DataFrame, built: pl.DataFrame) -> pl.DataFrame:
        """Claim rollouts; return those that this builder holds now.

        Args:
            rollouts: any frame with RunId and RolloutId.
            built: BUILT of them.

        Raises:
            StoreError: the store failed.
        """
        self.look()
        if rollouts.is_empty() or self.alone:
            return rollouts
        live = self._live(rollouts, built)
        free = rollouts.join(live.filter(pl.col("Builder") != self._builder), on=ROLLOUT, how="anti", maintain_order="left")
        unclaimed = free.join(live, on=ROLLOUT, how="anti", maintain_order="left").select(ROLLOUT).unique()
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
        asked = {"spec": self._reader.spec, "lease": self._lease}
        claims = concat((self._reader.frame(_LIVE.format(keys=constant(some)), asked) for some in batches(rollouts["RolloutId"])), _CLAIMS)
        done = built.select(*ROLLOUT, BuiltAt="IngestedAt")
        return claims.join(done, on=ROLLOUT, how="left").filter(pl.col("BuiltAt").is_null() | (pl.col("ClaimedAt") > pl.col("BuiltAt")))
