"""The trainer of the loop's benchmark: `spangrad train --follow` with an optimizer whose steps last as long as is set."""

from __future__ import annotations

import argparse
import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from spangrad.settings.sources import load_settings
from trainer import run
from trainer.data.batch import Batch, TokenValues
from trainer.publish.checkpoint import STATE, WEIGHTS
from trainer.publish.rank_sender import RankAddress


class TimedOptimizer:
    """One weight, to which each step adds 1 once its time is over."""

    step_seconds = 0.0
    times = Path("steps.jsonl")
    """File that gets begin and end of each step, in seconds since 1970."""
    device = "cpu"
    data_parallel_size = 1
    versions_to_hold = 0
    rank_senders: Sequence[RankAddress] = ()
    pass_seconds: Mapping[str, float] = {}

    def __init__(self, model: Path, *_: object, **__: object) -> None:
        self._weight = float(load_file(model / WEIGHTS)["weight"][0])

    def step(self, batch: Batch, before_update: Callable[[], None]) -> dict[str, float]:
        """Wait, and report the step's times, without its wait for the version before."""
        began = time.time()
        time.sleep(self.step_seconds)
        ended = time.time()
        before_update()
        self._weight += 1
        self.token_values = TokenValues(batch.advantages, batch.logprobs, -batch.logprobs)
        with self.times.open("a") as file:
            file.write(json.dumps({"began": began, "ended": ended, "rows": batch.real_rows}) + "\n")
        return {"loss": 0.5, "grad_norm": 1.0, "logprob_gap_max": 0.0, "updated": 1.0}

    def weights(self) -> Iterator[tuple[str, NDArray[np.float32]]]:
        """Yield the weight."""
        yield "weight", np.array([self._weight], np.float32)

    def collect(self, *, state: bool = True) -> None:
        """Copy the weight."""
        self._collected = self._weight

    def write(self, directory: Path) -> None:
        """Write the weight and a state."""
        save_file({"weight": np.array([self._collected], np.float32)}, directory / WEIGHTS)
        (directory / STATE).mkdir()
        (directory / STATE / "weight").write_text(str(self._collected))

    def load_state(self, directory: Path) -> None:
        """Read nothing: the weight is known."""

    def hold(self, checkpoints: Sequence[Path]) -> None:
        """Hold nothing."""

    def close(self) -> None:
        """Close nothing."""


def main() -> None:
    """Train until the process is asked to end."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--step-seconds", type=float, required=True)
    parser.add_argument("--times", type=Path, required=True)
    chosen = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    TimedOptimizer.step_seconds, TimedOptimizer.times = chosen.step_seconds, chosen.times
    optimizer: Any = TimedOptimizer
    with patch("trainer.optim.optimizer.VerlOptimizer", optimizer):
        run.train(load_settings(file=chosen.config), follow=True)


if __name__ == "__main__":
    main()
