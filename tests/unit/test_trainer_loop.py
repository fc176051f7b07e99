"""The loop, with a fake optimizer and a fake store: order of work, crashes, signals, and what is left to whom."""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import threading
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import sqlalchemy as sa

from spangrad.errors import GatewayError, LedgerError, SettingsError, TrainerError
from spangrad.settings import Selection
from spangrad.types import PolicyVersion, VersionStatus
from tests.support import trainers
from tests.support.policies import transition_row
from tests.support.trainers import SPEC, FakeOptimizer, FakePublisher, FakeSource, committed, group, settings, wired, write_base
from trainer import loop, run
from trainer.data.source import Group, Loaded
from trainer.ledger.ledger import Ledger
from trainer.ledger.recovery import prepare
from trainer.ledger.skips import MASKS, SkipReason
from trainer.ledger.tables import LEASES, LedgerVersion
from trainer.shutdown import Shutdown, Stopped

MASKED = dict.fromkeys((f"masked_{reason.value}" for reason in MASKS), 0.0)


class Turns(FakeSource):
    """Two groups of two rollouts, one of which won at its last call, with a call for each prompt."""

    def __init__(self, prompts: list[list[int]], agents: list[str] | None = None) -> None:
        super().__init__(["a", "b"])
        self.prompts, self.agents = prompts, agents or ["agent"] * len(prompts)

    def load(self, groups: Sequence[Group]) -> Loaded:
        loaded, last = super().load(groups), len(self.prompts) - 1
        rows = [
            transition_row(
                row["RolloutId"], turn, rewards=tuple(row["Rewards.Value"]) if turn == last else (), PromptIds=prompt,
                AgentName=agent, **{name: row[name] for name in ("GroupId", "BuildSpec", "TokenizerHash")},
            )
            for row in loaded.transitions.rows(named=True)
            for turn, (prompt, agent) in enumerate(zip(self.prompts, self.agents, strict=True))
        ]  # fmt: skip
        return Loaded(loaded.rollouts, pl.DataFrame(rows, schema_overrides={"Rewards.Value": pl.List(pl.Float64)}))


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return write_base(tmp_path / "base")


def test_trainer_once_takes_whole_batches_oldest_first(tmp_path: Path, base: Path, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO)
    trainer = wired(settings(base, tmp_path / "policies", checkpoint__keep=1), FakeSource(["d", "a", "c", "b", "e"]))
    trainer.run(follow=False)
    assert committed(trainer) == {0: [], 1: ["a-0", "a-1", "d-0", "d-1"], 2: ["b-0", "b-1", "c-0", "c-1"]}
    assert sorted(one.name for one in (tmp_path / "policies/policy/main").iterdir()) == ["v2"]
    newest = trainer.ledger.frontier()
    assert newest
    timed = {
        "tokens_per_second",
        *(f"seconds_{name}" for name in ("idle", "load", "credit", "lease", "train", "settle", "collect", "checkpoint", "step")),
    }
    assert timed <= newest.metrics.keys()
    known = {name: value for name, value in newest.metrics.items() if name not in timed}
    assert known == {
        "loss": 0.5, "grad_norm": 1.0, "logprob_gap_max": 2e-6, "updated": 1.0,
        "transitions": 4.0, **MASKED, "sequences": 4.0, "tokens": 20.0, "trained_tokens": 8.0, "merge_ratio": 1.0,
        "rollouts": 4.0, "groups": 2.0, "mean_return": 0.5, "mean_reward_reward": 0.5, "seconds_publish": 0.25,
        "success": 0.5, "staleness_mean": 1.0, "staleness_max": 1.0, "drops": 0.0, "return_std": 0.5,
        "truncated_share": 0.0, "response_tokens_mean": 2.0, "response_tokens_p95": 2.0,
        "failed_share": 0.0, "failed_alarm": 0.0,
        # Two groups are trained, and a batch of two is wanted for each of the 9 versions that calls may lie behind, and for the next.
        "groups_wanted": 22.0, "groups_skipped": 0.0, "filtered_share": 0.0, "publish_retries": 0.0, "store_retries": 0.0,
        "groups_incomplete": 0.0, "groups_failed": 0.0,
    }  # fmt: skip
    # Published at the start as well: only the gateway can tell whether what it serves is sound.
    assert json.loads((tmp_path / "policies/served.json").read_text()) == [0, 0, 1, 2]
    # Each version once, with the seconds that publishing took: nobody waits for the copy.
    written = [(one.version, "seconds_publish" in one.metrics) for one in trainer.mirror.written]
    assert written == [(0, False), (1, True), (2, True)]
    facts = r"2 groups, 4 rollouts, 4 transitions, return \+0\.50, success 0\.50, response 2 tokens, gap 2e-06"
    stages = ", ".join(rf"{name} \d\.\d\d s" for name in ("idle", "load", "credit", "lease", "train", "settle", "collect", "checkpoint"))
    assert re.search(rf"step 2 -> version 2: {facts}, {stages}, publish 0\.25 s, idle \d+%\n", caplog.text)
    trainer.run(follow=False)
    assert list(committed(trainer)) == [0, 1, 2], "a second run trains nothing"


