"""From whole groups of rollouts to one training step: credit, lengths, merging, layout.

In: what the store holds of the groups, and the trainer's settings. Out: the arrays of the step and the metrics that tell of them.
Invariant: a pure function but for its warnings; every call of the policy that is selected is in the batch, or counted as too long.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

import polars as pl

from spangrad.settings import TrainerSettings
from trainer.batch import Batch, layout
from trainer.chains import Chains, chains
from trainer.credit import GROUP, CreditRule, Normalise, advantages, named_returns, returns, with_greedy
from trainer.learning import ESTIMATORS
from trainer.merge import merge, separate
from trainer.skips import fits
from trainer.source import Loaded

logger = logging.getLogger(__name__)

_NAMED = 5
"""How many calls that are too long a warning names."""


def assemble(
    loaded: Loaded, settings: TrainerSettings, normalise: Normalise, *, lineage: Sequence[int], divisor: int
) -> tuple[Batch, dict[str, float]]:
    """The arrays of a step, and its metrics.

    Calls that no device takes are left out after the comparison, so that long rollouts count in their group's baseline as ever.

    Args:
        loaded: whole groups, other policies' calls and calls that are not selected among them: their rewards count.
        settings: policy, selection, credit, merging and lengths.
        normalise: how values are compared.
        lineage: committed versions, oldest first; the last one will be trained.
        divisor: the number of rows will be a multiple of it.

    Returns:
        The batch; transitions (trained calls), too_long (calls), sequences, tokens (processed), trained_tokens, merge_ratio, rollouts,
        groups, mean_return (weighted), mean_reward_NAME (raw) for each reward's name, and greedy_return (weighted, over groups) where the
        estimator compares with it.

    Raises:
        SettingsError: credit or selection has no meaning.
        TrainerError: a row is empty or contradicts itself.
    """
    rule, transitions = CreditRule.of(settings), loaded.transitions
    if loaded.greedy is not None:
        transitions = with_greedy(transitions, loaded.greedy, rule.reward_weights)
    own = loaded.own(settings.policy, settings.selection)
    short = loaded.transitions.select(fits(settings.max_tokens_per_device)).to_series()
    long = loaded.transitions.filter(own & ~short)["TransitionId"]
    if len(long):
        names = ", ".join(long.head(_NAMED)) + (", ..." if len(long) > _NAMED else "")
        limit = settings.max_tokens_per_device
        told = "%d calls are longer than trainer.max_tokens_per_device = %d and are not trained, though their rewards count: %s"
        logger.warning(told, len(long), limit, names)
    links: Chains | None = None
    if ESTIMATORS[settings.estimator].by_token:
        calls, links = chains(loaded.transitions, own & short, rule.reward_weights)
        values = pl.zeros(len(calls), eager=True)  # the engine's, once it has passed the rows forward
    else:
        calls = loaded.transitions.filter(own & short)
        values = advantages(transitions, own, rule, normalise=normalise).filter(short.filter(own))
    sequences = (merge if settings.merge else separate)(calls, values)
    batch = replace(layout(sequences, lineage=lineage, divisor=divisor), chains=links)
    metrics = {
        "transitions": len(calls),
        "too_long": len(long),
        "sequences": len(sequences),
        "tokens": sequences.tokens,
        "trained_tokens": sequences.trained_tokens,
        "merge_ratio": sequences.merge_ratio,
        "rollouts": len({(one.group, one.rollout_id) for one in loaded.rollouts}),
        "groups": len({one.group for one in loaded.rollouts}),
        "mean_return": returns(loaded.transitions, rule.reward_weights)["Return"].to_numpy().mean(),
        **({} if loaded.greedy is None else {"greedy_return": transitions.unique(GROUP)["Greedy"].to_numpy().mean()}),
        **{f"mean_reward_{name}": mean for name, mean in named_returns(loaded.transitions).items()},
    }
    return batch, {name: float(value) for name, value in metrics.items()}
