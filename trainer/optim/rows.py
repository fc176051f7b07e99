"""Conversion of a batch to the input of verl's workers, and of their outputs to NumPy arrays and numbers.

Invariant: values are the batch's, row by row; outputs for tokens that were not sampled are 0.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainer.data.batch import Batch


def tensordict(batch: Batch, *, role: str, **flags: Any) -> Any:
    """Return verl's jagged layout of a batch, with one temperature per row, for a pass with these flags (`flags_of`)."""
    import torch

    columns = {
        "prompts": batch.prompts.copy(),
        "responses": batch.responses.copy(),
        "attention_mask": batch.attention_mask,
        "temperature": batch.temperature,
        **response_columns(batch),
    }
    return unpadded({name: torch.from_numpy(value) for name, value in columns.items()}, flags_of(batch, role, **flags))


def response_columns(batch: Batch) -> dict[str, NDArray[Any]]:
    """Return what a loss reads of each response token and each row, by verl's names where it has one."""
    optional = {
        "values": batch.values,
        "returns": batch.returns,
        "rollout_is_weights": batch.weights,
        "ref_log_prob": batch.reference_logprobs,
        "row_share": batch.row_share,
        "rollout_log_ratio": batch.rollout_log_ratio,
    }
    return {
        "response_mask": batch.response_mask,
        "rollout_log_probs": batch.logprobs,
        "old_log_probs": batch.logprobs if batch.old_logprobs is None else batch.old_logprobs,
        "advantages": batch.advantages,
        **{name: value for name, value in optional.items() if value is not None},
    }


def flags_of(batch: Batch, role: str, *, entropy: bool = False, stepped: bool = False, **flags: bool | int) -> dict[str, Any]:
    """Return what a pass reads beside the rows.

    Args:
        batch: the rows.
        role: model of a worker.
        entropy: True if the loss has an entropy term.
        stepped: True if an optimizer step follows, which the learning rate's warm-up counts.
        flags: verl's own flags of a pass.
    """
    return {
        "role": role,
        "calculate_entropy": entropy,
        "measure_entropy": role == "policy" and not entropy and flags.get("compute_loss", True),
        "global_batch_size": batch.rollouts,
        "global_token_num": batch.token_counts,
        "update_lr_scheduler": stepped,
        **flags,
    }


def unpadded(columns: dict[str, Any], flags: dict[str, Any]) -> Any:
    """Return verl's jagged layout of padded columns.

    Args:
        columns: tensors by name: prompts (padded on the left), responses and what belongs to their tokens (padded on the right),
            attention_mask over both, and one value per row.
        flags: of the pass.
    """
    import torch
    from tensordict import TensorDict
    from verl.utils import tensordict_utils as tu
    from verl.workers.utils.padding import left_right_2_no_padding

    attention = columns["attention_mask"]
    whole = {
        **columns,
        "input_ids": torch.cat([columns["prompts"], columns["responses"]], dim=1),
        "position_ids": (attention.cumsum(-1) - 1).clamp(min=0),
    }
    jagged = left_right_2_no_padding(TensorDict(whole, batch_size=len(attention)))
    tu.assign_non_tensor(jagged, **flags)
    return jagged


def by_response(output: Any, batch: Batch) -> NDArray[np.float32]:
    """Return an output of a forward pass for the sampled tokens, of the batch's shape [rows, response]; 0 elsewhere.

    The output is jagged over the batch's tokens, row by row; at each position it has the value of the next token.
    """
    flat = (output.values() if output.is_nested else output.reshape(-1)).float().cpu().numpy()
    width = batch.prompts.shape[1]
    lengths, ends = batch.attention_mask[:, width:].sum(axis=1), batch.attention_mask.sum(axis=1).cumsum()
    column = np.arange(batch.responses.shape[1])
    at = (ends - lengths - 1)[:, None] + column
    inside = (column < lengths[:, None]) & batch.response_mask.astype(bool)
    return np.where(inside, flat[np.where(inside, at, 0)], np.float32(0))


def scalars(output: Any) -> dict[str, float]:
    """Return verl's metrics of a pass."""
    from verl.utils import tensordict_utils as tu

    return {name: _scalar(value) for name, value in tu.get(output, "metrics").items()}


def _scalar(value: Any) -> float:
    """Return a metric of verl as a number; verl gives numbers, or one `Metric` of micro-batches per rank."""
    from verl.utils.metric import Metric

    if isinstance(value, list) and isinstance(value[0], Metric):
        return float(Metric.aggregate_dp(value))
    return float(value.aggregate() if isinstance(value, Metric) else np.mean(value))
