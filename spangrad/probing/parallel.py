"""Division of an engine among workers, by vLLM's arguments.

In: engine.extra_args. Out: `ParallelSizes`. Invariant: arguments are read as vLLM reads them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from spangrad.probing.vllm_arguments import vllm_arguments


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
    values = vllm_arguments(extra_args)
    given = {name: values.get(f"--{name}-parallel-size", "") for name in ("tensor", "pipeline", "data")}
    return ParallelSizes(**{name: max(int(value), 1) for name, value in given.items() if value.isdigit()})
