"""Metrics of a batch beside its return: success, failures, roles and lengths of responses.

Invariant: pure functions of whole columns.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import polars as pl

from spangrad.semconv import REWARD_NAME
from spangrad.settings import TrainerSettings
from trainer.credit.assignment import KEY
from trainer.credit.roles import role_metrics
from trainer.data.failures import failed_shares
from trainer.data.masks import is_truncated
from trainer.data.source import Loaded


def batch_metrics(loaded: Loaded, settings: TrainerSettings) -> dict[str, float]:
    """Return the metrics of whole groups.

    Returns:
        success: share of the rollouts with transitions that succeeded (`succeeded`). truncated_share, response_tokens_mean and
        response_tokens_p95, over the policy's selected calls, masked ones included: share of responses that were cut at their limit of
        tokens, and tokens of a response. drops: calls of all rollouts that were dropped. The metrics of `failed_shares` and `role_metrics`
        are added.
    """
    rewards = (
        loaded.transitions.select(*KEY, Name="Rewards.Name", Value="Rewards.Value")
        .explode("Name", "Value")
        .group_by(*KEY, maintain_order=True)
        .agg(pl.struct("Name", "Value").filter(pl.col("Name").is_not_null()).alias("Rewards"))
    )
    named = [sums((reward["Name"], reward["Value"]) for reward in row) for row in rewards["Rewards"].to_list()]
    successes = [succeeded(values, settings) for values in named]
    calls = loaded.transitions.filter(loaded.own(settings.policy, settings.selection))
    return {
        "success": sum(successes) / len(successes) if successes else 0.0,
        "drops": float(sum(rollout.drops for rollout in loaded.rollouts)),
        **failed_shares(loaded, settings.alarms.failed_share),
        **role_metrics(loaded.transitions, settings.credit.reward_weights),
        **_responses(calls),
    }


def _responses(calls: pl.DataFrame) -> dict[str, float]:
    """Return the metrics of the responses' lengths; none where there are no calls."""
    if calls.is_empty():
        return {}
    tokens = pl.col("ResponseIds").list.len()
    facts = calls.select(
        truncated_share=is_truncated().mean(),
        response_tokens_mean=tokens.mean(),
        response_tokens_p95=tokens.quantile(0.95, "nearest"),
    )
    return {name: float(value) for name, value in facts.row(0, named=True).items()}


def succeeded(rewards: Mapping[str, float], settings: TrainerSettings) -> bool:
    """Return whether a rollout with these rewards, summed by name, succeeded.

    Its final reward (`reward`) decides, raw; a rollout that has none of that name is judged by its weighted return.
    """
    final = rewards.get(REWARD_NAME)
    return (weighted_return(rewards, settings) if final is None else final) >= settings.evaluation.success_reward


def weighted_return(rewards: Mapping[str, float], settings: TrainerSettings) -> float:
    """Return the sum of all rewards, each times its weight (trainer.credit.reward_weights)."""
    return sum(value * settings.credit.reward_weights.get(name, 1.0) for name, value in rewards.items())


def sums(rewards: Iterable[tuple[str, float]]) -> dict[str, float]:
    """Return the rewards of one rollout, summed by name; a name whose sum is 0 is included."""
    totals: dict[str, float] = {}
    for name, value in rewards:
        totals[name] = totals.get(name, 0.0) + value
    return totals
