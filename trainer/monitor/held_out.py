"""Held-out rollouts of a run, read from the span store as they are built.

In: builds and transitions of mode validate. Out: rewards by version, and games. Invariants: a read costs what was built since the one
before, however many rollouts the run has; a rollout counts by its newest build; one whose calls come of two versions counts for neither.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from spangrad.settings import Settings
from spangrad.store.clickhouse import store_errors
from spangrad.store.datasets import built_sql, rows_sql
from spangrad.types import Mode
from trainer.credit.roles import counts
from trainer.data.built_groups import SWEEP_OVERLAP, THIS_RUN
from trainer.monitor.batch_metrics import sums
from trainer.monitor.ratings import Competitor, Score, scores_of

if TYPE_CHECKING:
    from clickhouse_connect.driver.client import Client

_NEW = f"{THIS_RUN} AND Mode = '{Mode.VALIDATE.value}' AND IngestedAt >= fromUnixTimestamp64Micro(%(since)s)"
_ARRIVED = f"SELECT count(), toUnixTimestamp64Micro(max(IngestedAt)), groupUniqArray(RolloutId) FROM spangrad_internal.builds WHERE {_NEW}"
_VERSIONS = "if(empty(`Versions.Version`), [Version], `Versions.Version`)"
_ROLLOUTS = f"""
SELECT RolloutId, groupUniqArray((AgentName, Policy, {_VERSIONS})),
    groupArrayArray(`Rewards.Name`), groupArrayArray(`Rewards.Value`), groupArrayArray(`Rewards.Role`)
FROM {{rows}} AS t
WHERE Mode = '{Mode.VALIDATE.value}'
GROUP BY RolloutId
"""
"""Query of every reward of a rollout, not their sums: ClickHouse's sumMap drops a name whose sum is 0, and so a rollout that failed."""

Player = tuple[str, str, Sequence[int]]
"""Agent, policy, and the versions that sampled some answer of it."""
Reward = tuple[str, float, str]
"""Name, value and role."""


@dataclass(frozen=True, slots=True)
class HeldOutRollout:
    """Result of a held-out rollout."""

    version: int | None
    """Version of the policy that answered all of the policy's calls. None: there was no such call, or several versions answered."""
    rewards: Mapping[str, float]
    """Rewards that count for the policy, summed by name."""
    scores: Sequence[Score] = ()
    """Results between its players, where rewards have roles, and each role was played by one version."""


class HeldOutRollouts:
    """Reader of one run's held-out rollouts."""

    def __init__(self, client: Client, settings: Settings, build_spec: str) -> None:
        """Read with `client` the rollouts of the trainer's run that this specification built."""
        self._client = client
        self._settings = settings.trainer
        self._names = {"run": settings.trainer.run_id, "spec": build_spec}
        self._arrived: tuple[int, int] | None = None
        """Number of builds since `_since` at the last read, and the time of the newest, in microseconds since 1970."""
        self._since = 0
        """Time from which builds are read, in microseconds since 1970."""
        self._rollouts: dict[str, HeldOutRollout] = {}
        self._by_version: dict[int, dict[str, HeldOutRollout]] = {}
        self.games = Counter[Score]()
        """Number of games of each score, of all rollouts that were read."""
        self.game_changes = 0
        """Number of games that were added or removed."""

    def of_version(self, version: int) -> Collection[HeldOutRollout]:
        """Return the rollouts of a version that were read."""
        return self._by_version.get(version, {}).values()

    def read(self) -> set[int]:
        """Read what was built since the last call; return the versions whose rollouts changed.

        Raises:
            StoreError: the store failed; the next call reads the same.
        """
        with store_errors(self._client):
            count, newest, ids = self._query_arrived(self._since)
            if not count or (count, newest) == self._arrived:
                return set()
            since = max(newest - SWEEP_OVERLAP, 0)
            # Before the rollouts: what comes between the two is read again.
            arrived = self._query_arrived(since)[:2]
            new = f"{THIS_RUN} AND RolloutId IN {built_sql(_NEW)}" if self._since else THIS_RUN
            query = _ROLLOUTS.format(rows=rows_sql("transitions", self._settings.as_of, new))
            rows = self._client.query(query, parameters={**self._names, "since": self._since}).result_rows
        self._since, self._arrived = since, arrived
        return self._replace({**dict.fromkeys(ids), **{row[0]: self._rollout(row[1], [*zip(*row[2:], strict=True)]) for row in rows}})

    def _query_arrived(self, since: int) -> tuple[int, int, Sequence[str]]:
        ((count, newest, ids),) = self._client.query(_ARRIVED, parameters={**self._names, "since": since}).result_rows
        return count, newest, ids

    def _replace(self, read: Mapping[str, HeldOutRollout | None]) -> set[int]:
        """Replace rollouts by their newest builds (None: without transitions); return the versions whose rollouts changed."""
        changed: set[int] = set()
        for rollout_id, after in read.items():
            before = self._rollouts.get(rollout_id)
            if before == after:
                continue
            if before:
                del self._rollouts[rollout_id]
                self._count(before.scores, -1)
                if before.version is not None:
                    del self._by_version[before.version][rollout_id]
                    changed.add(before.version)
            if after:
                self._rollouts[rollout_id] = after
                self._count(after.scores, 1)
                if after.version is not None:
                    self._by_version.setdefault(after.version, {})[rollout_id] = after
                    changed.add(after.version)
        return changed

    def _count(self, scores: Iterable[Score], games: int) -> None:
        for score in scores:
            self.game_changes += 1
            self.games[score] += games
            if not self.games[score]:
                del self.games[score]

    def _rollout(self, players: Sequence[Player], rewards: Sequence[Reward]) -> HeldOutRollout:
        own = [(agent, versions) for agent, policy, versions in players if policy == self._settings.policy]
        roles = sorted({agent for agent, _ in own}) if self._settings.credit.by_role else self._settings.credit.reward_roles
        versions = {version for _, answered in own for version in answered}
        return HeldOutRollout(
            versions.pop() if len(versions) == 1 else None,
            sums((name, value) for name, value, role in rewards if counts(role, roles)),
            self._scores(players, rewards),
        )

    def _scores(self, players: Sequence[Player], rewards: Sequence[Reward]) -> list[Score]:
        """Return the scores of a game between roles; none where a role has two players, or a player two versions."""
        returns = sums((role, value) for _, value, role in rewards)
        if not any(returns) or len({role for role, *_ in players}) < len(players) or any(len(versions) > 1 for *_, versions in players):
            return []
        own = {self._settings.policy, self._settings.evaluation.past_policy} - {""}
        competitors = [
            Competitor(role, self._settings.policy if policy in own else policy, version) for role, policy, (version,) in players
        ]
        return scores_of(competitors, returns)
