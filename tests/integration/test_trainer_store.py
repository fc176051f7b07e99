"""The trainer over a real span store and real verl: what it takes, what it leaves, and what one SQL query tells afterwards."""

from __future__ import annotations

import logging
import os
import signal
import time
import uuid
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from commands.services.progress import ProgressReader
from spangrad.errors import StoreError
from spangrad.settings import BuilderSettings, Selection, Settings, StoreSettings
from spangrad.store import datasets
from spangrad.store.clickhouse import connect
from spangrad.supervisor.status_text import TrainingProgress
from spangrad.weights.checksums import checksum_directory
from tests.support.built_rollouts import BuiltRollouts, trainer_over
from tests.support.policies import changed, trainer_settings
from tests.support.processes import forked
from trainer.data.group_checks import find_skips
from trainer.data.source import BatchRollout, Group, GroupReader
from trainer.ledger.ledger import Ledger
from trainer.ledger.mirror import Mirror
from trainer.ledger.skips import Skip, SkipReason
from trainer.monitor.batch_times import batch_times
from trainer.run import train

SPEC = BuilderSettings().spec


@pytest.fixture
def run() -> str:
    return f"trainer-{uuid.uuid4().hex[:8]}"


@pytest.fixture
def settings(store: StoreSettings, tiny_model: Path, tmp_path: Path, run: str) -> Settings:
    return Settings(
        store=store,
        trainer=trainer_settings(
            run_id=run, branch=run, model=tiny_model, directory=tmp_path / "policies", groups_per_batch=2, learning_rate=1e-3, publish=False
        ),
    )


@pytest.fixture
def world(settings: Settings, tiny_model: Path) -> BuiltRollouts:
    return BuiltRollouts(settings, tiny_model)


def source(settings: Settings, world: BuiltRollouts) -> GroupReader:
    return GroupReader(world.client, settings)


def test_ready_lists_whole_groups_of_run_mode_and_build_spec_only(settings: Settings, world: BuiltRollouts, run: str):
    world.group("late", [1.0, 0.0])
    world.group("waits", [1.0], size=2)
    world.group("held-out", [1.0, 0.0], Mode="validate")
    world.group("probe", [1.0, 0.0], Mode="probe")
    world.group("other-spec", [1.0, 0.0], BuildSpec="another")
    world.group("other-run", [1.0, 0.0], RunId=f"{run}-other")
    world.group("unknown-size", [1.0], GroupSize=0)
    world.group("early", [1.0, None, 0.0])
    expected = [Group(run, "train", SPEC, "late"), Group(run, "train", SPEC, "early")]
    assert source(settings, world).ready() == expected
    world.group("waits", [None, None], size=2)
    assert source(settings, world).ready() == [*expected, Group(run, "train", SPEC, "waits")]
    told_otherwise = settings.model_copy(update={"trainer": settings.trainer.model_copy(update={"modes": ("validate",)})})
    assert source(told_otherwise, world).ready() == [Group(run, "validate", SPEC, "held-out")]


def test_load_gives_newest_revision_of_policy_once(settings: Settings, world: BuiltRollouts, run: str):
    world.group("g", [1.0, 0.25])
    world.group("g", [1.0, 0.25])  # delivered twice
    world.group("g", [0.5], size=2, Revision=1)
    world.group("g", [8.0], size=2, Policy="another", RolloutId="g-0", Revision=1, Turn=7)
    world.group("other", [3.0])
    group = Group(run, "train", SPEC, "g")
    loaded = source(settings, world).load([group])
    assert loaded.rollouts == [BatchRollout(group, "g-0", 0, 1), BatchRollout(group, "g-1", 0, 0)]
    own = loaded.transitions.filter(loaded.own(settings.trainer.policy, Selection()))
    assert own.select("RolloutId", "Revision", "Rewards.Value").rows() == [("g-0", 1, [0.5]), ("g-1", 0, [0.25])]
    # Another policy's calls are read as well: rewards of the same rollouts stand on them.
    assert loaded.transitions.select("RolloutId", "Policy", "Rewards.Value").rows()[1] == ("g-0", "another", [8.0])


