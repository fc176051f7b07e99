"""Checksums of a policy's weights and hashes of its tokenizer, for files, trainers and engines alike.

In: a Hugging Face model directory. Out: a checksum and a tokenizer hash, as short strings.
Invariant: the checksum does not depend on how parameters are named, fused, ordered or padded with zeros, so
that a trainer's checkpoint and the fused parameters in an engine's memory can be compared.

An adapter's directory (PEFT's layout) has the checksum of an engine that serves it: the words of its base model, and its own as they are
computed with, A and B times alpha over the rank. An adapter of zeros adds nothing, so it has its base's checksum.

The checksum is a multiset hash: each word w of a parameter's bits (32 bits for float32, 16 for bfloat16 and
float16) is mixed to 64 bits by `x = w * A; x ^= x >> 32; x *= B; x ^= x >> 29` (mod 2^64, so that a zero word
counts nothing), and the sum over all words mod 2^64 is written with its dtype: `float32:00c0ffee00c0ffee`.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import struct
from collections.abc import Generator, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spangrad.errors import CheckpointError
from spangrad.weights import adapters

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

MIX_A = 0x9E3779B97F4A7C15
MIX_B = 0xD6E8FEB86659FD93
MASK = 2**64 - 1
_DTYPES = {"F32": ("float32", 4), "BF16": ("bfloat16", 2), "F16": ("float16", 2)}


def checksum_directory(directory: Path, dtype: str | None = None) -> str:
    """Return the checksum of all `*.safetensors` in a model directory, or of an adapter and its base.

    Args:
        directory: a Hugging Face model directory, or an adapter's.
        dtype: the dtype that an engine casts the weights to; None keeps the file's own, and for an adapter its base's. Only float32 ->
            bfloat16 is a cast.

    Raises:
        CheckpointError: there are no weights, a file is truncated or cannot be read, or the dtypes cannot be compared.
    """
    with _readable(directory):
        adapter = adapters.adapter_facts(directory)
        if adapter is None:
            return _checksum(directory, _words(directory), dtype)
        if not adapter.base.is_dir():
            raise CheckpointError(f"{directory} adapts {adapter.base}, which is no directory here. Restore that model to where it was.")
        base, _, total = _checksum_of_base(adapter.base, dtype, _stamp(adapter.base)).partition(":")
        if not (directory / adapters.WEIGHTS).exists():
            raise CheckpointError(f"{directory} holds no {adapters.WEIGHTS}. Restore it from a copy.")
        own = _checksum(directory, _computed_with(directory, adapter.scaling, base), base).partition(":")[2]
        return f"{base}:{(int(total, 16) + int(own, 16)) & MASK:016x}"


def checksum_base(directory: Path, dtype: str | None = None) -> str:
    """Return the checksum of an adapter's base model, as `checksum_directory` does; cached while its files are unchanged.

    Raises:
        CheckpointError: as for `checksum_directory`.
    """
    with _readable(directory):
        return _checksum_of_base(directory, dtype, _stamp(directory))


@contextlib.contextmanager
def _readable(directory: Path) -> Generator[None]:
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{directory} cannot be read: {error}. Restore it from a copy, or let its files be read.") from error


def checksum_arrays(arrays: Iterable[NDArray[np.float32]], dtype: str) -> str:
    """Return the checksum of weights in memory, as an engine of that dtype holds them.

    Raises:
        CheckpointError: float32 is not cast to that dtype.
    """
    return _checksum("what is in memory", ((dtype, words_of(array, dtype)) for array in arrays), dtype)


def words_of(array: NDArray[np.float32], dtype: str) -> NDArray[np.unsignedinteger]:
    """Return the words of an array's bits, flat, after the cast.

    Raises:
        CheckpointError: float32 is not cast to that dtype.
    """
    import numpy as np

    words = np.ascontiguousarray(array).reshape(-1).view(np.uint32)
    return words if _word_bytes(dtype) == 4 else _to_bfloat16(words)


def nbytes(array: NDArray[np.float32], dtype: str) -> int:
    """Return the size in bytes of the result of `words_of`, without the cast.

    Raises:
        CheckpointError: float32 is not cast to that dtype.
    """
    return array.size * _word_bytes(dtype)


def _word_bytes(dtype: str) -> int:
    """Return the size in bytes of a word of a dtype that float32 is cast to."""
    match dtype:
        case "float32":
            return 4
        case "bfloat16":
            return 2
        case _:
            raise CheckpointError(
                f"float32 weights are cast to bfloat16 alone, not to {dtype}. Start the engine with engine.dtype = bfloat16."
            )


def _checksum(where: Path | str, words: Iterable[tuple[str, NDArray[np.unsignedinteger]]], dtype: str | None) -> str:
    """Return the checksum of pairs of dtype name and words, cast to `dtype` if that is given; `where` is for errors."""
    import numpy as np

    total, common = 0, ""
    for name, part in words:
        if dtype == "bfloat16" and name == "float32":
            part, name = _to_bfloat16(part), "bfloat16"
        if common not in {"", name} or dtype not in {None, name}:
            raise CheckpointError(f"{where} holds {name} weights beside {common or dtype}: one dtype is needed for a checksum.")
        common = name
        total = (total + mix_words(part.astype(np.uint64))) & MASK
    if not common:
        raise CheckpointError(f"{where} holds no *.safetensors. Save the model with `save_pretrained(..., safe_serialization=True)`.")
    return f"{common}:{total:016x}"


@functools.lru_cache(maxsize=64)
def _checksum_of_base(base: Path, dtype: str | None, stamp: tuple[tuple[str, int, int], ...]) -> str:
    """Return the checksum of a base model, cached for all its adapters while its files' stamp is unchanged."""
    return _checksum(base, _words(base), dtype)


