"""The credit benchmark's arms: two real steps of each, and ids that text cannot give."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.credit import arms, conclude
from benchmarks.credit_plain import run as run_plain
from benchmarks.credit_run import Arm, run
from benchmarks.credit_tasks import Inbox


def arm(task: str, name: str) -> Arm:
    return next(candidate for candidate in arms(group=4) if (candidate.task.name, candidate.name) == (task, name))


@pytest.mark.slow
@pytest.mark.parametrize(("task", "name"), [("flow", "air"), ("inbox", "own")])
def test_credit_benchmark_two_steps_account_for_every_call(task: str, name: str, tmp_path: Path) -> None:
    result = run(arm(task, name), 0, 2, tmp_path)
    assert (result.sampled, result.trained, result.unaccounted, result.drops) == (32, 32, 0, 0)
    assert result.calls == result.transitions > 64
    assert 0 < result.gap < 1e-4
    assert (len(result.success), len(result.mean_return), result.refused, result.alarms) == (2, 2, "", [])
    if task == "inbox":  # the return is the sum of the grades
        assert result.mean_return == pytest.approx([8 * success for success in result.success], abs=1e-3)
        # Another arithmetic, and no store, builder, trainer or verl between: the second step samples what the first one made.
        plain = run_plain(Inbox(group=4), name, 0, 2, tmp_path / "plain")
        assert (plain.success, plain.final) == (result.success, pytest.approx(result.final, abs=0.002))
    else:
        assert all(of_return > success for of_return, success in zip(result.mean_return, result.success, strict=True))
    concluded = conclude([result], whole=False)
    assert set(concluded["checked"].values()) == {0}


@pytest.mark.slow  # test_logprob_faults holds what the trainer refuses
def test_credit_benchmark_with_retokenized_ids_is_refused(tmp_path: Path) -> None:
    result = run(arm("flow", "retokenized"), 0, 2, tmp_path)
    assert "differ from the trainer's" in result.refused
    assert (len(result.success), result.sampled, result.trained, result.unaccounted) == (1, 16, 0, 0)
    trusted = run(replace(arm("flow", "retokenized"), retokenized=False), 0, 1, tmp_path / "sound")
    assert (trusted.refused, trusted.trained) == ("", 16)
