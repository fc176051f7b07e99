"""Reading of a model's files by the rows that a rank holds, straight into its memory.

In: a directory of safetensors files. Out: parts of tensors, filled. Invariant: what is read beside them is one buffer of 16 MiB, whatever
the size of a file; nothing is mapped, so that a rank's memory shows what it holds.
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

import torch

from spangrad.errors import CheckpointError
from spangrad.weights.safetensors_header import read_header, weight_files
from trainer.optim.weight_shards import WeightPart, row_range
from trainer.publish.shared_file import FilePart

_BUFFER_BYTES = 2**24
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "U8": torch.uint8,
}
"""Dtypes by their names in a file."""


class _Place(NamedTuple):
    """Place of a tensor in a file."""

    file: Path
    dtype: torch.dtype | None
    """None: it is not known here."""
    shape: tuple[int, ...]
    begin: int
    """Number of its first byte in the file."""


class WeightFiles:
    """Tensors of a directory's files."""

    def __init__(self, directory: Path) -> None:
        """Read the headers of all files of a model, adapters left out.

        Raises:
            CheckpointError: they cannot be read.
        """
        self.directory = directory
        self._places: dict[str, _Place] = {}
        self._open: dict[Path, int] = {}
        try:
            for file in weight_files(directory):
                self._places |= _places(file)
        except (OSError, ValueError, LookupError, struct.error) as error:
            raise CheckpointError(f"{directory} cannot be read ({error}). Restore it from a copy.") from error

    def __enter__(self) -> Self:
        """Return the files."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Close the files."""
        for handle in self._open.values():
            os.close(handle)
        self._open.clear()

    def holds(self, name: str) -> bool:
        """Return whether there is a tensor of a name, in whichever form."""
        return name in self._places

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of each tensor by name, in the order of the files."""
        return {name: place.shape for name, place in self._places.items()}

    def has(self, part: WeightPart) -> bool:
        """Return whether the tensor of a part is there, with its shape, in a dtype that can be read."""
        place = self._places.get(part.name)
        return place is not None and place.shape == part.shape and place.dtype is not None

    def lacking(self, parts: Iterable[WeightPart]) -> list[str]:
        """Return the names of the tensors that cannot be read."""
        return [part.name for part in parts if not self.has(part)]

    def read(self, part: WeightPart) -> None:
        """Fill a part in place.

        Raises:
            CheckpointError: the file is cut off.
        """
        place = self._places[part.name]
        assert place.dtype is not None  # `has`
        words = part.words.view(-1)
        size, step = place.dtype.itemsize, _BUFFER_BYTES // place.dtype.itemsize
        for begin in range(0, words.numel(), step):
            target = words[begin : begin + step]
            buffer = bytearray(target.numel() * size)
            self._fill(buffer, place, place.begin + (part.first + begin) * size)
            target.copy_(torch.frombuffer(buffer, dtype=place.dtype))

    def _fill(self, buffer: bytearray, place: _Place, offset: int) -> None:
        if place.file not in self._open:
            self._open[place.file] = os.open(place.file, os.O_RDONLY)
        done = 0
        while done < len(buffer):
            read = os.preadv(self._open[place.file], [memoryview(buffer)[done:]], offset + done)
            if not read:
                raise CheckpointError(f"{place.file} is cut off. Restore {self.directory} from a copy.")
            done += read


def written_parts(directory: Path, ranks: int, number: int) -> Iterator[FilePart]:
    """Yield the share of one rank (its number among `ranks`) of a version's weights in float32, one part at a time.

    Rows are divided as FSDP2 divides them, so that a rank reads what it has written.

    Raises:
        CheckpointError: the files cannot be read.
    """
    with WeightFiles(directory) as files:
        for name, shape in files.shapes().items():
            first, rows = row_range(shape[0] if shape else 1, ranks, number)
            row = math.prod(shape[1:])
            part = WeightPart(name, shape, first * row, torch.empty(rows * row))
            if lacking := files.lacking([part]):
                raise CheckpointError(f"{directory} holds {lacking[0]} in a dtype that is not sent. Save the model in float32 or bfloat16.")
            files.read(part)
            yield part.on_host(copy=False)


def _places(file: Path) -> dict[str, _Place]:
    header, first = read_header(file)
    places: dict[str, _Place] = {}
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        dtype, shape = _DTYPES.get(entry["dtype"]), tuple(entry["shape"])
        if dtype and end - begin != math.prod(shape) * dtype.itemsize:
            raise ValueError(f"{name} of {file.name} has another size than its shape")
        places[name] = _Place(file, dtype, shape, first + begin)
    return places