def test_trainer_leases_groups_before_it_derives_credit(tmp_path: Path, base: Path):
    trainer = wired(settings(base, tmp_path, max_staleness=0), FakeSource(["a", "b"]))
    normalise, leases = trainer.normalise, list[int]()

    def count_leases(units: Any) -> Any:
        with trainer.ledger.database.reading() as connection:
            leases.append(len(connection.execute(sa.select(LEASES)).all()))
        return normalise(units)

    trainer.normalise = count_leases
    trainer.run(follow=False)
    assert leases == [1]


def test_trainer_rolled_back_during_credit_trains_from_the_new_head(tmp_path: Path, base: Path):
    trainer = wired(settings(base, tmp_path, max_staleness=0), FakeSource(["a", "b"]))
    trainer.run(follow=False)
    source = trainer.source
    assert isinstance(source, FakeSource)
    source.names, source.version = ["c", "d"], lambda: trainer.branch.head().version
    source.changes |= dict.fromkeys(source.names, source.changes["a"])
    normalise = trainer.normalise

    def roll_back(units: Any) -> Any:
        trainer.normalise = normalise
        trainer.ledger.rollback(0)
        return normalise(units)

    trainer.normalise = roll_back
    batch = trainer.take()
    assert batch
    assert not trainer.step(batch), "the lease was undone"
    assert trainer.branch.head().version == 0


def test_trainer_whose_optimizer_cannot_be_loaded_takes_no_version(tmp_path: Path, base: Path):
    trainer = wired(settings(base, tmp_path, max_staleness=0), FakeSource(["a", "b"]))

    def load(version: LedgerVersion) -> Any:
        raise TrainerError("no memory")

    trainer.load_optimizer, trainer.optimizer = load, None
    with pytest.raises(TrainerError, match="no memory"):
        trainer.run(follow=False)
    assert [version.version for version in trainer.ledger.versions()] == [0]


def test_trainer_batch_has_advantages_and_staleness(tmp_path: Path, base: Path):
    optimizer = FakeOptimizer()
    trainer = wired(settings(base, tmp_path), FakeSource(["a", "b", "c", "d"]), optimizer)
    trainer.run(follow=False)
    assert [one.advantages[:, 0].tolist() for one in optimizer.batches] == [[1.0, -1.0, 1.0, -1.0]] * 2
    assert [(one.staleness == 0).any(axis=1).tolist() for one in optimizer.batches] == [[True] * 4, [False] * 4]


def test_stale_groups_are_skipped_once_and_counted(tmp_path: Path, base: Path, caplog: pytest.LogCaptureFixture):
    trainer = wired(settings(base, tmp_path, max_staleness=0), FakeSource(["a", "b", "c", "d", "e"]))
    trainer.run(follow=False)
    assert committed(trainer) == {0: [], 1: ["a-0", "a-1", "b-0", "b-1"]}
    assert trainer.ledger.skips.reasons() == dict.fromkeys([group("c"), group("d"), group("e")], SkipReason.STALE), (
        "of whole batches or not"
    )
    assert (
        "3 groups are skipped (stale): c, d, e. c: all 2 calls of the policy are masked: 2 stale (trainer.sampling.max_staleness = 0)"
        in caplog.text
    )
    assert "version 1 is trained. Raise trainer.sampling.max_staleness, or let" in caplog.text


