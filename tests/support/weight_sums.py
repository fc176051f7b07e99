"""Checksums of weights in memory, as an engine holds them."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from spangrad.weights.shards import ChecksumScope, TensorSums
from spangrad.weights.sums import cast_words, tensor_sums


def sums_of_arrays(arrays: Mapping[str, NDArray[np.float32]], dtype: str, others: Mapping[str, str] | None = None) -> dict[str, TensorSums]:
    """Return the sums of weights in an engine that is sent `dtype`, and holds some as one of `others`."""
    held = {name: (others or {}).get(name, dtype) for name in arrays}
    sent = {name: dtype if name in (others or {}) else "float32" for name in arrays}
    words = {name: np.ascontiguousarray(array).reshape(-1).view(np.uint32) for name, array in arrays.items()}
    return {
        name: tensor_sums(cast_words(words[name], "float32", sent[name]), sent[name], held[name], ChecksumScope.FULL) for name in arrays
    }
