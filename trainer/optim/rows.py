"""Conversion of a batch to the input of verl's workers, and of their outputs to NumPy arrays and numbers.

Invariant: values are the batch's, row by row; outputs for tokens that were not sampled are 0.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainer.data.batch import Batch


def tensordict(batch: Batch, *, role: str, entropy: bool = False, stepped: bool = False, **flags: bool | int) -> Any:
    """Return verl's jagged layout of a batch, with one temperature per row.

    Args:
        batch: its number of rows is a multiple of the number of workers.
        role: model of a worker that takes it (`trainer.optim.rank`).
        entropy: True if the loss has an entropy term.
        stepped: True if an optimizer step follows, which the learning rate's warm-up counts.
        flags: verl's own flags of a pass.
    """
    import torch
    from tensordict import TensorDict
    from verl.utils import tensordict_utils as tu
    from verl.workers.utils.padding import left_right_2_no_padding

    attention = torch.from_numpy(batch.attention_mask)
    prompts, responses = torch.from_numpy(batch.prompts.copy()), torch.from_numpy(batch.responses.copy())
    rows = TensorDict(
        {
            "prompts": prompts,
            "responses": responses,
            "input_ids": torch.cat([prompts, responses], dim=1),
            "attention_mask": attention,
            "position_ids": (attention.cumsum(-1) - 1).clamp(min=0),
            "response_mask": torch.from_numpy(batch.response_mask),
            "rollout_log_probs": torch.from_numpy(batch.logprobs),
            "old_log_probs": torch.from_numpy(batch.logprobs if batch.old_logprobs is None else batch.old_logprobs),
            "advantages": torch.from_numpy(batch.advantages),
            "temperature": torch.from_numpy(batch.temperature),
            **({} if batch.values is None else {"values": torch.from_numpy(batch.values), "returns": torch.from_numpy(batch.returns)}),
            **({} if batch.weights is None else {"rollout_is_weights": torch.from_numpy(batch.weights)}),
            **({} if batch.reference_logprobs is None else {"ref_log_prob": torch.from_numpy(batch.reference_logprobs)}),
            **({} if batch.row_share is None else {"row_share": torch.from_numpy(batch.row_share)}),
            **({} if batch.rollout_log_ratio is None else {"rollout_log_ratio": torch.from_numpy(batch.rollout_log_ratio)}),
        },
        batch_size=len(attention),
    )
    jagged = left_right_2_no_padding(rows)
    tu.assign_non_tensor(
        jagged,
        role=role,
        calculate_entropy=entropy,
        measure_entropy=role == "policy" and not entropy and flags.get("compute_loss", True),
        global_batch_size=batch.rollouts,
        global_token_num=batch.token_counts,
        update_lr_scheduler=stepped,
        **flags,
    )
    return jagged


def padded(output: Any, name: str, rows: Any, batch: Batch) -> NDArray[np.float32]:
    """Return an output of a forward pass for the sampled tokens, by verl's name; 0 elsewhere."""
    from verl.workers.utils.padding import no_padding_2_padding

    return no_padding_2_padding(output[name], rows).float().cpu().numpy() * batch.response_mask.astype(np.float32)


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
