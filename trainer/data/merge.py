"""Token sequences to train on, made of transitions: one per call, or one for calls whose prompts extend each other.

In: transitions with an advantage each. Out: `Sequences`, flat arrays with offsets. Invariants: every token and every logprob is the
engine's, value by value; a token is trained exactly when it was sampled, once, with its own call's advantage; its context in the
sequence is its call's prompt, token by token. So loss and gradient of a token-mean are those of the calls one by one.

A call continues a sequence when its prompt begins with all of that sequence's ids, prompt and responses as they were sampled; what its
prompt adds to them (tool results, user turns) is context, not trained. A prompt that continues no sequence is a break: history was
rewritten, cut or retokenised, or a sub-agent has a context of its own. It begins a new sequence; no history is repaired. A merged
sequence is never longer than its last call.

Prefixes are compared as bytes of flat buffers; no token becomes a Python object.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass

import numpy as np
import polars as pl
from numpy.typing import NDArray

from trainer.credit.assignment import GROUP, KEY
from trainer.data.token_versions import UNKNOWN, token_versions

_ALIKE = ("Policy", "TokenizerHash", "Temperature", "Reshaping")
"""Columns that calls of a merged sequence share, beside those of their rollout's attempt: a sequence has one temperature, and its logprobs
are of one kind of distribution. Policy versions are kept per token: a sequence may hold several."""
_TAIL = 64
"""Number of bytes at the end of a sequence that are compared first: prompts of a rollout begin alike, and differ there."""


@dataclass(frozen=True)
class Sequences:
    """Token sequences to train on, one after the other."""

    ids: NDArray[np.uint32]
    """Token ids of all sequences."""
    offsets: NDArray[np.int64]
    """Index in `ids` at which each sequence begins, and the end of the last: one element more than there are sequences."""
    prompts: NDArray[np.int64]
    """Number of tokens of each sequence's first prompt."""
    mask: NDArray[np.bool_]
    """True for tokens that were sampled, and are trained."""
    logprobs: NDArray[np.float32]
    """Logprob of each token, as the engine sampled it (nats); 0 where the mask is off."""
    advantages: NDArray[np.float32]
    """Advantage of each token's call; 0 where the mask is off."""
    temperature: NDArray[np.float32]
    """Sampling temperature of each sequence."""
    versions: NDArray[np.int64]
    """Policy version that sampled each token; -1 where the mask is off."""
    reshaped: NDArray[np.bool_]
    """True for sequences whose logprobs are of a distribution that more than a temperature shaped."""
    rollout: NDArray[np.int64]
    """Number of each sequence's rollout attempt among those of the rows, from 0."""
    group: NDArray[np.int64]
    """Number of each sequence's group among those of the rows, from 0."""
    calls: pl.Series
    """CallIds of each sequence's calls, in order (lists)."""
    separate_tokens: int
    """Number of tokens of all calls, prompt and response, if each were a sequence of its own."""

    def __len__(self) -> int:
        """Return the number of sequences."""
        return len(self.prompts)

    @property
    def tokens(self) -> int:
        """Return the number of tokens to process."""
        return len(self.ids)

    @property
    def trained_tokens(self) -> int:
        """Return the number of sampled tokens."""
        return int(self.mask.sum())

    @property
    def merge_ratio(self) -> float:
        """Return the factor by which merging reduces the tokens to process; 1 when nothing was merged."""
        return self.separate_tokens / max(self.tokens, 1)


def separate(transitions: pl.DataFrame, advantages: pl.Series) -> Sequences:
    """Make one sequence per call, in their order.

    Args:
        transitions: rows with the columns of `credit.KEY`, TransitionId, CallId, PromptIds, ResponseIds, Logprobs, Temperature, Reshaping,
            Version, `Versions.Start` and `Versions.Version`.
        advantages: one per row.
    """
    separate_rows = np.full(len(transitions), -1, np.int64)
    return _assemble(transitions, advantages, separate_rows)


def merge(transitions: pl.DataFrame, advantages: pl.Series) -> Sequences:
    """Make as few sequences as exact prefixes allow, ordered by rollout and first turn; the order of rows does not matter.

    Calls are taken in the order of their turns. Each continues the longest sequence of its rollout's attempt, policy, version, tokenizer,
    temperature and reshaping that its prompt begins with; of several calls that begin with the same one, the first continues it.

    Args:
        transitions: as for `separate`, with Turn, Policy and TokenizerHash.
        advantages: one per row.
    """
    ordered = transitions.with_columns(advantages.cast(pl.Float64).alias("_Advantage")).sort(*KEY, *_ALIKE, "Turn", "CallId")
    partition = ordered.select(pl.struct(*KEY, *_ALIKE).rle_id()).to_series()
    return _assemble(ordered, ordered["_Advantage"], _predecessors(ordered, partition.to_numpy()))


