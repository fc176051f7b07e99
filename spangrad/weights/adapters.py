"""LoRA adapters as directories, in PEFT's layout: `adapter_config.json` and `adapter_model.safetensors`.

In: an adapter's base model, rank and alpha. Out: its configuration, as PEFT and vLLM read it. Invariant: only plain LoRA with one rank and
one alpha: W + alpha / rank B A, with nothing beside A and B.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from spangrad.errors import JSON_ERRORS, CheckpointError

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."
"""Prefix of PEFT's names of tensors."""
A, B = ".lora_A.weight", ".lora_B.weight"
"""Suffixes of PEFT's names of tensors, in files."""
_UNKNOWN = ("use_rslora", "use_dora", "rank_pattern", "alpha_pattern", "modules_to_save")
"""Options of a configuration beside rank and alpha that are not supported; spangrad writes none of them."""


@dataclass(frozen=True, slots=True)
class AdapterFacts:
    """Content of an adapter's configuration."""

    base: Path
    """Directory of the base model."""
    rank: int
    alpha: float

    @property
    def scaling(self) -> float:
        """Return the factor of B A."""
        return self.alpha / self.rank


def adapter_facts(directory: Path) -> AdapterFacts | None:
    """Read an adapter's configuration. None: the directory holds a whole model, or nothing.

    Raises:
        CheckpointError: its configuration cannot be read, or has options beside rank and alpha.
    """
    file = directory / CONFIG
    try:
        if not file.exists():
            return None
        config = json.loads(file.read_text())
        extra = [name for name in _UNKNOWN if config.get(name)]
        facts = AdapterFacts(Path(config["base_model_name_or_path"]), int(config["r"]), float(config["lora_alpha"]))
        if facts.rank < 1:
            raise ValueError(f"r = {facts.rank}")
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error}. Restore {directory} from a copy, or let its files be read.") from error
    except (*JSON_ERRORS, TypeError, KeyError, AttributeError, OverflowError) as error:
        raise CheckpointError(f"{file} is no configuration of a LoRA adapter ({error!r}). Restore {directory} from a copy.") from error
    if extra:
        raise CheckpointError(f"{file} asks for {', '.join(extra)}: only plain LoRA, with one rank and alpha, can be compared and served.")
    return facts


def write_config(directory: Path, facts: AdapterFacts, tensors: Iterable[str]) -> None:
    """Write the configuration of an adapter beside its tensors, which have these names."""
    modules = sorted({name.removesuffix(A).removesuffix(B).rpartition(".")[2] for name in tensors})
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(facts.base),
        "r": facts.rank,
        "lora_alpha": facts.alpha,
        "target_modules": modules,
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
    }
    (directory / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
