"""Checksums of a policy's weights and hashes of its tokenizer, for files, trainers and engines alike.

In: a Hugging Face model directory. Out: a checksum and a tokenizer hash, as short strings.
Invariant: the checksum does not depend on how parameters are named, fused, ordered or padded with zeros, so
that a trainer's checkpoint and the fused parameters in an engine's memory can be compared.

An adapter's directory (PEFT's layout) has the checksum of an engine that serves it: the words of its base model, and its own as they are
computed with, A and B times alpha over the rank. An adapter of zeros adds nothing, so it has its base's checksum.

The checksum is a multiset hash: each word w of a parameter's bits (32 bits for float32, 16 for bfloat16 and
float16) is mixed to 64 bits by `x = w * A; x ^= x >> 32; x *= B; x ^= x >> 29` (mod 2^64, so that a zero word
counts nothing), and the sum over all words mod 2^64 is written with its dtype: `float32:00c0ffee00c0ffee`. `spangrad.weights.shards` says
how engines of several workers are compared, tensor by tensor.
"""

from __future__ import annotations

import functools
import hashlib
import json
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spangrad.errors import JSON_ERRORS, CheckpointError
from spangrad.weights import adapters
from spangrad.weights.safetensors_header import read_header, weight_files
from spangrad.weights.shards import ChecksumScope, TensorSums, checksum_of

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_DTYPES = {"F32": ("float32", 4), "BF16": ("bfloat16", 2), "F16": ("float16", 2)}
_NO_OTHERS: Mapping[str, str] = {}


def checksum_directory(directory: Path, dtype: str | None = None) -> str:
    """Return the checksum of the `*.safetensors` of a model directory, or of an adapter and its base.

    Args:
        directory: a Hugging Face model directory, or an adapter's.
        dtype: the dtype that an engine casts the weights to; None keeps the file's own, and for an adapter its base's.

    Raises:
        CheckpointError: there are no weights, a file is truncated or cannot be read, or the dtypes cannot be compared.
    """
    tensors = sums_of_directory(directory, dtype)
    dtypes = sorted({sums.dtype for sums in tensors.values()})
    if len(dtypes) > 1:
        raise CheckpointError(f"{directory} holds {dtypes[0]} weights beside {dtypes[1]}: one dtype is needed for a checksum.")
    return checksum_of(tensors, dtypes[0])


def sums_of_directory(
    directory: Path, dtype: str | None = None, others: Mapping[str, str] = _NO_OTHERS, scope: ChecksumScope = ChecksumScope.FULL
) -> dict[str, TensorSums]:
    """Return the sums of each tensor in a model directory, or of an adapter and its base, by name.

    Args:
        directory: a Hugging Face model directory, or an adapter's.
        dtype: the dtype that an engine casts the weights to; None keeps the file's own, and for an adapter its base's.
        others: dtypes of the tensors that the engine holds in another one, by name.
        scope: all words, or a sample of each tensor.

    Raises:
        CheckpointError: as for `checksum_directory`.
    """
    try:
        adapter = adapters.adapter_facts(directory)
        if adapter is None:
            return _sums(directory, weight_files(directory), dtype, others, scope)
        if not adapter.base.is_dir():
            raise CheckpointError(f"{directory} adapts {adapter.base}, which is no directory here. Restore that model to where it was.")
        base = _sums_of_base(adapter.base, dtype, tuple(sorted(others.items())), scope, _stamp(adapter.base))
        if not (directory / adapters.WEIGHTS).exists():
            raise CheckpointError(f"{directory} holds no {adapters.WEIGHTS}. Restore it from a copy.")
        own = next(iter(base.values())).dtype
        return base | _sums(directory, [directory / adapters.WEIGHTS], dtype or own, others, scope, adapter.scaling)
    except OSError as error:
        raise CheckpointError(f"{directory} cannot be read: {error}. Restore it from a copy, or let its files be read.") from error


