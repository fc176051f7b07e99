"""The losses of training on files: verl's own for supervised rows, and DPO over verl's forward pass.

In: what a forward pass gave and the jagged rows that it was given. Out: a loss and metrics, scaled as verl wants them: it sums over
micro-batches and averages over ranks. Invariant: a loss is the same however verl cuts its rows into micro-batches; a no-op row (mask 0
throughout) counts nothing.

Sources: verl.workers.utils.losses.sft_loss. DPO: Rafailov et al., Direct Preference Optimization (https://arxiv.org/abs/2305.18290),
equation 7. Label smoothing: Mitchell, A note on DPO with noisy preferences (https://ericmitchell.ai/cdpo.pdf), equation 3.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch

from trainer.sft.objective import Objective


class Preferences(NamedTuple):
    """Of each pair, a value."""

    losses: torch.Tensor
    chosen: torch.Tensor
    """The implicit reward of the chosen reply: beta times how far its logprob (nats) rose above the reference's."""
    rejected: torch.Tensor

    def figures(self) -> dict[str, torch.Tensor]:
        """What is told of each pair beside its loss, by the metric's name; without a gradient."""
        chosen, rejected = self.chosen.detach(), self.rejected.detach()
        margins = chosen - rejected
        return {
            "preference_accuracy": (margins > 0).float(),
            "preference_margin": margins,
            "chosen_reward": chosen,
            "rejected_reward": rejected,
        }


def preferences(sums: torch.Tensor, reference: torch.Tensor, beta: float, smoothing: float) -> Preferences:
    """DPO's loss of each pair: -(1 - e) log s(m) - e log s(-m), where m = chosen - rejected reward and s is the logistic function.

    Args:
        sums: logprob (nats) of each reply under the policy, chosen and rejected in turn; shape (2 pairs,).
        reference: the same under the reference.
        beta: how strongly the policy is held to the reference.
        smoothing: e, the share of pairs that are taken to be labelled the wrong way round.
    """
    rewards = beta * (sums - reference)
    chosen, rejected = rewards[0::2], rewards[1::2]
    margins = chosen - rejected
    log_sigmoid = torch.nn.functional.logsigmoid
    return Preferences(-(1 - smoothing) * log_sigmoid(margins) - smoothing * log_sigmoid(-margins), chosen, rejected)


def loss_of(objective: Objective) -> Any:
    """What verl calls after a forward pass. SFT's is verl's own: the mean of -logprob (nats) over the trained tokens of the whole batch."""
    from verl.workers.utils.losses import sft_loss

    if objective.method == "sft":
        return functools.partial(sft_loss, None)
    return functools.partial(dpo_loss, objective.beta, objective.label_smoothing)


def dpo_loss(beta: float, smoothing: float, model_output: Any, data: Any, dp_group: Any = None) -> tuple[Any, dict[str, Any]]:
    """The mean of DPO's loss over the pairs of the whole batch; rows are chosen and rejected in turn."""
    from verl.utils.metric import AggregationType, Metric

    sums = row_sums(model_output["log_probs"], data["loss_mask"])
    made = preferences(sums, data["reference"].to(sums.device), beta, smoothing)
    real = data["is_real"].to(sums.device)[0::2]
    share = real / data["pairs"] * data["dp_size"]
    metrics = {name: Metric(AggregationType.SUM, (value * share).sum()) for name, value in made.figures().items()}
    return (made.losses * share).sum(), metrics


def row_sums(log_probs: Any, loss_mask: Any) -> torch.Tensor:
    """Sum of the logprobs of each row's trained tokens.

    Args:
        log_probs: jagged; at each place that of the token which comes next.
        loss_mask: jagged; 1 on the tokens that are trained, never a row's first.
    """
    offsets = loss_mask.offsets().to(log_probs.device)
    # What stands at a row's last place is the mask of the next row's first token, which is 0.
    values = log_probs.values() if log_probs.is_nested else log_probs
    masked = values.float() * torch.roll(loss_mask.values(), shifts=-1, dims=0)
    rows = torch.repeat_interleave(torch.arange(len(offsets) - 1, device=masked.device), offsets.diff())
    return torch.zeros(len(offsets) - 1, dtype=masked.dtype, device=masked.device).index_add(0, rows, masked)
