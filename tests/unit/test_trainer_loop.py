"""The loop, with a fake optimiser and a fake store: order of work, crashes, signals, and what is left to whom."""

from __future__ import annotations

import json
import logging
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from crash import crashes
from fakes import transition_row
from numpy.typing import NDArray
from spangrad.errors import LedgerError, SettingsError, TrainerError
from spangrad.settings import BuilderSettings, Settings, TrainerSettings
from spangrad.types import PolicyVersion, VersionStatus
from trainer import loop
from trainer.batch import Batch
from trainer.eligibility import ExpiryReason
from trainer.ledger import Ledger, LedgerVersion
from trainer.loop import Trainer
from trainer.mirror import Mirror
from trainer.publisher import Publisher
from trainer.shutdown import Shutdown, Stopped
from trainer.source import BatchRollout, Group, Loaded

SPEC = BuilderSettings().spec


def group(name: str) -> Group:
    return Group("run", "train", SPEC, name)


@dataclass
class FakeSource:
    """Groups of two rollouts, one that won and one that lost, all sampled by `version`."""

    names: list[str]
    version: int | Callable[[], int] = 0
    rewards: tuple[float, float] = (1.0, 0.0)
    changes: dict[str, dict[str, object]] = field(default_factory=dict)

    def ready(self) -> list[Group]:
        return [group(name) for name in self.names]

    def load(self, groups: Sequence[Group]) -> Loaded:
        version = self.version if isinstance(self.version, int) else self.version()
        rollouts = [(one, f"{one.group_id}-{i}", self.rewards[i]) for one in groups for i in range(2)]
        rows = [
            transition_row(
                rollout, rewards=(reward,), GroupId=one.group_id, BuildSpec=SPEC, Version=version, **self.changes.get(one.group_id, {})
            )
            for one, rollout, reward in rollouts
        ]
        return Loaded([BatchRollout(one, rollout, 0, 0) for one, rollout, _ in rollouts], pl.DataFrame(rows))


@dataclass
class FakeOptimiser:
    """Adds 1 to its only weight at each step."""

    weight: float = 0.0
    fails: BaseException | None = None
    interrupted: bool = False
    batches: list[Batch] = field(default_factory=list)
    data_parallel_size: int = 1

    def step(self, batch: Batch) -> dict[str, float]:
        self.batches.append(batch)
        if self.fails:
            raise self.fails
        if self.interrupted:
            os.kill(os.getpid(), signal.SIGTERM)
        self.weight += batch.trainable
        return {"loss": 0.5, "grad_norm": 1.0, "logprob_gap": 2e-6, "updated": float(batch.trainable)}

    def weights(self) -> Iterator[tuple[str, NDArray[np.float32]]]:
        yield "weight", np.array([self.weight], np.float32)

    def save_state(self, directory: Path) -> None:
        (directory / "optimizer.pt").write_text(str(self.weight))


class FakeMirror(Mirror):
    """Writes to a list what the real one writes to the store."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self.written: list[LedgerVersion] = []

    def catch_up(self) -> int:
        self.written += self._ledger.versions()
        return len(self.written)

    def write(self, version: LedgerVersion) -> None:
        self.written.append(version)


class FakePublisher(Publisher):
    """A gateway that keeps what it serves in a file."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def served(self, policy: str) -> int:
        return json.loads(self._file.read_text())[-1]

    def publish(self, version: PolicyVersion) -> float:
        self._file.write_text(json.dumps([*json.loads(self._file.read_text()), version.version]))
        return 0.25


@pytest.fixture
def base(tmp_path: Path) -> Path:
    from safetensors.numpy import save_file

    directory = tmp_path / "base"
    directory.mkdir()
    save_file({"weight": np.zeros(1, np.float32)}, directory / "model.safetensors")
    (directory / "tokenizer.json").write_text("{}")
    (directory / "config.json").write_text("{}")
    return directory


def settings(base: Path, directory: Path, **changes: object) -> Settings:
    facts = {"run_id": "run", "model": base, "directory": directory, "groups_per_batch": 2, "poll_seconds": 0.001, "max_staleness": 9}
    return Settings(trainer=TrainerSettings(**{**facts, **changes}))  # type: ignore[arg-type]


def wired(chosen: Settings, source: FakeSource, optimiser: FakeOptimiser | None = None, *, tokenizer: bool = False) -> Trainer:
    """A trainer as `train` wires it, begun."""
    ledger = Ledger(chosen.trainer.directory, chosen.trainer.policy, chosen.trainer.branch)
    newest = loop.prepare(ledger, chosen)
    if not tokenizer:
        source.changes = {name: {"TokenizerHash": newest.tokenizer_hash, **source.changes.get(name, {})} for name in source.names}
    state = Path(newest.policy_version.path) / "optimizer.pt"
    served = chosen.trainer.directory / "served.json"
    if not served.exists():
        served.write_text("[0]")
    trainer = Trainer(
        settings=chosen,
        ledger=ledger,
        source=source,
        optimiser=optimiser or FakeOptimiser(float(state.read_text()) if state.exists() else 0.0),
        normalise=lambda values, _: values * 2 - 1,
        mirror=FakeMirror(ledger),
        publisher=FakePublisher(served),
        shutdown=Shutdown(),
    )
    trainer.start()
    return trainer


