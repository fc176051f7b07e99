"""Evaluation of versions on held-out tasks, and selection of the best version.

Invariant: held-out rollouts are measured and never trained; a rollout whose calls come of two versions counts for neither.

The held-out tasks run while a version is served: the user or a job starts `spangrad run --mode validate`, or the trainer does so beside
the steps (`evaluation_command`).
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from math import inf, isfinite
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from spangrad.settings import Settings, TrainerSettings
from spangrad.types import VersionStatus
from trainer.ledger.file_batches import runs_of
from trainer.ledger.ledger import Ledger
from trainer.ledger.tables import LedgerVersion
from trainer.monitor.batch_metrics import succeeded, weighted_return
from trainer.monitor.held_out import HeldOutRollouts
from trainer.monitor.ratings import ratings
from trainer.publish.checkpoint import versions_on_disk

if TYPE_CHECKING:
    from clickhouse_connect.driver.client import Client

    from trainer.monitor.watching import Watchers

logger = logging.getLogger(__name__)


class Evaluation:
    """Reader of one run's held-out rollouts."""

    def __init__(self, client: Client, settings: Settings, build_spec: str) -> None:
        """Read with `client` the rollouts of the trainer's run that this specification built."""
        self._settings = settings.trainer
        self._rollouts = HeldOutRollouts(client, settings, build_spec)
        self._unmeasured: set[int] = set()
        """Versions with rollouts that their metrics in the ledger do not count yet."""
        self._rated = 0
        """Number of changes of the games when versions were rated last."""

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
        self._unmeasured |= self._rollouts.read()
        rewards = {version: [rollout.rewards for rollout in self._rollouts.of_version(version)] for version in self._unmeasured}
        changed = self._write(ledger, {version: validation(known, self._settings) for version, known in rewards.items() if known})
        statuses = ledger.statuses() if self._unmeasured else {}
        self._unmeasured = {version for version in self._unmeasured & statuses.keys() if statuses[version] is None}
        return changed

    def _write(self, ledger: Ledger, by_version: Mapping[int, Mapping[str, float]]) -> list[LedgerVersion]:
        """Write metrics of committed versions into the ledger; return the versions that changed, oldest first."""
        changed: list[LedgerVersion] = []
        for version in ledger.versions(by_version) if by_version else ():
            metrics = by_version[version.version]
            if version.status is VersionStatus.COMMITTED and metrics.items() - version.metrics.items():
                ledger.add_metrics(version.version, dict(metrics))
                changed.append(replace(version, metrics={**version.metrics, **metrics}))
        return changed

    def rate(self, ledger: Ledger) -> list[LedgerVersion]:
        """Write ratings by role (validate_rating_ROLE) into the ledger, from the held-out games so far; return the versions that changed.

        Ratings are whole points: a game more moves those of all versions a little.
        """
        if self._rollouts.game_changes == self._rated:
            return []
        by_version: dict[int, dict[str, float]] = {}
        for competitor, rating in ratings(self._rollouts.games).items():
            if competitor.policy == self._settings.policy:
                by_version.setdefault(competitor.version, {})[f"validate_rating_{competitor.role}"] = float(round(rating))
        changed, self._rated = self._write(ledger, by_version), self._rollouts.game_changes
        return changed


def validation(rollouts: Sequence[Mapping[str, float]], settings: TrainerSettings) -> dict[str, float]:
    """Return the metrics of held-out rollouts, given the rewards of each, summed by name.

    Returns:
        validate_rollouts; validate_return (mean, weighted); validate_success (share: `batch_metrics.succeeded`);
        validate_reward_NAME (mean over the rollouts that have one of that name, raw).
    """
    names = sorted({name for rewards in rollouts for name in rewards})
    return {
        "validate_rollouts": float(len(rollouts)),
        "validate_return": fmean(weighted_return(rewards, settings) for rewards in rollouts),
        "validate_success": fmean(succeeded(rewards, settings) for rewards in rollouts),
        **{f"validate_reward_{name}": fmean(rewards[name] for rewards in rollouts if name in rewards) for name in names},
    }


def versions_with_weights(ledger: Ledger, settings: TrainerSettings) -> list[LedgerVersion]:
    """Return the versions of a branch whose directories are still there, and the one that it began with, oldest first."""
    beginning = [*ledger.statuses()][:1]  # its weights lie where the user put them
    return ledger.versions([*beginning, *versions_on_disk(settings)])


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


def best_of_files(ledger: Ledger, versions: Iterable[LedgerVersion], settings: TrainerSettings) -> LedgerVersion | None:
    """Return the version with the lowest held_out_loss among those of the branch's newest run over files; of equals the newest.

    None: none of them has been measured on held-out rows. Versions are few: committed ones that have files. Only if one of them was
    measured, the way to the head is looked up.
    """
    with_files = list(versions)
    measured = [version for version in with_files if isfinite(version.metrics.get("held_out_loss", inf))]
    if not measured:
        return None
    lineage = set(ledger.lineage())
    runs = runs_of(ledger.database, settings.policy, settings.branch, [version.version for version in with_files])
    runs = {version: run for version, run in runs.items() if version in lineage}
    of_newest = [version for version in measured if runs and runs.get(version.version) == runs[max(runs)]]
    return min(of_newest, key=lambda version: (version.metrics["held_out_loss"], -version.version), default=None)


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
