"""From the transitions of whole groups, with an advantage each, to the arrays of one training step.

In: a frame of transitions and their advantages. Out: a `Batch` of padded NumPy arrays in verl's layout (prompts to the left,
responses to the right of one seam). Invariant: token ids and logprobs are the engine's, value by value, and a response token has
mask 1 exactly when it was sampled; rows added to fit a divisor have mask 0 throughout, so that they change neither loss nor
gradient.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import polars as pl
from numpy.typing import NDArray

from spangrad.errors import TrainerError


@dataclass(frozen=True)
class Batch:
    """One optimiser step's rows; every array has a row a sequence, no-op rows last."""

    prompts: NDArray[np.int64]
    """Token ids, padded on the left with 0."""
    responses: NDArray[np.int64]
    """Token ids, padded on the right with 0."""
    attention_mask: NDArray[np.int64]
    """1 where there is a token, over prompt and response side by side."""
    response_mask: NDArray[np.int64]
    """1 on the tokens that the policy sampled."""
    logprobs: NDArray[np.float32]
    """Of the sampled tokens, as the engine gave them (nats)."""
    advantages: NDArray[np.float32]
    """The row's advantage on each sampled token."""
    temperature: NDArray[np.float32]
    """The row's sampling temperature: the logprobs are those of logits divided by it."""
    current: NDArray[np.bool_]
    """Whether the weights to be trained sampled the row, so that their logprobs must agree with its own."""
    real_rows: int
    """Rows that are transitions; the rest are no-op rows."""

    @property
    def trainable(self) -> bool:
        """Whether any advantage differs from 0; without one the gradient is 0."""
        return bool(np.any(self.advantages))

    @property
    def token_counts(self) -> list[int]:
        """Tokens of each row, prompt and response."""
        return self.attention_mask.sum(axis=1).tolist()


def layout(transitions: pl.DataFrame, advantages: pl.Series, *, version: int, max_tokens: int, divisor: int = 1) -> Batch:
    """Lay transitions out for a training step.

    Args:
        transitions: rows with TransitionId, PromptIds, ResponseIds, Logprobs, Temperature and Version.
        advantages: one a row.
        version: of the weights that will be trained.
        max_tokens: the longest row that fits a device.
        divisor: the number of rows will be a multiple of it.

    Raises:
        TrainerError: a row is empty, contradicts itself or is too long.
    """
    rows = transitions.select("TransitionId", "PromptIds", "ResponseIds", "Logprobs").rows()
    for name, prompt, response, logprobs in rows:
        _check(name, len(prompt), len(response), len(logprobs), max_tokens)
    count = -(-len(rows) // divisor) * divisor
    width = max((len(prompt) for _, prompt, _, _ in rows), default=1)
    length = max((len(response) for _, _, response, _ in rows), default=1)
    ids = np.zeros((count, width + length), np.int64)
    attention = np.zeros_like(ids)
    mask = np.zeros((count, length), np.int64)
    sampled = np.zeros((count, length), np.float32)
    for i, (_, prompt, response, logprobs) in enumerate(rows):
        start, end = width - len(prompt), width + len(response)
        ids[i, start:end] = prompt + response
        attention[i, start:end] = 1
        mask[i, : len(response)] = 1
        sampled[i, : len(response)] = logprobs
    attention[len(rows) :, width - 1] = 1  # a no-op row still needs one prompt token
    padding = count - len(rows)
    row_advantages = np.pad(advantages.cast(pl.Float32).to_numpy(), (0, padding))
    return Batch(
        prompts=ids[:, :width],
        responses=ids[:, width:],
        attention_mask=attention,
        response_mask=mask,
        logprobs=sampled,
        advantages=row_advantages[:, None] * mask.astype(np.float32),
        temperature=np.pad(transitions["Temperature"].cast(pl.Float32).to_numpy(), (0, padding), constant_values=1),
        current=np.pad((transitions["Version"] == version).to_numpy(), (0, padding)),
        real_rows=len(rows),
    )


def _check(name: str, prompt: int, response: int, logprobs: int, max_tokens: int) -> None:
    if not prompt or not response:
        raise TrainerError(
            f"transition {name} has {prompt} prompt and {response} response tokens; both are needed. Rebuild its rollout with "
            "`spangrad build`."
        )
    if response != logprobs:
        raise TrainerError(
            f"transition {name} has {response} response tokens and {logprobs} logprobs. Rebuild its rollout with `spangrad build`."
        )
    if prompt + response > max_tokens:
        raise TrainerError(
            f"transition {name} has {prompt + response} tokens and trainer.max_tokens_per_device = {max_tokens}. Raise the setting, or "
            "lower engine.max_model_len."
        )
