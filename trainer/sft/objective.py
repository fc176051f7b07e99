"""Objective of training on files, as one value that is sent to processes under Ray.

Invariant: each rank makes the same loss and the same schedule of it; it holds nothing of PyTorch's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from spangrad.settings import FinetuneSettings

Method = Literal["sft", "dpo"]
LEARNING_RATES: dict[Method, float] = {"sft": 1e-5, "dpo": 5e-7}
"""Default learning rate of each method, where finetune.learning_rate is not set."""


@dataclass(frozen=True, slots=True)
class Objective:
    """Loss and learning-rate schedule of a run over files."""

    method: Method
    learning_rate: float
    schedule: Literal["constant", "cosine"]
    warmup_steps: int
    steps: int
    """Number of optimizer steps of the whole run."""
    beta: float
    label_smoothing: float

    @classmethod
    def of(cls, method: Method, settings: FinetuneSettings, steps: int) -> Objective:
        """Return the objective of a run of `steps` optimizer steps."""
        rate = settings.learning_rate or LEARNING_RATES[method]
        return cls(method, rate, settings.schedule, round(settings.warmup * steps), steps, settings.beta, settings.label_smoothing)

    @property
    def sequences(self) -> int:
        """Return the number of rows of an example, which stay in one rank and one micro-batch."""
        return 2 if self.method == "dpo" else 1
