"""Mixing of a tensor's words for its sums, on the device that holds them.

In: words as signed integers of their size. Out: the mixed words (`spangrad.weights.checksums`) as int64. Invariant: bits are the same on
every device.

Runs inside vLLM's workers.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from spangrad.weights.shards import MIX_A, MIX_B
from spangrad.weights.sums import Mixer


def mixing(tensor: torch.Tensor, most: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return the function that mixes chunks of a tensor's words, each valid until the next.

    Args:
        tensor: its device and the size of its words decide.
        most: words of a chunk, at most.
    """
    if tensor.device.type != "cpu":
        return partial(mixed_words, bits=8 * tensor.element_size())
    mixer, unsigned = Mixer(most), np.dtype(f"u{tensor.element_size()}")
    return lambda words: torch.from_numpy(mixer.mixed(words.numpy().view(unsigned)).view(np.int64))


def mixed_words(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Return words of so many bits mixed by PyTorch: int64 arithmetic wraps as uint64's does, so only shifts and the sign need care."""
    mixed = words.to(torch.int64) & (2**bits - 1)
    mixed *= _signed(MIX_A)
    mixed ^= (mixed >> 32) & (2**32 - 1)
    mixed *= _signed(MIX_B)
    mixed ^= (mixed >> 29) & (2**35 - 1)
    return mixed


def _signed(word: int) -> int:
    return word - 2**64 if word >= 2**63 else word
