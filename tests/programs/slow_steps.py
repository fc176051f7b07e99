"""A logits processor that makes each of vLLM's steps take longer than what servers do with its tokens; imported in vLLM's environment.

A tiny model samples faster than two cores can stream: without it the engine has long ended the calls that its API server still answers,
and no publication finds one in flight.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from vllm.v1.sample.logits_processor.interface import BatchUpdate, LogitsProcessor

if TYPE_CHECKING:
    import torch
    from vllm import SamplingParams
    from vllm.config import VllmConfig

STEP_SECONDS = 0.015


class SlowSteps(LogitsProcessor):
    """Sleep once a step, and leave the logits as they are."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool) -> None:
        """Take vLLM's arguments; none matters."""

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        """Accept all."""

    def is_argmax_invariant(self) -> bool:
        """Return False: vLLM leaves out processors that change nothing where it samples greedily."""
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Keep no state."""

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the logits after STEP_SECONDS."""
        time.sleep(STEP_SECONDS)
        return logits
