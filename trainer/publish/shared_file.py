"""Safetensors files that several processes write at once, each its own ranges of bytes.

In: parts of tensors. Out: one file, as any reader of safetensors takes it. Invariant: every process computes the same header from the same
names and shapes, so that none waits for another; a process holds nothing beside its parts.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spangrad.weights.shards import TensorSums
from spangrad.weights.sums import tensor_sums

_WORD_BYTES = 4
_WRITE_BYTES = 2**26
"""Most bytes of one system call, of which Linux takes less than 2 GiB."""


@dataclass(frozen=True, slots=True)
class FilePart:
    """Part of a float32 tensor in main memory: one range of the tensor's words, row by row."""

    name: str
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    first: int
    """Number of the part's first word in the whole tensor."""
    words: NDArray[np.float32]
    """Words, contiguous. Empty: another process has them."""


def write_parts(file: Path, parts: Sequence[FilePart], metadata: Mapping[str, str], *, first: bool) -> None:
    """Write a process's parts into a file, and have them on the disk.

    Args:
        file: of all processes; whichever comes first makes it.
        parts: a part of each tensor of the file, in the same order in every process, if an empty one.
        metadata: of the header, the same in every process.
        first: True in one process, which writes the header.

    Raises:
        OSError: the file cannot be written.
    """
    header, places = _layout(parts, metadata)
    size = len(header) + sum(_nbytes(part) for part in parts)
    handle = os.open(file, os.O_CREAT | os.O_WRONLY, 0o644)
    try:
        os.ftruncate(handle, size)
        if first:
            _write(handle, memoryview(header), 0)
        for part in parts:
            if part.words.size:
                own = places[part.name] + part.first * _WORD_BYTES
                _write(handle, part.words.reshape(-1).view(np.uint8).data, len(header) + own)
        os.fsync(handle)
    finally:
        os.close(handle)


def sums_of_parts(parts: Iterable[FilePart]) -> dict[str, TensorSums]:
    """Return the sums of float32 parts, by name; those of all processes add up to the whole tensors' (`spangrad.weights.shards.added`)."""
    sums: dict[str, TensorSums] = {}
    for part in parts:
        if part.words.size:
            words = part.words.reshape(-1).view(np.uint32)
            sums[part.name] = tensor_sums(words, "float32", "float32", first=part.first, whole=math.prod(part.shape))
    return sums


def _layout(parts: Sequence[FilePart], metadata: Mapping[str, str]) -> tuple[bytes, dict[str, int]]:
    """Return the header, and the place of each tensor's first byte after it."""
    entries: dict[str, Any] = {"__metadata__": dict(metadata)}
    places: dict[str, int] = {}
    end = 0
    for part in parts:
        places[part.name], end = end, end + _nbytes(part)
        entries[part.name] = {"dtype": "F32", "shape": part.shape, "data_offsets": (places[part.name], end)}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text, places


def _nbytes(part: FilePart) -> int:
    """Return the size of the whole tensor."""
    return math.prod(part.shape) * _WORD_BYTES


def _write(handle: int, data: memoryview, offset: int) -> None:
    done = 0
    while done < len(data):
        done += os.pwrite(handle, data[done : done + _WRITE_BYTES], offset + done)
