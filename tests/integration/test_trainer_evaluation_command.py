"""The command that evaluates a version beside training."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from spangrad.processes import process_start, wait_until
from spangrad.settings.trainer_service import EvaluationSettings
from spangrad.types import PolicyVersion, VersionStatus
from tests.support.trainers import FakeSource, settings, wired, write_base
from trainer.ledger.ledger import Ledger
from trainer.ledger.tables import LedgerVersion
from trainer.monitor import evaluation_command
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


@pytest.fixture
def another_user(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Commands that the trainer may not signal, such as those that sudo runs; they are killed at the end."""
    groups, kill = set[int](), os.killpg

    def killpg(group: int, number: int) -> None:
        groups.add(group)
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(evaluation_command.os, "killpg", killpg)
    yield
    for group in groups:
        kill(group, signal.SIGKILL)


SLEEPING = (sys.executable, "-c", "import time; time.sleep(600)")
ANOTHER_USER = "trainer.evaluation.command runs as another user, and cannot be ended. End it yourself."


@pytest.mark.usefixtures("another_user")
def test_evaluation_command_of_another_user_is_recorded_as_failed(caplog: pytest.LogCaptureFixture) -> None:
    assert ended(*SLEEPING, timeout_seconds=0.1) == {3: 1.0}
    assert caplog.messages == [ANOTHER_USER, "trainer.evaluation.command took more than 0.1 s for version 3"]


@pytest.mark.usefixtures("another_user")
@pytest.mark.parametrize("started", [True, False])
def test_evaluation_command_of_another_user_ends_no_close(
    started: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It runs already, or is being started as the trainer ends."""
    evaluation = EvaluationCommand(EvaluationSettings(every=1, command=SLEEPING))
    closing, popen = threading.Thread(target=evaluation.close, daemon=True), subprocess.Popen

    def close_meanwhile(*arguments: Any, **options: Any) -> Any:
        closing.start()
        wait_until(lambda: evaluation._is_closed, 60, "the begin of the end")  # pyright: ignore[reportPrivateUsage]
        return popen(*arguments, **options)

    if not started:
        monkeypatch.setattr(evaluation_command.subprocess, "Popen", close_meanwhile)
    evaluation.start(1)
    if started:
        wait_until(lambda: evaluation._process is not None, 60, "the command")  # pyright: ignore[reportPrivateUsage]
        closing.start()
    wait_until(lambda: bool(closing.ident) and not closing.is_alive(), 60, "the end of the trainer")
    assert caplog.messages == [ANOTHER_USER]


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


OF_SHELL = """
import os, pathlib, signal, sys, time
directory, mode = pathlib.Path(sys.argv[1]), sys.argv[2]
def end(*_):
    (directory / "asked").touch()
    if mode == "polite":
        raise SystemExit
signal.signal(signal.SIGTERM, end)
(directory / "pid.part").write_text(str(os.getpid()))
(directory / "pid.part").rename(directory / "pid")
while True:
    time.sleep(1)
"""
"""Program that writes down its id, and that it was asked to end."""


def pid_in(directory: Path) -> int:
    """Return the id that OF_SHELL wrote down, and forget it."""
    wait_until(lambda: (directory / "pid").exists(), 60, "the evaluation")
    return int((directory / "pid").rename(directory / "known").read_text())


@pytest.mark.parametrize("mode", ["polite", "stubborn"])
def test_evaluation_command_of_shell_ends_with_its_programs(mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluation_command, "_KILL_SECONDS", 60.0 if mode == "polite" else 5.0)
    command = ("sh", "-c", '"$@"; exit', "sh", sys.executable, "-c", OF_SHELL, str(tmp_path), mode)
    evaluation = EvaluationCommand(EvaluationSettings(every=1, command=command))
    evaluation.start(1)
    pid = pid_in(tmp_path)
    evaluation.close()
    assert (tmp_path / "asked").exists()
    wait_until(lambda: not process_start(pid), 60, "the end of the evaluation")


def test_evaluation_command_ends_when_the_trainer_is_killed(tmp_path: Path) -> None:
    trainer = f"""
import time
from spangrad.settings.trainer_service import EvaluationSettings
from trainer.monitor.evaluation_command import EvaluationCommand
EvaluationCommand(EvaluationSettings(every=1, command={(sys.executable, "-c", OF_SHELL, str(tmp_path), "polite")!r})).start(1)
time.sleep(600)
"""
    with subprocess.Popen([sys.executable, "-c", trainer]) as process:
        pid = pid_in(tmp_path)
        process.kill()
    wait_until(lambda: not process_start(pid), 60, "the end of the evaluation")


def test_trainer_beside_evaluation_command_makes_all_steps_and_waits_at_end(tmp_path: Path) -> None:
    command = (sys.executable, "-c", AWAITING, str(tmp_path), str(tmp_path / "policies/policy/main/v3"))
    chosen = settings(write_base(tmp_path / "base"), tmp_path / "policies", evaluation__every=1, evaluation__command=command)
    trainer = wired(chosen, FakeSource([*"abcdef"]))
    trainer.run(follow=False)
    trainer.close()
    failed = {version.version: version.metrics.get("evaluation_failed") for version in trainer.ledger.versions()}
    assert (failed[1], failed[3]) == (0.0, 0.0), "version 3 was written while the command ran for version 1"
    assert trainer.mirror.written[-1].metrics["evaluation_failed"] == 0  # type: ignore[attr-defined]