def test_load_with_remax_separates_greedy_rollout(settings: Settings, world: BuiltRollouts, run: str):
    remax = with_trainer(settings, estimator="remax")
    world.group("g", [1.0, 0.25])
    world.group("waits", [1.0], size=2)
    group = Group(run, "train", SPEC, "g")
    assert source(settings, world).ready() == [group]
    assert source(remax, world).ready() == []
    states = {one.group.group_id: (one.rollouts, one.size, one.whole) for one in source(remax, world).states()}
    assert states == {"g": (2, 3, False), "waits": (1, 3, False)}
    world.group("g", [0.5], Mode="greedy", RolloutId="g-greedy", temperature=1.0, Temperature=0.0)
    assert source(remax, world).ready() == source(settings, world).ready() == [group]
    states = {one.group.group_id: (one.rollouts, one.size, one.whole) for one in source(remax, world).states()}
    assert states == {"g": (3, 3, True), "waits": (1, 3, False)}
    assert len(source(settings, world).states()) == 3, "to others it is a group of another mode"
    loaded = source(remax, world).load([group])
    assert [one.rollout_id for one in loaded.rollouts] == ["g-0", "g-1"]
    assert loaded.transitions["RolloutId"].to_list() == ["g-0", "g-1"]
    assert loaded.greedy is not None
    assert loaded.greedy.select("RolloutId", "Mode", "Temperature", "Rewards.Value").rows() == [("g-greedy", "greedy", 0.0, [0.5])]
    plain = source(settings, world).load([group])
    assert (len(plain.transitions), plain.greedy) == (2, None)


def test_find_skips_group_with_cancelled_rollout(settings: Settings, world: BuiltRollouts, run: str):
    """Its rollouts are built; its calls would be fresh enough and differ."""
    world.group("cancelled", [1.0, 0.0, None])
    world.group("sound", [1.0, 0.0])
    of_run = {"RunId": run, "Mode": "train", "BuildSpec": SPEC, "GroupId": "cancelled", "GroupSize": 3}
    world.insert("builds", [{**of_run, "RolloutId": "cancelled-2", "Attempt": 0, "Revision": 1, "Failure": "cancelled"}])
    groups = source(settings, world).ready()
    assert {one.group_id for one in groups} == {"cancelled", "sound"}
    loaded = source(settings, world).load(groups)
    assert loaded.cancelled == {"cancelled"}
    skips = find_skips(groups, loaded, settings.trainer, lineage=[0], tokenizer_hash=world.tokenizer)
    assert skips == {Group(run, "train", SPEC, "cancelled"): Skip(SkipReason.CANCELLED)}


