"""Optimizer state that is not written with every version: schedule, replays, orphaned versions, what is kept."""

from __future__ import annotations

import errno
import fcntl
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from spangrad.errors import CheckpointError
from spangrad.types import VersionStatus
from tests.support.policies import trainer_settings
from tests.support.trainers import FakeOptimizer, FakeSource, committed, group, normalise, settings, wired, write_base
from trainer.data.batch import Batch
from trainer.data.source import BatchRollout, Loaded
from trainer.ledger.optimizer_state import StateSchedule, steps_since_state
from trainer.ledger.recovery import prune, running_trainer, undo_leases
from trainer.loop import Trainer
from trainer.publish import checkpoint
from trainer.restoring import restore

GROUPS = [*"abcdefghijkl"]


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return write_base(tmp_path / "base")


class Crashes(FakeOptimizer):
    """Fails at one step, as if its process had died there."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.at = at

    def step(self, batch: Batch, before_update: Callable[[], None] = lambda: None) -> dict[str, float]:
        if len(self.batches) + 1 == self.at:
            raise MemoryError
        return super().step(batch, before_update)


class Doubled(FakeOptimizer):
    """Moves the weights twice as far, as other settings would."""

    def step(self, batch: Batch, before_update: Callable[[], None] = lambda: None) -> dict[str, float]:
        super().step(batch, before_update)
        return super().step(batch)


class Lacking(FakeSource):
    """A store from which rows of a trained batch are gone."""

    def load_batch(self, rollouts: Sequence[BatchRollout]) -> Loaded:
        loaded = super().load_batch(rollouts)
        return Loaded(loaded.rollouts, loaded.transitions, incomplete={group("a"): "rollout 'a-0' has 0 of 1 transitions."})


def crashed(base: Path, directory: Path, at: int, **changes: object) -> Trainer:
    """A trainer that has died in a step."""
    trainer = wired(settings(base, directory, **changes), FakeSource(GROUPS))
    trainer.optimizer = Crashes(at)  # type: ignore[assignment]
    with pytest.raises(MemoryError):
        trainer.run(follow=False)
    return trainer


def again(trainer: Trainer, source: type[FakeSource] = FakeSource) -> Trainer:
    """The same trainer, started anew."""
    return wired(trainer.settings, source(GROUPS))


def with_state(trainer: Trainer) -> list[int]:
    """The versions beside whose weights the optimizer's state lies."""
    paths = {
        version.version: Path(version.policy_version.path)
        for version in trainer.ledger.versions()
        if version.policy_version.parent is not None
    }
    return [number for number, path in paths.items() if checkpoint.has_state(path)]


def weight(trainer: Trainer) -> float:
    assert isinstance(trainer.optimizer, FakeOptimizer)
    return trainer.optimizer.weight


@pytest.mark.parametrize(
    ("changes", "due"),
    [
        ({}, [1, 2, 3, 4, 5, 6]),
        ({"checkpoint__every": 3}, [3, 6]),
        ({"checkpoint__every": 99, "checkpoint__minutes": 2}, [2, 4, 6]),
        ({"checkpoint__every": 3, "lora__rank": 4}, [1, 2, 3, 4, 5, 6]),
    ],
    ids=["every step", "steps", "minutes", "adapters"],
)
def test_state_schedule_is_due_after_steps_or_minutes(tmp_path: Path, base: Path, changes: dict[str, object], due: list[int]) -> None:
    trainer = wired(settings(base, tmp_path / "policies"), FakeSource([]))
    seconds = iter(range(0, 9999, 60))
    schedule = StateSchedule(trainer_settings(**changes), trainer.ledger, trainer.loaded, lambda: next(seconds))
    assert [step for step in range(1, 7) if schedule.step()] == due


def test_trainer_writes_state_every_steps_and_at_end(tmp_path: Path, base: Path) -> None:
    trainer = wired(settings(base, tmp_path / "policies", checkpoint__every=4, checkpoint__keep=9), FakeSource(GROUPS))
    trainer.run(follow=False)
    assert (with_state(trainer), weight(trainer)) == ([4, 6], 6.0)
    newest = trainer.ledger.version(6).policy_version
    checkpoint.verify(Path(newest.path), newest.checksum)
    assert json.loads((Path(newest.path) / checkpoint.MARKER).read_text())["files"]["optimizer/weight"] == len("6.0")
    assert steps_since_state(trainer.ledger, trainer.ledger.version(5)) == (trainer.ledger.version(4), [trainer.ledger.version(5)])


