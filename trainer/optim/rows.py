"""A batch as verl's workers take it, and what they answer as NumPy arrays and numbers.

In: a `Batch`; verl's outputs. Out: verl's jagged TensorDict; arrays shaped as the batch's responses, floats. Invariant: values are the
batch's, row by row; what verl tells of tokens that were not sampled is 0.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainer.data.batch import Batch


def tensordict(batch: Batch, *, role: str, entropy: bool = False, stepped: bool = False, **flags: bool | int) -> Any:
    """Verl's jagged layout of a batch, with a temperature a row.

    Args:
        batch: its rows divide by the number of workers.
        role: which of a worker's models takes it (`trainer.optim.rank`).
        entropy: whether the loss looks at it.
        stepped: whether an optimiser step follows, which the learning rate's warm-up counts.
        flags: verl's own, of a pass.
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
    """What a forward pass told of the sampled tokens, by verl's name; 0 elsewhere."""
    from verl.workers.utils.padding import no_padding_2_padding

    return no_padding_2_padding(output[name], rows).float().cpu().numpy() * batch.response_mask.astype(np.float32)


def scalars(output: Any) -> dict[str, float]:
    """Verl's metrics of a pass."""
    from verl.utils import tensordict_utils as tu

    return {name: _scalar(value) for name, value in tu.get(output, "metrics").items()}


def _scalar(value: Any) -> float:
    """Metrics of verl come as numbers, or as one `Metric` of micro-batches a rank."""
    from verl.utils.metric import Metric

    if isinstance(value, list) and isinstance(value[0], Metric):
        return float(Metric.aggregate_dp(value))
    return float(value.aggregate() if isinstance(value, Metric) else np.mean(value))
