"""A LoRA adapter as a directory, in PEFT's layout: `adapter_config.json` and `adapter_model.safetensors`.

In: what an adapter is of, and how large. Out: its configuration, as PEFT and vLLM read it. Invariant: plain LoRA alone, of one rank and
one alpha: W + alpha / rank B A, with nothing beside A and B.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from spangrad.errors import CheckpointError

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."
"""What PEFT's names of tensors begin with."""
A, B = ".lora_A.weight", ".lora_B.weight"
"""What they end with, in files."""
_UNKNOWN = ("use_rslora", "use_dora", "rank_pattern", "alpha_pattern", "modules_to_save")
"""What a configuration may ask for beside rank and alpha; nothing of ours does."""


@dataclass(frozen=True, slots=True)
class AdapterFacts:
    """What an adapter's configuration says."""

    base: Path
    """Directory of the model that it adapts."""
    rank: int
    alpha: float

    @property
    def scaling(self) -> float:
        """What B A is multiplied by."""
        return self.alpha / self.rank


def adapter_facts(directory: Path) -> AdapterFacts | None:
    """What is known of an adapter. None: the directory holds a whole model, or nothing.

    Raises:
        CheckpointError: its configuration cannot be read, or asks for more than rank and alpha.
    """
    file = directory / CONFIG
    try:
        if not file.exists():
            return None
        said = json.loads(file.read_text())
        beside = [name for name in _UNKNOWN if said.get(name)]
        facts = AdapterFacts(Path(said["base_model_name_or_path"]), int(said["r"]), float(said["lora_alpha"]))
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error}. Restore {directory} from a copy, or let its files be read.") from error
    except (ValueError, TypeError, KeyError) as error:
        raise CheckpointError(f"{file} is no configuration of a LoRA adapter ({error!r}). Restore {directory} from a copy.") from error
    if beside:
        raise CheckpointError(f"{file} asks for {', '.join(beside)}: only plain LoRA, with one rank and alpha, can be compared and served.")
    return facts


def write_config(directory: Path, facts: AdapterFacts, tensors: Iterable[str]) -> None:
    """Write an adapter's configuration.

    Args:
        directory: where its tensors lie.
        facts: what it is of.
        tensors: their names in the file.
    """
    modules = sorted({name.removesuffix(A).removesuffix(B).rpartition(".")[2] for name in tensors})
    said = {
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
    (directory / CONFIG).write_text(json.dumps(said, indent=2) + "\n")