def test_load_with_missing_rows_reports_incomplete_and_trainer_waits(
    settings: Settings, world: BuiltRollouts, run: str, caplog: pytest.LogCaptureFixture
):
    """A replica whose copy of a build came before its rows does not have the call with the final reward yet."""
    written = list[dict[str, Any]]()

    def noted(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        written.extend(rows)
        return rows

    world.group("short", [1.0, 0.0], calls=({}, {}), spoil=noted)
    world.client.command(f"DELETE FROM spangrad_internal.transitions WHERE RunId = '{run}' AND RolloutId = 'short-0' AND Turn = 1")
    for name in "ab":
        world.group(name, [1.0, 0.0])
    group = Group(run, "train", SPEC, "short")
    assert group in source(settings, world).ready()
    loaded = source(settings, world).load([group])
    assert loaded.incomplete == {group: "rollout 'short-0' has 1 of 2 transitions and 0 of 1 rewards in the store so far."}
    trainer = trainer_over(world, settings)
    trainer.run(follow=False)
    assert sorted({row.group.group_id for row in trainer.ledger.batch(trainer.ledger.versions()[-1].policy_version.batch_id or "")}) == [
        "a",
        "b",
    ]
    assert (trainer.ledger.skips.reasons(), "group short is not ready yet: rollout 'short-0' has 1 of 2 transitions" in caplog.text) == (
        {},
        True,
    )
    world.insert("transitions", written[1:2])
    assert source(settings, world).load([group]).incomplete == {}
    trainer.ledger.close()


def test_batch_times_come_from_first_builds_of_rollouts(settings: Settings, world: BuiltRollouts, run: str):
    for name, seconds, waited in (("a", 2.0, 0.5), ("b", 4.0, 1.5)):
        world.group(name, [1.0, 0.0])
        world.client.command(
            f"ALTER TABLE spangrad_internal.builds UPDATE Seconds = {seconds}, IngestedAt = toDateTime64('2026-01-01 00:00:10', 6, 'UTC'),"
            f" Watermark = toDateTime64('2026-01-01 00:00:{10 - waited}', 6, 'UTC') WHERE RunId = '{run}' AND GroupId = '{name}'"
            " SETTINGS mutations_sync = 1"
        )
    rollouts = source(settings, world).load([Group(run, "train", SPEC, name) for name in "ab"]).rollouts
    assert batch_times(world.client, rollouts) == {
        "seconds_rollout": 3.0,
        "seconds_build": pytest.approx(1.0, abs=1e-3),
    }
    assert batch_times(world.client, []) == {}


def test_connect_with_sequential_consistency_sends_setting(store: StoreSettings):
    query = "SELECT getSetting('select_sequential_consistency')"
    for in_sequence in (True, False):
        client = connect(store.model_copy(update={"sequential_consistency": in_sequence}), consistent=True)
        assert client.query(query).result_rows == [(in_sequence,)]
        client.close()


def test_load_after_rebuild_without_transitions_has_no_old_rows(settings: Settings, world: BuiltRollouts, run: str):
    world.group("g", [1.0, 0.25])
    world.group("g", [None], size=2, Revision=1)
    loaded = source(settings, world).load([Group(run, "train", SPEC, "g")])
    assert loaded.transitions["RolloutId"].to_list() == ["g-1"]
    assert [(one.rollout_id, one.revision) for one in loaded.rollouts] == [("g-0", 1), ("g-1", 0)]


def test_load_batch_after_rebuild_reads_revisions_of_batch(settings: Settings, world: BuiltRollouts, run: str):
    world.group("g", [1.0, 0.25])
    group, reader = Group(run, "train", SPEC, "g"), source(settings, world)
    before = reader.load([group])
    world.group("g", [0.5], size=2, Revision=1)
    elsewhere = source(with_trainer(settings, run_id="another run"), world)
    assert reader.load([group]).transitions["Revision"].to_list() == [1, 0]
    for again in (reader.load_batch(before.rollouts), elsewhere.load_batch(before.rollouts)):
        assert (again.rollouts, again.transitions.rows(), again.incomplete) == (before.rollouts, before.transitions.rows(), {})


def with_trainer(settings: Settings, **changes: Any) -> Settings:
    return settings.model_copy(update={"trainer": changed(settings.trainer, changes)})


def test_load_ignores_rows_of_unfinished_build(settings: Settings, world: BuiltRollouts, run: str):
    world.group("g", [1.0, 0.25], Content=5)
    world.insert(
        "transitions", [{**world.call({"RunId": run, "GroupId": "g", "GroupSize": 2, "RolloutId": "g-0"}, 3, {}, 1.0, 1), "Content": 6}]
    )
    group = Group(run, "train", SPEC, "g")
    assert source(settings, world).load([group]).transitions.select("RolloutId", "Turn", "Content").rows() == [("g-0", 0, 5), ("g-1", 0, 5)]


def test_ready_and_load_of_dataset_read_its_revision_as_of_time(settings: Settings, world: BuiltRollouts, run: str):
    world.group("g", [1.0, 0.0])
    world.group("g", [1.0, 0.0], BuildSpec="with brevity")
    name = f"data-{run}"
    for spec in (SPEC, "with brevity"):
        datasets.register(world.client, name, spec, {}, "a test")
    for text, spec in ((name, "with brevity"), (f"{name}@1", SPEC), (f"{name}@2", "with brevity")):
        reader = source(with_trainer(settings, dataset=text), world)
        assert (reader.build_spec, reader.ready()) == (spec, [Group(run, "train", spec, "g")])
    with pytest.raises(StoreError, match=f"has no dataset '{name}@3'.*{name}@1, {name}@2"):
        source(with_trainer(settings, dataset=f"{name}@3"), world)

    ((before,),) = world.rows("SELECT now64(6, 'UTC')")
    world.group("g", [0.5], size=2, Revision=1)
    world.group("later", [1.0, 0.0])
    group = Group(run, "train", SPEC, "g")
    reader = source(with_trainer(settings, as_of=before), world)
    assert reader.ready() == [group]
    assert [(one.rollout_id, one.revision) for one in reader.load([group]).rollouts] == [("g-0", 0), ("g-1", 0)]
    assert reader.load([group]).transitions["Rewards.Value"].to_list() == [[1.0], [0.0]]
    now = source(settings, world)
    assert now.load([group]).transitions["Rewards.Value"].to_list() == [[0.5], [0.0]]
    assert now.ready() == [Group(run, "train", SPEC, "g"), Group(run, "train", SPEC, "later")]


def test_selections_train_several_policies_from_same_spans(settings: Settings, world: BuiltRollouts, run: str, tiny_model: Path):
    """Two policies answer in the same rollouts; of one of them, two agents' calls go to two branches."""
    calls = [
        {"AgentName": "planner", "Policy": "large", "Components": ["crew", "planner"]},
        {"AgentName": "coder", "Policy": "small", "Components": ["crew", "coder"], "Tools": ["search", "run"]},
        {"AgentName": "critic", "Policy": "small", "Components": ["crew", "critic"]},
    ]
    for name in ("a", "b"):
        world.group(name, [1.0, 0.0], calls=calls)
    trainers = {
        "planning": with_trainer(settings, policy="large", branch=f"{run}-planning", selection=Selection(agents="plan.*")),
        "coding": with_trainer(settings, policy="small", branch=f"{run}-coding", selection=Selection(tools="run", components="crew")),
        "critic": with_trainer(settings, policy="small", branch=f"{run}-critic", selection=Selection(agents="critic")),
    }
    for chosen in trainers.values():
        train(chosen, follow=False)
    versions = """
    SELECT Policy, Branch, Version, Parent, ParentBranch, Metrics['transitions'], Metrics['mean_return'], Metrics['logprob_gap_max'] < 1e-4
    FROM spangrad.policy_versions WHERE startsWith(Branch, %(run)s) ORDER BY Policy, Branch, Version"""
    coding, planning, critic = f"{run}-coding", f"{run}-planning", f"{run}-critic"
    assert world.rows(versions) == [
        ("large", planning, 0, None, "", 0, 0, True),
        ("large", planning, 1, 0, planning, 4, 0.5, True),
        ("small", coding, 0, None, "", 0, 0, True),
        ("small", coding, 1, 0, coding, 4, 0.5, True),
        # It begins with the very weights that the other branch began with; number 1 is that one's.
        ("small", critic, 0, 0, coding, 0, 0, True),
        ("small", critic, 2, 0, critic, 4, 0.5, True),
    ]
    checksums = world.rows("SELECT DISTINCT Checksum FROM spangrad.policy_versions WHERE startsWith(Branch, %(run)s) AND BatchId != ''")
    assert len(checksums) == 3
    spans = "SELECT Branch, uniqExact(RolloutId) FROM spangrad.lineage WHERE startsWith(Branch, %(run)s) GROUP BY Branch ORDER BY Branch"
    assert world.rows(spans) == [(coding, 4), (critic, 4), (planning, 4)]


def test_training_progress_counts_built_rollouts_that_are_not_trained(settings: Settings, world: BuiltRollouts, run: str):
    world.group("g", [1.0, 0.0])
    world.group("g", [0.5], size=2, Revision=1)
    world.group("held-out", [1.0], Mode="validate")
    assert ProgressReader(settings).read() == TrainingProgress(2, None, None, None)
    trained = {"Policy": "policy", "Branch": run, "BatchId": "b", "Version": 1, "RunId": run, "Mode": "train", "GroupId": "g", "Attempt": 0}
    world.insert("batches", [{**trained, "RolloutId": "g-0", "BuildSpec": SPEC, "Revision": 1}])
    assert ProgressReader(settings).read() == TrainingProgress(1, None, None, None)
    step = {"Policy": "policy", "Branch": run, "BatchId": "b", "Status": "committed"}
    world.insert("policy_versions", [{**step, "Version": 1, "Metrics": {"loss": 0.5}}])
    assert ProgressReader(settings).read() == TrainingProgress(1, 1, None, None), "a step on files has no return"
    metrics = {"mean_return": -0.5, "seconds_idle": 1.0, "seconds_step": 3.0}
    world.insert("policy_versions", [{**step, "Version": 2, "Metrics": metrics}])
    assert ProgressReader(settings).read() == TrainingProgress(1, 2, -0.5, 0.25)


def test_train_once_from_store_to_committed_version(
    settings: Settings, world: BuiltRollouts, tiny_model: Path, run: str, caplog: pytest.LogCaptureFixture
):
    caplog.set_level(logging.INFO)
    world.group("alone", [1.0], size=1)
    world.group("a", [1.0, 0.0, None])
    world.group("b", [1.0, 0.25], temperature=0.7)
    world.group("held-out", [1.0, 0.0], Mode="validate")
    world.group("left", [1.0, 0.0])
    train(settings, follow=False)

    path = settings.trainer.directory.absolute() / f"policy/{run}/v1"
    versions = (
        "SELECT Version, Parent, Status, RunId, Mode, Path, Checksum FROM spangrad.policy_versions WHERE Branch = %(run)s ORDER BY Version"
    )
    assert world.rows(versions) == [
        (0, None, "committed", run, "", str(tiny_model), checksum_directory(tiny_model)),
        (1, 0, "committed", run, "train", str(path), checksum_directory(path)),
    ]
    assert checksum_directory(path) != checksum_directory(tiny_model)
    ((metrics,),) = world.rows("SELECT Metrics FROM spangrad.policy_versions WHERE Branch = %(run)s AND Version = 1")
    assert {name: metrics[name] for name in ("groups", "rollouts", "transitions", "mean_return", "updated")} == {
        "groups": 2.0, "rollouts": 5.0, "transitions": 4.0, "mean_return": 0.5625, "updated": 1.0,
    }  # fmt: skip
    assert metrics["logprob_gap_max"] < 1e-4
    assert metrics["grad_norm"] > 0
    batches = "SELECT Version, Mode, GroupId, RolloutId, Attempt, BuildSpec, Revision FROM spangrad.batches WHERE RunId = %(run)s"
    assert sorted(world.rows(batches)) == [
        (1, "train", name, f"{name}-{i}", 0, SPEC, 0) for name, count in (("a", 3), ("b", 2)) for i in range(count)
    ]
    lineage = "SELECT Version, Parent, RolloutId, SpanId FROM spangrad.lineage WHERE Branch = %(run)s ORDER BY RolloutId"
    assert world.rows(lineage) == [(1, 0, name, f"SpanId-{run}-{name}") for name in ("a-0", "a-1", "b-0", "b-1")]
    of_b = "spangrad.trained_calls WHERE Branch = %(run)s AND GroupId = 'b'"
    credit = f"SELECT Version, RolloutId, Turn, Advantage > 0 FROM {of_b} ORDER BY RolloutId"
    assert world.rows(credit) == [(1, "b-0", 0, 1), (1, "b-1", 0, 0)]
    tokens = """SELECT k.TrainerLogprobs, t.Logprobs, k.Entropies FROM spangrad.trained_tokens AS k
        INNER JOIN spangrad.transitions AS t ON t.CallId = k.CallId AND t.RunId = %(run)s WHERE k.Branch = %(run)s"""
    of_calls = world.rows(tokens)
    assert len(of_calls) == 4
    for trainer, sampled, entropies in of_calls:
        assert np.exp(np.subtract(trainer, sampled)) == pytest.approx(np.ones(len(sampled)), abs=1e-3), "an importance ratio is 1 on policy"
        assert len(entropies) == len(sampled)
        assert min(entropies) > 0
    assert "1 groups are skipped (one_rollout): alone" in caplog.text

    train(settings, follow=False)
    assert world.rows("SELECT max(Version) FROM spangrad.policy_versions WHERE Branch = %(run)s") == [(1,)]
    assert caplog.text.count("step 1 -> version 1") == 1


def test_mirror_catches_up_with_ledger(settings: Settings, world: BuiltRollouts, run: str):
    world.group("a", [1.0, 0.0])
    world.group("b", [1.0, 0.0])
    train(settings, follow=False)
    world.client.command(f"DELETE FROM spangrad_internal.policy_versions WHERE Branch = '{run}'")
    world.client.command(f"DELETE FROM spangrad_internal.batches WHERE Branch = '{run}' AND RolloutId = 'a-0'")
    for table in ("trained_calls", "trained_tokens"):
        world.client.command(f"DELETE FROM spangrad_internal.{table} WHERE Branch = '{run}'")
    ledger = Ledger(settings.trainer.directory, "policy", run)
    mirror = Mirror(world.client, settings.store, ledger)
    assert (mirror.catch_up(), mirror.catch_up()) == (2, 0)
    ledger.close()
    for table in ("lineage", "trained_calls", "trained_tokens"):
        assert world.rows(f"SELECT count() FROM spangrad.{table} WHERE Branch = %(run)s") == [(4,)]


def test_mirror_deletes_batches_of_versions_that_were_orphaned(settings: Settings, world: BuiltRollouts, run: str):
    world.group("a", [1.0, 0.0])
    world.group("b", [1.0, 0.0])
    train(settings, follow=False)
    trained = "SELECT count() FROM spangrad.rollouts WHERE RunId = %(run)s AND notEmpty(Trained)"
    assert world.rows(trained) == [(4,)]
    ledger = Ledger(settings.trainer.directory, "policy", run)
    mirror = Mirror(world.client, settings.store, ledger)
    assert ledger.orphan([ledger.version(1)], 0)
    assert (mirror.catch_up(), mirror.catch_up()) == (1, 0)
    ledger.close()
    assert world.rows(trained) == [(0,)]
    for table in ("batches", "lineage", "trained_calls", "trained_tokens"):
        assert world.rows(f"SELECT count() FROM spangrad.{table} WHERE Branch = %(run)s") == [(0,)]


def test_train_command_follows_until_sigterm(settings: Settings, world: BuiltRollouts, run: str, tmp_path: Path):
    world.group("a", [1.0, 0.0])
    world.group("b", [0.0, 1.0])
    flags = {
        "store.url": settings.store.url, "store.otlp_endpoint": settings.store.otlp_endpoint, "trainer.branch": run,
        "trainer.directory": settings.trainer.directory, "trainer.weight_sync.publish": "false", "trainer.sampling.groups_per_batch": 2,
    }  # fmt: skip
    overrides = [word for name, value in flags.items() for word in ("--set", f"{name}={value}")]
    command = ["-m", "spangrad", "train", "--follow", "--model", str(world.model), "--run-id", run, *overrides]
    log = tmp_path / "log"
    with log.open("wb") as out:
        trainer = forked(command, out, out, {**os.environ, "SPANGRAD_CONFIG": ""}, kind="trainer")
    try:
        end = time.monotonic() + 300
        while "step 1 -> version 1" not in log.read_text():
            assert trainer.poll() is None, log.read_text()
            assert time.monotonic() < end, log.read_text()
            time.sleep(0.05)
        trainer.send_signal(signal.SIGTERM)
        assert trainer.wait(60) == 0
    finally:
        trainer.kill()
    lines = [line.split(": ", 1)[1] for line in log.read_text().splitlines()]
    assert [line.split(",")[0] for line in lines] == [
        "version 0 of policy is loaded on cpu", "training with device cpu", "step 1 -> version 1: 2 groups", "stopped by SIGTERM",
    ]  # fmt: skip
