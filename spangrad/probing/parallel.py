"""Division of an engine among workers, by vLLM's arguments.

In: engine.extra_args. Out: `ParallelSizes`. Invariant: arguments are read as vLLM reads them: with `=` or without, `_` for `-`, short.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

_OPTIONS = {
    "--tensor-parallel-size": "tensor",
    "-tp": "tensor",
    "--pipeline-parallel-size": "pipeline",
    "-pp": "pipeline",
    "--data-parallel-size": "data",
    "-dp": "data",
}


@dataclass(frozen=True, slots=True)
class ParallelSizes:
    """Numbers of parts and copies of a model in one engine."""

    tensor: int = 1
    """Number of workers that have parts of each layer."""
    pipeline: int = 1
    """Number of stages, each of some layers."""
    data: int = 1
    """Number of replicas."""

    @property
    def of_replica(self) -> int:
        """Return the number of workers that hold the model once."""
        return self.tensor * self.pipeline

    @property
    def workers(self) -> int:
        """Return the number of all workers, each of which takes a GPU."""
        return self.of_replica * self.data

    @property
    def arguments(self) -> tuple[str, ...]:
        """Return the arguments that differ from vLLM's defaults."""
        sizes = {"tensor": self.tensor, "pipeline": self.pipeline, "data": self.data}
        return tuple(word for name, size in sizes.items() if size > 1 for word in (f"--{name}-parallel-size", str(size)))

    @property
    def label(self) -> str:
        """Return the sizes as `spangrad backends list` shows them; empty for one worker."""
        sizes = {"tp": self.tensor, "pp": self.pipeline, "dp": self.data}
        return " ".join(f"{name}{size}" for name, size in sizes.items() if size > 1)


def parallel_sizes(extra_args: Sequence[str]) -> ParallelSizes:
    """Return the sizes that arguments of vLLM set."""
    sizes: dict[str, int] = {}
    for at, word in enumerate(extra_args):
        option, equals, value = word.partition("=")
        name = _OPTIONS.get(option.replace("_", "-"))
        value = value if equals else "".join(extra_args[at + 1 : at + 2])
        if name and value.isdigit():
            sizes[name] = max(int(value), 1)
    return ParallelSizes(**sizes)
