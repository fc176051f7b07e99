"""Finished groups of rollouts, and their transitions, out of the span store.

In: `otel.v_builds` and `otel.transitions`. Out: `Group`s whose last rollout was built, oldest first, and their transitions as Polars
frames. Invariant: only the run, modes and build specification that the trainer was told; a rollout's newest revision, each row
once. What the ledger has used is the caller's to leave out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import polars as pl

from spangrad.clickhouse import store_errors
from spangrad.settings import Settings

if TYPE_CHECKING:
    from clickhouse_connect.driver.client import Client

GROUP_COLUMNS = ("RunId", "Mode", "BuildSpec", "GroupId")

_READY = """
SELECT Mode, GroupId
FROM otel.v_builds
WHERE RunId = %(run)s AND Mode IN %(modes)s AND BuildSpec = %(spec)s AND GroupSize > 0
GROUP BY Mode, GroupId
HAVING uniqExact(RolloutId) >= max(GroupSize)
ORDER BY max(FirstBuiltAt), Mode, GroupId
"""

_BUILDS = """
SELECT RunId, Mode, BuildSpec, GroupId, RolloutId, Attempt, max(Revision) AS Revision
FROM otel.v_builds
WHERE RunId = %(run)s AND BuildSpec = %(spec)s AND (Mode, GroupId) IN %(groups)s
GROUP BY RunId, Mode, BuildSpec, GroupId, RolloutId, Attempt
ORDER BY Mode, GroupId, RolloutId, Attempt
"""

_TRANSITIONS = """
SELECT RunId, Mode, BuildSpec, GroupId, RolloutId, Attempt, Revision, Turn, CallId, TransitionId, Version, TokenizerHash, Temperature,
    Policy, PromptIds, ResponseIds, Logprobs, `Rewards.Value`
FROM otel.transitions FINAL
WHERE RunId = %(run)s AND BuildSpec = %(spec)s AND (Mode, GroupId) IN %(groups)s
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

    def own(self, policy: str) -> pl.DataFrame:
        """One policy's transitions: those that it can be trained on."""
        return self.transitions.filter(pl.col("Policy") == policy)


class Source:
    """Reads one run's groups."""

    def __init__(self, client: Client, settings: Settings) -> None:
        """Read with `client`; the trainer's and the builder's settings say what."""
        self._client = client
        self._url = settings.store.url
        self._run = settings.trainer.run_id
        self._spec = settings.builder.spec
        self._modes = settings.trainer.modes

    def ready(self) -> list[Group]:
        """All groups with as many built rollouts as their size, in the order in which they became ready.

        Groups of unknown size (0) are never ready.
        """
        with store_errors(self._url):
            rows = self._client.query(_READY, parameters={"run": self._run, "modes": tuple(self._modes), "spec": self._spec}).result_rows
        return [Group(self._run, mode, self._spec, group) for mode, group in rows]

    def load(self, groups: Sequence[Group]) -> Loaded:
        """Read the rollouts and transitions of some groups."""
        where: dict[str, object] = {
            "run": self._run,
            "spec": self._spec,
            "groups": tuple((one.mode, one.group_id) for one in groups),
        }
        builds = self._frame(_BUILDS, where)
        newest = self._frame(_TRANSITIONS, where).join(builds, on=builds.columns, how="semi", maintain_order="left")
        rollouts = [
            BatchRollout(Group(*group), rollout, attempt, revision)
            for *group, rollout, attempt, revision in builds.select(*GROUP_COLUMNS, "RolloutId", "Attempt", "Revision").iter_rows()
        ]
        return Loaded(rollouts, newest)

    def _frame(self, query: str, parameters: dict[str, object]) -> pl.DataFrame:
        with store_errors(self._url):
            table = self._client.query_arrow(query, parameters=parameters, use_strings=True)
        frame = pl.from_arrow(table)
        assert isinstance(frame, pl.DataFrame)
        return frame.with_columns(pl.col(pl.Categorical, pl.Binary).cast(pl.String))
