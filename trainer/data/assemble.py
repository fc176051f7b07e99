"""Assembly of one training step from whole groups of rollouts: credit, lengths, merging, layout.

Invariant: a pure function but for its warnings; every call of the policy that is selected is in the batch, or counted as masked.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from operator import attrgetter

import numpy as np
import polars as pl
from numpy.typing import NDArray

from spangrad.settings import TrainerSettings
from trainer.credit.assignment import GROUP, KEY, Normalise, advantages, named_returns, returns, with_greedy
from trainer.credit.learning import by_token, merges
from trainer.data.batch import Batch, TokenValues, layout
from trainer.data.chains import chains
from trainer.data.masks import masks
from trainer.data.merge import Sequences, merge, separate
from trainer.data.source import GROUP_COLUMNS, Group, Loaded
from trainer.data.token_versions import UNKNOWN, staleness, versions_of_calls
from trainer.ledger.skips import MASKS, SkipReason

logger = logging.getLogger(__name__)

_NAMED = 5
"""Largest number of masked calls that a warning names."""
_BOUNDS = {SkipReason.STALE: "sampling.max_staleness", SkipReason.TOO_LONG: "max_tokens_per_device"}
"""The settings that bound calls."""


def assemble(
    loaded: Loaded, settings: TrainerSettings, normalise: Normalise, *, lineage: Sequence[int], divisor: int, tokenizer_hash: str = ""
) -> tuple[Batch, dict[str, float], pl.DataFrame]:
    """Return the arrays of a step, its metrics, and the calls that it trains.

    Masked calls (`trainer.data.masks`) are left out after the comparison, so that their rollouts still count in their group's baseline.

    Args:
        loaded: whole groups, other policies' calls and calls that are not selected among them: their rewards count.
        settings: policy, selection, credit, merging and lengths.
        normalise: how values are compared.
        lineage: committed versions, oldest first; the last one will be trained.
        divisor: the number of rows will be a multiple of it.
        tokenizer_hash: the policy's; empty: calls of any tokenizer are trained.

    Returns:
        The batch; transitions (trained calls), masked_REASON (calls) for each reason of `trainer.ledger.skips.MASKS`, sequences, tokens
        (processed), trained_tokens, merge_ratio, staleness_mean and staleness_max (of trained tokens), rollouts, groups, mean_return and
        return_std (weighted, over rollouts), mean_reward_NAME (raw) for each reward's name, and greedy_return (weighted, over groups) where
        the estimator compares with it. The calls, a row each in the order of their tokens in the batch, with the columns of `trained_calls`
        but Advantage (`with_token_values`).

    Raises:
        SettingsError: the selection has no meaning.
    """
    weights, transitions = settings.credit.reward_weights, loaded.transitions
    if loaded.greedy is not None:
        transitions = with_greedy(transitions, loaded.greedy, weights)
    own = loaded.own(settings.policy, settings.selection)
    masked = masks(loaded.transitions, settings, lineage=lineage, tokenizer_hash=tokenizer_hash)
    trained = own & masked.is_null()
    counts = _count_masked(loaded.transitions["TransitionId"].filter(own), masked.filter(own), settings)
    rewards: NDArray[np.float64] | None = None
    if by_token(settings):
        calls, rewards = chains(loaded.transitions, trained, weights)
        values = pl.zeros(len(calls), eager=True)  # the engine's, once it has passed the rows forward
    else:
        calls = loaded.transitions.filter(trained)
        values = advantages(transitions, own, settings.credit, normalise=normalise, trained=trained).filter(trained.filter(own))
    sequences = (merge if merges(settings) else separate)(calls, values)
    batch = layout(sequences, lineage=lineage, divisor=divisor, rewards=rewards)
    rollouts = returns(loaded.transitions, weights)
    worth = rollouts["Return"].to_numpy()
    metrics = {
        "transitions": len(calls),
        **counts,
        "sequences": len(sequences),
        "tokens": sequences.tokens,
        "trained_tokens": sequences.trained_tokens,
        "merge_ratio": sequences.merge_ratio,
        "rollouts": len({(rollout.group, rollout.rollout_id) for rollout in loaded.rollouts}),
        "groups": len({rollout.group for rollout in loaded.rollouts}),
        "mean_return": worth.mean(),
        "return_std": worth.std(),
        **batch.staleness_spread,
        **({} if loaded.greedy is None else {"greedy_return": transitions.unique(GROUP)["Greedy"].to_numpy().mean()}),
        **{f"mean_reward_{name}": mean for name, mean in named_returns(loaded.transitions).items()},
    }
    used = _describe(calls.join(rollouts, on=KEY, how="left", maintain_order="left"), sequences, lineage)
    return batch, {name: float(value) for name, value in metrics.items()}, used


def _describe(calls: pl.DataFrame, sequences: Sequences, lineage: Sequence[int]) -> pl.DataFrame:
    """Return the columns of `trained_calls` but Advantage, a row each call with its rollout's Return, in the order of the tokens."""
    first = calls.select(versions_of_calls().list.first().cast(pl.Int64)).to_series().to_numpy()
    behind = pl.Series(staleness(first, lineage))
    names = ("BuildSpec", "Revision", "TaskId", "Turn", "TransitionId", "CallId", "TraceId", "SpanId", "AgentName", "Tools", "FinishReason")
    described = calls.select(
        *KEY,
        *names,
        "Return",
        SampledVersions=versions_of_calls(),
        Staleness=pl.when(behind != UNKNOWN).then(behind),
        InputTokens=pl.col("PromptIds").list.len(),
        OutputTokens=pl.col("ResponseIds").list.len(),
        Reward=pl.col("Rewards.Value").list.sum(),
    )
    return pl.DataFrame({"CallId": sequences.calls.explode()}).join(described, on="CallId", how="left", maintain_order="left")


