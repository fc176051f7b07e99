"""Mixing of a tensor's words for its sums, on the device that holds them.

In: words as signed integers of their size. Out: the mixed words (`spangrad.weights.checksums`) as int64. Invariant: bits are the same on
every device.

Runs inside vLLM's workers.
"""

from __future__ import annotations

import numpy as np
import torch

from spangrad.weights.shards import MIX_A, MIX_B
from spangrad.weights.sums import mixed_words


def mixed(words: torch.Tensor) -> torch.Tensor:
    """Return the mixed words, valid until the thread's next call."""
    if words.device.type != "cpu":
        return mixed_by_torch(words)
    unsigned = np.dtype(f"u{words.element_size()}")
    return torch.from_numpy(mixed_words(words.numpy().view(unsigned)).view(np.int64))


def mixed_by_torch(words: torch.Tensor) -> torch.Tensor:
    """Return the words mixed by PyTorch: int64 arithmetic wraps as uint64's does, so only shifts and the sign need care."""
    each = words.to(torch.int64) & (2 ** (8 * words.element_size()) - 1)
    each *= _signed(MIX_A)
    each ^= (each >> 32) & (2**32 - 1)
    each *= _signed(MIX_B)
    each ^= (each >> 29) & (2**35 - 1)
    return each


def _signed(word: int) -> int:
    return word - 2**64 if word >= 2**63 else word
