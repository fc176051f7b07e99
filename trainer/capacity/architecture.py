"""Shapes of a transformer and its numbers of parameters, from its config.json alone.

In: a model directory or a config.json. Out: `Architecture`. Invariant: counts equal those of the model that transformers makes of the same
configuration; a kind of model that is not known here is refused, never guessed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from spangrad.errors import SettingsError
from spangrad.probing.model import json_object


@dataclass(frozen=True, slots=True)
class _Family:
    """Properties of a kind of model that its config.json does not state."""

    qkv_bias: bool | str = False
    """True, or the key of the configuration that says whether the projections of queries, keys and values have biases."""
    output_bias: str = ""
    """Key of the configuration that says whether the projection of attention's output has a bias. Empty: it has none."""
    mlp_bias: str = ""
    """Key of the configuration that says whether the layers of the MLP have biases. Empty: they have none."""
    norms: int = 2
    """Number of norms over the hidden state in each layer."""
    has_head_norms: bool = False
    """True if queries and keys are normed head by head."""
    is_tied: bool = False
    """True if embedding and head are one tensor where the configuration does not say."""
    head_dim: int | None = None
    """Size of a head where the configuration does not say. None: the hidden size over the number of heads."""


_BIAS = "attention_bias"
_FAMILIES = {
    "gemma": _Family(_BIAS, _BIAS, is_tied=True, head_dim=256),
    "gemma2": _Family(_BIAS, _BIAS, norms=4, is_tied=True, head_dim=256),
    "gemma3_text": _Family(_BIAS, _BIAS, norms=4, has_head_norms=True, is_tied=True, head_dim=256),
    "llama": _Family(_BIAS, _BIAS, "mlp_bias"),
    "mistral": _Family(),
    "mixtral": _Family(),
    "qwen2": _Family(qkv_bias=True),
    "qwen2_moe": _Family(qkv_bias=True),
    "qwen3": _Family(_BIAS, _BIAS, has_head_norms=True, head_dim=128),
    "qwen3_moe": _Family(_BIAS, _BIAS, has_head_norms=True),
}
"""model_type of a config.json -> properties."""


@dataclass(frozen=True, slots=True)
class Architecture:
    """Shapes of a decoder-only transformer."""

    kind: str
    """model_type of the configuration."""
    layers: int
    hidden: int
    vocabulary: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    """Width of the MLP of a dense layer."""
    context: int | None
    """Longest context, in tokens. None: the configuration does not say."""
    is_tied: bool
    """True if embedding and head are one tensor."""
    family: _Family
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    experts: int = 0
    """Number of experts of a layer. 0: every layer is dense."""
    active_experts: int = 0
    """Number of experts that a token passes through in a layer."""
    expert_width: int = 0
    shared_width: int = 0
    """Width of the expert that every token passes through. 0: there is none."""
    expert_layers: int = 0
    """Number of layers with experts; the others are dense."""

    @property
    def query_width(self) -> int:
        """Return the width of all heads' queries."""
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Return the width of all heads' keys, which is that of their values."""
        return self.kv_heads * self.head_dim

    @property
    def head_parameters(self) -> int:
        """Return the number of the head's parameters, which are the embedding's where both are one tensor."""
        return self.vocabulary * self.hidden

    @property
    def parameters(self) -> int:
        """Return the number of parameters, tied ones once."""
        layers = self.expert_layers * self._expert_layer(self.experts) + (self.layers - self.expert_layers) * self._dense_layer
        return layers + self._outside

    @property
    def active_parameters(self) -> int:
        """Return the number of parameters that a token passes through; without experts all of them."""
        layers = self.expert_layers * self._expert_layer(self.active_experts) + (self.layers - self.expert_layers) * self._dense_layer
        return layers + self._outside

    @property
    def largest_layer(self) -> int:
        """Return the number of parameters of the largest layer."""
        return max(self._expert_layer(self.experts) if self.expert_layers else 0, self._dense_layer)

    @property
    def critic_parameters(self) -> int:
        """Return the number of parameters of the model with a value head in the place of its own."""
        return self.parameters - (0 if self.is_tied else self.head_parameters) + self.hidden + 1

    def adapter_parameters(self, rank: int, modules: tuple[str, ...] = ()) -> int:
        """Return the number of parameters of LoRA adapters of a rank, in the layers of these names.

        Without names, every linear layer but the head has adapters, or with experts those of attention.
        """
        attention = {
            "q_proj": self.hidden + self.query_width,
            "k_proj": self.hidden + self.kv_width,
            "v_proj": self.hidden + self.kv_width,
            "o_proj": self.query_width + self.hidden,
        }
        mlp = dict.fromkeys(("gate_proj", "up_proj", "down_proj"), self.hidden + self.intermediate)
        layers = dict.fromkeys(attention, self.layers) | dict.fromkeys(mlp, 0 if self.expert_layers else self.layers)
        return rank * sum(size * layers[name] for name, size in {**attention, **mlp}.items() if not modules or name in modules)

    @property
    def _attention(self) -> int:
        projections = self.hidden * (2 * self.query_width + 2 * self.kv_width)
        biases = self.qkv_bias * (self.query_width + 2 * self.kv_width) + self.output_bias * self.hidden
        return projections + biases + 2 * self.family.has_head_norms * self.head_dim + self.family.norms * self.hidden

    @property
    def _dense_layer(self) -> int:
        return self._attention + 3 * self.hidden * self.intermediate + self.mlp_bias * (2 * self.intermediate + self.hidden)

    def _expert_layer(self, experts: int) -> int:
        shared = 3 * self.hidden * self.shared_width + (self.hidden if self.shared_width else 0)
        return self._attention + self.hidden * self.experts + 3 * self.hidden * self.expert_width * experts + shared

    @property
    def _outside(self) -> int:
        """Return the number of parameters outside the layers: embedding, head and last norm."""
        return self.head_parameters * (1 if self.is_tied else 2) + self.hidden


