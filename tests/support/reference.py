"""What transformers says of the tokens that versions of a policy sampled, and versions that differ."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray


def perturbed(model: Path, directory: Path, factor: float = 1.25) -> Path:
    """Copy a model with its weights multiplied."""
    from safetensors.numpy import load_file, save_file

    shutil.copytree(model, directory)
    weights = {name: (value * factor).astype(value.dtype) for name, value in load_file(model / "model.safetensors").items()}
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


class Reference:
    """Models of several versions, in float32."""

    def __init__(self, versions: dict[int, Path]) -> None:
        """Load the directory of each version."""
        import torch
        from transformers import AutoModelForCausalLM

        self.models = {version: AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32) for version, path in versions.items()}

    def gaps(self, row: dict[str, Any], version: int) -> NDArray[np.float64]:
        """Return |difference| of each response token's logprob (nats) between a row of `calls` and a version's weights."""
        import torch

        prompt, response = list(row["PromptIds"]), list(row["ResponseIds"])
        with torch.inference_mode():
            logits = self.models[version](torch.tensor([prompt + response])).logits[0]
        at = torch.log_softmax(logits[len(prompt) - 1 : -1], -1)[torch.arange(len(response)), torch.tensor(response)]
        return np.abs(np.array(row["Logprobs"], np.float64) - at.numpy())

    def agrees(self, row: dict[str, Any], version: int) -> NDArray[np.bool_]:
        """Return for each response token whether its logprob is that of a version."""
        return self.gaps(row, version) < 1e-3
