"""Alarms of a version: failed rollouts, and reward gaming, which is a return that rises over versions while success does not.

Invariant: pure functions of numbers that are in every version's metrics; an alarm stops nothing.

A policy learns whatever is rewarded. Where a rule rewards a tool that never fails and leads nowhere, the policy ends by calling nothing
else: its return rises, gradient, logprob gap and loss look healthy, and the task is never done (docs/concepts/credit.md has a measured
run). The symptom is that the return rises and the reward that stands for success does not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from spangrad.settings.trainer_service import AlarmSettings
from trainer.data import failures
from trainer.ledger.tables import LedgerVersion

RETURN = "mean_return"
_SHARE = 0.1
"""Largest rise of success, as a fraction of the return's rise, that counts as no rise: means of sampled batches are never quite flat."""


def gaming(history: Sequence[Mapping[str, float]], rule: AlarmSettings) -> dict[str, float]:
    """Return the metrics of gaming that are added to the newest of consecutive versions, whose metrics are given oldest first.

    `mean_return` (weighted) and `mean_reward_NAME` (raw) are read.

    Returns:
        return_rise, success_rise: over gaming_versions versions, by the line fitted to them; gaming_alarm: 1 where the return rose by more
        than gaming_rise and success by less than a tenth of that, else 0. Nothing where versions are too few, or one lacks that reward.
    """
    last = history[-rule.gaming_versions :]
    success = f"mean_reward_{rule.gaming_reward}"
    if (
        not rule.gaming_versions
        or len(last) < rule.gaming_versions
        or not all(RETURN in metrics and success in metrics for metrics in last)
    ):
        return {}
    of_return, of_success = (rise([metrics[name] for metrics in last]) for name in (RETURN, success))
    alarm = of_return > rule.gaming_rise and of_success < _SHARE * of_return
    return {"return_rise": of_return, "success_rise": of_success, "gaming_alarm": float(alarm)}


def new_alarms(version: LedgerVersion, parent: LedgerVersion, rule: AlarmSettings) -> list[str]:
    """Return the texts of the alarms of a version that its parent did not have."""
    texts = list[str]()
    if version.metrics.get("gaming_alarm") and not parent.metrics.get("gaming_alarm"):
        texts.append(describe(version.version, version.metrics, rule))
    if version.metrics.get("failed_alarm") and not parent.metrics.get("failed_alarm"):
        texts.append(failures.describe(version.version, version.metrics, rule.failed_share))
    return texts


def rise(values: Sequence[float]) -> float:
    """Return the rise of a series from its first value to its last, by its least-squares line; 0 for fewer than two values."""
    if len(values) < 2:
        return 0.0
    centred = np.arange(len(values)) - (len(values) - 1) / 2
    return float(centred @ np.asarray(values, float) / (centred @ centred) * (len(values) - 1))


def describe(version: int, metrics: Mapping[str, float], rule: AlarmSettings) -> str:
    """Return the text of the alarm."""
    return (
        f"version {version}: over {rule.gaming_versions} versions the mean return rose by {metrics['return_rise']:.2f}, and the reward "
        f"{rule.gaming_reward!r} by {metrics['success_rise']:.2f}. Something pays without leading to success: see which of the metrics "
        "mean_reward_NAME rose, and let builder.rules name only what advances the task (docs/concepts/credit.md). If another reward stands "
        "for success, name it in trainer.alarms.gaming_reward."
    )
