"""Rollouts of a dataset, part by part: their transitions, and the requested drops.

Parts hold whole groups, in the order of run, mode, group and rollout. Invariants: only the revision that was a rollout's newest at the
requested time; every call of every requested rollout is in a part, or counted as left out; what is in memory is one part, and a row of
numbers and names for each rollout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any

import polars as pl

from spangrad.errors import BuilderError
from spangrad.selection import expression
from spangrad.settings import Selection
from spangrad.store import datasets
from spangrad.store.clickhouse import constant, microseconds
from spangrad.types import DropReason
from transition_builder.export.tally import ExportTally, LeftOut
from transition_builder.frames import empty
from transition_builder.schemas import NANOSECONDS, TRANSITIONS
from transition_builder.source.queries import query

if TYPE_CHECKING:
    from clickhouse_connect.driver.client import Client

PART_CALLS = 500
"""Calls in a part, at most; a group that has more is a part of its own."""
PART_ROLLOUTS = 500
SPOKEN = (
    DropReason.NO_TOKEN_IDS,
    DropReason.NO_LOGPROBS,
    DropReason.NO_REWARD,
    DropReason.RETOKENIZED,
    DropReason.OTHER_TOKENIZER,
    DropReason.OTHER_DISTRIBUTION,
    DropReason.OTHER_MODALITY,
    DropReason.MIXED_VERSIONS,
    DropReason.UNKNOWN_VERSION,
    DropReason.UNKNOWN_SAMPLING,
    DropReason.OVER_LENGTH,
)
"""Drop reasons of calls whose text is a whole response that the agent used: they may be exported as text."""

ROLLOUT = ("RunId", "Mode", "GroupId", "RolloutId", "Attempt")
_GROUP = ("RunId", "Mode", "Alone")
_BUILD = ("RunId", "RolloutId", "Revision", "Content")
_KEY = ("RunId", "Mode", "GroupId", "RolloutId")
"""Key columns of transitions and drops that find a rollout."""
_TOTALS = ("RewardTotals.Name", "RewardTotals.Role", "RewardTotals.Value")
_FACTS = ("Mode", "GroupId", "GroupSize", "TaskId", "Attempt", "Revision", "Content", "Calls", "Transitions")
_DROPS = ("RunId", "RolloutId", "Revision", "Content", "Attempt", "CallId", "TraceId", "SpanId", "ChoiceIndex", "Timestamp", "AgentName",
          "Policy", "Model", "Reason")  # fmt: skip
_NAMED = " AND ".join(f"isValidUTF8({name})" for name in _KEY)


@dataclass(frozen=True)
class ExportSelection:
    """Request of an export: its dataset, rollouts and calls."""

    dataset: str
    """Dataset, as NAME or NAME@REVISION."""
    as_of: datetime | None = None
    """Time of the state of the store that is read; None: now."""
    runs: tuple[str, ...] = ()
    """Runs to read; empty: all."""
    modes: tuple[str, ...] = ()
    """Modes to read; empty: all."""
    rollouts: tuple[str, ...] = ()
    """Ids of the rollouts to read; empty: all."""
    since: datetime | None = None
    """Time at or after which rollouts were first built; None: any."""
    selection: Selection = field(default_factory=Selection)
    min_return: float | None = None
    reward_weights: Mapping[str, float] = field(default_factory=dict[str, float])
    """Factor of the rewards of each name; 1 for other names."""
    dropped: tuple[DropReason, ...] = ()
    """Drop reasons of calls that are exported nevertheless, for their text."""


@dataclass(frozen=True)
class GroupSlice:
    """Part of a dataset: some whole groups."""

    rollouts: pl.DataFrame
    """Rollouts, a row each: ROLLOUT, TaskId, GroupSize, Group (the number of its group), and Return, the weighted sum of its rewards. Null:
    it has none, or they are of several roles."""
    calls: pl.DataFrame
    """Calls, a row each, by rollout and turn: TRANSITIONS, Return and Reason. Reason is empty, or that of a drop, which has neither ids nor
    rewards."""

    def by_rollout(self) -> Iterator[tuple[dict[str, Any], list[dict[str, Any]]]]:
        """Yield each rollout with its calls; rollouts without calls are left out."""
        key = list(_BUILD[:2])
        parts = self.calls.partition_by(key, as_dict=True, maintain_order=True)
        for row in self.rollouts.iter_rows(named=True):
            calls = parts.get((row["RunId"], row["RolloutId"]))
            if calls is not None:
                yield row, list(calls.iter_rows(named=True))


class ExportReader:
    """Reads the requested rollouts, once; `tally` counts."""

    def __init__(self, client: Client, request: ExportSelection, progress: Callable[[int, int], None] = lambda done, total: None) -> None:
        """Look the dataset up and list its rollouts; `progress` is called with the number of rollouts done and of all.

        Raises:
            StoreError: the store failed, or has no such dataset.
            BuilderError: requested drops are no whole responses, or a selection is no regular expression.
        """
        self.client = client
        self.request = request
        self.tally = ExportTally()
        self._progress = progress
        for reason in request.dropped:
            if reason not in SPOKEN:
                raise BuilderError(f"calls dropped as {reason} cannot be exported: take {', '.join(SPOKEN)}.")
        self.dataset = datasets.resolve(client, request.dataset, request.as_of)
        self.rollouts = self._rollouts()

    def parts(self) -> Iterator[GroupSlice]:
        """Yield the parts, in order; each is counted as it is yielded."""
        done, total = 0, self.rollouts.height
        self._progress(done, total)
        for rollouts in self._slices():
            yield self._part(rollouts)
            done += rollouts.height
            self._progress(done, total)

    def _rollouts(self) -> pl.DataFrame:
        of_runs = f" AND RunId IN {constant(self.request.runs)}" if self.request.runs else ""
        of_ids = f" AND RolloutId IN {constant(self.request.rollouts)}" if self.request.rollouts else ""
        facts = (*_FACTS, *(f"`{name}`" for name in _TOTALS))
        builds = datasets.builds_sql(self.request.as_of, f"BuildSpec = '{self.dataset.build_spec}'{of_runs}{of_ids}", facts)
        after = [f"Mode IN {constant(self.request.modes)}"] if self.request.modes else []
        if self.request.since is not None:
            after.append(f"FirstBuiltAt >= fromUnixTimestamp64Micro({microseconds(self.request.since)})")
        columns = f"SELECT * REPLACE (toValidUTF8(TaskId) AS TaskId), {_NAMED} AS Named"
        sql = f"{columns} FROM {builds} AS b WHERE {' AND '.join(after) or 'true'} ORDER BY RunId, Mode, GroupId, RolloutId"
        # A rollout of no group is one by itself.
        alone = pl.when(pl.col("GroupId") == "").then("rollout " + pl.col("RolloutId")).otherwise("group " + pl.col("GroupId"))
        every = self._frame(sql)
        unnamed = int(every.filter(pl.col("Named") == 0)["Calls"].sum())
        self.tally.calls += unnamed
        self.tally.count_left_out(LeftOut.NOT_UTF8, unnamed)
        rollouts = every.filter(pl.col("Named") == 1).drop("Named").with_columns(Alone=alone).with_columns(Group=pl.struct(_GROUP).rle_id())
        return rollouts.join(self._returns(rollouts), on=list(_BUILD), maintain_order="left").drop(_TOTALS)

    def _slices(self) -> Iterator[pl.DataFrame]:
        sizes = self.rollouts.group_by("Group", maintain_order=True).agg(Calls=pl.col("Calls").sum(), Rollouts=pl.len())
        start = end = calls = rollouts = 0
        for group_calls, group_rollouts in sizes.select("Calls", "Rollouts").iter_rows():
            if end > start and (calls + group_calls > PART_CALLS or rollouts + group_rollouts > PART_ROLLOUTS):
                yield self.rollouts[start:end]
                start, calls, rollouts = end, 0, 0
            end, calls, rollouts = end + group_rollouts, calls + group_calls, rollouts + group_rollouts
        if end > start:
            yield self.rollouts[start:end]

    def _part(self, rollouts: pl.DataFrame) -> GroupSlice:
        transitions = self._rows("transitions", TRANSITIONS, rollouts)
        transitions = transitions.with_columns(pl.col("Timestamp").cast(NANOSECONDS), Reason=pl.lit(""))
        drops = self._rows("drops", _DROPS, rollouts).filter(pl.col("CallId") != "")
        self._count(rollouts, drops)
        taken = drops.filter(pl.col("Reason").is_in(list(self.request.dropped))) if self.request.dropped else drops.clear()
        calls = pl.concat([transitions, self._like_transitions(taken, rollouts)], how="diagonal")
        calls = calls.join(rollouts.select(*_BUILD, "Return"), on=list(_BUILD), how="left", maintain_order="left")
        if self.request.min_return is not None:
            below = pl.col("Return") < self.request.min_return
            self.tally.count_left_out(LeftOut.BELOW_RETURN, calls.filter(below).height)
            self.tally.count_left_out(LeftOut.NO_RETURN, calls["Return"].null_count())
            calls = calls.filter(~below)
        chosen = expression(self.request.selection)
        kept = calls.filter(chosen)
        self.tally.count_left_out(LeftOut.NOT_SELECTED, calls.height - kept.height)
        ordered = kept.sort("RunId", "Mode", "GroupId", "RolloutId", "Turn", "Timestamp", "CallId", nulls_last=True)
        return GroupSlice(rollouts.select(*ROLLOUT, "TaskId", "GroupSize", "Group", "Return"), ordered)

    def _count(self, rollouts: pl.DataFrame, drops: pl.DataFrame) -> None:
        self.tally.calls += int(rollouts["Calls"].sum())
        self.tally.rollouts += rollouts.height
        self.tally.groups += rollouts["Group"].n_unique()
        self.tally.bare_rollouts += rollouts.filter(pl.col("Calls") == 0).height
        exported = list(self.request.dropped)
        for reason, count in drops.filter(~pl.col("Reason").is_in(exported)).group_by("Reason").len().sort("Reason").iter_rows():
            self.tally.left_out[f"dropped: {reason}"] += count

    def _rows(self, table: str, columns: Iterable[str], rollouts: pl.DataFrame) -> pl.DataFrame:
        """Return rows of the given builds, each once; the table's key finds them."""
        where = " AND ".join(f"{name} IN {name}s" for name in _KEY)
        constants = ", ".join(f"{constant(rollouts[name].unique(maintain_order=True))} AS {name}s" for name in _KEY)
        revisions = ", ".join(map(str, rollouts["Revision"].unique(maintain_order=True)))
        sql = (
            f"WITH {constants} SELECT {', '.join(map(_column, columns))} FROM spangrad_internal.{table} "
            f"WHERE BuildSpec = '{self.dataset.build_spec}' AND {where} AND Revision IN ({revisions})"
        )
        rows = self._frame(sql).join(rollouts.select(*_BUILD), on=list(_BUILD), how="semi", maintain_order="left")
        return rows.unique(["RunId", "RolloutId", "Attempt", "CallId"], keep="first", maintain_order=True)

    def _like_transitions(self, drops: pl.DataFrame, rollouts: pl.DataFrame) -> pl.DataFrame:
        about = rollouts.select(*_BUILD, "Mode", "GroupId", "GroupSize", "TaskId")
        described = drops.join(about, on=list(_BUILD), how="left", maintain_order="left")
        lists = [name for name, dtype in TRANSITIONS.items() if isinstance(dtype, pl.List)]
        return pl.concat([empty(TRANSITIONS).with_columns(Reason=pl.lit("")), described], how="diagonal_relaxed").with_columns(
            pl.col("Timestamp").cast(NANOSECONDS), pl.col(lists).fill_null([]), BuildSpec=pl.lit(self.dataset.build_spec)
        )

    def _returns(self, rollouts: pl.DataFrame) -> pl.DataFrame:
        """Return the weighted sum of each rollout's rewards.

        Null where they name several roles, which are never added up, and where there is neither a reward nor a transition.
        """
        weights = dict(self.request.reward_weights)
        name, role, value = map(pl.col, _TOTALS)
        weighted = value * name.replace_strict(weights, default=1.0, return_dtype=pl.Float64) if weights else value
        has_return = (role.filter(role != "").n_unique() <= 1) & (name.is_not_null().any() | (pl.col("Transitions") > 0).any())
        totals = rollouts.select(*_BUILD, "Transitions", *_TOTALS).explode(_TOTALS, empty_as_null=True)
        return totals.group_by(*_BUILD).agg(Return=pl.when(has_return).then(weighted.sum()))

    def _frame(self, sql: str) -> pl.DataFrame:
        return query(self.client, sql).with_columns(
            pl.col(pl.Categorical, pl.Binary).cast(pl.String), pl.col(pl.List(pl.Categorical), pl.List(pl.Binary)).cast(pl.List(pl.String))
        )


def _column(name: str) -> str:
    """Return SQL of a column of transitions or drops: a text that is not UTF-8 is read with replacements, keys as they are.

    A condition on a name means the column of the answer, and the index finds no rows by a function of a key.
    """
    if name == "Timestamp":
        return "toUnixTimestamp64Nano(Timestamp) AS Timestamp"
    dtype = TRANSITIONS.get(name)
    if dtype == pl.String() and name not in (*_KEY, "BuildSpec"):
        return f"toValidUTF8({name}) AS {name}"
    return f"arrayMap(text -> toValidUTF8(text), `{name}`) AS `{name}`" if dtype == pl.List(pl.String()) else f"`{name}`"
