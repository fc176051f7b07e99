"""What a worker optimises when it trains on files, as one value that travels to processes under Ray.

In: settings, a method. Out: an `Objective`. Invariant: each rank makes the same loss and the same schedule of it; it holds nothing of
PyTorch's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from spangrad.settings import TuningSettings

Method = Literal["sft", "dpo"]
LEARNING_RATES: dict[Method, float] = {"sft": 1e-5, "dpo": 5e-7}
"""Where tuning.learning_rate names none."""


@dataclass(frozen=True, slots=True)
class Objective:
    """A loss, and how the learning rate goes."""

    method: Method
    learning_rate: float
    schedule: Literal["constant", "cosine"]
    warmup_steps: int
    steps: int
    """Optimiser steps of the whole run."""
    beta: float
    label_smoothing: float

    @classmethod
    def of(cls, method: Method, settings: TuningSettings, steps: int) -> Objective:
        """Of a run of so many optimiser steps."""
        rate = settings.learning_rate or LEARNING_RATES[method]
        return cls(method, rate, settings.schedule, round(settings.warmup * steps), steps, settings.beta, settings.label_smoothing)

    @property
    def sequences(self) -> int:
        """Rows of an example, which no rank and no micro-batch may tear apart."""
        return 2 if self.method == "dpo" else 1
