"""Fake of the optimizer of a run over files, whose only weight shows what was trained."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from trainer.publish.checkpoint import STATE, WEIGHTS
from trainer.sft import training
from trainer.sft.examples import Example
from trainer.sft.training import FileTrainPlan


@dataclass
class FakeFileOptimizer:
    """Adds the first id of each trained row to its only weight: what was trained twice, or not at all, shows."""

    weight: float = 0.0
    device: str = "cpu"
    reference: NDArray[np.float32] | None = None
    steps: list[list[int]] = field(default_factory=list)
    fails_at: int | None = None

    def step(self, examples: Sequence[Example], reference: NDArray[np.float32] | None = None) -> dict[str, float]:
        self.steps.append([example.sequences[0].ids[0] for example in examples])
        if self.fails_at == len(self.steps):
            raise RuntimeError("the machine caught fire")
        self.weight += sum(self.steps[-1])
        return {"loss": 0.5, "grad_norm": 1.0, "tokens": float(len(examples))}

    def logprobs(self, examples: Sequence[Example]) -> NDArray[np.float32]:
        return np.zeros(sum(len(example.sequences) for example in examples), np.float32)

    def measure(self, examples: Sequence[Example], reference: NDArray[np.float32] | None) -> dict[str, float]:
        return {"loss": 1.0 / (1.0 + self.weight)} if examples else {}

    def collect(self, *, state: bool = True) -> None:
        self.collected = self.weight, state

    def write(self, directory: Path) -> None:
        weight, state = self.collected
        save_file({"weight": np.array([weight], np.float32)}, directory / WEIGHTS)
        if state:
            (directory / STATE).mkdir()
            (directory / STATE / "weight").write_text(str(weight))

    def close(self) -> None:
        """Nothing is open."""


def with_fakes(*, fails_at: int | None = None) -> list[FakeFileOptimizer]:
    """Have runs make fakes from here on, each with its base's weight; the list of those that were made."""
    optimizers: list[FakeFileOptimizer] = []

    def fake(_: Any, plan: FileTrainPlan) -> FakeFileOptimizer:
        directory = Path(plan.base.policy_version.path)
        weight = float(load_file(directory / "model.safetensors")["weight"][0])
        assert not plan.at or float((directory / STATE / "weight").read_text()) == weight, "a run goes on from its own state"
        optimizers.append(FakeFileOptimizer(weight, fails_at=fails_at))
        return optimizers[-1]

    training._Run._optimizer = fake  # type: ignore[assignment, method-assign]
    training._store = lambda _: None  # a store that is away, without asking
    return optimizers
