"""The overview: services that answer, rollouts that wait, and the newest steps.

In: the store, addresses of services. Out: plain values for JSON, the same for all who look within `FRESH_SECONDS`. Invariant: who looks
again and again gets every step once, unless it changes; a store that does not answer hides no service.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from page.reading import PageStore
from page.services import services_of
from page.training import branches_of, steps_of
from spangrad.errors import StoreError
from spangrad.settings import Settings
from spangrad.store.built_rollouts import arrived_drops_sql, ended_rollouts_sql, newest_revisions_sql, revisions_sql
from spangrad.store.datasets import built_sql

FRESH_SECONDS = 3.0
"""Time for which an overview is shown to others, in seconds, and the pause between two of a stream."""
STEPS = 200
"""Number of newest steps whose curves are shown."""
_LAST_HOUR = "IngestedAt > now64(6) - INTERVAL 1 HOUR"
_ROLLOUTS = f"""
SELECT count() AS Built, countIf(Outcome = 'succeeded') AS Succeeded, avg(Return) AS Mean, avgMap(ReturnsByRole) AS MeanByRole,
    sum(Drops) AS Drops, toUnixTimestamp64Milli(max(IngestedAt)) AS LastMs, toUnixTimestamp64Milli(now64(6)) AS NowMs
FROM {revisions_sql()} WHERE {_LAST_HOUR} AND (BuildId, IngestedAt) IN {newest_revisions_sql(_LAST_HOUR)}
"""
_WAITING = f"""
SELECT uniqExact(RolloutId) AS Waiting, toUnixTimestamp64Milli(min(Timestamp)) AS OldestMs
FROM {ended_rollouts_sql(_LAST_HOUR)}
WHERE RolloutId NOT IN {built_sql("IngestedAt > now64(6) - INTERVAL 2 HOUR")}
"""
_DROPS = f"""
SELECT Reason, count() AS Count FROM {arrived_drops_sql("IngestedAt > now64(6) - INTERVAL 24 HOUR")}
GROUP BY Reason ORDER BY Count DESC LIMIT 20
"""


class OverviewReader:
    """The overview of a store, read at most once in `FRESH_SECONDS`, however many look."""

    def __init__(self, store: PageStore, settings: Settings) -> None:
        self._store = store
        self._settings = settings
        self._read_at = -FRESH_SECONDS
        self._value: dict[str, Any] = {}

    def read(self) -> dict[str, Any]:
        """Return the overview; where the store does not answer, or refuses, services and `error` alone. Two calls at once both read."""
        if time.monotonic() - self._read_at >= FRESH_SECONDS:
            self._value = self._fresh()
            self._read_at = time.monotonic()
        return self._value

    def _fresh(self) -> dict[str, Any]:
        services = services_of(self._settings)
        try:
            return {"services": services, **self._stored()}
        except StoreError as error:
            return {"services": services, "error": str(error)}

    def _stored(self) -> dict[str, Any]:
        (rollouts,), (waiting,) = self._store.rows(_ROLLOUTS), self._store.rows(_WAITING)
        known = branches_of(self._store)
        newest = max(known, key=lambda branch: branch["NewestMs"], default=None)
        return {
            "rollouts": {**rollouts, **waiting},
            "drops": self._store.rows(_DROPS),
            "branches": known,
            "newest": newest,
            "steps": self._steps(newest),
        }

    def _steps(self, newest: Mapping[str, Any] | None) -> list[dict[str, Any]]:
        if newest is None:
            return []
        # A version that is added, changed or orphaned changes the row of its branch.
        if newest == self._value.get("newest"):
            return self._value["steps"]
        return steps_of(self._store, newest["Policy"], newest["Branch"], STEPS)


def overview_without(overview: Mapping[str, Any], sent: Mapping[int, Mapping[str, Any]]) -> dict[str, Any]:
    """Return an overview with the versions of its steps, and only those steps that differ from the ones that were sent, by version."""
    steps = overview.get("steps", [])
    return {
        **overview,
        "versions": [step["Version"] for step in steps],
        "steps": [step for step in steps if sent.get(step["Version"]) != step],
    }