def test_trainer_skipped_group_is_replaced_by_next(tmp_path: Path, base: Path):
    source = FakeSource(["a", "b", "c"], changes={"a": {"Temperature": 0.0}})
    trainer = wired(settings(base, tmp_path), source)
    trainer.run(follow=False)
    assert committed(trainer) == {0: [], 1: ["b-0", "b-1", "c-0", "c-1"]}
    assert trainer.ledger.skips.reasons() == {group("a"): SkipReason.GREEDY}


def test_trainer_calls_over_max_tokens_per_device_are_masked_and_logged(tmp_path: Path, base: Path, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO)
    long = Turns([[1, 2], [1, 2, 3, 4, 5, 6, 7, 8]])
    optimizer = FakeOptimizer()
    trainer = wired(settings(base, tmp_path, max_tokens_per_device=9), long, optimizer)
    trainer.run(follow=False)
    (batch,) = optimizer.batches
    assert (batch.token_counts, batch.advantages[:, 0].tolist()) == ([4] * 4, [1.0, -1.0, 1.0, -1.0]), "rewards on the long calls count"
    newest = loop.newest_version(trainer.ledger)
    assert (newest.metrics["transitions"], newest.metrics["masked_too_long"]) == (4, 4)
    message = "4 calls are masked (too_long; trainer.max_tokens_per_device = 9), though their rewards count: transition-a-0-1, "
    assert message in caplog.text
    assert "4 transitions, 4 calls masked, return +0.50" in caplog.text


def test_trainer_group_without_fitting_call_is_skipped_as_too_long(tmp_path: Path, base: Path):
    trainer = wired(settings(base, tmp_path, max_tokens_per_device=4), FakeSource(["a", "b"]))
    trainer.run(follow=False)
    assert trainer.ledger.skips.reasons() == {group("a"): SkipReason.TOO_LONG, group("b"): SkipReason.TOO_LONG}


def test_trainer_skip_equal_groups_skips_and_refills(tmp_path: Path, base: Path):
    """DAPO's filter: the next groups fill the batch."""
    equal = {"Rewards.Value": [1.0]}
    trainer = wired(settings(base, tmp_path, skip_equal_groups=True), FakeSource(["a", "b", "c"], changes={"a": equal}))
    trainer.run(follow=False)
    assert committed(trainer) == {0: [], 1: ["b-0", "b-1", "c-0", "c-1"]}
    assert trainer.ledger.skips.reasons() == {group("a"): SkipReason.EQUAL}


def test_trainer_merge_trains_same_tokens_in_fewer_rows(tmp_path: Path, base: Path, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO)
    prompts = [[1, 2], [1, 2, 4, 5, 6], [9, 9]]
    measured = {}
    for merged in (False, True):
        optimizer = FakeOptimizer()
        trainer = wired(settings(base, tmp_path / str(merged), merge=merged), Turns(prompts), optimizer)
        trainer.run(follow=False)
        metrics = loop.newest_version(trainer.ledger).metrics
        measured[merged] = {name: metrics[name] for name in ("transitions", "sequences", "tokens", "trained_tokens", "merge_ratio")}
        assert int(optimizer.batches[0].response_mask.sum()) == 24
    assert measured == {
        False: {"transitions": 12, "sequences": 12, "tokens": 60, "trained_tokens": 24, "merge_ratio": 1},
        True: {"transitions": 12, "sequences": 8, "tokens": 44, "trained_tokens": 24, "merge_ratio": 60 / 44},
    }
    assert "12 transitions, return +0.50" in caplog.text
    assert "12 transitions, 1.4x fewer tokens in 8 sequences, return +0.50" in caplog.text