def _sums(
    directory: Path, files: Iterable[Path], dtype: str | None, others: Mapping[str, str], scope: ChecksumScope, scaling: float = 1.0
) -> dict[str, TensorSums]:
    """Return the sums of a directory's tensors; B of an adapter is scaled in the dtype that it is computed with."""
    from spangrad.weights.sums import cast_words, scaled_words, tensor_sums

    tensors = dict[str, TensorSums]()
    for name, own, words in _tensors(files):
        held = others.get(name, dtype or own)
        if name.endswith(adapters.B) and scaling != 1:
            words, own = scaled_words(cast_words(words, own, held), held, scaling), held
        tensors[name] = tensor_sums(words, own, held, scope)
    if not tensors:
        raise CheckpointError(f"{directory} holds no *.safetensors. Save the model with `save_pretrained(..., safe_serialization=True)`.")
    return tensors


@functools.lru_cache(maxsize=16)
def _sums_of_base(
    base: Path, dtype: str | None, others: tuple[tuple[str, str], ...], scope: ChecksumScope, stamp: tuple[tuple[str, int, int], ...]
) -> dict[str, TensorSums]:
    """Return the sums of a base model, cached for all its adapters while its files' stamp is unchanged."""
    return _sums(base, weight_files(base), dtype, dict(others), scope)


def _stamp(directory: Path) -> tuple[tuple[str, int, int], ...]:
    facts = [(file.name, file.stat()) for file in weight_files(directory)]
    return tuple((name, fact.st_mtime_ns, fact.st_size) for name, fact in facts)


def tokenizer_hash(directory: Path) -> str:
    """Return the hash of a model directory's tokenizer and chat template: 16 hex digits of SHA-256.

    Raises:
        CheckpointError: the directory holds no tokenizer.json, or it cannot be read.
    """
    vocabulary = directory / "tokenizer.json"
    if not vocabulary.exists():
        raise CheckpointError(f"{directory} holds no tokenizer.json. Save the tokenizer there with `save_pretrained`.")
    template = directory / "chat_template.jinja"
    text = _read(template, str) if template.exists() else _configured_template(directory / "tokenizer_config.json")
    # Canonical JSON: saving a tokenizer again may change its spacing, not its meaning.
    canonical = _read(vocabulary, lambda text: json.dumps(json.loads(text), sort_keys=True))
    return hashlib.sha256(f"{canonical}\0{text}".encode()).hexdigest()[:16]


def _configured_template(config: Path) -> str:
    return _read(config, lambda text: str(json.loads(text).get("chat_template", ""))) if config.exists() else ""


def _read(file: Path, parse: Callable[[str], str]) -> str:
    try:
        return parse(file.read_text())
    except (OSError, AttributeError, *JSON_ERRORS) as error:
        raise CheckpointError(f"{file} cannot be read ({error}). Restore it from a copy.") from error


def _tensors(files: Iterable[Path]) -> Iterator[tuple[str, str, NDArray[np.unsignedinteger]]]:
    """Yield name, dtype name and words of every floating-point tensor, read directly from the files."""
    import numpy as np

    for file in files:
        try:
            data = np.memmap(file, dtype=np.uint8, mode="r")  # ValueError when the file is empty
            header, first = read_header(file)
            tensors = list(_placed(header))
        except (struct.error, ValueError, LookupError, TypeError, AttributeError, RecursionError):
            raise CheckpointError(f"{file} is not a safetensors file: its header cannot be read.") from None
        for tensor, dtype, start, end in tensors:
            if dtype not in _DTYPES:
                raise CheckpointError(f"{file}: tensor {tensor} is {dtype}; checksums know {', '.join(_DTYPES)}.")
            name, size = _DTYPES[dtype]
            raw = data[first + start : first + end]
            if raw.size != end - start:
                raise CheckpointError(f"{file} is truncated: tensor {tensor} ends beyond the file.")
            if raw.size % size:
                raise CheckpointError(f"{file}: tensor {tensor} has {raw.size} bytes, which are no {name} values.")
            yield tensor, name, raw.view(np.uint32 if size == 4 else np.uint16)


def _placed(header: dict[str, Any]) -> Iterator[tuple[str, str, int, int]]:
    for tensor, facts in header.items():
        start, end = facts["data_offsets"]
        yield tensor, str(facts["dtype"]), int(start), int(end)
