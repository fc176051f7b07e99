"""Optimizer interface of the training loop, and a lazily loaded optimizer: a run with nothing to train never imports PyTorch.

In: a function that loads an optimizer. Out: the optimizer, later. Invariant: it is loaded at most once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from trainer.data.batch import Batch

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class Optimizer(Protocol):
    """Interface of the optimizer of the weights (`trainer.optim.optimizer.Engine`)."""

    @property
    def data_parallel_size(self) -> int:
        """Return the number that a batch's rows must be divisible by."""
        ...

    @property
    def token_advantages(self) -> NDArray[np.float32]:
        """Return the advantages that the last step used, where the estimator gives each token its own: shaped as the batch's."""
        ...

    def step(self, batch: Batch) -> dict[str, float]:
        """Take one step; return its metrics."""
        ...

    def weights(self) -> Iterator[tuple[str, NDArray[np.float32]]]:
        """Yield the parameters by name."""
        ...

    def save_weights(self, directory: Path) -> None:
        """Write the parameters."""
        ...

    def save_state(self, directory: Path) -> None:
        """Write the optimizer's state."""
        ...

    def close(self) -> None:
        """End its workers."""
        ...


class DeferredOptimizer:
    """Proxy of the optimizer that `load` returns, loaded at first use."""

    def __init__(self, load: Callable[[], Optimizer]) -> None:
        self._load = load

    @cached_property
    def _optimizer(self) -> Optimizer:
        return self._load()

    @property
    def is_loaded(self) -> bool:
        """Return whether the optimizer was loaded."""
        return "_optimizer" in self.__dict__

    @property
    def data_parallel_size(self) -> int:
        """Return the number that a batch's rows must be divisible by."""
        return self._optimizer.data_parallel_size

    @property
    def token_advantages(self) -> NDArray[np.float32]:
        """Return the advantages that the last step used, where the estimator gives each token its own: shaped as the batch's."""
        return self._optimizer.token_advantages

    def step(self, batch: Batch) -> dict[str, float]:
        """Take one step; return its metrics."""
        return self._optimizer.step(batch)

    def weights(self) -> Iterator[tuple[str, NDArray[np.float32]]]:
        """Yield the parameters by name."""
        return self._optimizer.weights()

    def save_weights(self, directory: Path) -> None:
        """Write the parameters."""
        self._optimizer.save_weights(directory)

    def save_state(self, directory: Path) -> None:
        """Write the optimizer's state."""
        self._optimizer.save_state(directory)

    def close(self) -> None:
        """Close the optimizer, if it was loaded."""
        if self.is_loaded:
            self._optimizer.close()
