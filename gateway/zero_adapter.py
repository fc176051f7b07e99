"""The zero adapter: all zeros, so it changes nothing; an engine that takes adapters serves it until it is given another one.

In: the engine's settings and its model. Out: a directory in PEFT's layout. Invariant: all of its words are 0, so that what is computed, and
its checksum, are the base model's; calls in flight when an engine goes back to the base go on with the base.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path

from spangrad.errors import JSON_ERRORS, CheckpointError, EngineError
from spangrad.settings import EngineSettings
from spangrad.weights.adapters import PREFIX, WEIGHTS, A, AdapterFacts, B, write_config
from spangrad.weights.safetensors_header import read_header, weight_files

_KNOWN = "_proj.weight"
"""Suffix of the names of the layers that the adapters of every architecture support."""


def zero_adapter(engine: EngineSettings) -> Path:
    """Return the adapter's directory; one for each port, since engines that share a cache may have different models."""
    return engine.cache_dir.absolute() / f"zero-adapter-{engine.port}"


def write_zero_adapter(engine: EngineSettings, model: Path) -> None:
    """Write the adapter, of rank 1, for one layer.

    Raises:
        EngineError: the model has no layer that adapters are known to fit.
        CheckpointError: its files cannot be listed, or read.
    """
    layer = next((layer for file in weight_files(model) for layer in _layers(file)), None)
    if layer is None:
        raise EngineError(
            f"engine.lora_rank = {engine.lora_rank}, and {model} has no layer *{_KNOWN} in *.safetensors: adapters are not known to "
            "fit it. Set engine.lora_rank = 0, and trainer.weight_sync.method = disk."
        )
    name, (rows, columns) = layer
    shapes = {f"{PREFIX}{name}{A}": [1, columns], f"{PREFIX}{name}{B}": [rows, 1]}
    directory = zero_adapter(engine)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / WEIGHTS).write_bytes(_zeros(shapes))
    write_config(directory, AdapterFacts(model, 1, 1.0), shapes)


def _layers(file: Path) -> list[tuple[str, list[int]]]:
    """Return the name and shape of each layer in a file that can be adapted."""
    try:
        header, _ = read_header(file)
        return [
            (name.removesuffix(".weight"), facts["shape"])
            for name, facts in header.items()
            if name.endswith(_KNOWN) and len(facts["shape"]) == 2
        ]
    except (OSError, struct.error, LookupError, TypeError, AttributeError, *JSON_ERRORS) as error:
        raise CheckpointError(f"{file} cannot be read ({error}). Restore it from a copy.") from error


def _zeros(shapes: dict[str, list[int]]) -> bytes:
    """Return a safetensors file of float32 zeros."""
    header, end = dict[str, object](), 0
    for name, (rows, columns) in shapes.items():
        begin, end = end, end + 4 * rows * columns
        header[name] = {"dtype": "F32", "shape": [rows, columns], "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + bytes(end)