def test_trainer_selection_trains_selected_calls_and_counts_other_rewards(tmp_path: Path, base: Path):
    optimizer = FakeOptimizer()
    source = Turns([[1], [2], [3]], agents=["planner", "coder", "planner"])
    trainer = wired(settings(base, tmp_path, selection=Selection(agents="cod.*")), source, optimizer)
    trainer.run(follow=False)
    (batch,) = optimizer.batches
    assert (batch.prompts.tolist(), batch.advantages[:, 0].tolist()) == ([[2]] * 4, [1.0, -1.0, 1.0, -1.0])
    nobody = wired(settings(base, tmp_path / "nobody", selection=Selection(agents="cod")), source)
    nobody.run(follow=False)
    assert nobody.ledger.skips.reasons() == {group("a"): SkipReason.NO_TRANSITIONS, group("b"): SkipReason.NO_TRANSITIONS}


def test_trainer_branch_of_branch_trains_rollouts_of_parent(tmp_path: Path, base: Path, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO)
    names = ["a", "b", "c", "d"]
    main = wired(settings(base, tmp_path / "policies"), FakeSource(names))
    main.run(follow=False)
    assert list(committed(main)) == [0, 1, 2]
    of_main = loop.newest_version(main.ledger).policy_version
    # Sampled by versions 0 and 1 of main; branch brevity begins with version 2.
    source = FakeSource(names, changes={"a": {"Version": 1}, "b": {"Version": 1}})
    fork = settings(Path(of_main.path), tmp_path / "policies", branch="brevity", max_staleness=1)
    brevity = wired(fork, source, FakeOptimizer(2.0))
    brevity.run(follow=False)
    assert committed(brevity) == {2: [], 3: ["a-0", "a-1", "b-0", "b-1"]}
    assert brevity.ledger.skips.reasons() == {group("c"): SkipReason.STALE, group("d"): SkipReason.STALE}
    assert "branch brevity begins with version 2 of branch main" in caplog.text
    first, second = brevity.ledger.versions()
    assert (first.parent_branch, first.policy_version.checksum) == ("main", of_main.checksum)
    assert (second.policy_version.parent, second.parent_branch) == (2, "brevity")
    stranger = wired(settings(base, tmp_path / "elsewhere", branch="brevity"), source)
    stranger.run(follow=False)
    assert stranger.ledger.skips.reasons()[group("a")] is SkipReason.UNKNOWN_VERSION, "without main's past its versions mean nothing"


def test_trainer_keeps_checkpoint_that_another_branch_begins_with(tmp_path: Path, base: Path):
    main = wired(settings(base, tmp_path, checkpoint__keep=1), FakeSource(["a", "b"]))
    main.run(follow=False)
    path = Path(loop.newest_version(main.ledger).policy_version.path)
    fork = wired(settings(path, tmp_path, branch="fork"), FakeSource([]))
    more = FakeSource(["c", "d"], changes=dict.fromkeys("cd", main.source.changes["a"]))  # type: ignore[attr-defined]
    main.source = more
    main.run(follow=False)
    assert list(committed(main)) == [0, 1, 2]
    assert path.is_dir()
    fork.ledger.close()
    prepare(Ledger(tmp_path, "policy", "fork"), settings(path, tmp_path, branch="fork"))


def test_trainer_batch_without_advantages_commits_weights_of_parent(tmp_path: Path, base: Path, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO)
    trainer = wired(settings(base, tmp_path), FakeSource(["a", "b"], rewards=(0.5, 0.5)))
    trainer.run(follow=False)
    before, after = trainer.ledger.versions()
    assert after.policy_version.checksum == before.policy_version.checksum
    assert (after.version, after.metrics["updated"], after.metrics["mean_return"]) == (1, 0.0, 0.5)
    assert "all advantages 0: weights as before" in caplog.text


def test_trainer_follow_ends_after_max_steps_of_branch(tmp_path: Path, base: Path):
    names = [f"g{i}" for i in range(8)]
    wired(settings(base, tmp_path), FakeSource(names[:2])).ledger.close()
    trainer = wired(settings(base, tmp_path, max_steps=3), FakeSource(names))
    trainer.run(follow=True)
    assert list(committed(trainer)) == [0, 1, 2, 3]
    trainer.run(follow=True)
    assert list(committed(trainer)) == [0, 1, 2, 3]


