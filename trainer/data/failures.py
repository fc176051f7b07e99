"""Failed rollouts of a batch: their share, by reason and by staleness of the policy version.

Invariant: pure functions; an alarm stops nothing.

Failures that the policy caused have a reward and are trained as other rollouts are (docs/guides/runner.md). Many of them mean that a time
limit, the context or the number of turns decides what is learnt, or that the policy found a way to fail that pays.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import polars as pl

from trainer.data.source import Loaded
from trainer.data.token_versions import versions_of_calls

SHARE = "failed_share"


def failed_shares(loaded: Loaded, policy: str, lineage: Sequence[int], alarm: float) -> dict[str, float]:
    """Return metrics of a batch.

    Args:
        loaded: whole groups.
        policy: the one that is trained.
        lineage: committed versions, oldest first; the last one is about to be trained.
        alarm: `trainer.alarms.failed_share`.

    Returns:
        failed_share: share of the rollouts whose attempt failed. failed_share_REASON: the share of each reason that occurs.
        failed_share_staleness_N: share among the rollouts whose newest call of the policy was sampled N committed versions before the one
        about to be trained, so that versions are separate; a rollout without such a call is in none. failed_alarm: 1 where failed_share is
        more than `alarm`, else 0.
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
        **_by_staleness(loaded, policy, lineage),
    }


def describe(version: int, metrics: Mapping[str, float], alarm: float) -> str:
    """Return the text of the alarm."""
    known = {name.removeprefix(f"{SHARE}_"): share for name, share in metrics.items() if name.startswith(f"{SHARE}_")}
    reasons = {name: share for name, share in known.items() if not name.startswith("staleness_")}
    named = ", ".join(f"{share:.0%} {reason}" for reason, share in sorted(reasons.items(), key=lambda item: -item[1]))
    return (
        f"version {version}: {metrics[SHARE]:.0%} of the batch's rollouts failed ({named}), more than trainer.alarms.failed_share = "
        f"{alarm:g}. See with `spangrad rollout why` what became of one; raise the limit that they run into, or lower its reward in "
        "runner.failure_rewards where failing pays (docs/guides/runner.md)."
    )


def _by_staleness(loaded: Loaded, policy: str, lineage: Sequence[int]) -> dict[str, float]:
    index_of = {version: at for at, version in enumerate(lineage)}
    newest = (
        loaded.transitions.filter(pl.col("Policy") == policy)
        .group_by("RunId", "RolloutId", "Attempt")
        .agg(versions_of_calls().list.max().max())
    )
    versions = {(run, rollout, attempt): version for run, rollout, attempt, version in newest.rows()}
    failed, rollouts = Counter[int](), Counter[int]()
    for rollout in loaded.rollouts:
        version = versions.get((rollout.group.run_id, rollout.rollout_id, rollout.attempt))
        if version in index_of:
            behind = len(lineage) - 1 - index_of[version]
            rollouts[behind] += 1
            failed[behind] += bool(rollout.failure)
    return {f"{SHARE}_staleness_{behind}": failed[behind] / count for behind, count in sorted(rollouts.items())}
