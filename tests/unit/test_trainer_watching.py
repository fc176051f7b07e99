"""Watchers of the trainer: the stages and steps that they are told of, their lines, table and metrics, and the failure of one."""

from __future__ import annotations

import importlib.util
import io
import logging
import sys
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from spangrad.errors import SettingsError
from spangrad.settings import Settings
from spangrad.settings.sources import load_settings
from spangrad.settings.trainer_service import CheckpointSettings
from spangrad.types import PolicyVersion, VersionStatus
from tests.support.policies import trainer_settings
from tests.support.trainers import FakeSource, settings, wired, write_base
from trainer.ledger.tables import LedgerVersion
from trainer.monitor.evaluate import best, describe_best, validation
from trainer.monitor.tracking import Trackers, grouped
from trainer.monitor.view import LiveView, LogLines, row
from trainer.monitor.watchers import watchers_of
from trainer.monitor.watching import Clock, CommittedStep, StepStage, Watcher, Watchers
from trainer.optim.process import quiet

SECOND = 1_000_000_000


METRICS = {
    "groups": 4.0, "rollouts": 16.0, "transitions": 30.0, "merge_ratio": 1.0, "masked_too_long": 0.0, "mean_return": 0.25, "success": 0.5,
    "logprob_gap_max": 2e-6, "staleness_mean": 0.5, "seconds_idle": 6.0, "seconds_train": 1.5, "seconds_publish": 0.5,
}  # fmt: skip


def version(number: int = 3, path: str = "", **metrics: float) -> LedgerVersion:
    facts = PolicyVersion("policy", number, number - 1, f"batch{number}", "", path)
    return LedgerVersion(facts, "main", "main", "run", "train", "", VersionStatus.COMMITTED, {**METRICS, **metrics})


