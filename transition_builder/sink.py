"""How conclusions get into the store: each once, and never half of a rollout before a trainer's eyes.

In: `Built`. Out: rows of otel.rewards, otel.transitions and otel.drops. Invariants: a call that has a row for this
build specification gets no second one, whoever wrote the first; a trainer that sees a rollout sees all its transitions.

The order is rewards, transitions, drops. A trainer counts a group as ready by the rollouts that transitions or drops
name, and reads transitions only. So a rollout must not be named by its drops while its transitions are still to come;
the other way round it misses nothing. All transitions of a write go in one block, which becomes visible at once.
(Calls of one rollout on both sides of a month's end lie in two partitions, whose parts appear one after the other.)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import polars as pl

from spangrad.clickhouse import store_errors
from spangrad.settings import Settings
from spangrad.types import DropReason
from transition_builder.frames import DROPS, Built, concat
from transition_builder.unclaimed import LATE

if TYPE_CHECKING:
    from clickhouse_connect.driver.client import Client

_ROLLOUT = ["RunId", "RolloutId"]
_CALL = [*_ROLLOUT, "Attempt", "CallId"]
_WRITTEN = """
SELECT DISTINCT RunId, RolloutId, Attempt, CallId FROM otel.{table}
WHERE BuildSpec = %(spec)s AND RunId IN %(runs)s AND GroupId IN %(groups)s AND RolloutId IN %(rollouts)s
"""


class Sink:
    """Writes for one build specification."""

    def __init__(self, client: Client, settings: Settings) -> None:
        """Write with `client`; nothing is asked of the store yet."""
        self._client = client
        self._url = settings.store.url
        self._spec = settings.builder.spec

    def write(self, built: Built) -> Built:
        """Write what the store does not hold yet, and say what that was.

        A rollout that was concluded before stays as it was: calls that have turned up since drop as incomplete.
        """
        written = self._written(built)
        fresh = only_new(built, written)
        for table, rows in (("rewards", fresh.rewards), ("transitions", fresh.transitions), ("drops", fresh.drops)):
            if rows.height:
                with store_errors(self._url):
                    self._client.insert_arrow(f"otel.{table}", rows.rechunk().to_arrow(compat_level=pl.CompatLevel.oldest()))
        return fresh

    def _written(self, built: Built) -> pl.DataFrame:
        names = pl.concat([frame.select("RunId", "RolloutId", "GroupId") for frame in (built.transitions, built.drops)]).unique()
        frames = [pl.DataFrame(schema={name: built.drops.schema[name] for name in _CALL})]
        for some in names.sort("RunId", "RolloutId").iter_slices(1000):
            parameters = {
                "spec": self._spec,
                "runs": tuple(some["RunId"].unique()),
                "groups": tuple(some["GroupId"].unique()),
                "rollouts": tuple(some["RolloutId"]),
            }
            for table in ("transitions", "drops"):
                with store_errors(self._url):
                    answer = self._client.query_arrow(_WRITTEN.format(table=table), parameters=parameters, use_strings=True)
                rows = pl.from_arrow(answer)
                assert isinstance(rows, pl.DataFrame)
                frames.append(rows.select(pl.col(name).cast(dtype) for name, dtype in frames[0].schema.items()))
        return pl.concat(frames)


def only_new(built: Built, written: pl.DataFrame) -> Built:
    """The rows to write, given the calls (RunId, RolloutId, Attempt, CallId) that have theirs."""
    known = written.select(_ROLLOUT).unique()
    transitions = built.transitions.join(known, on=_ROLLOUT, how="anti", maintain_order="left")
    late = built.transitions.join(known, on=_ROLLOUT, how="semi", maintain_order="left").with_columns(
        Reason=pl.lit(DropReason.INCOMPLETE.value), Detail=pl.lit(LATE)
    )
    drops = concat([built.drops, late], DROPS).join(written, on=_CALL, how="anti", maintain_order="left")
    return Built(transitions, drops, built.rewards.join(known, on=_ROLLOUT, how="anti", maintain_order="left"))
