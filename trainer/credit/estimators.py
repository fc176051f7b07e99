"""Verl's advantage estimators, called on rollouts or calls.

Invariant: the numbers are those that verl's own function of the estimator's name gives for the units as rows, each with its value on its
last token, or for the chains as rows, each call's rewards on its last token; a rollout is one row however many calls it has, so that the
number of turns does not bias its baseline.

verl and torch are imported when units are first compared.
"""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spangrad.settings import TrainerSettings
from trainer.credit.assignment import Normalise, Units
from trainer.credit.learning import ESTIMATORS
from trainer.data.batch import Batch
from trainer.optim.losses.rollout_tokens import RolloutTokens
from trainer.optim.process import prepare_process, quiet


def estimator(settings: TrainerSettings) -> Normalise:
    """Return the comparison that `trainer.credit.estimator` names, with verl's parameters as the settings have them."""

    def compare(units: Units) -> NDArray[np.float64]:
        with quiet():
            prepare_process()
            return _call(settings, units)

    return compare


def _call(settings: TrainerSettings, units: Units) -> NDArray[np.float64]:
    import torch
    from verl.trainer.config import AlgoConfig

    name = settings.credit.estimator
    lengths = units.lengths if ESTIMATORS[name].tokens else np.ones_like(units.lengths)
    mask = np.arange(lengths.max()) < lengths[:, None]
    rewards = np.zeros(mask.shape)
    rewards[np.arange(len(lengths)), lengths - 1] = units.values
    names = list(units.named)
    facts = {
        "token_level_rewards": torch.from_numpy(rewards),
        "response_mask": torch.from_numpy(mask.astype(np.float64)),
        "index": units.groups,
        "norm_adv_by_std_in_grpo": settings.credit.norm_by_std,
        "config": AlgoConfig(
            norm_adv_by_std_in_grpo=settings.credit.norm_by_std,
            gdpo_reward_keys=names or None,
            gdpo_reward_weights=[settings.credit.reward_weights.get(reward, 1.0) for reward in names] or None,
        ),
    }
    if units.greedy is not None:
        facts["reward_baselines"] = torch.from_numpy(units.greedy)
    if names:
        attention = torch.from_numpy(np.pad(mask, ((0, 0), (1, 0)), constant_values=True).astype(np.int64))
        facts |= {"non_tensor_batch": dict(units.named), "batch": {"prompts": attention[:, :1], "attention_mask": attention}}
    result, _ = _estimate(name, facts)
    # One number a unit: rewards lie on last tokens and verl's discount is 1, so that all of a row's tokens have the same.
    return result[:, 0].double().numpy()


def over_tokens(
    settings: TrainerSettings, batch: Batch, **token_values: NDArray[np.float32]
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return the advantage and the return of each sampled token, by an estimator that works by token.

    Where it compares the chains of a group, one that stands alone has advantage 0; verl takes its raw return.

    Args:
        settings: the estimator, `gamma` (per token) and `gae_lambda`.
        batch: with `call_rewards`.
        token_values: values of the batch's tokens that the estimator needs, by verl's names; shaped as `logprobs`.
    """
    with quiet():
        prepare_process()
        import torch
        from verl.trainer.config import AlgoConfig

    assert batch.call_rewards is not None
    tokens = RolloutTokens.of(batch)
    last = np.append(tokens.row[1:] != tokens.row[:-1], [True])
    rewards = np.zeros(batch.logprobs.shape)
    rewards[tokens.row[last], tokens.column[last]] = batch.call_rewards[tokens.row[last]]
    groups = batch.group[tokens.row[np.unique(tokens.rollout, return_index=True)[1]]]

    def laid(values: NDArray[np.generic]) -> torch.Tensor:
        return torch.from_numpy(tokens.scatter(values.astype(np.float64)))

    facts = {
        "token_level_rewards": laid(rewards),
        "response_mask": laid(batch.response_mask),
        "index": groups,
        "gamma": settings.credit.gamma,
        "lam": settings.credit.gae_lambda,
        "config": AlgoConfig(),
        **{name: laid(values) for name, values in token_values.items()},
    }
    outputs = _estimate(settings.credit.estimator, facts)
    advantages, returns = (tokens.gather(output.numpy()).astype(np.float32) for output in outputs)
    if ESTIMATORS[settings.credit.estimator].scope == "group":
        advantages[tokens.row, tokens.column] *= (np.bincount(groups) > 1)[groups[tokens.rollout]]
    return advantages, returns


def _estimate(name: str, facts: dict[str, object]) -> tuple[Any, Any]:
    """Return advantages and returns by verl's estimator, called with the facts that it accepts: some take no `**kwargs`."""
    from verl.trainer.ppo.core_algos import get_adv_estimator_fn

    function = get_adv_estimator_fn(name)
    parameters = inspect.signature(function).parameters
    if not any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
        facts = {key: value for key, value in facts.items() if key in parameters}
    return function(**facts)
