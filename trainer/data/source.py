"""Finished groups of rollouts, and their transitions, read from the span store.

Invariant: only the run, modes and dataset of the trainer's settings, as of the time that they name; a rollout's newest revision, each row
once. The caller leaves out the groups that the ledger has used.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass, field, replace
from datetime import UTC
from typing import TYPE_CHECKING, Any

import polars as pl

from spangrad.selection import selected_of
from spangrad.settings import Selection, Settings
from spangrad.store.clickhouse import LONG, constant, store_errors
from spangrad.store.datasets import ROWS_OF, builds_sql, resolve
from spangrad.types import AttemptFailure, Mode
from trainer.credit.learning import ESTIMATORS, Need
from trainer.credit.overlong import with_overlong
from trainer.credit.roles import cancelling_roles, count_own_roles, count_roles, missing_roles
from trainer.data.built_groups import THIS_RUN, VISIBLE_SECONDS, BuiltGroups, Key

if TYPE_CHECKING:
    from clickhouse_connect.driver.client import Client

logger = logging.getLogger(__name__)

GROUP_COLUMNS = ("RunId", "Mode", "BuildSpec", "GroupId")

_IN_GROUPS = "(Mode, GroupId) IN arrayZip({modes}, {groups})"

_STATES = """
SELECT Mode, GroupId, max(GroupSize), uniqExact(RolloutId)
FROM {builds} AS v
GROUP BY Mode, GroupId
ORDER BY max(FirstBuiltAt), Mode, GroupId
"""

_UNBUILT = """
SELECT uniqExact(RolloutId) FROM spangrad.attempts
WHERE RunId = %(run)s AND Final AND Mode IN %(read)s
    AND RolloutId NOT IN (SELECT RolloutId FROM spangrad_internal.builds WHERE RunId = %(run)s AND BuildSpec = %(spec)s)
"""

_ELSEWHERE = """
SELECT RunId, BuildSpec = %(spec)s AS Ours, uniqExact(RolloutId) FROM spangrad_internal.builds GROUP BY RunId, Ours
    ORDER BY max(IngestedAt) DESC LIMIT 5
"""

_BUILDS = """
SELECT RunId, Mode, BuildSpec, GroupId, RolloutId, Attempt, Revision, Content, Transitions, Rewards, Failure, Drops
FROM {builds} AS v
WHERE {in_groups}
ORDER BY Mode, GroupId, RolloutId, Attempt
"""

_BUILT = {
    "RolloutId": pl.String(),
    "Revision": pl.UInt32(),
    "Dated": pl.Int64(),
    "Mode": pl.String(),
    "GroupId": pl.String(),
    "GroupSize": pl.UInt32(),
    "Attempt": pl.UInt16(),
    "Content": pl.UInt64(),
    "Transitions": pl.UInt32(),
    "Rewards": pl.UInt32(),
    "Failure": pl.String(),
    "Drops": pl.UInt32(),
}
"""Columns of `BuiltRow`."""

_TRANSITIONS = """
SELECT RunId, Mode, BuildSpec, GroupId, TaskId, RolloutId, Attempt, Revision, Content, Turn, CallId, TransitionId, TraceId, SpanId,
    AgentName, Components, Tools, Policy, Version, `Versions.Start`, `Versions.Version`, Model, TokenizerHash, Temperature, Reshaping,
    FinishReason, PromptIds, ResponseIds, Logprobs, `Rewards.Name`, `Rewards.Value`, `Rewards.CallId`, `Rewards.Role`, `Rewards.Turn`
FROM spangrad_internal.transitions FINAL
WHERE {this_run} AND {in_groups}
ORDER BY Mode, GroupId, RolloutId, Attempt, Turn, CallId
"""


@dataclass(frozen=True, slots=True)
class Group:
    """Rollouts that share a baseline, as one build specification made them."""

    run_id: str
    mode: str
    build_spec: str
    group_id: str


@dataclass(frozen=True, slots=True)
class GroupState:
    """Build progress of a group; its greedy rollout counts where the trainer's estimator compares with it."""

    group: Group
    rollouts: int
    """Number of its rollouts that are built."""
    size: int
    """Number of rollouts of the whole group; 0: unknown."""

    @property
    def whole(self) -> bool:
        """Return whether all of its rollouts are built."""
        return 0 < self.size <= self.rollouts


AttemptKey = tuple[str, str, int]
"""Run id, rollout id and attempt."""


@dataclass(frozen=True, slots=True)
class BatchRollout:
    """One attempt of a rollout in a group, at the revision that is trained."""

    group: Group
    rollout_id: str
    attempt: int
    revision: int
    failure: str = ""
    """`AttemptFailure` of the attempt; empty: it ended well."""
    drops: int = 0
    """Number of its calls that were dropped; 1 where it has none."""

    @property
    def key(self) -> AttemptKey:
        """Return what names the attempt, whatever group and revision it is in."""
        return self.group.run_id, self.rollout_id, self.attempt