def with_token_values(calls: pl.DataFrame, response_mask: NDArray[np.int64], values: TokenValues) -> pl.DataFrame:
    """Add what a step computed of their tokens to the calls of a batch, as `assemble` returns them.

    Returns:
        The calls with Advantage, the mean over the call's tokens, and TrainerLogprobs and Entropies, a value each token of the response in
        order.
    """
    mask, ends = response_mask.astype(bool), np.cumsum(calls["OutputTokens"].to_numpy().astype(np.int64))
    starts = ends - calls["OutputTokens"].to_numpy()
    sums = np.add.reduceat(values.advantages[mask].astype(np.float64), starts) if len(calls) else []

    def by_call(whole: NDArray[np.float32]) -> pl.Series:
        tokens = whole[mask]
        return pl.Series([tokens[start:end] for start, end in zip(starts, ends, strict=True)], dtype=pl.List(pl.Float32))

    return calls.with_columns(
        Advantage=pl.Series(sums, dtype=pl.Float64) / calls["OutputTokens"],
        TrainerLogprobs=by_call(values.logprobs),
        Entropies=by_call(values.entropies),
    )


def batch_groups(calls: pl.DataFrame) -> list[Group]:
    """Return the groups of a batch's calls (`assemble`), in the order in which `Batch.group` numbers them."""
    return [Group(*names) for names in calls.select(GROUP_COLUMNS).unique().sort(*GROUP).rows()]


def _count_masked(names: pl.Series, masked: pl.Series, settings: TrainerSettings) -> dict[str, float]:
    """Return metrics: the number of masked calls, by reason; log a warning for each reason that occurs."""
    counts = {reason: int((masked == reason.value).sum()) for reason in MASKS}
    for reason, count in counts.items():
        if count:
            calls = names.filter(masked == reason.value)
            shown = ", ".join(calls.head(_NAMED)) + (", ..." if count > _NAMED else "")
            bound = _BOUNDS.get(reason)
            limit = f"; trainer.{bound} = {attrgetter(bound)(settings)}" if bound else ""
            logger.warning("%d calls are masked (%s%s), though their rewards count: %s", count, reason, limit, shown)
    return {f"masked_{reason.value}": float(count) for reason, count in counts.items()}
