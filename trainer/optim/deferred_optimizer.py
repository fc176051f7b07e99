"""An optimiser as the loop sees it, and one that is loaded when first needed: a run that finds nothing to train never imports PyTorch.

In: how to load one. Out: the same, later. Invariant: it is loaded once at most.
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


class Optimiser(Protocol):
    """What steps the weights: `trainer.optim.optimizer.Engine`."""

    @property
    def data_parallel_size(self) -> int:
        """The number that a batch's rows must be divisible by."""
        ...

    def step(self, batch: Batch) -> dict[str, float]:
        """One step; its metrics."""
        ...

    def weights(self) -> Iterator[tuple[str, NDArray[np.float32]]]:
        """Parameters by name."""
        ...

    def save_weights(self, directory: Path) -> None:
        """Write the parameters."""
        ...

    def save_state(self, directory: Path) -> None:
        """Write the optimiser's state."""
        ...

    def close(self) -> None:
        """End whatever it runs elsewhere."""
        ...


class Deferred:
    """Stands for the optimiser that `load` gives."""

    def __init__(self, load: Callable[[], Optimiser]) -> None:
        self._load = load

    @cached_property
    def _optimiser(self) -> Optimiser:
        return self._load()

    @property
    def is_loaded(self) -> bool:
        """Whether it was needed yet."""
        return "_optimiser" in self.__dict__

    @property
    def data_parallel_size(self) -> int:
        """The number that a batch's rows must be divisible by."""
        return self._optimiser.data_parallel_size

    def step(self, batch: Batch) -> dict[str, float]:
        """One step; its metrics."""
        return self._optimiser.step(batch)

    def weights(self) -> Iterator[tuple[str, NDArray[np.float32]]]:
        """Parameters by name."""
        return self._optimiser.weights()

    def save_weights(self, directory: Path) -> None:
        """Write the parameters."""
        self._optimiser.save_weights(directory)

    def save_state(self, directory: Path) -> None:
        """Write the optimiser's state."""
        self._optimiser.save_state(directory)

    def close(self) -> None:
        """End what was loaded, if anything was."""
        if self.is_loaded:
            self._optimiser.close()
