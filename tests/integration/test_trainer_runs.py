"""A scheduled trainer over a service's own traces: `spangrad train --once` again and again, as cron would start it, by real processes.

Store, builder, verl, TensorBoard are real. The traces are made by hand: mode production, and each names its group.
"""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
from clickhouse_connect.driver.client import Client

from spangrad import semconv
from spangrad.settings import Settings
from spangrad.store.clickhouse import connect
from spangrad.types import Mode
from tests.support.built_rollouts import RUN, send
from tests.support.policies import changed, trainer_settings
from tests.support.processes import forked
from tests.support.servers import running_store, store_settings
from trainer.data.plan import GroupOutcome
from trainer.data.planning import make_plan
from trainer.data.source import BatchRollout, Group
from trainer.ledger.ledger import Ledger
from transition_builder import loop


def log_of(stderr: str) -> tuple[str, set[str]]:
    """Return the log, and the heavy packages that were imported."""
    imports = [line.rpartition("|")[2].strip() for line in stderr.splitlines() if line.startswith("import time:")]
    logged = "\n".join(line for line in stderr.splitlines() if not line.startswith("import time:"))
    return logged, {name.split(".")[0] for name in imports} & {"torch", "verl", "ray", "tensorboard"}


@dataclass
class Service:
    """A store that holds one service's traces, and its trainer."""

    settings: Settings
    client: Client
    model: Path

    def command(self, *words: str) -> list[str]:
        """Arguments of an interpreter that runs `spangrad train` with the service's settings."""
        trainer = self.settings.trainer
        values = {
            "store.url": self.settings.store.url, "store.otlp_endpoint": self.settings.store.otlp_endpoint,
            "trainer.weight_sync.publish": "false",
            "trainer.modes": '["production"]', "trainer.sampling.groups_per_batch": 2, "trainer.sampling.max_staleness": 9,
            "trainer.directory": trainer.directory, "trainer.trackers": '["tensorboard", "file"]', "trainer.checkpoint.best_rollouts": 2,
            "trainer.checkpoint.keep": 1,
        }  # fmt: skip
        overrides = [word for name, value in values.items() for word in ("--set", f"{name}={value}")]
        flags = ["--model", str(self.model), "--run-id", RUN, *overrides]
        return ["-m", "spangrad", "train", *words, *flags]

    def run(self, *words: str) -> tuple[str, str, set[str]]:
        """Run it as cron would: its output, its log, and which of the heavy packages it imported."""
        environment, command = {**os.environ, "SPANGRAD_CONFIG": ""}, [sys.executable, "-X", "importtime", *self.command(*words)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240, env=environment)
        assert done.returncode == 0, done.stderr
        return (done.stdout, *log_of(done.stderr))

    def run_in_terminal(self, *words: str) -> tuple[str, str]:
        """Run it as a person would, stdout being a terminal: what stands there at the end, and its log."""
        controller, terminal = pty.openpty()
        environment = {**os.environ, "SPANGRAD_CONFIG": "", "TERM": "xterm", "COLUMNS": "140", "NO_COLOR": "1"}
        with tempfile.TemporaryFile("w+") as log:
            process = forked(self.command(*words), terminal, log, environment, kind="trainer")
            os.close(terminal)
            shown = b""
            with contextlib.suppress(OSError):  # the other end is closed
                while part := os.read(controller, 65536):
                    shown += part
            os.close(controller)
            code = process.wait(240)
            log.seek(0)
            logged = log.read()
        assert code == 0, logged
        return shown.decode(), logged

    def rows(self, query: str) -> list[tuple[Any, ...]]:
        return [tuple(row) for row in self.client.query(query).result_rows]

    def counts(self) -> tuple[Any, ...]:
        """Builds, transitions, drops: what the builder has made."""
        return tuple(self.rows(f"SELECT count() FROM spangrad.{view}")[0][0] for view in ("builds", "transitions", "drops"))

    def outcomes(self) -> dict[str, str]:
        return {one.group_id: one.outcome.value for one in make_plan(self.settings).groups}