def _stamp(directory: Path) -> tuple[tuple[str, int, int], ...]:
    facts = [(file.name, file.stat()) for file in sorted(directory.glob("*.safetensors"))]
    return tuple((name, fact.st_mtime_ns, fact.st_size) for name, fact in facts)


def _words(directory: Path) -> Iterator[tuple[str, NDArray[np.unsignedinteger]]]:
    return ((dtype, words) for _, dtype, words in _tensors(directory))


def _computed_with(directory: Path, scaling: float, dtype: str) -> Iterator[tuple[str, NDArray[np.unsignedinteger]]]:
    """Yield an adapter's words as an engine of that dtype multiplies with them: cast, then B scaled in that dtype."""
    import numpy as np

    for name, own, words in _tensors(directory):
        if own == "float32" and dtype == "bfloat16":
            words, own = _to_bfloat16(words), "bfloat16"
        if name.endswith(adapters.B) and scaling != 1:
            wide = words.astype(np.uint32) << np.uint32(16) if own == "bfloat16" else words
            if own not in {"float32", "bfloat16"}:
                raise CheckpointError(f"{directory}: tensor {name} is {own}; adapters of float32 and bfloat16 can be compared.")
            scaled = (wide.view(np.float32) * np.float32(scaling)).view(np.uint32)
            words = _to_bfloat16(scaled) if own == "bfloat16" else scaled
        yield own, words


def mix_words(words: NDArray[np.uint64]) -> int:
    """Return the sum of the mixed words, mod 2^64."""
    import numpy as np

    with np.errstate(over="ignore"):
        mixed = words * np.uint64(MIX_A)
        mixed ^= mixed >> np.uint64(32)
        mixed *= np.uint64(MIX_B)
        mixed ^= mixed >> np.uint64(29)
        return int(mixed.sum(dtype=np.uint64))


def tokenizer_hash(directory: Path) -> str:
    """Return the hash of a model directory's tokenizer and chat template: 16 hex digits of SHA-256.

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


def _tensors(directory: Path) -> Iterator[tuple[str, str, NDArray[np.unsignedinteger]]]:
    """Yield name, dtype name and words of every floating-point tensor, read directly from the files."""
    import numpy as np

    for file in sorted(directory.glob("*.safetensors")):
        try:
            data = np.memmap(file, dtype=np.uint8, mode="r")  # ValueError when the file is empty
            (length,) = struct.unpack("<Q", data[:8].tobytes())
            tensors = list(_placed(json.loads(data[8 : 8 + length].tobytes())))
        except (struct.error, ValueError, LookupError, TypeError, AttributeError, RecursionError):
            raise CheckpointError(f"{file} is not a safetensors file: its header cannot be read.") from None
        for tensor, dtype, start, end in tensors:
            if dtype not in _DTYPES:
                raise CheckpointError(f"{file}: tensor {tensor} is {dtype}; checksums know {', '.join(_DTYPES)}.")
            name, size = _DTYPES[dtype]
            raw = data[8 + length + start : 8 + length + end]
            if raw.size != end - start:
                raise CheckpointError(f"{file} is truncated: tensor {tensor} ends beyond the file.")
            if raw.size % size:
                raise CheckpointError(f"{file}: tensor {tensor} has {raw.size} bytes, which are no {name} values.")
            yield tensor, name, raw.view(np.uint32 if size == 4 else np.uint16)


def _placed(header: dict[str, Any]) -> Iterator[tuple[str, str, int, int]]:
    """Yield name, dtype, start and end of the tensors that a header names."""
    for tensor, facts in header.items():
        if tensor != "__metadata__":
            start, end = facts["data_offsets"]
            yield tensor, str(facts["dtype"]), int(start), int(end)


def _to_bfloat16(words: NDArray[np.unsignedinteger]) -> NDArray[np.uint16]:
    """Round float32 bits to bfloat16 bits, to nearest even, as PyTorch does."""
    import numpy as np

    wide = words.astype(np.uint64)
    return ((wide + 0x7FFF + ((wide >> np.uint64(16)) & np.uint64(1))) >> np.uint64(16)).astype(np.uint16)