def read_architecture(model: Path) -> Architecture:
    """Read the shapes of a model from its directory's config.json, or from that file; weights are not needed.

    Raises:
        SettingsError: there is no config.json, it is not JSON, or it describes a kind of model that is not known.
    """
    file = model / "config.json" if model.is_dir() else model
    config = json_object(file)
    if config is None:
        raise SettingsError(f"{file} does not exist. Name a model directory in Hugging Face's layout, or its config.json.")
    return architecture_of(config, file)


def architecture_of(config: Mapping[str, Any], file: Path) -> Architecture:
    """Return the shapes that a configuration states; errors name its file.

    Raises:
        SettingsError: its kind of model is not known, or it lacks a shape.
    """
    kind = str(config.get("model_type"))
    family = _FAMILIES.get(kind)
    if family is None:
        raise SettingsError(
            f"{file}: model_type {kind!r} is not known to the planner, which counts {', '.join(sorted(_FAMILIES))}. Plan with a model of "
            "these kinds and of the same size."
        )

    def size(*names: str, default: int | None = None) -> int:
        values = [config[name] for name in names if config.get(name) is not None]
        value = values[0] if values else default
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise SettingsError(f"{file}: {names[0]} = {value!r} is no size. Take the config.json that `save_pretrained` writes.")
        return value

    heads, layers = size("num_attention_heads"), size("num_hidden_layers")
    if not heads or not layers:
        raise SettingsError(f"{file}: the model has {layers} layers of {heads} heads. Take the config.json that `save_pretrained` writes.")
    tied = config.get("tie_word_embeddings")
    shapes = Architecture(
        kind=kind,
        layers=layers,
        hidden=size("hidden_size"),
        vocabulary=size("vocab_size"),
        heads=heads,
        kv_heads=size("num_key_value_heads", default=heads),
        head_dim=size("head_dim", default=family.head_dim or size("hidden_size") // heads),
        intermediate=size("intermediate_size"),
        context=size("max_position_embeddings", default=0) or None,
        is_tied=family.is_tied if tied is None else bool(tied),
        family=family,
        qkv_bias=bool(config.get(family.qkv_bias)) if isinstance(family.qkv_bias, str) else family.qkv_bias,
        output_bias=bool(config.get(family.output_bias)),
        mlp_bias=bool(config.get(family.mlp_bias)),
    )
    experts = size("num_local_experts", "num_experts", default=0)
    return _with_experts(shapes, experts, config, size) if experts else shapes


def _with_experts(shapes: Architecture, experts: int, config: Mapping[str, Any], size: Any) -> Architecture:
    sparse_step = max(size("decoder_sparse_step", default=1), 1)
    dense = cast("list[int]", config.get("mlp_only_layers") or [])
    return replace(
        shapes,
        experts=experts,
        active_experts=size("num_experts_per_tok"),
        expert_width=size("moe_intermediate_size", default=shapes.intermediate),
        shared_width=size("shared_expert_intermediate_size", default=0),
        expert_layers=sum(layer not in dense and (layer + 1) % sparse_step == 0 for layer in range(shapes.layers)),
    )