def committed(trainer: Trainer) -> dict[int, list[str]]:
    versions = [one for one in trainer.ledger.versions() if one.status is VersionStatus.COMMITTED]
    return {one.version: [row.rollout_id for row in trainer.ledger.batch(one.policy_version.batch_id or "")] for one in versions}


def test_once_takes_whole_batches_oldest_first_and_leaves_the_rest(tmp_path: Path, base: Path, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO)
    trainer = wired(settings(base, tmp_path / "policies", keep_checkpoints=1), FakeSource(["d", "a", "c", "b", "e"]))
    trainer.run(follow=False)
    assert committed(trainer) == {0: [], 1: ["a-0", "a-1", "d-0", "d-1"], 2: ["b-0", "b-1", "c-0", "c-1"]}
    assert sorted(one.name for one in (tmp_path / "policies/policy/main").iterdir()) == ["lock", "v2"]
    newest = trainer.ledger.frontier()
    assert newest
    known = {name: value for name, value in newest.metrics.items() if name not in {"seconds_train", "seconds_checkpoint"}}
    assert known == {
        "loss": 0.5, "grad_norm": 1.0, "logprob_gap": 2e-6, "updated": 1.0,
        "transitions": 4.0, "rollouts": 4.0, "groups": 2.0, "mean_return": 0.5, "seconds_publish": 0.25,
    }  # fmt: skip
    assert json.loads((tmp_path / "policies/served.json").read_text()) == [0, 1, 2]
    # Each version once as it was committed, and once with the seconds that publishing took.
    assert [(one.version, "seconds_publish" in one.metrics) for one in trainer.mirror.written] == [
        (0, False), (1, False), (1, True), (2, False), (2, True),
    ]  # fmt: skip
    assert "step 2 -> version 2: 2 groups, 4 rollouts, 4 transitions, return +0.50, gap 2e-06, train 0.00 s, publish 0.25 s" in caplog.text
    trainer.run(follow=False)
    assert list(committed(trainer)) == [0, 1, 2], "a second run trains nothing"


def test_the_batch_holds_the_advantages_and_knows_what_is_on_policy(tmp_path: Path, base: Path):
    optimiser = FakeOptimiser()
    trainer = wired(settings(base, tmp_path), FakeSource(["a", "b", "c", "d"]), optimiser)
    trainer.run(follow=False)
    assert [one.advantages[:, 0].tolist() for one in optimiser.batches] == [[1.0, -1.0, 1.0, -1.0]] * 2
    assert [one.current.tolist() for one in optimiser.batches] == [[True] * 4, [False] * 4]


def test_stale_groups_are_put_aside_once_and_counted(tmp_path: Path, base: Path, caplog: pytest.LogCaptureFixture):
    trainer = wired(settings(base, tmp_path, max_staleness=0), FakeSource(["a", "b", "c", "d", "e"]))
    trainer.run(follow=False)
    assert committed(trainer) == {0: [], 1: ["a-0", "a-1", "b-0", "b-1"]}
    assert trainer.ledger.expired() == {group("c"): ExpiryReason.STALE, group("d"): ExpiryReason.STALE}
    assert "2 groups will not be trained (stale): c, d" in caplog.text


def test_a_group_that_may_not_be_trained_is_replaced_by_the_next(tmp_path: Path, base: Path):
    source = FakeSource(["a", "b", "c"], changes={"a": {"Temperature": 0.0}})
    trainer = wired(settings(base, tmp_path), source)
    trainer.run(follow=False)
    assert committed(trainer) == {0: [], 1: ["b-0", "b-1", "c-0", "c-1"]}
    assert trainer.ledger.expired() == {group("a"): ExpiryReason.GREEDY}


def test_a_batch_without_advantages_commits_the_parents_weights(tmp_path: Path, base: Path, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO)
    trainer = wired(settings(base, tmp_path), FakeSource(["a", "b"], rewards=(0.5, 0.5)))
    trainer.run(follow=False)
    before, after = trainer.ledger.versions()
    assert after.policy_version.checksum == before.policy_version.checksum
    assert (after.version, after.metrics["updated"], after.metrics["mean_return"]) == (1, 0.0, 0.5)
    assert "all advantages 0: weights as before" in caplog.text


