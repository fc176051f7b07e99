"""Alarms over a policy's versions: a return that rises while success stands still.

In: metrics of consecutive versions, and how much is tolerated. Out: metrics of the newest one that tell whether its reward is being gamed.
Invariant: pure functions of numbers that are in every version's metrics; an alarm stops nothing.

A policy learns whatever pays. Where a rule pays for a tool that never fails and leads nowhere, the policy ends by calling nothing else:
its return rises, gradient, logprob gap and loss look healthy, and the task is never done (docs/credit.md has a measured run). What gives it
away is that the return rises and the reward that stands for success does not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from spangrad.settings import TrainerSettings

RETURN = "mean_return"
_SHARE = 0.1
"""Success that rises by less than this part of the return's rise stands still: batches are samples, and no mean is quite flat."""


@dataclass(frozen=True, slots=True)
class GamingRule:
    """When a return is gamed."""

    success: str = "reward"
    """Name of the reward that stands for success."""
    versions: int = 20
    """Over how many versions a rise is measured; fewer say nothing. 0: no alarm."""
    rise: float = 0.2
    """How much the return must rise over them."""

    @classmethod
    def of(cls, settings: TrainerSettings) -> GamingRule:
        """The trainer's."""
        return cls(settings.gaming_reward, settings.gaming_versions, settings.gaming_rise)


def gaming(history: Sequence[Mapping[str, float]], rule: GamingRule) -> dict[str, float]:
    """What the newest of some versions adds to its metrics.

    Args:
        history: metrics of consecutive versions, oldest first; `mean_return` (weighted) and `mean_reward_NAME` (raw) are read.
        rule: what counts as gamed.

    Returns:
        return_rise, success_rise: over rule.versions versions, by the line fitted to them; gaming_alarm: 1 where the return rose by more
        than rule.rise and success by less than a tenth of that, else 0. Nothing where versions are too few, or one lacks that reward.
    """
    last = history[-rule.versions :]
    success = f"mean_reward_{rule.success}"
    if not rule.versions or len(last) < rule.versions or not all(RETURN in one and success in one for one in last):
        return {}
    of_return, of_success = (rise([one[name] for one in last]) for name in (RETURN, success))
    alarm = of_return > rule.rise and of_success < _SHARE * of_return
    return {"return_rise": of_return, "success_rise": of_success, "gaming_alarm": float(alarm)}


def rise(values: Sequence[float]) -> float:
    """How much a series rises from its first place to its last, by its least-squares line; 0 for fewer than two values."""
    if len(values) < 2:
        return 0.0
    place = np.arange(len(values)) - (len(values) - 1) / 2
    return float(place @ np.asarray(values, float) / (place @ place) * (len(values) - 1))


def told(version: int, metrics: Mapping[str, float], rule: GamingRule) -> str:
    """The alarm in words."""
    return (
        f"version {version}: over {rule.versions} versions the mean return rose by {metrics['return_rise']:.2f}, and the reward "
        f"{rule.success!r} by {metrics['success_rise']:.2f}. Something pays without leading to success: see which of the metrics "
        "mean_reward_NAME rose, and let builder.rules name only what advances the task (docs/credit.md). If another reward stands for "
        "success, name it in trainer.gaming_reward."
    )