@dataclass(frozen=True)
class Loaded:
    """Rollouts and transitions of some groups in the store."""

    rollouts: list[BatchRollout]
    """Every attempt that was built, with transitions or with dropped calls only."""
    transitions: pl.DataFrame
    """Transitions of all policies, of the newest revisions; ordered by group, rollout, attempt and turn. A final reward is on a rollout's
    last call, of any policy, so a policy's values are not known from its own rows alone."""
    greedy: pl.DataFrame | None = None
    """Transitions of the groups' greedy rollouts. None: the trainer's estimator compares with none."""
    cancelled: frozenset[str] = frozenset()
    """Ids of groups of which a rollout was cancelled, so that its attempt ended before its agent had."""
    incomplete: Mapping[Group, str] = field(default_factory=dict[Group, str])
    """Groups of which the store shows fewer rows than were built, with a sentence about each: they are not ready yet."""

    def own(self, policy: str, selection: Selection) -> pl.Series:
        """Return a mask of the transitions that a policy can be trained on: those that it answered and that are selected.

        Raises:
            SettingsError: a pattern of the selection is no regular expression.
        """
        return self.transitions.select(Own=selected_of(policy, selection))["Own"]

    def oldest_versions(self, policy: str) -> dict[Group, int]:
        """Return the oldest version of a policy that answered a call of each group; groups without such a call are left out."""
        oldest = (
            self.transitions.filter(pl.col("Policy") == policy)
            .group_by(*GROUP_COLUMNS)
            .agg(Oldest=pl.coalesce(pl.col("Versions.Version").list.min(), "Version").min())
            .drop_nulls("Oldest")
        )
        return {Group(*group): version for *group, version in oldest.iter_rows()}

    def only(self, groups: Collection[Group]) -> Loaded:
        """Return what was loaded of some of the groups."""
        ids = {group.group_id for group in groups}
        names = pl.DataFrame([(group.mode, group.group_id) for group in groups], schema=["Mode", "GroupId"], orient="row")
        if names.is_empty():
            names = names.cast(pl.String)
        return Loaded(
            [rollout for rollout in self.rollouts if rollout.group in groups],
            self.transitions.join(names, on=["Mode", "GroupId"], how="semi", maintain_order="left"),
            None if self.greedy is None else self.greedy.filter(pl.col("GroupId").is_in(pl.Series(sorted(ids), dtype=pl.String).implode())),
            self.cancelled & ids,
            {group: detail for group, detail in self.incomplete.items() if group in groups},
        )

    def __add__(self, other: Loaded) -> Loaded:
        """Return the groups of both, which are distinct, in the store's order."""
        greedy = [frame for frame in (self.greedy, other.greedy) if frame is not None]
        return Loaded(
            sorted([*self.rollouts, *other.rollouts], key=lambda row: (row.group.mode, row.group.group_id, row.rollout_id, row.attempt)),
            _in_order([self.transitions, other.transitions]),
            _in_order(greedy) if greedy else None,
            self.cancelled | other.cancelled,
            {**self.incomplete, **other.incomplete},
        )


_ORDER = ("Mode", "GroupId", "RolloutId", "Attempt", "Turn", "CallId")


def _in_order(frames: Sequence[pl.DataFrame]) -> pl.DataFrame:
    """Return the rows of all frames, in the order in which the store gives them."""
    return pl.concat([frame for frame in frames if frame.height] or frames[:1], how="vertical_relaxed").sort(*_ORDER)


def _with_greedy(states: Sequence[GroupState], modes: Sequence[str]) -> list[GroupState]:
    """Count the greedy rollout as one more of each group; groups of greedy rollouts alone are left out, as part of those."""
    built = {state.group.group_id for state in states if state.group.mode == Mode.GREEDY}
    return [
        replace(state, rollouts=min(state.rollouts, state.size) + (state.group.group_id in built), size=state.size + 1)
        if state.group.mode in modes and state.size
        else state
        for state in states
        if state.group.mode != Mode.GREEDY
    ]


