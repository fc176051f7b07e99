"""Layout of token sequences as the arrays of one training step, and its parts for several optimizer steps.

Invariant: token ids and logprobs are the engine's, value by value, and a token has mask 1 exactly when it was sampled; what a merged
sequence holds after its first prompt lies right of the seam, observations with mask 0; rows added to fit a divisor have mask 0 throughout,
so that they change neither loss nor gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from trainer.data.merge import Sequences
from trainer.data.token_versions import UNKNOWN, staleness

_T = TypeVar("_T", bound=np.generic)


@dataclass(frozen=True)
class Batch:
    """Rows of one optimizer step; every array has one row per sequence, no-op rows last."""

    prompts: NDArray[np.int64]
    """Token ids, padded on the left with 0."""
    responses: NDArray[np.int64]
    """Token ids of what follows the first prompt, padded on the right with 0."""
    attention_mask: NDArray[np.int64]
    """1 where there is a token, over prompt and response side by side."""
    response_mask: NDArray[np.int64]
    """1 on the tokens that the policy sampled."""
    logprobs: NDArray[np.float32]
    """Logprobs of the sampled tokens, as the engine gave them (nats)."""
    advantages: NDArray[np.float32]
    """Advantage of each sampled token: that of its call."""
    temperature: NDArray[np.float32]
    """Sampling temperature of each row: the logprobs are those of logits divided by it."""
    versions: NDArray[np.int64]
    """Policy version that sampled each response token; -1 where none did."""
    staleness: NDArray[np.int16]
    """Staleness of each response token: number of committed versions between its version and the one that is trained; -1 where no version
    sampled it, or one that is not known."""
    reshaped: NDArray[np.bool_]
    """True for rows whose logprobs are of a distribution that more than a temperature shaped (`trainer.optim.losses.reshaped`)."""
    rollout: NDArray[np.int64]
    """Number of each row's rollout within the batch, from 0; -1 for no-op rows."""
    group: NDArray[np.int64]
    """Number of each row's group within the batch, from 0; -1 for no-op rows."""
    real_rows: int
    """Number of rows that are sequences; the rest are no-op rows."""
    index: NDArray[np.int64] | None = None
    """Index of each row in the batch of its step, -1 for no-op rows. None: it is in no step yet."""
    old_logprobs: NDArray[np.float32] | None = None
    """Logprobs (nats) of the sampled tokens under the weights at the step's start: denominators of the ratios. None: `logprobs`."""
    reference_logprobs: NDArray[np.float32] | None = None
    """Logprobs (nats) of the sampled tokens under the reference weights. None: the loss has no KL term against a reference."""
    call_rewards: NDArray[np.float64] | None = None
    """Reward of each row's call (`trainer.data.chains`), where the estimator works by token. None: advantages are known."""
    values: NDArray[np.float32] | None = None
    """Values of the sampled tokens, by the critic at the step's start. None: there is no critic."""
    returns: NDArray[np.float32] | None = None
    """Targets of the critic for the sampled tokens. None: there is no critic."""
    weights: NDArray[np.float32] | None = None
    """Factor of each sampled token's loss. None: 1."""
    row_share: NDArray[np.float32] | None = None
    """Share of each row in its rollout's trained tokens, where entropy and KL are means over a rollout's tokens. None: 1."""
    rollout_log_ratio: NDArray[np.float32] | None = None
    """Mean of log(pi / pi_old) over the trained tokens of each row's rollout. None: the row is all of its rollout, or the loss looks at
    tokens."""

    @property
    def trainable(self) -> bool:
        """Return whether any advantage of a token in the loss differs from 0; without one the policy's gradient is 0."""
        return bool(np.any(self.advantages[self.response_mask.astype(bool)]))

    @property
    def advantage_spread(self) -> dict[str, float]:
        """Return metrics: mean and standard deviation of the advantages of the tokens in the loss."""
        advantages = self.advantages[self.response_mask.astype(bool)].astype(np.float64)
        mean, deviation = (advantages.mean(), advantages.std()) if len(advantages) else (0.0, 0.0)
        return {"advantage_mean": float(mean), "advantage_std": float(deviation)}

    @property
    def staleness_spread(self) -> dict[str, float]:
        """Return metrics: mean and largest staleness of the sampled tokens; 0 is on policy."""
        behind = self.staleness[self.staleness != UNKNOWN]
        return {"staleness_mean": float(behind.mean()) if len(behind) else 0.0, "staleness_max": float(behind.max(initial=0))}

    def numbered(self) -> Batch:
        """Return the batch as that of a step, with the index of each row."""
        rows = np.arange(len(self.rollout), dtype=np.int64)
        return replace(self, index=np.where(rows < self.real_rows, rows, -1))

    @property
    def token_counts(self) -> list[int]:
        """Return the number of tokens of each row, prompt and response."""
        return self.attention_mask.sum(axis=1).tolist()

    @property
    def rollouts(self) -> int:
        """Return the number of rollouts that have a row."""
        return len(np.unique(self.rollout[: self.real_rows]))


