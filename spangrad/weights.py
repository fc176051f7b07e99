"""What identifies a policy's weights and its tokenizer, wherever they lie: in a file, a trainer or an engine.

In: a Hugging Face model directory. Out: a checksum and a tokenizer hash, as short strings.
Invariant: the checksum does not depend on how parameters are named, fused, ordered or padded with zeros, so
that a trainer's checkpoint and the fused parameters in an engine's memory can be compared.

The checksum is a multiset hash: each word w of a parameter's bits (32 bits for float32, 16 for bfloat16 and
float16) is mixed to 64 bits by `x = w * A; x ^= x >> 32; x *= B; x ^= x >> 29` (mod 2^64, so that a zero word
counts nothing), and the sum over all words mod 2^64 is written with its dtype: `float32:00c0ffee00c0ffee`.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from spangrad.errors import CheckpointError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

MIX_A = 0x9E3779B97F4A7C15
MIX_B = 0xD6E8FEB86659FD93
MASK = 2**64 - 1
_DTYPES = {"F32": ("float32", 4), "BF16": ("bfloat16", 2), "F16": ("float16", 2)}


def checksum_directory(directory: Path, dtype: str | None = None) -> str:
    """Checksum of all `*.safetensors` in a model directory.

    Args:
        directory: a Hugging Face model directory.
        dtype: the dtype that an engine casts the weights to; None keeps the file's own. Only float32 -> bfloat16 is a cast.

    Raises:
        CheckpointError: there are no weights, a file is truncated, or the dtypes cannot be compared.
    """
    import numpy as np

    total, found = 0, ""
    for name, words in _tensors(directory):
        if dtype == "bfloat16" and name == "float32":
            words, name = _to_bfloat16(words), "bfloat16"
        if found not in {"", name} or dtype not in {None, name}:
            raise CheckpointError(f"{directory} holds {name} weights beside {found or dtype}: one dtype is needed for a checksum.")
        found = name
        total = (total + mix_words(words.astype(np.uint64))) & MASK
    if not found:
        raise CheckpointError(f"{directory} holds no *.safetensors. Save the model with `save_pretrained(..., safe_serialization=True)`.")
    return f"{found}:{total:016x}"


def mix_words(words: NDArray[np.uint64]) -> int:
    """Sum of the mixed words, mod 2^64."""
    import numpy as np

    with np.errstate(over="ignore"):
        mixed = words * np.uint64(MIX_A)
        mixed ^= mixed >> np.uint64(32)
        mixed *= np.uint64(MIX_B)
        mixed ^= mixed >> np.uint64(29)
        return int(mixed.sum(dtype=np.uint64))


def tokenizer_hash(directory: Path) -> str:
    """Hash of a model directory's tokenizer and chat template: 16 hex digits of SHA-256.

    Raises:
        CheckpointError: the directory holds no tokenizer.json.
    """
    vocabulary = directory / "tokenizer.json"
    if not vocabulary.exists():
        raise CheckpointError(f"{directory} holds no tokenizer.json. Save the tokenizer there with `save_pretrained`.")
    template = directory / "chat_template.jinja"
    text = template.read_text() if template.exists() else _configured_template(directory / "tokenizer_config.json")
    # Canonical JSON: saving a tokenizer again may change its spacing, not its meaning.
    canonical = json.dumps(json.loads(vocabulary.read_text()), sort_keys=True)
    return hashlib.sha256(f"{canonical}\0{text}".encode()).hexdigest()[:16]


def _configured_template(config: Path) -> str:
    return str(json.loads(config.read_text()).get("chat_template", "")) if config.exists() else ""


def _tensors(directory: Path) -> Iterator[tuple[str, NDArray[np.unsignedinteger]]]:
    """Dtype name and words of every floating tensor, straight from the files' own layout."""
    import numpy as np

    for file in sorted(directory.glob("*.safetensors")):
        try:
            data = np.memmap(file, dtype=np.uint8, mode="r")  # ValueError when the file is empty
            (length,) = struct.unpack("<Q", data[:8].tobytes())
            header = json.loads(data[8 : 8 + length].tobytes())
        except (struct.error, ValueError):
            raise CheckpointError(f"{file} is not a safetensors file: its header cannot be read.") from None
        for tensor, facts in header.items():
            if tensor == "__metadata__":
                continue
            start, end = facts["data_offsets"]
            if facts["dtype"] not in _DTYPES:
                raise CheckpointError(f"{file}: tensor {tensor} is {facts['dtype']}; checksums know {', '.join(_DTYPES)}.")
            name, size = _DTYPES[facts["dtype"]]
            raw = data[8 + length + start : 8 + length + end]
            if raw.size != end - start:
                raise CheckpointError(f"{file} is truncated: tensor {tensor} ends beyond the file.")
            yield name, raw.view(np.uint32 if size == 4 else np.uint16)


def _to_bfloat16(words: NDArray[np.unsignedinteger]) -> NDArray[np.uint16]:
    """Round float32 bits to bfloat16 bits, to nearest even, as PyTorch does."""
    import numpy as np

    wide = words.astype(np.uint64)
    return ((wide + 0x7FFF + ((wide >> np.uint64(16)) & np.uint64(1))) >> np.uint64(16)).astype(np.uint16)
