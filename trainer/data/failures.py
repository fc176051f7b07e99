"""Failed rollouts of a batch: their share, by reason.

Invariant: pure functions; an alarm stops nothing.

Failures that the policy caused have a reward and are trained as other rollouts are (docs/guides/runner.md). Many of them mean that a time
limit, the context or the number of turns decides what is learnt, or that the policy found a way to fail that pays.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from trainer.data.source import Loaded

SHARE = "failed_share"


def failed_shares(loaded: Loaded, alarm: float) -> dict[str, float]:
    """Return metrics of a batch of whole groups.

    Returns:
        failed_share: share of the rollouts whose attempt failed. failed_share_REASON: the share of each reason that occurs. failed_alarm:
        1 where failed_share is more than `alarm` (trainer.alarms.failed_share), else 0.
    """
    total = len(loaded.rollouts)
    if not total:
        return {}
    reasons = Counter(rollout.failure for rollout in loaded.rollouts if rollout.failure)
    share = reasons.total() / total
    return {
        SHARE: share,
        "failed_alarm": float(share > alarm),
        **{f"{SHARE}_{reason}": count / total for reason, count in sorted(reasons.items())},
    }


def describe(version: int, metrics: Mapping[str, float], alarm: float) -> str:
    """Return the text of the alarm."""
    reasons = {name.removeprefix(f"{SHARE}_"): share for name, share in metrics.items() if name.startswith(f"{SHARE}_")}
    named = ", ".join(f"{share:.0%} {reason}" for reason, share in sorted(reasons.items(), key=lambda item: -item[1]))
    return (
        f"version {version}: {metrics[SHARE]:.0%} of the batch's rollouts failed ({named}), more than trainer.alarms.failed_share = "
        f"{alarm:g}. See with `spangrad rollout why` what became of one; raise the limit that they run into, or lower its reward in "
        "runner.failure_rewards where failing pays (docs/guides/runner.md)."
    )
