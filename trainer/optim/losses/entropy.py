"""The policy's entropy as a metric, from the logits that a forward pass has anyway.

In: verl's engine of a model. Out: the same engine, whose forward passes return the entropy at each token of a response. Invariant: no
gradient, and no memory beyond a chunk of the logits: where the loss rewards entropy, verl computes it with its gradient instead.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from verl.utils import tensordict_utils as tu

_CHUNK = 512
"""Largest number of tokens whose distribution over the vocabulary is held at once, in float32."""


def measure_entropy(engine: Any) -> None:
    """Make an engine's passes flagged `measure_entropy` return `measured_entropy`, jagged as its log_probs (nats)."""
    prepare = engine.prepare_model_outputs

    def prepare_model_outputs(output: Any, output_args: Any, micro_batch: Any, logits_processor_func: Any) -> Any:
        result = prepare(output, output_args, micro_batch, logits_processor_func)
        if tu.get_non_tensor_data(micro_batch, key="measure_entropy", default=False):
            result["measured_entropy"] = _of_responses(output.logits, micro_batch)
        return result

    engine.prepare_model_outputs = prepare_model_outputs


@torch.no_grad()
def _of_responses(logits: Any, micro_batch: Any) -> Any:
    """Return the entropy (nats) at the tokens of the responses, whose distributions are one position before them; 0 elsewhere.

    Args:
        logits: (rows, longest, vocabulary), or packed (1, tokens, vocabulary).
        micro_batch: input_ids (jagged), attention_mask, prompts and temperature.
    """
    offsets = micro_batch["input_ids"].offsets()
    width = micro_batch["prompts"].shape[1]
    prompts = micro_batch["attention_mask"][:, :width].sum(dim=1).tolist()
    starts = offsets.tolist()
    packed = len(logits) == 1 and logits.shape[1] >= starts[-1]
    entropy = torch.zeros(starts[-1], device=logits.device)
    for row, (start, end) in enumerate(pairwise(starts)):
        of_row = logits[0, start:end] if packed else logits[row, : end - start]
        temperature = micro_batch["temperature"][row].clamp(min=1e-8)
        for first in range(prompts[row] - 1, end - start - 1, _CHUNK):
            last = min(first + _CHUNK, end - start - 1)
            logprobs = (of_row[first:last].float() / temperature).log_softmax(-1)
            entropy[start + first : start + last] = -(logprobs.exp() * logprobs).sum(-1)
    return torch.nested.nested_tensor_from_jagged(entropy, offsets)