def test_trainer_after_crash_replays_steps_without_state(tmp_path: Path, base: Path, caplog: pytest.LogCaptureFixture) -> None:
    whole = wired(settings(base, tmp_path / "whole"), FakeSource(GROUPS))
    whole.run(follow=False)
    caplog.set_level("INFO")
    dead = crashed(base, tmp_path / "policies", 4, checkpoint__every=9)
    assert with_state(dead) == []
    started = again(dead)
    assert "last written with version 0: the steps of versions 1, 2, 3 are replayed" in caplog.text
    assert isinstance(started.optimizer, FakeOptimizer)
    assert [batch.rollouts for batch in started.optimizer.batches] == [4, 4, 4]
    started.run(follow=False)
    assert list(committed(started).values()) == list(committed(whole).values())
    assert (weight(started), with_state(started)) == (6.0, [started.loaded.version])


def test_trainer_after_crash_orphans_steps_without_state(tmp_path: Path, base: Path) -> None:
    dead = crashed(base, tmp_path / "policies", 4, checkpoint__every=2, checkpoint__after_crash="orphan")
    assert with_state(dead) == [2]
    started = again(dead)
    statuses = {version.version: version.status for version in started.ledger.versions()}
    assert statuses[3] is VersionStatus.ORPHANED
    assert (started.loaded.version, json.loads((tmp_path / "policies/served.json").read_text())[-1]) == (2, 2)
    started.run(follow=False)
    rollouts = [rollout for batch in committed(started).values() for rollout in batch]
    assert (len(rollouts), len(set(rollouts)), weight(started)) == (24, 24, 6.0), "nothing is trained twice, and nothing skipped"


def test_trainer_after_crash_replays_pinned_versions(tmp_path: Path, base: Path) -> None:
    dead = crashed(base, tmp_path / "policies", 4, checkpoint__every=2, checkpoint__after_crash="orphan")
    dead.ledger.pin(3)
    assert again(dead).loaded.version == 3


def test_trainer_after_crash_replays_versions_that_other_branches_began_with(tmp_path: Path, base: Path) -> None:
    dead = crashed(base, tmp_path / "policies", 4, checkpoint__every=9, checkpoint__after_crash="orphan")
    fork = wired(settings(Path(dead.ledger.version(2).policy_version.path), tmp_path / "policies", branch="fork"), FakeSource([]))
    assert fork.ledger.lineage() == [0, 1, 2]
    assert again(dead).loaded.version == 3
    checkpoint.verify(Path(fork.loaded.policy_version.path), fork.loaded.policy_version.checksum)


def test_trainer_after_rollback_replays_versions_that_others_came_of(tmp_path: Path, base: Path) -> None:
    trainer = wired(
        settings(base, tmp_path / "policies", checkpoint__every=4, checkpoint__keep=9, checkpoint__after_crash="orphan"), FakeSource(GROUPS)
    )
    trainer.run(follow=False)
    assert with_state(trainer) == [4, 6]
    trainer.ledger.rollback(3)
    assert again(trainer).loaded.version == 3
    assert list(committed(trainer)) == [*range(7)]


@pytest.mark.parametrize(("after_crash", "begins_at"), [("replay", 4), ("orphan", 1)])
def test_branch_without_state_restarts_after_its_parent_was_pruned(tmp_path: Path, base: Path, after_crash: str, begins_at: int) -> None:
    facts = {"checkpoint__every": 9, "checkpoint__keep": 1}
    main = wired(settings(base, tmp_path / "policies", **facts), FakeSource([*"ab"]))
    main.run(follow=False)
    beginning = Path(main.ledger.version(1).policy_version.path)
    crashed(beginning, tmp_path / "policies", 1, branch="fork", **facts)
    main.source = FakeSource([*"abcd"], changes=dict.fromkeys("cd", main.source.changes["a"]))  # type: ignore[attr-defined]
    main.run(follow=False)
    dead = crashed(beginning, tmp_path / "policies", 2, branch="fork", checkpoint__after_crash=after_crash, **facts)
    assert (dead.ledger.lineage(), with_state(dead)) == ([0, 1, 4], [1])
    prune(main.ledger, main.settings)
    assert again(dead).loaded.version == begins_at


def test_trainer_after_crash_orphans_nothing_where_the_state_is_damaged(tmp_path: Path, base: Path) -> None:
    dead = crashed(base, tmp_path / "policies", 4, checkpoint__every=2, checkpoint__after_crash="orphan")
    (Path(dead.ledger.version(2).policy_version.path) / "optimizer/weight").unlink()
    with pytest.raises(CheckpointError, match="optimizer/weight is missing"):
        again(dead)
    assert dead.ledger.version(3).status is VersionStatus.COMMITTED


def test_trainer_beside_running_one_orphans_none_of_its_versions(tmp_path: Path, base: Path) -> None:
    trainer = crashed(base, tmp_path / "policies", 4, checkpoint__every=2, checkpoint__after_crash="orphan")
    with running_trainer(trainer.ledger, settings(base, tmp_path / "policies", checkpoint__every=2)):
        assert again(trainer).loaded.version == 3, "its optimizer's state may be in the memory of the one that runs"
    assert again(trainer).loaded.version == 2, "no trainer runs"


