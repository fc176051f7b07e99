"""The loop's benchmark on a small load: its stand-ins fit the trainer and the engine's clients of today."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.loop import Load, measure


@pytest.mark.slow
def test_loop_of_small_load_trains_each_rollout_once(tmp_path: Path) -> None:
    load = Load(groups=2, size=2, slots=4, mean_seconds=0.2, steps=3, warm_up=2, seed=0)
    measured = measure(tmp_path / "run", load, 1)
    assert set(measured.checked.values()) == {0}
    assert measured.figures["steps_per_s"] > 0
