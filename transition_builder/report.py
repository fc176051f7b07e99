"""Report on all calls of a build specification, and a check of their sum.

Invariant (law 2, checked on the rows that readers see): calls = transitions + drops, each call once, and nothing that the gateway recorded
for a rollout that was built is in neither.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from spangrad.store.clickhouse import store_errors
from spangrad.store.datasets import builds_sql, rows_sql

if TYPE_CHECKING:
    from clickhouse_connect.driver.client import Client

MOST_WRONG = 20
"""Rollouts that the report names when the sum is wrong, at most."""
_OF_SPEC = "BuildSpec = {spec:String}"
_BUILDS = "SELECT count(), sum(Calls) FROM {builds} AS b"
_DROPS = "SELECT Reason, countIf(CallId != ''), countIf(CallId = '') FROM {drops} AS d GROUP BY Reason ORDER BY count() DESC, Reason"
_TRANSITIONS = "SELECT count() FROM {transitions} AS t"
_WRONG = f"""
SELECT RunId, RolloutId, Unaccounted, Missing FROM spangrad.reconcile
WHERE {_OF_SPEC} AND (Unaccounted != 0 OR Missing != 0)
ORDER BY RunId, RolloutId
"""


@dataclass(frozen=True, slots=True)
class Wrong:
    """A rollout whose calls do not add up."""

    run_id: str
    rollout_id: str
    unaccounted: int
    """Calls that its build counted and that have no row, and rows too many."""
    missing: int
    """Calls that the gateway recorded and that have neither a transition nor a drop."""


@dataclass(frozen=True, slots=True)
class ReconcileReport:
    """Sum of everything that one build specification built, newest revisions."""

    rollouts: int
    calls: int
    """Policy calls of all attempts, a choice each, as the builds counted them."""
    transitions: int
    drops: Mapping[str, int]
    """Calls by reason, most first."""
    empty: Mapping[str, int]
    """Rollouts without a call in their final attempt, by the reason of the drop that stands for them."""
    wrong: Sequence[Wrong]
    """Empty when everything is accounted for."""

    @property
    def dropped(self) -> int:
        """Calls that were dropped."""
        return sum(self.drops.values())

    @property
    def is_right(self) -> bool:
        """True if every call is in exactly one place."""
        return not self.wrong and self.calls == self.transitions + self.dropped


def reconcile_report(client: Client, spec: str) -> ReconcileReport:
    """Query the results of a BuildSpec for all rollouts, and compare them with the recorded calls.

    Raises:
        StoreError: the store failed.
    """

    def rows(sql: str) -> list[Any]:
        with store_errors(client):
            return list(client.query(sql, parameters={"spec": spec}).result_rows)

    ((rollouts, calls),) = rows(_BUILDS.format(builds=builds_sql(where=_OF_SPEC)))
    ((transitions,),) = rows(_TRANSITIONS.format(transitions=rows_sql("transitions", where=_OF_SPEC)))
    drops = rows(_DROPS.format(drops=rows_sql("drops", where=_OF_SPEC)))
    return ReconcileReport(
        rollouts,
        calls,
        transitions,
        {reason: named for reason, named, _ in drops if named},
        {reason: alone for reason, _, alone in drops if alone},
        [Wrong(*row) for row in rows(_WRONG)],
    )
