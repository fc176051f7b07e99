"""Evaluation of versions on held-out tasks, and selection of the best version.

Invariant: held-out rollouts are measured and never trained; a rollout whose calls come of two versions counts for neither.

The held-out tasks run while a version is served: the user or a job starts `spangrad run --mode validate`, or the trainer does so beside
the steps (`evaluation_command`).
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from spangrad.settings import Settings, TrainerSettings
from spangrad.store.clickhouse import store_errors
from spangrad.store.datasets import rows_sql
from spangrad.types import Mode, VersionStatus
from trainer.credit.roles import counts
from trainer.ledger.ledger import Ledger
from trainer.ledger.tables import LedgerVersion
from trainer.monitor.batch_metrics import succeeded, sums, weighted_return
from trainer.monitor.ratings import Competitor, Score, ratings, scores_of
from trainer.publish.checkpoint import versions_on_disk

if TYPE_CHECKING:
    from clickhouse_connect.driver.client import Client

    from trainer.monitor.watching import Watchers

logger = logging.getLogger(__name__)

_THIS_RUN = "RunId = %(run)s AND BuildSpec = %(spec)s"
_ARRIVED = f"""
SELECT count(), toUnixTimestamp64Micro(max(IngestedAt)) FROM spangrad_internal.builds
WHERE {_THIS_RUN} AND Mode = '{Mode.VALIDATE.value}' AND spangrad_internal.builds.IngestedAt >= fromUnixTimestamp64Micro(%(since)s)
"""
_OVERLAP = 120_000_000
"""Overlap of two reads, in microseconds: longer than any insert takes to become visible after its rows were dated."""
_ROLLOUTS = """
SELECT groupUniqArrayArrayIf(if(empty(`Versions.Version`), [Version], `Versions.Version`), Policy = %(policy)s) AS Versions,
    groupUniqArrayIf(AgentName, Policy = %(policy)s),
    groupArrayArray(`Rewards.Name`), groupArrayArray(`Rewards.Value`), groupArrayArray(`Rewards.Role`)
FROM {rows} AS t
WHERE Mode = '{mode}'
GROUP BY RolloutId, Attempt
HAVING length(Versions) = 1
"""
"""Query of every reward of a rollout, not their sums: ClickHouse's sumMap drops a name whose sum is 0, and so a rollout that failed."""
_GAMES = """
SELECT groupUniqArray((AgentName, Policy, if(empty(`Versions.Version`), [Version], `Versions.Version`))),
    groupArrayArray(`Rewards.Role`), groupArrayArray(`Rewards.Value`)
FROM {rows} AS t
WHERE Mode = '{mode}'
GROUP BY RolloutId, Attempt
HAVING notEmpty(arrayFilter(role -> role != '', groupArrayArray(`Rewards.Role`)))
"""