@dataclass(frozen=True, slots=True)
class TokenValues:
    """Values that a step computed of a batch's sampled tokens; arrays of the batch's shape [rows, response]."""

    advantages: NDArray[np.float32]
    """Advantages that the loss used."""
    logprobs: NDArray[np.float32]
    """Logprobs (nats) under the weights at the step's start, at the temperature of the row."""
    entropies: NDArray[np.float32]
    """Entropies (nats) of the distributions that the tokens are from, under the same weights."""


def layout(sequences: Sequences, *, lineage: Sequence[int], divisor: int = 1, rewards: NDArray[np.float64] | None = None) -> Batch:
    """Lay sequences out for a training step.

    Args:
        sequences: of `merge.separate` or `merge.merge`.
        lineage: committed versions, oldest first; the last one will be trained.
        divisor: the number of rows will be a multiple of it.
        rewards: of each sequence's call, where the estimator works by token (`chains`).
    """
    lengths = np.diff(sequences.offsets)
    count = -(-len(sequences) // divisor) * divisor
    width = int(sequences.prompts.max(initial=1))
    length = int((lengths - sequences.prompts).max(initial=1))
    ids, attention = np.zeros((count, width + length), np.int64), np.zeros((count, width + length), np.int64)
    starts, ends = width - sequences.prompts, width - sequences.prompts + lengths
    for row, (start, end) in enumerate(zip(starts.tolist(), ends.tolist(), strict=True)):
        ids[row, start:end] = sequences.ids[sequences.offsets[row] : sequences.offsets[row + 1]]
        attention[row, start:end] = 1
    attention[len(sequences) :, width - 1] = 1  # a no-op row still needs one prompt token
    mask = np.zeros((count, length), np.int64)
    logprobs, advantages = np.zeros((count, length), np.float32), np.zeros((count, length), np.float32)
    sampled = np.flatnonzero(sequences.mask)
    rows = np.searchsorted(sequences.offsets, sampled, side="right") - 1
    cells = rows, sampled - (sequences.offsets[:-1] + sequences.prompts)[rows]
    mask[cells] = 1
    logprobs[cells] = sequences.logprobs[sampled]
    advantages[cells] = sequences.advantages[sampled]
    versions = np.full((count, length), UNKNOWN, np.int64)
    versions[cells] = sequences.versions[sampled]
    behind = staleness(versions, lineage)
    padding = count - len(sequences)
    return Batch(
        prompts=ids[:, :width],
        responses=ids[:, width:],
        attention_mask=attention,
        response_mask=mask,
        logprobs=logprobs,
        advantages=advantages,
        temperature=np.pad(sequences.temperature, (0, padding), constant_values=1),
        versions=versions,
        staleness=behind,
        reshaped=np.pad(sequences.reshaped, (0, padding)),
        rollout=np.pad(sequences.rollout, (0, padding), constant_values=-1),
        group=np.pad(sequences.group, (0, padding), constant_values=-1),
        real_rows=len(sequences),
        call_rewards=None if rewards is None else np.pad(rewards, (0, padding)),
    )


def split(batch: Batch, order: Sequence[int], count: int) -> list[NDArray[np.int64]]:
    """Divide a batch's rollouts among `count` optimizer steps, as evenly as their number allows; return the rows of each step.

    There are fewer steps where there are fewer rollouts.

    Args:
        batch: the whole.
        order: a permutation of its `rollouts` rollouts, in the order of their numbers: the first step takes the first of them, with all of
            their rows.
        count: number of steps.
    """
    number = np.unique(batch.rollout[: batch.real_rows], return_inverse=True)[1]
    rows_of = np.split(np.argsort(number, kind="stable"), np.cumsum(np.bincount(number))[:-1])
    return [np.concatenate([rows_of[at] for at in chosen]) for chosen in np.array_split(np.asarray(order, np.int64), count) if len(chosen)]


def take(batch: Batch, rows: NDArray[np.int64], *, divisor: int = 1) -> Batch:
    """Return some rows of a batch, in the order given, and no-op rows up to a multiple of a divisor."""
    count = -(-len(rows) // divisor) * divisor

    def rows_of(whole: NDArray[_T], fill: float = 0) -> NDArray[_T]:
        result = np.full((count, *whole.shape[1:]), fill, whole.dtype)
        result[: len(rows)] = whole[rows]
        return result

    fills = {"temperature": 1, "versions": UNKNOWN, "staleness": UNKNOWN, "rollout": -1, "group": -1, "index": -1}
    arrays = {name: rows_of(value, fills.get(name, 0)) for name, value in vars(batch).items() if isinstance(value, np.ndarray)}
    arrays["attention_mask"][len(rows) :, batch.prompts.shape[1] - 1] = 1
    return replace(batch, **arrays, real_rows=len(rows))