def _predecessors(rows: pl.DataFrame, partition: NDArray[np.uint32]) -> NDArray[np.int64]:
    """Return the row that each row continues, -1 where it begins a sequence; rows of a partition are adjacent, in order."""
    prompts, prompt_at = _bytes(rows["PromptIds"])
    responses, response_at = _bytes(rows["ResponseIds"])
    predecessors = np.full(len(rows), -1, np.int64)
    open_ends: list[tuple[int, int]] = []  # bytes, row: by length
    current = -1
    for row, group in enumerate(partition.tolist()):
        if group != current:
            current, open_ends = group, []
        start, stop = prompt_at[row], prompt_at[row + 1]
        candidates = bisect.bisect_right(open_ends, (stop - start, len(rows)))
        for index in range(candidates - 1, -1, -1):
            size, end = open_ends[index]
            prompt, response = slice(prompt_at[end], prompt_at[end + 1]), slice(response_at[end], response_at[end + 1])
            boundary = start + prompt.stop - prompt.start
            tail = responses[max(response.start, response.stop - _TAIL) : response.stop]
            if (
                prompts.startswith(tail, start + size - len(tail))
                and prompts.startswith(responses[response], boundary)
                and prompts.startswith(prompts[prompt], start)
            ):
                predecessors[row] = end
                del open_ends[index]
                break
        bisect.insort(open_ends, (stop - start + response_at[row + 1] - response_at[row], row))
    return predecessors


def _bytes(ids: pl.Series) -> tuple[bytes, list[int]]:
    """Return all token ids as bytes, and the offset of each row's; a byte offset is four times a token's, so prefixes fall on tokens."""
    lengths = ids.list.len().to_numpy().astype(np.int64)
    return _flat(ids, pl.UInt32()).tobytes(), [0, *(4 * np.cumsum(lengths)).tolist()]


def _assemble(rows: pl.DataFrame, advantages: pl.Series, predecessors: NDArray[np.int64]) -> Sequences:
    """Lay out the chains that `predecessors` make: the ids of a chain are its last call's prompt and response."""
    prompts, responses = (rows[name].list.len().to_numpy().astype(np.int64) for name in ("PromptIds", "ResponseIds"))
    first = predecessors < 0
    sequence = np.where(first, np.cumsum(first) - 1, -1)
    for row in np.flatnonzero(~first).tolist():
        sequence[row] = sequence[predecessors[row]]
    count = int(first.sum())
    last = np.zeros(count, np.int64)
    last[sequence] = np.arange(len(rows))  # rows are in order, so a chain's last one stays
    ids = _flat(rows[last].select(pl.concat_list("PromptIds", "ResponseIds")).to_series(), pl.UInt32()).astype(np.uint32, copy=False)
    offsets = np.concatenate([[0], np.cumsum((prompts + responses)[last])]).astype(np.int64)
    sampled = ragged(offsets[sequence] + prompts, responses)
    mask = np.zeros(len(ids), np.bool_)
    mask[sampled] = True
    logprobs = np.zeros(len(ids), np.float32)
    logprobs[sampled] = _flat(rows["Logprobs"], pl.Float32())
    spread = np.zeros(len(ids), np.float32)
    spread[sampled] = np.repeat(advantages.cast(pl.Float32).to_numpy(), responses)
    versions = np.full(len(ids), UNKNOWN, np.int64)
    versions[sampled] = token_versions(rows)
    heads = rows.filter(first)
    return Sequences(
        ids=ids,
        offsets=offsets,
        prompts=prompts[first],
        mask=mask,
        logprobs=logprobs,
        advantages=spread,
        temperature=heads["Temperature"].cast(pl.Float32).to_numpy(),
        versions=versions,
        reshaped=(heads["Reshaping"] != "").to_numpy(),
        rollout=_numbers(rows, KEY)[first],
        group=_numbers(rows, GROUP)[first],
        calls=_calls(rows["CallId"], sequence),
        separate_tokens=int(prompts.sum() + responses.sum()),
    )


def _numbers(rows: pl.DataFrame, key: tuple[str, ...]) -> NDArray[np.int64]:
    """Number the rows by their keys, in the order of keys, so that the order of rows does not matter."""
    return rows.select(pl.struct(key).rank("dense").cast(pl.Int64) - 1).to_series().to_numpy()


def ragged(starts: NDArray[np.int64], lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the indices start, start + 1, ... of each run of a length, one run after the other."""
    begins = np.cumsum(lengths) - lengths
    return np.repeat(starts - begins, lengths) + np.arange(int(lengths.sum()))


def _calls(names: pl.Series, sequence: NDArray[np.int64]) -> pl.Series:
    held = pl.DataFrame({"Sequence": sequence, "CallId": names}, schema_overrides={"Sequence": pl.Int64})
    return held.group_by("Sequence", maintain_order=True).agg("CallId").sort("Sequence")["CallId"].alias("CallIds")


def _flat(lists: pl.Series, dtype: pl.DataType) -> NDArray[np.generic]:
    return lists.explode(empty_as_null=False).cast(dtype).to_numpy()
