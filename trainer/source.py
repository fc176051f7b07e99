"""Finished groups of rollouts, and their transitions, out of the span store.

In: `otel.builds` and `otel.transitions`, as `spangrad.datasets` reads them. Out: `Group`s whose last rollout was built, oldest first,
and their transitions as Polars frames. Invariant: only the run, modes and dataset that the trainer was told, as of the time that it was
told; a rollout's newest revision, each row once. What the ledger has used is the caller's to leave out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC
from typing import TYPE_CHECKING, Any

import polars as pl

from spangrad.clickhouse import LONG, batches, constant, store_errors
from spangrad.datasets import ROWS_OF, builds_sql, resolve
from spangrad.selection import expression
from spangrad.settings import Selection, Settings
from spangrad.types import AttemptFailure, Mode
from trainer.learning import ESTIMATORS, Need

if TYPE_CHECKING:
    from clickhouse_connect.driver.client import Client

GROUP_COLUMNS = ("RunId", "Mode", "BuildSpec", "GroupId")

_MINE = "RunId = %(run)s AND BuildSpec = %(spec)s"
_IN_GROUPS = "(Mode, GroupId) IN arrayZip({modes}, {groups})"

_READY = """
SELECT Mode, GroupId
FROM {builds} AS v
WHERE Mode IN %(modes)s AND GroupSize > 0 {compared}
GROUP BY Mode, GroupId
HAVING uniqExact(RolloutId) >= max(GroupSize)
ORDER BY max(FirstBuiltAt), Mode, GroupId
"""

_COMPARED = "AND GroupId IN (SELECT GroupId FROM {builds} AS greedy WHERE Mode = '" + Mode.GREEDY.value + "')"

_STATES = """
SELECT Mode, GroupId, max(GroupSize), uniqExact(RolloutId)
FROM {builds} AS v
GROUP BY Mode, GroupId
ORDER BY max(FirstBuiltAt), Mode, GroupId
"""

_UNBUILT = """
SELECT uniqExact(RolloutId) FROM otel.v_rollouts
WHERE RunId = %(run)s AND Final AND Mode IN %(read)s
    AND RolloutId NOT IN (SELECT RolloutId FROM otel.builds WHERE RunId = %(run)s AND BuildSpec = %(spec)s)
"""

_ELSEWHERE = """
SELECT RunId, BuildSpec = %(spec)s AS Ours, uniqExact(RolloutId) FROM otel.builds GROUP BY RunId, Ours ORDER BY max(IngestedAt) DESC LIMIT 5
"""

_BUILDS = """
SELECT RunId, Mode, BuildSpec, GroupId, RolloutId, Attempt, Revision, Content
FROM {builds} AS v
WHERE {in_groups}
ORDER BY Mode, GroupId, RolloutId, Attempt
"""

_CANCELLED = """
SELECT RolloutId FROM otel.v_rollouts
WHERE RunId = %(run)s AND RolloutId IN {rollouts} AND Final AND Failure = '{reason}'
"""

_TRANSITIONS = """
SELECT RunId, Mode, BuildSpec, GroupId, RolloutId, Attempt, Revision, Content, Turn, CallId, TransitionId, AgentName, Components, Tools,
    Policy, Version, `Versions.Start`, `Versions.Version`, Model, TokenizerHash, Temperature, Reshaping, FinishReason,
    PromptIds, ResponseIds, Logprobs, `Rewards.Name`, `Rewards.Value`, `Rewards.CallId`, `Rewards.Role`
FROM otel.transitions FINAL
WHERE {mine} AND {in_groups}
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
    """How far a group is built; its greedy rollout is one of it where the trainer's estimator compares with that."""

    group: Group
    rollouts: int
    """That are built."""
    size: int
    """That it has when it is whole; 0: nobody said."""

    @property
    def whole(self) -> bool:
        """Whether all of it is built."""
        return 0 < self.size <= self.rollouts


@dataclass(frozen=True, slots=True)
class BatchRollout:
    """One attempt of a rollout in a group, at the revision that is trained."""

    group: Group
    rollout_id: str
    attempt: int
    revision: int


@dataclass(frozen=True)
class Loaded:
    """What the store holds of some groups."""

    rollouts: list[BatchRollout]
    """Every attempt that was built, whether it left transitions or only drops."""
    transitions: pl.DataFrame
    """Every policy's, of the newest revisions; ordered by group, rollout, attempt and turn. A final reward stands on a rollout's
    last call, whoever made it, so a policy's values are not known from its own rows alone."""
    greedy: pl.DataFrame | None = None
    """Transitions of the groups' greedy rollouts. None: the trainer's estimator compares with none."""
    cancelled: frozenset[str] = frozenset()
    """Ids of groups of which a rollout was cancelled, so that its attempt ended before its agent had."""

    def own(self, policy: str, selection: Selection) -> pl.Series:
        """Which transitions one policy can be trained on: those that it answered and that are selected.

        Raises:
            SettingsError: a pattern of the selection is no regular expression.
        """
        return self.transitions.select(Own=(pl.col("Policy") == policy) & expression(selection))["Own"]


