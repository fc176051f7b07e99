"""Safetensors files of a model, and their headers.

In: a model directory, or a file. Out: the files; a file's tensors with dtypes, shapes and places. Invariant: no more than a file is read,
whatever length its header claims.

Source: https://github.com/huggingface/safetensors, the format.
"""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path
from typing import Any

from spangrad.errors import JSON_ERRORS, CheckpointError
from spangrad.weights import adapters

INDEX = "model.safetensors.index.json"
"""File that names the file of each tensor of a model."""
METADATA = "__metadata__"
"""Entry of a header that is no tensor."""


def weight_files(directory: Path) -> list[Path]:
    """Return the files of a whole model in a directory, by name: those that its index names, as every reader of the format takes them.

    Others may lie beside them, such as the same weights under other names. Without an index, all but an adapter's.

    Raises:
        CheckpointError: the index cannot be read, or names a file that is missing.
        OSError: the directory cannot be read.
    """
    index = directory / INDEX
    if not index.exists():
        return sorted(file for file in directory.glob("*.safetensors") if file.name != adapters.WEIGHTS)
    try:
        files = sorted({directory / name for name in json.loads(index.read_text())["weight_map"].values()})
    except (*JSON_ERRORS, LookupError, TypeError, AttributeError):
        raise CheckpointError(f"{index} is no index of safetensors files. Restore {directory} from a copy.") from None
    if lacking := next((file for file in files if not file.exists()), None):
        raise CheckpointError(f"{index} names {lacking.name}, which is missing. Restore {directory} from a copy.")
    return files


def read_header(file: Path) -> tuple[dict[str, Any], int]:
    """Return the entries of a file's tensors by name (`dtype`, `shape`, `data_offsets`), and the number of the first byte behind them.

    Raises:
        OSError: the file cannot be read.
        ValueError, struct.error: it has no such header.
    """
    with file.open("rb") as opened:
        (length,) = struct.unpack("<Q", opened.read(8))
        header: dict[str, Any] = json.loads(opened.read(min(length, os.fstat(opened.fileno()).st_size)))
    return {name: entry for name, entry in header.items() if name != METADATA}, 8 + length
