"""Headers of safetensors files.

In: a file. Out: its tensors' dtypes, shapes and places. Invariant: no more than the file is read, whatever length its header claims.

Source: https://github.com/huggingface/safetensors, the format.
"""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path
from typing import Any

METADATA = "__metadata__"
"""Entry of a header that is no tensor."""


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