def test_trainer_beside_an_orphaning_trainer_begins_at_its_head(tmp_path: Path, base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = crashed(base, tmp_path / "policies", 4, checkpoint__every=2, checkpoint__after_crash="orphan")

    def locked(file: int, kind: int) -> None:
        """The other trainer orphans while this one waits for its lock."""
        if kind != fcntl.LOCK_SH:
            raise BlockingIOError
        assert fcntl.fcntl(file, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDWR, "NFS has no shared locks for writers"
        trainer.ledger.orphan([trainer.ledger.version(3)], 2)

    monkeypatch.setattr(fcntl, "flock", locked)
    with running_trainer(trainer.ledger, trainer.settings) as newest:
        assert newest.version == 2


def test_trainer_on_a_file_system_without_locks_logs_that(
    tmp_path: Path, base: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = crashed(base, tmp_path / "policies", 4, checkpoint__every=2, checkpoint__after_crash="orphan")

    def locked(file: int, kind: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", locked)
    with running_trainer(trainer.ledger, trainer.settings) as newest:
        assert newest.version == 3
    assert "cannot be locked (No locks available)" in caplog.text


def test_add_state_while_another_trainer_sweeps_writes_it(tmp_path: Path, base: Path) -> None:
    dead = crashed(base, tmp_path / "policies", 2, checkpoint__every=9)
    path = Path(dead.ledger.version(1).policy_version.path)

    def write(directory: Path) -> None:
        undo_leases(dead.ledger, dead.settings)
        (directory / checkpoint.STATE).mkdir()
        (directory / checkpoint.STATE / "weight").write_text("1.0")

    checkpoint.add_state(path, write)
    assert with_state(dead) == [1]
    assert [file.name for file in path.parent.iterdir()] == ["v1"]


def test_half_written_state_is_removed_once_no_trainer_runs(tmp_path: Path, base: Path) -> None:
    trainer = wired(settings(base, tmp_path / "policies"), FakeSource([]))
    left = tmp_path / "policies/policy/main/.state-v1"
    left.mkdir(parents=True)
    with running_trainer(trainer.ledger, trainer.settings):
        assert not left.exists()
        left.mkdir()
        with running_trainer(trainer.ledger, trainer.settings):
            assert left.exists()


def test_ledger_orphan_of_moved_head_changes_nothing(tmp_path: Path, base: Path) -> None:
    trainer = wired(settings(base, tmp_path / "policies", checkpoint__every=9), FakeSource([*"abcd"]))
    trainer.run(follow=False)
    before = trainer.ledger.versions()
    assert not trainer.ledger.orphan([trainer.ledger.version(1)], 0)
    lease = trainer.ledger.begin([BatchRollout(group("x"), "x-0", 0, 0)])
    assert lease
    assert not trainer.ledger.orphan([trainer.ledger.version(2)], 1)
    trainer.ledger.recover()
    assert trainer.ledger.versions()[:3] == before


def test_replay_of_missing_rows_raises_with_remedy(tmp_path: Path, base: Path) -> None:
    dead = crashed(base, tmp_path / "policies", 3, checkpoint__every=9)
    with pytest.raises(CheckpointError, match=r"step of version 1 cannot be replayed: rollout 'a-0' has 0 of 1.*from version 0 with"):
        again(dead, Lacking)


def test_replay_to_other_weights_keeps_those_of_version(tmp_path: Path, base: Path, caplog: pytest.LogCaptureFixture) -> None:
    dead = crashed(base, tmp_path / "policies", 4, checkpoint__every=9)
    newest = dead.ledger.version(3)
    optimizer = restore(newest, dead.ledger, dead.source, dead.settings.trainer, normalise, lambda _: Doubled())  # type: ignore[arg-type]
    assert isinstance(optimizer, Doubled)
    assert (optimizer.weight, len(optimizer.batches)) == (3.0, 6)
    assert "the replay led to other weights than those of version 3, which are kept" in caplog.text


@pytest.mark.parametrize(("keep", "left"), [(1, [3, 5]), (2, [3, 4, 5]), (9, [1, 2, 3, 4, 5])])
def test_prune_keeps_newest_and_those_they_are_replayed_from(tmp_path: Path, base: Path, keep: int, left: list[int]) -> None:
    dead = crashed(base, tmp_path / "policies", 6, checkpoint__every=3, checkpoint__keep=99)
    prune(dead.ledger, settings(base, tmp_path / "policies", checkpoint__keep=keep))
    assert sorted(int(path.name[1:]) for path in (tmp_path / "policies/policy/main").iterdir()) == left
