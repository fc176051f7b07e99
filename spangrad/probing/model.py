"""Facts of a model directory, from its own files.

In: a directory. Out: `ModelFacts`. Invariant: nothing is guessed: a directory that holds no model is refused with what it lacks.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from spangrad.errors import SettingsError
from spangrad.weights.safetensors_header import weight_files

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
"""Type of weights -> bytes of a value."""

_LFS_POINTER = b"version https://git-lfs"
"""First bytes of the text that `git clone` writes in the place of a large file where Git LFS is not installed."""


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Facts of a model."""

    directory: Path
    architecture: str
    context_tokens: int | None
    """Longest context, in tokens. None: its files do not say."""
    dtype: str
    """Type of the weights: float32, bfloat16 or float16."""
    weight_bytes: int
    kv_values_a_token: int | None
    """Number of values that the KV cache holds for each token. None: its files do not say."""
    has_chat_template: bool


def read_model(directory: Path) -> ModelFacts:
    """Read the facts of a model directory.

    Raises:
        SettingsError: it is no directory of a model that can be trained.
        CheckpointError: its files cannot be listed.
    """
    remedy = "Name a directory that `save_pretrained` has written, or that was downloaded from Hugging Face's hub."
    if not directory.is_dir():
        raise SettingsError(f"{directory} is no directory. {remedy}")
    config = json_object(directory / "config.json")
    if config is None:
        raise SettingsError(f"{directory} holds no config.json, so it is no model. {remedy}")
    weights = weight_files(directory)
    if not weights:
        raise SettingsError(f"{directory} holds no weights (*.safetensors). {remedy}")
    if pointer := next((file for file in weights if _is_lfs_pointer(file)), None):
        raise SettingsError(f"{pointer} is a pointer of Git LFS, not the weights. Call `git lfs pull` in {directory}.")
    if not (directory / "tokenizer.json").is_file():
        raise SettingsError(f"{directory} holds no tokenizer.json. Save the tokenizer there with `save_pretrained`.")
    return facts_of(directory, config, sum(file.stat().st_size for file in weights), has_chat_template=_has_chat_template(directory))


def facts_of(directory: Path, config: Mapping[str, Any], weight_bytes: int, *, has_chat_template: bool) -> ModelFacts:
    """Return the facts that a model's configuration states."""
    text = _text_config(config)
    dtype = str(text.get("dtype") or text.get("torch_dtype") or "float32").removeprefix("torch.")
    architectures = cast("list[str]", config.get("architectures") or [])
    return ModelFacts(
        directory=directory,
        architecture=architectures[0] if architectures else str(config.get("model_type") or "unknown"),
        context_tokens=_context(text),
        dtype=dtype if dtype in DTYPE_BYTES else "float32",
        weight_bytes=weight_bytes,
        kv_values_a_token=_kv_values(text),
        has_chat_template=has_chat_template,
    )


def configured(directory: Path) -> ModelFacts:
    """Return the facts of a model directory's config.json alone.

    Raises:
        SettingsError: the file is not a JSON object.
    """
    return facts_of(directory, json_object(directory / "config.json") or {}, 0, has_chat_template=False)


def vocabulary_size(directory: Path) -> int | None:
    """Return the number of tokens that a model knows. None: its config.json does not say.

    Raises:
        SettingsError: the file is not a JSON object.
    """
    size = _text_config(json_object(directory / "config.json") or {}).get("vocab_size")
    return size if isinstance(size, int) else None


def _text_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration of the language model, which those that also see or hear have inside."""
    return {**config, **cast("Mapping[str, Any]", config.get("text_config") or {})}


def _context(config: Mapping[str, Any]) -> int | None:
    lengths = [config.get(name) for name in ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")]
    return next((length for length in lengths if isinstance(length, int) and length > 0), None)


def _kv_values(config: Mapping[str, Any]) -> int | None:
    layers = config.get("num_hidden_layers") or config.get("n_layer")
    heads = config.get("num_attention_heads") or config.get("n_head")
    hidden = config.get("hidden_size") or config.get("n_embd")
    if not (isinstance(layers, int) and isinstance(heads, int) and isinstance(hidden, int)):
        return None
    head = config.get("head_dim") or hidden // heads
    return 2 * layers * int(config.get("num_key_value_heads") or heads) * int(head)


def _is_lfs_pointer(file: Path) -> bool:
    with file.open("rb") as opened:
        return opened.read(len(_LFS_POINTER)) == _LFS_POINTER


def _has_chat_template(directory: Path) -> bool:
    config = json_object(directory / "tokenizer_config.json") or {}
    return (directory / "chat_template.jinja").is_file() or bool(config.get("chat_template"))


def json_object(file: Path) -> dict[str, Any] | None:
    """Return a file's JSON object. None: there is no file.

    Raises:
        SettingsError: the file is not a JSON object.
    """
    try:
        content = json.loads(file.read_text("utf-8"))
    except FileNotFoundError:
        return None
    except (ValueError, OSError) as error:
        raise SettingsError(f"{file} cannot be read as JSON ({error}). Save the model again with `save_pretrained`.") from None
    if not isinstance(content, dict):
        raise SettingsError(f"{file} is not a JSON object. Save the model again with `save_pretrained`.")
    return cast("dict[str, Any]", content)