@pytest.fixture(scope="module")
def service(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    directory = tmp_path_factory.mktemp("service")
    store = store_settings(directory / "store")
    trainer = trainer_settings(
        run_id=RUN, model=tiny_model, directory=directory / "policies", groups_per_batch=2, modes=("production",), max_staleness=9,
        publish=False, best_rollouts=2, checkpoint__keep=1,
    )  # fmt: skip
    with running_store(store, directory / "store.log"):
        settings = Settings(store=store, trainer=trainer)
        client = connect(store)
        yield Service(settings, client, tiny_model)
        client.close()


def test_train_once_trains_new_groups_only_and_empty_run_names_reason(service: Service, tiny_model: Path) -> None:
    """The tests below look at what this one leaves."""
    store, settings = service.settings.store, service.settings
    assert not settings.trainer.directory.exists()
    assert make_plan(settings).summary.startswith("there is nothing to train: nothing is built of run 'service' by specification ")
    assert not settings.trainer.directory.exists(), "a plan leaves nothing behind"

    send(store, tiny_model, ["a", "b", "c"])
    send(store, tiny_model, ["part"], size=3)
    send(store, tiny_model, ["kept"], mode=Mode.VALIDATE, version=1)
    assert make_plan(settings).summary == "there is nothing to train: 8 rollouts ended and not built (`spangrad build`)."
    loop.build_once(settings)
    assert service.outcomes() == {"a": "batch", "b": "batch", "c": "left", "part": "waiting", "kept": "other_mode"}
    _, first, heavy = service.run("--once")
    assert heavy >= {"torch", "verl"}
    assert "step 1 -> version 1: 2 groups, 4 rollouts" in first
    assert "version 1 on 2 held-out rollouts: return +0.500, success 0.50" in first
    assert "best: version 1, validate_return +0.500 over 2 held-out rollouts" in first

    why = (
        "there is nothing to train: 1 group is ready and a batch takes 2 (trainer.sampling.groups_per_batch); 1 group waits for 1 rollout "
        "to be "
        "built; 1 group is of mode validate; 2 groups trained before."
    )
    _, second, heavy = service.run("--once")
    assert [line.split(": ", 1)[1] for line in second.splitlines()] == [why]
    assert heavy == set(), "nothing is loaded when there is nothing to train"

    send(store, tiny_model, ["d", "e"])
    loop.build_once(settings)
    shown, _ = service.run_in_terminal("--once")
    assert "policy/main: 1 step, waited for rollouts" in shown
    assert re.search(r"\n +2 +2 +\+0\.50 +0\.50 +- +\S+ +1\.0 ", shown), "a row of the table"
    assert "version 1 of policy is loaded on cpu" in shown, "the log stands above it"
    used = "SELECT Version, groupUniqArray(GroupId) AS g, count() FROM spangrad.batches GROUP BY Version ORDER BY Version"
    assert [(version, sorted(groups), count) for version, groups, count in service.rows(used)] == [(1, ["a", "b"], 4), (2, ["c", "d"], 4)]
    now = {"a": "trained", "b": "trained", "c": "trained", "d": "trained", "e": "left", "part": "waiting", "kept": "other_mode"}
    assert service.outcomes() == now


def test_make_plan_beside_running_trainer_changes_nothing(service: Service) -> None:
    trainer = service.settings.trainer
    chosen = service.settings.model_copy(update={"trainer": changed(trainer, {"groups_per_batch": 1})})
    ledger = Ledger(trainer.directory, trainer.policy, trainer.branch)
    try:
        before = (ledger.versions(), ledger.skips.reasons())
        plan = make_plan(chosen)
        assert (ledger.versions(), ledger.skips.reasons()) == before
        group = Group(RUN, "production", plan.build_spec, "e")
        ledger.begin([BatchRollout(group, f"e-{at}", 0, 0) for at in range(2)])
        during = make_plan(chosen)
        ledger.recover()
        after = make_plan(chosen)
    finally:
        ledger.close()
    assert (plan.batches, plan.version) == (1, 2)
    assert [(one.group_id, one.batch, one.rollouts, one.size) for one in plan.with_outcome(GroupOutcome.BATCH)] == [("e", 1, 2, 2)]
    assert (during.batches, [one.group_id for one in during.with_outcome(GroupOutcome.UNDER_WAY)]) == (0, ["e"])
    assert after == plan
    fresh = service.settings.model_copy(update={"trainer": changed(trainer, {"groups_per_batch": 1, "max_staleness": 1})})
    stale = make_plan(fresh)
    assert [(one.group_id, str(one.reason)) for one in stale.with_outcome(GroupOutcome.SKIPPED)] == [("e", "stale")]


def test_trainer_spans_link_to_rollouts_and_are_no_rollout(service: Service) -> None:
    counts = service.counts()
    loop.build_all(service.settings)
    assert service.counts() == counts
    steps = service.rows(
        "SELECT SpanAttributes['spangrad.trainer.version'] AS v, ScopeName, ParentSpanId, Links.TraceId AS t, Links.SpanId AS s, "
        "TraceId, SpanId FROM otel.otel_traces WHERE ServiceName = 'spangrad-trainer' AND SpanName = 'train step' ORDER BY v"
    )
    assert [(version, scope, parent) for version, scope, parent, *_ in steps] == [(v, semconv.TRAINER_SCOPE, "") for v in ("1", "2")]
    for version, _, _, traces, spans, trace_id, span_id in steps:
        linked = sorted(zip(traces, spans, strict=True))
        roots = (
            "SELECT TraceId, SpanId FROM spangrad.attempts WHERE RolloutId IN "
            f"(SELECT RolloutId FROM spangrad.batches WHERE Version = {version})"
        )
        assert linked == sorted(service.rows(roots))
        assert len(linked) == 4
        stages = f"SELECT SpanName FROM otel.otel_traces WHERE TraceId = '{trace_id}' AND ParentSpanId = '{span_id}' ORDER BY Timestamp"
        names = [name for (name,) in service.rows(stages)]
        names.remove("lease")  # before the pass, or before the update where the last version was pending
        assert [name for name, _ in groupby(names)] == ["load", "credit", "train", "settle", "train", "collect", "checkpoint"]
    assert service.rows("SELECT count() FROM spangrad.reconcile WHERE Unaccounted > 0") == [(0,)]


def test_tensorboard_has_metrics_of_every_version(service: Service) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    trainer = service.settings.trainer
    events = EventAccumulator(str(trainer.directory / trainer.policy / trainer.branch / "tensorboard"))
    events.Reload()
    names = set(events.Tags()["scalars"])
    assert {"train/loss", "train/mean_return", "train/success", "seconds/train", "seconds/idle_share", "logprob_gap/max"} <= names
    assert [(one.step, one.value) for one in events.Scalars("train/mean_return")] == [(1, 0.5), (2, 0.5)]
    assert [(one.step, one.value) for one in events.Scalars("validate/return")] == [(1, 0.5)]
    assert [(one.step, one.value) for one in events.Scalars("validate/version")] == [(1, 1.0)]
    (line,) = (trainer.directory / trainer.policy / trainer.branch / "metrics.jsonl").read_text().splitlines()
    record = json.loads(line)
    assert (record["step"], record["data"]["train/mean_return"], record["data"]["staleness/max"]) == (2, 0.5, 1.0)


def test_checkpoint_of_best_version_is_kept(service: Service, tiny_model: Path) -> None:
    trainer = service.settings.trainer
    own = trainer.directory / trainer.policy / trainer.branch
    assert sorted(one.name for one in own.glob("v*")) == ["v1", "v2"], "one is kept, and the best"
    metrics = "SELECT Version, Metrics['validate_return'], Metrics['validate_rollouts'] FROM spangrad.policy_versions ORDER BY Version"
    assert service.rows(metrics) == [(0, 0.0, 0.0), (1, 0.5, 2.0), (2, 0.0, 0.0)]


def test_train_plan_table_and_json_are_equal(service: Service, capsys: pytest.CaptureFixture[str]) -> None:
    from commands.training.train_plan import as_json, show

    plan = make_plan(service.settings)
    show(plan)
    assert [line.rstrip() for line in capsys.readouterr().out.splitlines()] == [
        "policy/main, run service, from version 2 (best: version 1, validate_return +0.500 over 2 held-out rollouts)",
        "batch  group  mode        rollouts  what becomes of it",
        "-      e      production  2 of 2    waits for others: a batch takes more",
        "-      part   production  2 of 3    waits for its rollouts",
        "-      kept   validate    2 of 2    of a mode that is not trained",
        "There is nothing to train: 1 group is ready and a batch takes 2 (trainer.sampling.groups_per_batch); 1 group waits for 1 rollout "
        "to be "
        "built; 1 group is of mode validate; 4 groups trained before.",
    ]
    printed, _, heavy = service.run("--plan", "--json")
    assert (json.loads(printed), heavy) == (json.loads(as_json(plan)), set())
    parsed = json.loads(printed)
    assert parsed["counts"] == {"trained": 4, "left": 1, "waiting": 1, "other_mode": 1}
    assert (parsed["batches"], parsed["version"], parsed["summary"]) == (0, 2, plan.summary)
    assert [one["group_id"] for one in parsed["groups"]] == ["e", "part", "kept"]