def test_trainer_refused_step_frees_groups_and_keeps_weights(tmp_path: Path, base: Path):
    source = FakeSource(["a", "b"])
    trainer = wired(settings(base, tmp_path), source, FakeOptimizer(fails=TrainerError("gap")))
    with pytest.raises(TrainerError, match="gap"):
        trainer.run(follow=False)
    assert [(one.version, one.status) for one in trainer.ledger.versions()] == [(0, VersionStatus.COMMITTED), (1, VersionStatus.ORPHANED)]
    assert set.union(*trainer.ledger.finished_groups("run", SPEC)) == set()
    trainer.ledger.close()
    again = wired(settings(base, tmp_path), source)
    again.run(follow=False)
    assert committed(again) == {0: [], 2: ["a-0", "a-1", "b-0", "b-1"]}
    assert [one.policy_version.parent for one in again.ledger.versions()] == [None, 0, 0]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_trainer_signal_while_waiting_ends_loop(tmp_path: Path, base: Path, number: signal.Signals):
    trainer = wired(settings(base, tmp_path), FakeSource(["a"]))
    trainer.arrived = lambda _: os.kill(os.getpid(), number) is None
    with pytest.raises(Stopped), trainer.shutdown.listening():
        trainer.run(follow=True)
    assert trainer.shutdown.requested == number.name


def test_trainer_signal_during_step_undoes_lease(tmp_path: Path, base: Path):
    trainer = wired(settings(base, tmp_path), FakeSource(["a", "b"]), FakeOptimizer(interrupted=True))
    with pytest.raises(Stopped), trainer.shutdown.listening():
        trainer.run(follow=True)
    assert set.union(*trainer.ledger.finished_groups("run", SPEC)) == set()
    assert [one.status for one in trainer.ledger.versions()] == [VersionStatus.COMMITTED, VersionStatus.ORPHANED]
    assert list(tmp_path.glob("policy/main/*")) == []


def test_shutdown_signal_within_shield_waits_for_its_end():
    shutdown = Shutdown()
    done = []

    def work() -> None:
        with shutdown.shielded():
            os.kill(os.getpid(), signal.SIGTERM)
            done.append("transaction")
        done.append("never")

    with pytest.raises(Stopped), shutdown.listening():
        work()
    assert done == ["transaction"]


def test_shutdown_shield_of_another_thread_holds_no_signal_back():
    shutdown, entered, left = Shutdown(), threading.Event(), threading.Event()

    def shield() -> None:
        with shutdown.shielded():
            entered.set()
            left.wait(60)

    def stop() -> None:
        entered.wait(60)
        os.kill(os.getpid(), signal.SIGTERM)
        left.wait(0.1)

    thread = threading.Thread(target=shield)
    thread.start()
    with pytest.raises(Stopped), shutdown.listening():
        stop()
    left.set()
    thread.join()


def test_trainer_with_invalid_settings_raises(tmp_path: Path, base: Path):
    with pytest.raises(SettingsError, match=r"trainer\.model is not set"):
        wired(settings(base, tmp_path, model=None), FakeSource([]))
    contradiction = settings(base, tmp_path, credit__scheme="reward_to_go", baseline="rollout")
    with pytest.raises(SettingsError, match=r"trainer\.credit\.baseline = 'turn'"):
        run.train(contradiction, follow=False)
    with pytest.raises(SettingsError, match="compares returns with that of a whole greedy rollout"):
        run.train(settings(base, tmp_path, estimator="remax", credit__scheme="own", baseline="turn"), follow=False)
    ledger = Ledger(tmp_path, "empty", "main")
    with pytest.raises(LedgerError, match="no weights to train"):
        loop.newest_version(ledger)


def test_trainer_start_publishes_newest_version_to_restarted_engine(tmp_path: Path, base: Path):
    served = tmp_path / "policies/served.json"
    source = FakeSource(["a", "b"])
    trainer = wired(settings(base, tmp_path / "policies", max_staleness=0), source)
    trainer.run(follow=False)
    assert json.loads(served.read_text())[-1] == 1
    served.write_text("[0]")  # the engine was started again, with the weights that training began with
    source.names = ["c", "d"]
    source.changes |= dict.fromkeys(source.names, source.changes["a"])
    trainer.run(follow=False)
    assert (committed(trainer)[1], json.loads(served.read_text())) == (["a-0", "a-1", "b-0", "b-1"], [0, 1])


