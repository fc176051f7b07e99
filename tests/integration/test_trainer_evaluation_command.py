"""The command that evaluates a version beside training."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import pytest

from spangrad.settings.trainer_service import EvaluationSettings
from spangrad.types import PolicyVersion, VersionStatus
from tests.support.trainers import FakeSource, settings, wired, write_base
from trainer.ledger.ledger import Ledger
from trainer.ledger.tables import LedgerVersion
from trainer.monitor.evaluation_command import EvaluationCommand

AWAITING = """
import pathlib, sys, time
directory, awaited = map(pathlib.Path, sys.argv[1:])
(directory / f"run-{len(list(directory.glob('run-*')))}").touch()
while not awaited.exists():
    time.sleep(0.005)
"""
"""Program that notes its run in a directory, and waits for a file."""


class FakeLedger(Ledger):
    """Metrics of versions in memory."""

    def __init__(self) -> None:
        self.failed: dict[int, float] = {}

    def add_metrics(self, version: int, metrics: dict[str, float]) -> None:
        assert metrics["evaluation_seconds"] >= 0
        self.failed[version] = metrics["evaluation_failed"]

    def version(self, number: int) -> LedgerVersion:
        facts = PolicyVersion("policy", number, number - 1, "batch", "", "")
        return LedgerVersion(facts, "main", "main", "run", "train", "", VersionStatus.COMMITTED, {})


def ended(*command: str, timeout_seconds: float = 60) -> dict[int, float]:
    """Return evaluation_failed by version, after the command ran for version 3."""
    evaluation = EvaluationCommand(EvaluationSettings(every=1, command=command, timeout_seconds=timeout_seconds))
    ledger = FakeLedger()
    assert evaluation.record(ledger) == []
    evaluation.start(3)
    assert evaluation.wait()
    assert not evaluation.wait()
    assert [version.version for version in evaluation.record(ledger)] == [3]
    return ledger.failed


def test_evaluation_command_is_due_every_n_steps() -> None:
    assert [step for step in range(1, 7) if EvaluationCommand(EvaluationSettings(every=2, command=("x",))).is_due(step)] == [2, 4, 6]
    assert not EvaluationCommand(EvaluationSettings(command=("x",))).is_due(1)
    assert not EvaluationCommand(EvaluationSettings(every=1)).is_due(1)


def test_evaluation_command_that_ends_is_recorded_with_its_version() -> None:
    assert ended(sys.executable, "-c", "") == {3: 0.0}


def test_evaluation_command_failures_are_logged_and_recorded(caplog: pytest.LogCaptureFixture) -> None:
    assert ended(sys.executable, "-c", "raise SystemExit(7)") == {3: 1.0}
    assert ended("/nowhere/at/all") == {3: 1.0}
    assert ended(sys.executable, "-c", "import time; time.sleep(600)", timeout_seconds=0.1) == {3: 1.0}
    assert caplog.messages[0] == "trainer.evaluation.command ended with exit code 7 for version 3"
    assert "trainer.evaluation.command cannot be started" in caplog.messages[1]
    assert caplog.messages[2:] == ["trainer.evaluation.command took more than 0.1 s for version 3, and was ended"]


def test_evaluation_command_runs_one_at_a_time_for_newest_version(tmp_path: Path) -> None:
    command = (sys.executable, "-c", AWAITING, str(tmp_path), str(tmp_path / "released"))
    evaluation, ledger = EvaluationCommand(EvaluationSettings(every=1, command=command)), FakeLedger()
    evaluation.start(1)
    while not (tmp_path / "run-0").exists():
        assert evaluation.record(ledger) == []
    evaluation.start(2)
    evaluation.start(3)
    (tmp_path / "released").touch()
    assert evaluation.wait()
    evaluation.record(ledger)
    assert ledger.failed == {1: 0.0, 3: 0.0}
    assert sorted(file.name for file in tmp_path.glob("run-*")) == ["run-0", "run-1"]


def test_evaluation_command_closed_ends_its_run_and_starts_no_other(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    command = (sys.executable, "-c", AWAITING, str(tmp_path), str(tmp_path / "never"))
    evaluation = EvaluationCommand(EvaluationSettings(every=1, command=command))
    evaluation.start(1)
    evaluation.start(2)
    closing = threading.Thread(target=evaluation.close)
    closing.start()
    closing.join(60)
    assert not closing.is_alive()
    evaluation.start(3)
    assert not evaluation.wait()
    assert not caplog.messages


def test_trainer_beside_evaluation_command_makes_all_steps_and_waits_at_end(tmp_path: Path) -> None:
    command = (sys.executable, "-c", AWAITING, str(tmp_path), str(tmp_path / "policies/policy/main/v3"))
    chosen = settings(write_base(tmp_path / "base"), tmp_path / "policies", evaluation__every=1, evaluation__command=command)
    trainer = wired(chosen, FakeSource([*"abcdef"]))
    trainer.run(follow=False)
    trainer.close()
    failed = {version.version: version.metrics.get("evaluation_failed") for version in trainer.ledger.versions()}
    assert (failed[1], failed[3]) == (0.0, 0.0), "version 3 was written while the command ran for version 1"
    assert trainer.mirror.written[-1].metrics["evaluation_failed"] == 0  # type: ignore[attr-defined]
