"""The step benchmark's own honesty: all three train the same tokens to the same gradients, and a difference is counted."""

from __future__ import annotations

import json
import sys
from dataclasses import replace

import pytest

from benchmarks import step
from benchmarks.step import Timed, different

TIMED = Timed([0.1], [0.5, 0.4], [2.0, 1.9])


def test_step_on_small_rows_reports_equal_losses_and_gradients(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = {"rollouts": 2, "turns": 3, "hidden": 64, "layers": 1, "words": 64, "rounds": 1}
    monkeypatch.setattr(sys, "argv", ["step", *(text for name, value in sizes.items() for text in (f"--{name}", str(value)))])
    assert step.main() == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert report["checked"] == {"different": 0, "unmerged_calls": 0, "untrained_tokens": 0}
    # Prompts of 48, 64 and 80 tokens with responses of 8 become one sequence of 88.
    assert report["ours"]["merge_ratio"] == pytest.approx((56 + 72 + 88) / 88, abs=5e-3)
    assert report["ratio"].keys() == {"unmerged", "merged"}


@pytest.mark.parametrize("change", [{"losses": [0.5, 0.41]}, {"norms": [2.1, 1.9]}])
def test_different_counts_steps_that_differ(change: dict[str, list[float]]) -> None:
    assert different(TIMED, replace(TIMED, **change), 1e-3) == 1
    assert different(TIMED, TIMED, 0.0) == 0