def test_follow_ends_after_max_steps_of_the_branch(tmp_path: Path, base: Path):
    names = [f"g{i}" for i in range(8)]
    wired(settings(base, tmp_path), FakeSource(names[:2])).ledger.close()
    trainer = wired(settings(base, tmp_path, max_steps=3), FakeSource(names))
    trainer.run(follow=True)
    assert list(committed(trainer)) == [0, 1, 2, 3]
    trainer.run(follow=True)
    assert list(committed(trainer)) == [0, 1, 2, 3]


def test_a_refused_step_frees_its_groups_and_keeps_the_weights(tmp_path: Path, base: Path):
    source = FakeSource(["a", "b"])
    trainer = wired(settings(base, tmp_path), source, FakeOptimiser(fails=TrainerError("gap")))
    with pytest.raises(TrainerError, match="gap"):
        trainer.run(follow=False)
    assert [(one.version, one.status) for one in trainer.ledger.versions()] == [(0, VersionStatus.COMMITTED), (1, VersionStatus.ORPHANED)]
    assert trainer.ledger.finished_groups("run", SPEC) == set()
    trainer.ledger.close()
    again = wired(settings(base, tmp_path), source)
    again.run(follow=False)
    assert committed(again) == {0: [], 2: ["a-0", "a-1", "b-0", "b-1"]}
    assert [one.policy_version.parent for one in again.ledger.versions()] == [None, 0, 0]


def test_every_boundary_of_the_loop_is_a_safe_place_to_die(tmp_path: Path, base: Path):
    """Law 4 over ledger, checkpoint and gateway together."""
    names = ["a", "b", "c", "d"]

    def train(boundary: int) -> None:
        trainer = wired(settings(base, tmp_path / str(boundary)), FakeSource(names))
        trainer.run(follow=False)
        trainer.ledger.close()

    deaths = 0
    for boundary in crashes(train, Path(loop.__file__), {"step", "_commit", "prepare", "undo_leases", "start"}):
        deaths += 1
        directory = tmp_path / str(boundary)
        trainer = wired(settings(base, directory), FakeSource(names))
        trainer.run(follow=False)
        batches = committed(trainer)
        assert list(batches.values()) == [[], ["a-0", "a-1", "b-0", "b-1"], ["c-0", "c-1", "d-0", "d-1"]]
        newest = trainer.ledger.frontier()
        assert newest
        assert (Path(newest.policy_version.path) / "optimizer.pt").read_text() == "2.0", "a step was repeated or skipped"
        here = {one.name for one in (directory / "policy/main").iterdir()}
        assert here == {"lock", *(f"v{version}" for version in batches if version)}, "an uncommitted version was left"
        assert json.loads((directory / "served.json").read_text())[-1] == newest.version
        trainer.ledger.close()
    assert deaths > 60


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_waiting_ends_the_loop(tmp_path: Path, base: Path, number: signal.Signals, monkeypatch: pytest.MonkeyPatch):
    trainer = wired(settings(base, tmp_path), FakeSource(["a"]))
    monkeypatch.setattr(loop.time, "sleep", lambda _: os.kill(os.getpid(), number))
    with pytest.raises(Stopped), trainer.shutdown.listening():
        trainer.run(follow=True)
    assert trainer.shutdown.requested == number.name


def test_a_signal_during_a_step_undoes_the_lease_at_once(tmp_path: Path, base: Path):
    trainer = wired(settings(base, tmp_path), FakeSource(["a", "b"]), FakeOptimiser(interrupted=True))
    with pytest.raises(Stopped), trainer.shutdown.listening():
        trainer.run(follow=True)
    assert trainer.ledger.finished_groups("run", SPEC) == set()
    assert [one.status for one in trainer.ledger.versions()] == [VersionStatus.COMMITTED, VersionStatus.ORPHANED]
    assert sorted(one.name for one in (tmp_path / "policy/main").iterdir()) == ["lock"]


def test_a_signal_inside_a_transaction_waits_for_its_end():
    shutdown = Shutdown()
    done = []
    with pytest.raises(Stopped), shutdown.listening():
        with shutdown.shielded():
            os.kill(os.getpid(), signal.SIGTERM)
            done.append("transaction")
        done.append("never")
    assert done == ["transaction"]


def test_settings_that_cannot_be_trained_are_refused(tmp_path: Path, base: Path):
    with pytest.raises(SettingsError, match=r"trainer\.model is not set"):
        wired(settings(base, tmp_path, model=None), FakeSource([]))
    contradiction = settings(base, tmp_path, credit="reward_to_go", baseline="rollout")
    with pytest.raises(SettingsError, match=r"trainer\.baseline = 'turn'"):
        loop.train(contradiction, follow=False)
    ledger = Ledger(tmp_path, "empty", "main")
    with pytest.raises(LedgerError, match="no weights to train"):
        loop.newest_version(ledger)
