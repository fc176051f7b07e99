"""Losses of training on files: verl's own for supervised rows, and DPO over verl's forward pass.

Invariant: a loss is the same however verl cuts its rows into micro-batches; a no-op row (mask 0 throughout) does not count.

Sources: verl.workers.utils.losses.sft_loss. DPO: Rafailov et al., Direct Preference Optimization (https://arxiv.org/abs/2305.18290),
equation 7. Label smoothing: Mitchell, A note on DPO with noisy preferences (https://ericmitchell.ai/cdpo.pdf), equation 3.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch

from trainer.sft.objective import Objective


class Preferences(NamedTuple):
    """DPO loss and implicit rewards, one value per pair."""

    losses: torch.Tensor
    chosen: torch.Tensor
    """Implicit reward of the chosen reply: beta times the difference of its logprob (nats) and the reference's."""
    rejected: torch.Tensor
    """Implicit reward of the rejected reply."""

    def figures(self) -> dict[str, torch.Tensor]:
        """Return the metrics of each pair beside its loss, by name; without a gradient."""
        chosen, rejected = self.chosen.detach(), self.rejected.detach()
        margins = chosen - rejected
        return {
            "preference_accuracy": (margins > 0).float(),
            "preference_margin": margins,
            "chosen_reward": chosen,
            "rejected_reward": rejected,
        }


def preferences(sums: torch.Tensor, reference: torch.Tensor, beta: float, smoothing: float) -> Preferences:
    """Return DPO's loss of each pair: -(1 - e) log s(m) - e log s(-m), with m = chosen - rejected reward and s the logistic function.

    Args:
        sums: logprob (nats) of each reply under the policy, chosen and rejected in turn; shape (2 pairs,).
        reference: the same under the reference.
        beta: strength of the KL constraint to the reference.
        smoothing: e, the assumed share of pairs with swapped labels.
    """
    rewards = beta * (sums - reference)
    chosen, rejected = rewards[0::2], rewards[1::2]
    margins = chosen - rejected
    log_sigmoid = torch.nn.functional.logsigmoid
    return Preferences(-(1 - smoothing) * log_sigmoid(margins) - smoothing * log_sigmoid(-margins), chosen, rejected)


def loss_of(objective: Objective) -> Any:
    """Return verl's loss function. SFT's is verl's own: the mean of -logprob (nats) over the trained tokens of the whole batch."""
    from verl.workers.utils.losses import sft_loss

    if objective.method == "sft":
        unread: Any = None
        return functools.partial(sft_loss, unread)
    return functools.partial(dpo_loss, objective.beta, objective.label_smoothing)


def dpo_loss(beta: float, smoothing: float, model_output: Any, data: Any, dp_group: Any = None) -> tuple[Any, dict[str, Any]]:
    """Return the mean of DPO's loss over the pairs of the whole batch, and metrics; rows are chosen and rejected in turn."""
    from verl.utils.metric import AggregationType, Metric

    sums = row_sums(model_output["log_probs"], data["loss_mask"])
    pairs = preferences(sums, data["reference"].to(sums.device), beta, smoothing)
    real = data["is_real"].to(sums.device)[0::2]
    share = real / data["pairs"] * data["dp_size"]
    metrics = {name: Metric(AggregationType.SUM, (value * share).sum()) for name, value in pairs.figures().items()}
    return (pairs.losses * share).sum(), metrics


def row_sums(log_probs: Any, loss_mask: Any) -> torch.Tensor:
    """Return the sum of the logprobs of each row's trained tokens.

    Args:
        log_probs: jagged; at each position that of the next token.
        loss_mask: jagged; 1 on the tokens that are trained, never a row's first.
    """
    offsets = loss_mask.offsets().to(log_probs.device)
    # A row's last position gets the mask of the next row's first token, which is 0.
    values = log_probs.values() if log_probs.is_nested else log_probs
    masked = values.float() * torch.roll(loss_mask.values(), shifts=-1, dims=0)
    rows = torch.repeat_interleave(torch.arange(len(offsets) - 1, device=masked.device), offsets.diff())
    return torch.zeros(len(offsets) - 1, dtype=masked.dtype, device=masked.device).index_add(0, rows, masked)
