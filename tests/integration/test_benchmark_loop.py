"""The loop's benchmark on a small load: its stand-ins fit the trainer and the engine's clients of today."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.loop import Load, measure
from benchmarks.loop_trainer import TimedOptimizer
from tests.support.trainers import FakeOptimizer

_OF_TESTS = {"batches", "fails", "interrupted", "weight"}
_OF_RECOVERY_AND_COLOCATION = {"load_back", "load_weights", "offload", "weight_sums"}


def test_timed_optimizer_has_all_attributes_that_the_loop_uses() -> None:
    assert _public(FakeOptimizer) - _public(TimedOptimizer) == _OF_TESTS | _OF_RECOVERY_AND_COLOCATION


def _public(kind: type[object]) -> set[str]:
    return {name for name in {*dir(kind), *kind.__annotations__} if not name.startswith("_")}


@pytest.mark.slow
def test_loop_of_small_load_trains_each_rollout_once(tmp_path: Path) -> None:
    load = Load(groups=2, size=2, slots=4, mean_seconds=0.2, steps=3, warm_up=2, seed=0)
    measured = measure(tmp_path / "run", load, 1)
    assert set(measured.checked.values()) == {0}
    assert measured.figures["steps_per_s"] > 0