def _with_greedy(states: Sequence[GroupState], modes: Sequence[str]) -> list[GroupState]:
    """Groups that lack one rollout more as long as their greedy one is not built; those of greedy rollouts alone are part of them."""
    built = {one.group.group_id for one in states if one.group.mode == Mode.GREEDY}
    return [
        replace(one, rollouts=min(one.rollouts, one.size) + (one.group.group_id in built), size=one.size + 1)
        if one.group.mode in modes and one.size
        else one
        for one in states
        if one.group.mode != Mode.GREEDY
    ]


class Source:
    """Reads one run's groups."""

    def __init__(self, client: Client, settings: Settings) -> None:
        """Read with `client`; the trainer's settings say what: a dataset, else what the builder's settings make.

        A name without a revision means the newest one now: training does not change over to another under way.

        Raises:
            StoreError: the store has no such dataset.
        """
        trainer = settings.trainer
        self._client = client
        self._url = settings.store.url
        self._run = trainer.run_id
        self._modes = trainer.modes
        self._greedy = ESTIMATORS[trainer.estimator].needs is Need.GREEDY_ROLLOUT
        as_of = trainer.as_of
        self._as_of = as_of.replace(tzinfo=UTC) if as_of and not as_of.tzinfo else as_of
        self.build_spec = (
            settings.builder.spec if trainer.dataset is None else resolve(client, self._url, trainer.dataset, self._as_of).build_spec
        )

    def ready(self) -> list[Group]:
        """All groups with as many built rollouts as their size, in the order in which they became ready.

        Groups of unknown size (0) are never ready. Where the estimator compares with a greedy rollout, that is waited for, too.
        """
        builds = builds_sql(self._as_of, _MINE)
        rows = self._rows(_READY.format(builds=builds, compared=_COMPARED.format(builds=builds) if self._greedy else ""))
        return [Group(self._run, mode, self.build_spec, group) for mode, group in rows]

    def states(self) -> list[GroupState]:
        """All groups of the run, of every mode and however far they are built, in the order of `ready`."""
        rows = self._rows(_STATES.format(builds=builds_sql(self._as_of, _MINE)))
        states = [GroupState(Group(self._run, mode, self.build_spec, group), count, size) for mode, group, size, count in rows]
        return _with_greedy(states, self._modes) if self._greedy else states

    def unbuilt(self) -> int:
        """How many rollouts of the run, of the modes that are trained, have ended and are not built."""
        ((count,),) = self._rows(_UNBUILT)
        return count

    def elsewhere(self) -> list[str]:
        """What is built of other runs, or by other specifications, in words; the newest first."""
        rows = self._rows(_ELSEWHERE)
        return [f"{count} rollouts of run {run!r}{'' if ours else ' by another specification'}" for run, ours, count in rows]

    def _rows(self, query: str) -> list[tuple[Any, ...]]:
        read = (*self._modes, *([Mode.GREEDY.value] if self._greedy else []))
        parameters = {"run": self._run, "modes": tuple(self._modes), "read": read, "spec": self.build_spec}
        with store_errors(self._url):
            return [tuple(row) for row in self._client.query(query, parameters=parameters).result_rows]

    def load(self, groups: Sequence[Group]) -> Loaded:
        """Read the rollouts and transitions of some groups."""
        named = [(mode, one.group_id) for one in groups for mode in (one.mode, *([Mode.GREEDY.value] if self._greedy else []))]
        in_groups = _IN_GROUPS.format(modes=constant(mode for mode, _ in named), groups=constant(group for _, group in named))
        theirs = f"{_MINE} AND RolloutId IN (SELECT RolloutId FROM otel.builds WHERE {_MINE} AND {in_groups})"
        builds = self._frame(_BUILDS.format(builds=builds_sql(self._as_of, theirs), in_groups=in_groups))
        rows = self._frame(_TRANSITIONS.format(mine=_MINE, in_groups=in_groups))
        newest = rows.join(builds.select(ROWS_OF), on=ROWS_OF, how="semi", maintain_order="left")
        rollouts = [
            BatchRollout(Group(*group), rollout, attempt, revision)
            for *group, rollout, attempt, revision in builds.select(*GROUP_COLUMNS, "RolloutId", "Attempt", "Revision").iter_rows()
        ]
        cancelled = self._cancelled(rollouts)
        if not self._greedy:
            return Loaded(rollouts, newest, cancelled=cancelled)
        greedy = pl.col("Mode") == Mode.GREEDY
        trained = [one for one in rollouts if one.group.mode != Mode.GREEDY]
        return Loaded(trained, newest.filter(~greedy), newest.filter(greedy), cancelled)

    def _cancelled(self, rollouts: Sequence[BatchRollout]) -> frozenset[str]:
        ids = set[str]()
        for some in batches(one.rollout_id for one in rollouts):
            query = _CANCELLED.format(reason=AttemptFailure.CANCELLED.value, rollouts=constant(some))
            with store_errors(self._url):
                ids |= {name for (name,) in self._client.query(query, parameters={"run": self._run}, settings=LONG).result_rows}
        return frozenset(one.group.group_id for one in rollouts if one.rollout_id in ids)

    def _frame(self, query: str) -> pl.DataFrame:
        parameters = {"run": self._run, "spec": self.build_spec}
        with store_errors(self._url):
            table = self._client.query_arrow(query, parameters=parameters, use_strings=True, settings=LONG)
        frame = pl.from_arrow(table)
        assert isinstance(frame, pl.DataFrame)
        return frame.with_columns(pl.col(pl.Categorical, pl.Binary).cast(pl.String))
