"""Sums of a checkpoint's tensors over the shards that an engine's workers hold, and their comparison with a version's.

In: reports of workers, and the sums of a version's tensors. Out: sums by tensor, and what differs. Invariant: sums of shards add up to the
sums of the whole tensor, however it is split; a shard that several workers hold counts once, and its copies must agree.

A tensor's words are numbered from 0 in the order of the checkpoint's file. Of the mixed words m (`spangrad.weights.checksums`), `plain` is
the sum of all m, and `weighted` the sum of number * m, both mod 2^64. A worker numbers its words as the whole tensor does, so both sums are
additive; `plain` summed over tensors is the version's checksum, and `weighted` changes when words or shards change places.

A sample is the words whose number is a multiple of `sample_step`, so that each worker knows which of them it holds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum

import msgspec

from spangrad.errors import CheckpointError

MASK = 2**64 - 1
MIX_A = 0x9E3779B97F4A7C15
MIX_B = 0xD6E8FEB86659FD93
SAMPLES = 4096
"""Words of a tensor that a sample has, about."""
SHOWN = 3
"""Most tensors that a difference names."""

Region = tuple[int, tuple[tuple[int, int], ...]]
"""Place of a shard in its tensor: number of its first word; size and stride of each dimension, largest stride first."""


class ChecksumScope(StrEnum):
    """Part of an engine's parameters that is compared after a publication (`engine.checksum`)."""

    FULL = "full"
    """Every word of every parameter."""
    SAMPLED = "sampled"
    """About 4,096 words of each parameter."""
    OFF = "off"
    """None."""


class TensorSums(msgspec.Struct, frozen=True):
    """Sums of a tensor, or of a part of it."""

    dtype: str
    words: int
    """Number of the words that the sums are of."""
    plain: int
    weighted: int

    def __add__(self, other: TensorSums) -> TensorSums:
        """Return the sums of two parts of a tensor together."""
        return TensorSums(self.dtype, self.words + other.words, (self.plain + other.plain) & MASK, (self.weighted + other.weighted) & MASK)


class Shard(msgspec.Struct, frozen=True, array_like=True):
    """Part of a tensor in a worker's memory."""

    name: str
    """Name of the tensor in the checkpoint."""
    region: Region
    sums: TensorSums


class WorkerReport(msgspec.Struct, frozen=True):
    """Shards that one worker holds, and the tensors that it holds in another form."""

    shards: list[Shard]
    unread: dict[str, str] = {}
    """Tensors of the checkpoint whose words are not in memory as they are in the file, with the reason."""


class EngineReports(msgspec.Struct, frozen=True):
    """Reports of all workers of an engine."""

    replicas: list[list[WorkerReport]]
    """Reports of the workers of each data-parallel replica."""


class EngineSums(msgspec.Struct, frozen=True):
    """Sums by tensor that an engine holds, each replica the same."""

    tensors: dict[str, TensorSums]
    unread: dict[str, str] = {}

    @property
    def dtype(self) -> str:
        """Dtype of most of the words; empty: none is known."""
        words: dict[str, int] = {}
        for sums in self.tensors.values():
            words[sums.dtype] = words.get(sums.dtype, 0) + sums.words
        return max(words, key=lambda dtype: words[dtype], default="")

    @property
    def checksum(self) -> str:
        """Checksum of all tensors, as `spangrad.weights.checksums` writes it."""
        return checksum_of(self.tensors, self.dtype)


def checksum_of(tensors: Mapping[str, TensorSums], dtype: str) -> str:
    """Return the checksum of tensors, with the name of a dtype."""
    return f"{dtype}:{sum(sums.plain for sums in tensors.values()) & MASK:016x}"


def added(sums: Iterable[tuple[str, TensorSums]], holders: str = "ranks") -> dict[str, TensorSums]:
    """Return the sums of tensors, by name, from those of their shards; an error names the processes that hold them.

    Raises:
        CheckpointError: shards of a tensor have different dtypes.
    """
    tensors: dict[str, TensorSums] = {}
    for name, shard in sums:
        before = tensors.get(name, TensorSums(shard.dtype, 0, 0, 0))
        if before.dtype != shard.dtype:
            raise CheckpointError(f"{holders} hold {name} as {before.dtype} and as {shard.dtype}.")
        tensors[name] = before + shard
    return tensors


def sample_step(words: int) -> int:
    """Return the distance between the sampled words of a tensor: odd, so that samples fall into all columns of a matrix."""
    return max(1, words // SAMPLES) | 1


def region_of(first: int, dimensions: Iterable[tuple[int, int]]) -> Region:
    """Return the place of a shard in the one form that equal shards have; dimensions are in any order."""
    merged: list[tuple[int, int]] = []
    for size, stride in sorted(dimensions, key=lambda dimension: -dimension[1]):
        if size == 1:
            continue
        if merged and merged[-1][1] == size * stride:
            merged[-1] = merged[-1][0] * size, stride
        else:
            merged.append((size, stride))
    return first, tuple(merged)


def combine(reports: EngineReports) -> EngineSums:
    """Return the sums of an engine, from the reports of its workers.

    Raises:
        CheckpointError: copies of a shard differ, or a replica holds other weights than the first one.
    """
    replicas = reports.replicas
    combined = [_of_replica(workers, f"replica {number}'s " if len(replicas) > 1 else "") for number, workers in enumerate(replicas)]
    if not combined:
        raise CheckpointError("no worker reported its parameters. Restart the engine.")
    for number, other in enumerate(combined[1:], 1):
        reason = difference(combined[0].tensors, other)
        if reason:
            raise CheckpointError(f"data-parallel replica {number} holds other weights than replica 0: {reason}")
    return combined[0]


def _of_replica(workers: Sequence[WorkerReport], owner: str) -> EngineSums:
    holders: dict[tuple[str, Region], tuple[int, TensorSums]] = {}
    for worker, report in enumerate(workers):
        for shard in report.shards:
            first, sums = holders.setdefault((shard.name, shard.region), (worker, shard.sums))
            if sums != shard.sums:
                raise CheckpointError(f"{owner}workers {first} and {worker} hold different copies of {shard.name}.")
    tensors = added(((name, sums) for (name, _), (_, sums) in holders.items()), f"{owner}workers")
    unread = {name: reason for report in workers for name, reason in report.unread.items()}
    return EngineSums({name: sums for name, sums in tensors.items() if name not in unread}, unread)


def difference(expected: Mapping[str, TensorSums], held: EngineSums) -> str:
    """Return in words how an engine's tensors differ from the expected ones; empty: they are the same, as far as they can be compared."""
    missing = [name for name in expected if name not in held.tensors and name not in held.unread]
    # A tensor of zeros adds nothing: the adapter that changes nothing is one.
    surplus = [name for name, sums in held.tensors.items() if name not in expected and (sums.plain or sums.weighted)]
    compared = [(name, expected[name], held.tensors[name]) for name in expected if name in held.tensors]
    counts = [f"{name} ({sums.words} of {whole.words} words)" for name, whole, sums in compared if sums.words != whole.words]
    others = [name for name, whole, sums in compared if sums.words == whole.words and sums != whole]
    problems = [
        ("it lacks", missing),
        ("it has beside the version's", surplus),
        ("it does not hold each word once of", counts),
        ("it holds other values of", others),
    ]
    return "; ".join(f"{problem} {_listed(names)}" for problem, names in problems if names)


def _listed(names: Sequence[str]) -> str:
    rest = len(names) - SHOWN
    return ", ".join(names[:SHOWN]) + (f" and {rest} more" if rest > 0 else "")
