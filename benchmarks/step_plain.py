"""The peer of `benchmarks.step`: an optimizer step as it is written with PyTorch and transformers alone.

In: the same sequences. Out: loss and gradient's norm of each step. Invariant: rows of similar lengths share a micro-batch, padded to the
longest, within the same bound of tokens, so that the peer wastes no more on padding than it must.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from trainer.data.merge import Sequences
from trainer.optim.micro_batches import padded_partition

CLIP = 0.2
BETAS = (0.9, 0.95)


def load(model: Path) -> Any:
    """Return the model of a directory in float32, on the CPU."""
    return AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)


def logprobs_of(model: Any, ids: list[int]) -> list[float]:
    """Return the logprob (nats) of each token after those before it; 0 for the first."""
    with torch.inference_mode():
        logits = model(torch.tensor([ids])).logits[0, :-1]
        chosen = torch.tensor(ids[1:])[:, None]
        return [0.0, *logits.log_softmax(-1).gather(1, chosen)[:, 0].tolist()]


class PlainLoop:
    """Model, AdamW, and the rows as padded micro-batches."""

    def __init__(self, model: Path, rows: Sequences, *, learning_rate: float, device_tokens: int, clip_grad: float) -> None:
        """Load the model; rows are cut into micro-batches of at most `device_tokens` padded tokens."""
        self._device = "cuda" if torch.cuda.is_available() else "cpu"
        self._autocast = torch.autocast(self._device, torch.bfloat16, enabled=self._device == "cuda")
        self._model = load(model).to(self._device)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=learning_rate, betas=BETAS, weight_decay=0.0)
        self._clip_grad = clip_grad
        self._trained = rows.trained_tokens
        self._micro_batches = [self._padded(rows, part) for part in padded_partition(np.diff(rows.offsets).tolist(), device_tokens)]

    def step(self) -> dict[str, float]:
        """Pass all rows forward and backward, and step the weights; return loss and grad_norm (before clipping)."""
        total = 0.0
        for ids, attention, mask, old, advantages in self._micro_batches:
            with self._autocast:
                logits = self._model(input_ids=ids, attention_mask=attention, use_cache=False).logits[:, :-1]
            logprobs = logits.float().log_softmax(-1).gather(2, ids[:, 1:, None])[..., 0]
            ratio = (logprobs - old).exp()
            gain = torch.minimum(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages)
            loss = -(gain * mask).sum() / self._trained
            loss.backward()
            total += float(loss.detach())
        norm = torch.nn.utils.clip_grad_norm_(self._model.parameters(), self._clip_grad)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return {"loss": total, "grad_norm": float(norm)}

    def _padded(self, rows: Sequences, part: list[int]) -> tuple[Any, ...]:
        """Return ids and attention [rows, tokens], and mask, logprobs and advantages of the tokens after the first."""
        spans = [slice(rows.offsets[row], rows.offsets[row + 1]) for row in part]
        width = max(span.stop - span.start for span in spans)

        def padded(values: Any, dtype: torch.dtype) -> torch.Tensor:
            whole = np.zeros((len(part), width))
            for at, span in enumerate(spans):
                whole[at, : span.stop - span.start] = values[span]
            return torch.tensor(whole, dtype=dtype, device=self._device)

        ids, mask = padded(rows.ids, torch.long), padded(rows.mask, torch.float32)
        attention = padded(np.ones(len(rows.ids)), torch.long)
        old, advantages = padded(rows.logprobs, torch.float32), padded(rows.advantages, torch.float32)
        return ids, attention, mask[:, 1:], old[:, 1:], advantages[:, 1:]
