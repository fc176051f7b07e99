"""Failures of the policy in a batch: what the comparison of a group sees of them, and what the trainer tells."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import polars as pl
import pytest

from spangrad.types import AttemptFailure
from tests.support.policies import group_relative, transition_row
from tests.support.trainers import FakeSource, group, settings, wired, write_base
from trainer.credit.assignment import advantages
from trainer.data.failures import describe, failed_shares
from trainer.data.source import BatchRollout, Group, Loaded


def compared(values: list[float]) -> list[float]:
    """Advantages of a group whose rollouts have these returns, as GRPO compares them."""
    frame = pl.DataFrame([transition_row(f"r{number}", rewards=(value,)) for number, value in enumerate(values)])
    return [round(value, 2) for value in advantages(frame, pl.Series([True] * len(frame)), normalise=group_relative)]


@pytest.mark.parametrize(
    ("survivors", "failures", "alone", "together"),
    [
        ([1.0, 1.0], [0.0] * 6, [0.0, 0.0], [1.62, 1.62, *[-0.54] * 6]),
        ([1.0, -1.0], [-1.0] * 6, [0.71, -0.71], [2.47, *[-0.35] * 7]),
        ([1.0], [0.0] * 7, [0.0], [2.47, *[-0.35] * 7]),
    ],
)
def test_advantages_of_a_group_with_timeouts_count_them(
    survivors: list[float], failures: list[float], alone: list[float], together: list[float]
) -> None:
    assert compared(survivors) == alone, "what was seen where failures left no transition"
    assert compared(survivors + failures) == together


def loaded(*rollouts: tuple[str, int | None]) -> Loaded:
    """Rollouts by how they failed, and the version that sampled them; None: they left no transition."""
    rows = [transition_row(f"r{n}", Version=version) for n, (_, version) in enumerate(rollouts) if version is not None]
    judged = [transition_row("r0", 1, Policy="judge", Version=9)]
    of = Group("run", "train", "spec", "group")
    return Loaded([BatchRollout(of, f"r{n}", 0, 0, failure) for n, (failure, _) in enumerate(rollouts)], pl.DataFrame(rows + judged))


def test_failed_shares_by_reason() -> None:
    batch = loaded(("timeout", 4), ("", 4), ("", 4), ("", 4), ("timeout", 2), ("exception", 2), ("crash", None), ("", 7))
    assert failed_shares(batch, 0.5) == {
        "failed_share": 0.5,
        "failed_alarm": 0.0,
        "failed_share_crash": 0.125,
        "failed_share_exception": 0.125,
        "failed_share_timeout": 0.25,
    }
    assert failed_shares(batch, 0.4)["failed_alarm"] == 1.0
    assert failed_shares(loaded(("", 0)), 0.0)["failed_alarm"] == 0.0
    assert failed_shares(Loaded([], pl.DataFrame()), 0.5) == {}


def test_failed_alarm_in_trainer_warns_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Failing(FakeSource):
        def load(self, groups: list[Group]) -> Loaded:  # type: ignore[override]
            loaded = super().load(groups)
            late = {group("c"), group("d"), group("e"), group("f")}
            rollouts = [
                replace(rollout, failure=AttemptFailure.TIMEOUT.value) if rollout.group in late else rollout for rollout in loaded.rollouts
            ]
            return replace(loaded, rollouts=rollouts)

    trainer = wired(settings(write_base(tmp_path / "base"), tmp_path / "policies"), Failing([*"abcdef"]))
    with caplog.at_level(logging.WARNING):
        trainer.run(follow=False)
    metrics = [version.metrics for version in trainer.ledger.versions()[1:]]
    assert [recorded["failed_share"] for recorded in metrics] == [0.0, 1.0, 1.0]
    assert [recorded["failed_alarm"] for recorded in metrics] == [0.0, 1.0, 1.0]
    warned = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert warned == [describe(2, metrics[1], 0.5)]
    assert warned[0].startswith(
        "version 2: 100% of the batch's rollouts failed (100% timeout), more than trainer.alarms.failed_share = 0.5. See with"
    )