def step(number: int = 3, **metrics: float) -> CommittedStep:
    stages = [StepStage("load", 0, SECOND), StepStage("train", SECOND, 2 * SECOND), StepStage("publish", 3 * SECOND // 2, 2 * SECOND)]
    return CommittedStep(number, version(number, **metrics), (), stages)


class Terminal(io.StringIO):
    """A terminal's output."""

    def isatty(self) -> bool:
        return True


class Broken(Watcher):
    """A tracker whose network is down."""

    def stepped(self, step: CommittedStep) -> None:
        raise ConnectionError("no route")

    def evaluated(self, version: LedgerVersion, newest: int) -> None:
        raise ConnectionError("no route")

    def close(self) -> None:
        raise ConnectionError("no route")


class Kept(Watcher):
    """Remembers what it is told."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    def stepped(self, step: CommittedStep) -> None:
        names = [one.name for one in step.stages]
        names.remove("lease")  # before the pass, or before the update where the last version was pending
        self.told.append((step.number, step.version.version, [name for name, _ in groupby(names)], len(step.rollouts)))

    def evaluated(self, version: LedgerVersion, newest: int) -> None:
        self.told.append((version.version, newest))

    def close(self) -> None:
        self.told.append("closed")


def test_watcher_that_fails_stops_neither_training_nor_others(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trainer = wired(settings(write_base(tmp_path / "base"), tmp_path / "policies"), FakeSource(["a", "b", "c", "d"]))
    kept = Kept()
    trainer.watchers = Watchers([Broken(), kept])
    trainer.run(follow=False)
    trainer.watchers.close()
    stages = ["load", "credit", "train", "settle", "train", "collect", "checkpoint", "publish"]
    assert kept.told == [(1, 1, stages, 4), (2, 2, stages, 4), "closed"]
    assert caplog.text.count("Broken failed, and training continues: ConnectionError: no route") == 3
    seconds = trainer.ledger.versions()[-1].metrics
    assert all(seconds[f"seconds_{name}"] >= 0 for name in ("idle", "lease", *stages))


def test_clock_idle_seconds_are_time_between_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("trainer.monitor.watching.time.monotonic", lambda: now[0])
    clock = Clock()
    now[0] += 6
    clock.begin()
    now[0] += 2
    clock.end()
    assert clock.seconds() == {"seconds_idle": 6.0}
    now[0] += 1
    clock.begin()
    assert clock.seconds() == {"seconds_idle": 1.0}
    assert step().idle_share == 0.75, "6 s of waiting and 2 s of work"


def test_clock_stage_within_stage_interrupts_it(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0]
    monkeypatch.setattr("trainer.monitor.watching.time.time_ns", lambda: now[0] * SECOND)
    clock = Clock()
    clock.begin()
    with clock.stage("train"):
        now[0] += 3
        with clock.stage("settle"):
            now[0] += 2
        now[0] += 1
    clock.stages.append(StepStage("checkpoint", 6 * SECOND, 9 * SECOND, beside=True))
    parts = [(stage.name, stage.began // SECOND, stage.ended // SECOND) for stage in clock.stages]
    assert parts == [("train", 0, 3), ("settle", 3, 5), ("train", 5, 6), ("checkpoint", 6, 9)]
    seconds = clock.seconds()
    assert seconds.pop("seconds_idle") >= 0
    assert seconds == {"seconds_train": 4.0, "seconds_settle": 2.0, "seconds_checkpoint": 3.0, "seconds_step": 6.0}


def test_clock_after_failed_stage_times_next_step_alone() -> None:
    clock = Clock()
    with pytest.raises(ValueError, match="bad rows"), clock.stage("train"), clock.stage("settle"):
        raise ValueError("bad rows")
    clock.end()
    clock.begin()
    with clock.stage("credit"):
        pass
    assert [stage.name for stage in clock.stages] == ["credit"]


def test_row_of_interrupted_stage_sums_its_parts() -> None:
    stages = [StepStage("train", 0, SECOND), StepStage("settle", SECOND, 2 * SECOND), StepStage("train", 2 * SECOND, 4 * SECOND)]
    stages += [StepStage("checkpoint", 4 * SECOND, 9 * SECOND, beside=True)]
    shown = CommittedStep(3, version(3), (), stages)
    assert row(shown, {})[10:12] == ["3.00", "5.00"]
    assert (shown.seconds_whole, shown.idle_share) == (10.0, 0.6), "6 s of waiting and 4 s of the trainer's own work"


def test_log_lines_have_one_line_per_step_and_evaluation(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    LogLines().stepped(step(masked_too_long=2.0, updated=0.0))
    LogLines().evaluated(version(validate_rollouts=64, validate_return=0.75, validate_success=0.7), 4)
    assert [record.message for record in caplog.records] == [
        "step 3 -> version 3: 4 groups, 16 rollouts, 30 transitions, 2 calls masked, return +0.25, success 0.50, gap 2e-06, "
        "idle 6.00 s, train 1.50 s, publish 0.50 s, idle 75%, all advantages 0: weights as before",
        "version 3 on 64 held-out rollouts: return +0.750, success 0.70",
    ]


def test_live_view_shows_table_of_last_steps_below_log(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=140, color_system=None)
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    handler = logging.StreamHandler(stream)
    logging.getLogger().addHandler(handler)
    try:
        view = LiveView(trainer_settings(branch="[/s]"), console)
        for number in range(1, 15):
            view.stepped(step(number))
        view.evaluated(version(14, validate_return=0.75, validate_rollouts=8.0), 14)
        logging.getLogger("x").warning("a line of the log")
        table = view.table()
        view.close()
    finally:
        logging.getLogger().removeHandler(handler)
    assert handler.stream is stream
    assert stream.getvalue() == ""
    assert "a line of the log" in out.getvalue()
    plain = io.StringIO()
    Console(file=plain, width=140).print(table)
    lines = [line.split() for line in plain.getvalue().splitlines()]
    assert " ".join(lines[0]) == "policy/[/s]: 14 steps, waited for rollouts 75% of 112 s"
    assert lines[2] == ["3", "3", "+0.25", "0.50", "-", "2e-06", "0.5", "-", "1.00", "-", "1.00", "-", "0.50", "75%", "-"]
    assert lines[-1] == ["14", "14", "+0.25", "0.50", "+0.75", "2e-06", "0.5", "-", "1.00", "-", "1.00", "-", "0.50", "75%", "-"]
    assert len(lines) == 14


def test_live_view_of_many_versions_keeps_metrics_of_table_only() -> None:
    view = LiveView(trainer_settings(), Console(file=io.StringIO(), force_terminal=True, width=140))
    try:
        for number in range(1, 101):
            view.stepped(step(number))
            view.evaluated(version(number, validate_return=0.5, validate_rollouts=8.0), number)
        assert len(view._validation) <= 13  # pyright: ignore[reportPrivateUsage]
    finally:
        view.close()


def test_log_lines_in_terminal_pass_while_prints_are_kept_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass of the model keeps third parties' prints from the terminal, and other threads log meanwhile."""
    terminal, handler = Terminal(), logging.StreamHandler(io.StringIO())
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setattr(sys, "stderr", handler.stream)
    monkeypatch.setenv("TERM", "xterm")
    logging.getLogger().addHandler(handler)
    watchers = watchers_of(Settings(trainer=trainer_settings(traces=False)), client=None)  # type: ignore[arg-type]
    try:
        with quiet():
            print("verl's own")
            logging.getLogger("x").warning("version 5 is served")
            watchers.stepped(step(7))
    finally:
        watchers.close()
        logging.getLogger().removeHandler(handler)
    assert "version 5 is served" in terminal.getvalue()
    assert "verl's own" not in terminal.getvalue()


def test_step_idle_share_leaves_out_stages_beside_next_step_and_line_names_engines(caplog: pytest.LogCaptureFixture) -> None:
    stages = [StepStage("train", 0, 2 * SECOND), StepStage("publish", 2 * SECOND, 9 * SECOND, beside=True)]
    own = CommittedStep(3, version(seconds_idle=6.0, engine_idle=0.125), [], stages)
    assert own.idle_share == 0.75
    assert replace(own, stages=[replace(stage, beside=False) for stage in stages]).idle_share == 0.4
    caplog.set_level(logging.INFO)
    LogLines().stepped(own)
    assert caplog.messages[-1].endswith("idle 75%, engines idle 12%")


def test_validation_gives_metrics_by_reward_name() -> None:
    weighted = trainer_settings(reward_weights={"tool": 0.5})
    rows = [{"reward": 1.0, "tool": -1.0}, {"reward": 0.0}, {"style": 2.0}]
    assert validation(rows, weighted) == {
        "validate_rollouts": 3.0, "validate_return": pytest.approx(2.5 / 3), "validate_success": pytest.approx(2 / 3),
        "validate_reward_reward": 0.5, "validate_reward_style": 2.0, "validate_reward_tool": -1.0,
    }  # fmt: skip


def test_best_metric_is_any_that_a_validation_gives() -> None:
    given = [*validation([{"reward": 1.0, "tool": -1.0}], trainer_settings()), "validate_rating_white"]
    assert [CheckpointSettings(best_metric=metric).best_metric for metric in given] == given


@pytest.mark.parametrize("metric", ["validate_retrun", "mean_return", "validate_reward_", "validate_rating_", ""])
def test_best_metric_that_no_validation_gives_is_refused_with_those_that_exist(metric: str) -> None:
    with pytest.raises(SettingsError) as caught:
        load_settings({"trainer.checkpoint.best_metric": metric}, env={})
    message = str(caught.value)
    assert message.startswith(f"setting trainer.checkpoint.best_metric = {metric!r} (flag): ")
    assert f"no validation gives the metric {metric!r}" in message
    assert "Set one of validate_return, validate_success, validate_rollouts, validate_reward_NAME, validate_rating_ROLE" in message


def test_best_version_has_enough_rollouts_and_a_checkpoint(tmp_path: Path) -> None:
    chosen = trainer_settings(best_rollouts=8)
    directory = str(tmp_path)

    def measured(number: int, value: float, rollouts: float = 8, path: str = directory) -> LedgerVersion:
        return version(number, path, validate_return=value, validate_rollouts=rollouts)

    few, pruned = measured(1, 0.9, 7), measured(2, 0.9, path=f"{directory}/pruned")
    orphan = replace(measured(6, 0.9), status=VersionStatus.ORPHANED)
    best_version = best([few, pruned, measured(3, 0.5), measured(4, 0.5), measured(5, 0.1), orphan, version(7, directory)], chosen)
    assert best_version
    assert describe_best(best_version, chosen) == "best: version 4, validate_return +0.500 over 8 held-out rollouts"
    assert best([few, pruned], chosen) is None


def test_grouped_gives_metrics_a_section() -> None:
    names = ["loss", "seconds_train", "validate_reward_reward", "mean_reward_tool", "logprob_gap_max", "logprob_gap_mean", "staleness_max"]
    assert [grouped(name) for name in names] == [
        "train/loss", "seconds/train", "validate/reward_reward", "mean_reward/tool", "logprob_gap/max", "logprob_gap/mean", "staleness/max",
    ]  # fmt: skip


def test_trackers_without_package_raise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(
        SettingsError, match=r"trainer\.trackers names 'clearml', whose package is not installed\. Run `pip install clearml`"
    ):
        Trackers(Settings(trainer=trainer_settings(trackers=("clearml",))))