class Evaluation:
    """Reader of one run's held-out rollouts."""

    def __init__(self, client: Client, settings: Settings, build_spec: str) -> None:
        """Read with `client` the rollouts of the trainer's run that this specification built."""
        self._client = client
        self._url = settings.store.url
        self._settings = settings.trainer
        self._build_spec = build_spec
        self._arrived: tuple[int, int] | None = None
        """Number of rows since `_since` at the last read, and the time of the newest, in microseconds since 1970."""
        self._since = 0
        """Time from which rows are counted, in microseconds since 1970."""
        self._games: Sequence[Sequence[Any]] = ()
        """Held-out rollouts with rewards by role that were read and not rated yet: their players, and roles and values of the rewards."""

    def update(self, ledger: Ledger, watchers: Watchers) -> list[LedgerVersion]:
        """Measure and rate versions on what was built since the last poll, and report that; return the versions that changed."""
        measured, newest = self.measure(ledger), ledger.frontier()
        for version in measured:
            watchers.evaluated(version, newest.version if newest else version.version)
        if measured and (chosen := best(versions_with_weights(ledger, self._settings), self._settings)):
            logger.info("%s", describe_best(chosen, self._settings))
        return [*measured, *self.rate(ledger)]

    def measure(self, ledger: Ledger) -> list[LedgerVersion]:
        """Write new metrics of versions into the ledger; return the versions that changed, oldest first."""
        return self._changed(ledger, self._metrics())

    def _changed(self, ledger: Ledger, by_version: Mapping[int, Mapping[str, float]]) -> list[LedgerVersion]:
        """Write metrics by version into the ledger; return the versions that changed, oldest first."""
        changed: list[LedgerVersion] = []
        for version in ledger.versions(by_version) if by_version else ():
            metrics = by_version[version.version]
            if version.status is VersionStatus.COMMITTED and metrics.items() - version.metrics.items():
                ledger.add_metrics(version.version, dict(metrics))
                changed.append(replace(version, metrics={**version.metrics, **metrics}))
        return changed

    def _metrics(self) -> dict[int, dict[str, float]]:
        """Return metrics by version; empty when nothing has been built since the last poll."""
        names = {"run": self._settings.run_id, "spec": self._build_spec, "policy": self._settings.policy}
        with store_errors(self._url):
            ((count, newest),) = self._client.query(_ARRIVED, parameters={**names, "since": self._since}).result_rows
            if not count or (count, newest) == self._arrived:
                return {}
            since = max(newest - _OVERLAP, 0)
            # Before the rollouts: what comes between the two is read again.
            (arrived,) = self._client.query(_ARRIVED, parameters={**names, "since": since}).result_rows
            source = {"rows": rows_sql("transitions", self._settings.as_of, _THIS_RUN), "mode": Mode.VALIDATE.value}
            rows = self._client.query(_ROLLOUTS.format(**source), parameters=names).result_rows
            self._games = self._client.query(_GAMES.format(**source), parameters=names).result_rows
        self._since, self._arrived = since, tuple(arrived)
        by_version: dict[int, list[dict[str, float]]] = {}
        roles = self._settings.credit.reward_roles
        for (version,), agents, *rewards in rows:
            own = agents if self._settings.credit.by_role else roles
            counted = [(name, value) for name, value, role in zip(*rewards, strict=True) if counts(role, own)]
            by_version.setdefault(int(version), []).append(sums(counted))
        return {version: validation(rollouts, self._settings) for version, rollouts in by_version.items()}

    def rate(self, ledger: Ledger) -> list[LedgerVersion]:
        """Write ratings by role into the ledger, from the held-out games that were last read; return the versions that changed.

        Ratings are whole points: a game more moves those of all versions a little.
        """
        games, self._games = self._games, ()
        rated = self._ratings(games) if games else {}
        return self._changed(ledger, rated)

    def _ratings(self, games: Iterable[Sequence[Any]]) -> dict[int, dict[str, float]]:
        """Return the rating by role of each version of the policy (validate_rating_ROLE), from games in which each role has one version."""
        own = {self._settings.policy, self._settings.evaluation.past_policy} - {""}
        scores: list[Score] = []
        for players, roles, values in games:
            if len({role for role, *_ in players}) == len(players) and all(len(versions) == 1 for *_, versions in players):
                returns: dict[str, float] = {}
                for role, value in zip(roles, values, strict=True):
                    returns[role] = returns.get(role, 0.0) + value
                competitors = [
                    Competitor(role, self._settings.policy if policy in own else policy, version) for role, policy, (version,) in players
                ]
                scores += scores_of(competitors, returns)
        by_version: dict[int, dict[str, float]] = {}
        for competitor, rating in ratings(scores).items():
            if competitor.policy == self._settings.policy:
                by_version.setdefault(competitor.version, {})[f"validate_rating_{competitor.role}"] = float(round(rating))
        return by_version


def validation(rollouts: Iterable[dict[str, float]], settings: TrainerSettings) -> dict[str, float]:
    """Return the metrics of held-out rollouts, given the rewards of each, summed by name.

    Returns:
        validate_rollouts; validate_return (mean, weighted); validate_success (share: `batch_metrics.succeeded`);
        validate_reward_NAME (mean over the rollouts that have one of that name, raw).
    """
    rows = list(rollouts)
    names = sorted({name for row in rows for name in row})
    return {
        "validate_rollouts": float(len(rows)),
        "validate_return": fmean(weighted_return(row, settings) for row in rows),
        "validate_success": fmean(succeeded(row, settings) for row in rows),
        **{f"validate_reward_{name}": fmean(row[name] for row in rows if name in row) for name in names},
    }


def versions_with_weights(ledger: Ledger, settings: TrainerSettings) -> list[LedgerVersion]:
    """Return the versions of a branch whose directories are still there, and the one that it began with, oldest first."""
    beginning = [*ledger.statuses()][:1]  # its weights lie where the user put them
    return ledger.versions([*beginning, *versions_on_disk(settings.directory, settings.policy, settings.branch)])


def best(versions: Iterable[LedgerVersion], settings: TrainerSettings) -> LedgerVersion | None:
    """Return the version with the highest trainer.checkpoint.best_metric among those whose weights are still there; of equals the newest.

    None: no version has been measured on trainer.checkpoint.best_rollouts held-out rollouts.
    """
    measured = [
        version
        for version in versions
        if version.status is VersionStatus.COMMITTED
        and settings.checkpoint.best_metric in version.metrics
        and version.metrics.get("validate_rollouts", 0) >= settings.checkpoint.best_rollouts
        and Path(version.policy_version.path).is_dir()
    ]
    return max(measured, key=lambda version: (version.metrics[settings.checkpoint.best_metric], version.version), default=None)


def describe_best(version: LedgerVersion, settings: TrainerSettings) -> str:
    """Return a short text about the best version."""
    value, rollouts = version.metrics[settings.checkpoint.best_metric], version.metrics["validate_rollouts"]
    return f"best: version {version.version}, {settings.checkpoint.best_metric} {value:+.3f} over {rollouts:.0f} held-out rollouts"


def describe_validation(version: LedgerVersion) -> str:
    """Return one line with the metrics of a version on held-out rollouts."""
    m = version.metrics
    return (
        f"version {version.version} on {m['validate_rollouts']:.0f} held-out rollouts: return {m['validate_return']:+.3f}, "
        f"success {m['validate_success']:.2f}"
    )