def test_trainer_does_not_publish_version_that_another_continued(tmp_path: Path, base: Path):
    """It is refused, being older than what the other one published meanwhile; a refusal for another reason is told."""
    chosen = settings(base, tmp_path / "policies", groups_per_batch=1)
    source = FakeSource(["a"])
    trainer = wired(chosen, source)
    other = Ledger(chosen.trainer.directory, "policy", "main", holder="other-host 7 123 other-boot/pid:[1]")

    class Overtaken(FakePublisher):
        def publish(self, version: PolicyVersion, *, again: bool = False, weights: object = None) -> float:
            if version.version == 1:
                lease = other.begin(trainer.source.load([group("other")]).rollouts)
                assert lease
                same = {"checksum": version.checksum, "path": version.path, "tokenizer_hash": loop.newest_version(other).tokenizer_hash}
                other.commit(lease, **same, metrics={})
                super().publish(other.version(2).policy_version)
            return super().publish(version)

    served = tmp_path / "policies/served.json"
    assert trainer.publishing
    trainer.publishing.publisher = Overtaken(served)
    trainer.run(follow=False)
    source.names, source.changes = ["a", "b"], dict.fromkeys("abc", source.changes["a"])
    trainer.run(follow=False)
    assert committed(trainer) == {0: [], 1: ["a-0", "a-1"], 2: ["other-0", "other-1"], 3: ["b-0", "b-1"]}
    assert json.loads(served.read_text()) == [0, 0, 2, 3]
    assert ["seconds_publish" in one.metrics for one in trainer.ledger.versions()] == [False, False, False, True]
    source.names.append("c")
    served.write_text("[9]")
    with pytest.raises(GatewayError, match="version 4 is not newer"):
        trainer.run(follow=False)


def test_trainer_overtaken_loads_head_once_and_frees_old_optimizer(tmp_path: Path, base: Path):
    chosen = settings(base, tmp_path / "policies")
    ours, other = wired(chosen, FakeSource([*"abcdef"])), wired(chosen, FakeSource([*"abcd"]))
    loads, held = list[tuple[int, bool]](), list[weakref.ref[Any]]()

    def load(version: LedgerVersion) -> FakeOptimizer:
        loads.append((version.version, any(one() for one in held)))
        return trainers.restored(version, ours.ledger, ours.source, chosen)

    ours.load_optimizer, ours.optimizer = load, None
    other.run(follow=False)
    ours.run(follow=False)
    assert loads == [(2, False)], "what was the head when it began is not loaded"
    held.append(weakref.ref(ours.optimizer))
    for source in (other.source, ours.source):
        source.names = [*"abcdefgh"] if source is other.source else [*"abcdefghij"]  # type: ignore[attr-defined]
        source.changes |= dict.fromkeys(source.names, source.changes["a"])  # type: ignore[attr-defined]
    other.run(follow=False)
    ours.run(follow=False)
    assert loads == [(2, False), (4, False)], "what it held is gone before as much again is loaded"
    assert isinstance(ours.optimizer, FakeOptimizer)
    assert (ours.optimizer.weight, ours.ledger.committed_versions()) == (5, [0, 1, 2, 3, 4, 5]), "one step a version, whoever made it"


def test_trainer_idle_republishes_newest_version(tmp_path: Path, base: Path):
    served = tmp_path / "policies/served.json"
    trainer = wired(settings(base, tmp_path / "policies"), FakeSource(["a", "b"]))
    trainer.run(follow=False)
    served.write_text("[0]")

    class EnoughError(Exception):
        pass

    def arrived(seconds: float) -> bool:
        raise EnoughError

    trainer.arrived = arrived
    with pytest.raises(EnoughError):
        trainer.run(follow=True)
    assert json.loads(served.read_text()) == [0, 1]