class GroupReader:
    """Reads one run's groups."""

    def __init__(self, client: Client, settings: Settings, *, arrived: Callable[[float], bool] = lambda _: True) -> None:
        """Read with `client`: the dataset of the trainer's settings, else what the builder's settings make.

        A name without a revision means the newest one now: training does not switch to another revision later. `arrived` returns whether
        builds may have arrived within the last so many seconds.

        Raises:
            StoreError: the store has no such dataset.
        """
        trainer = settings.trainer
        self._client = client
        self._trainer = trainer
        self._run = trainer.run_id
        self._modes = trainer.modes
        self._greedy = ESTIMATORS[trainer.credit.estimator].needs is Need.GREEDY_ROLLOUT
        self._roles, self._weights = trainer.credit.reward_roles, trainer.credit.reward_weights
        self._warned_of_roles = False
        as_of = trainer.as_of
        self._as_of = as_of.replace(tzinfo=UTC) if as_of and not as_of.tzinfo else as_of
        self.build_spec = settings.builder.spec if trainer.dataset is None else resolve(client, trainer.dataset, self._as_of).build_spec
        self._built = BuiltGroups(self._rows, self._as_of, greedy=self._greedy)
        self._arrived = arrived
        self._beside = ThreadPoolExecutor(1, "builds of groups")
        self._keys: list[tuple[str, str]] = []
        self._ready: list[Group] = []

    def ready(self) -> list[Group]:
        """Return the groups with as many built rollouts as their size, in the order in which they became ready, but those released.

        Groups of unknown size (0) are never ready. Where the estimator compares with a greedy rollout, that is waited for, too. The first
        call reads all of history, each further one what has arrived since; the list is the same as long as nothing changes.
        """
        keys = self._built.poll(arrived=self._arrived(VISIBLE_SECONDS))
        if keys is not self._keys:
            self._keys, self._ready = keys, [Group(self._run, mode, self.build_spec, group) for mode, group in keys]
        return self._ready

    def release(self, groups: Iterable[Group]) -> None:
        """Forget groups: they are trained, or skipped."""
        self._built.release((group.mode, group.group_id) for group in groups)

    def rescan(self) -> None:
        """Have `ready` remember all groups again."""
        self._built.rescan()

    def states(self) -> list[GroupState]:
        """Return all groups of the run, of every mode, whole or not, in the order of `ready`."""
        rows = self._rows(_STATES.format(builds=builds_sql(self._as_of, THIS_RUN)))
        states = [GroupState(Group(self._run, mode, self.build_spec, group), count, size) for mode, group, size, count in rows]
        return _with_greedy(states, self._modes) if self._greedy else states

    def unbuilt(self) -> int:
        """Return the number of rollouts of the run, of the trained modes, that have ended and are not built."""
        ((count,),) = self._rows(_UNBUILT)
        return count

    def elsewhere(self) -> list[str]:
        """Return descriptions of rollouts built of other runs or by other specifications; the newest first."""
        rows = self._rows(_ELSEWHERE)
        return [f"{count} rollouts of run {run!r}{'' if ours else ' by another specification'}" for run, ours, count in rows]

    def _rows(self, query: str) -> list[tuple[Any, ...]]:
        read = (*self._modes, *([Mode.GREEDY.value] if self._greedy else []))
        parameters = {"run": self._run, "modes": tuple(self._modes), "read": read, "spec": self.build_spec}
        with store_errors(self._client):
            return [tuple(row) for row in self._client.query(query, parameters=parameters, settings=LONG).result_rows]

    def load(self, groups: Sequence[Group]) -> Loaded:
        """Read the rollouts and transitions of some groups."""
        known = self._built.rows(self._keys_of(groups))
        if known is None:
            return self._load(groups, lambda: self._builds_of(groups, "TRUE"))
        builds = pl.DataFrame(known, schema=_BUILT, orient="row")
        return self._load(groups, lambda: builds.with_columns(RunId=pl.lit(self._run), BuildSpec=pl.lit(self.build_spec)))

    def load_batch(self, rollouts: Sequence[BatchRollout]) -> Loaded:
        """Read what one batch was made of: its rollouts at the revisions that it trained, which newer ones may have followed.

        Where the estimator compares with a greedy rollout, that is read at its newest revision.
        """
        ids, revisions = constant(rollout.rollout_id for rollout in rollouts), [rollout.revision for rollout in rollouts]
        trained = f"(RolloutId, Revision) IN arrayZip({ids}, {revisions}) OR Mode = '{Mode.GREEDY.value}'"
        groups = list(dict.fromkeys(rollout.group for rollout in rollouts))
        return self._load(groups, lambda: self._builds_of(groups, trained))

    def _keys_of(self, groups: Sequence[Group]) -> list[Key]:
        """Return modes and ids of what is read of some groups."""
        return [(mode, group.group_id) for group in groups for mode in (group.mode, *([Mode.GREEDY.value] if self._greedy else []))]

    def _in_groups(self, groups: Sequence[Group]) -> str:
        keys = self._keys_of(groups)
        return _IN_GROUPS.format(modes=constant(mode for mode, _ in keys), groups=constant(group for _, group in keys))

    def _builds_of(self, groups: Sequence[Group], revisions: str) -> pl.DataFrame:
        """Read the rollouts of groups of one run and specification, at the newest of the revisions that a condition admits."""
        in_groups = self._in_groups(groups)
        same_rollouts = f"{THIS_RUN} AND RolloutId IN (SELECT RolloutId FROM spangrad_internal.builds WHERE {THIS_RUN} AND {in_groups})"
        builds = builds_sql(self._as_of, f"{same_rollouts} AND ({revisions})")
        return self._frame(_BUILDS.format(builds=builds, in_groups=in_groups), groups)

    def _load(self, groups: Sequence[Group], builds_of: Callable[[], pl.DataFrame]) -> Loaded:
        """Read the transitions of groups of one run and specification; their rollouts are read beside."""
        reading = self._beside.submit(copy_context().run, builds_of)  # also where an outage is not waited for
        rows = self._frame(_TRANSITIONS.format(this_run=THIS_RUN, in_groups=self._in_groups(groups)), groups)
        builds = reading.result()
        newest = rows.join(builds.select(ROWS_OF), on=ROWS_OF, how="semi", maintain_order="left")
        rollouts = [
            BatchRollout(Group(*row[: len(GROUP_COLUMNS)]), *row[len(GROUP_COLUMNS) :])
            for row in builds.select(*GROUP_COLUMNS, "RolloutId", "Attempt", "Revision", "Failure", "Drops").iter_rows()
        ]
        cancelled = frozenset(rollout.group.group_id for rollout in rollouts if rollout.failure == AttemptFailure.CANCELLED)
        missing = missing_rows(builds, newest)
        incomplete = {group: missing[group.group_id] for group in groups if group.group_id in missing}
        newest = with_overlong(self._with_counted_rewards(newest), self._trainer)
        if not self._greedy:
            return Loaded(rollouts, newest, cancelled=cancelled, incomplete=incomplete)
        greedy = pl.col("Mode") == Mode.GREEDY
        trained = [rollout for rollout in rollouts if rollout.group.mode != Mode.GREEDY]
        return Loaded(trained, newest.filter(~greedy), newest.filter(greedy), cancelled, incomplete)

    def _with_counted_rewards(self, transitions: pl.DataFrame) -> pl.DataFrame:
        """Return the transitions with the rewards that trainer.credit counts by role; log a warning at the first odd choice of roles."""
        counted = count_roles(transitions, self._roles)
        if self._trainer.credit.by_role:
            return count_own_roles(counted, self._trainer.policy)
        warning = missing_roles(transitions, self._roles) or cancelling_roles(counted, self._weights)
        if warning and not self._warned_of_roles:
            logger.warning("%s", warning)
            self._warned_of_roles = True
        return counted

    def _frame(self, query: str, groups: Sequence[Group]) -> pl.DataFrame:
        """Return the result of a query of the run and the specification of some groups, which share them."""
        names = {"run": groups[0].run_id, "spec": groups[0].build_spec} if groups else {}
        parameters = {"run": self._run, "spec": self.build_spec, **names}
        with store_errors(self._client):
            table = self._client.query_arrow(query, parameters=parameters, use_strings=True, settings=LONG)
        frame = pl.from_arrow(table)
        assert isinstance(frame, pl.DataFrame)
        return frame.with_columns(pl.col(pl.Categorical, pl.Binary).cast(pl.String))


def missing_rows(builds: pl.DataFrame, transitions: pl.DataFrame) -> dict[str, str]:
    """Compare loaded rows with what the builder counted: a replica may show a build before its rows.

    Args:
        builds: ROWS_OF, GroupId, Transitions and Rewards of the newest revisions.
        transitions: their rows, as far as the store shows them.

    Returns:
        Ids of groups with a rollout of which rows are missing, with a sentence that names one such rollout.
    """
    rows = transitions.group_by(ROWS_OF).agg(Rows=pl.len(), Entries=pl.col("Rewards.Value").list.len().sum())
    counts = builds.join(rows, on=ROWS_OF, how="left").with_columns(pl.col("Rows", "Entries").fill_null(0))
    short = counts.filter((pl.col("Rows") < pl.col("Transitions")) | (pl.col("Entries") < pl.col("Rewards")))
    if short.is_empty():
        return {}
    return {
        group: f"rollout {rollout!r} has {rows} of {built} transitions and {entries} of {rewards} rewards in the store so far."
        for group, rollout, rows, built, entries, rewards in short.sort("GroupId", "RolloutId", descending=True)
        .select("GroupId", "RolloutId", "Rows", "Transitions", "Entries", "Rewards")
        .iter_rows()
    }
