"""Versions that are written and committed beside the next step: order, staleness, failures, rivals, stops."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from spangrad.errors import BadRowsError, CheckpointError, StoreError
from spangrad.types import VersionStatus
from tests.support.trainers import SPEC, FakeOptimizer, FakeSource, committed, group, settings, wired, write_base
from trainer import commits
from trainer.data.batch import Batch
from trainer.ledger.demand import Consumption
from trainer.ledger.ledger import Ledger
from trainer.ledger.skips import SkipReason
from trainer.ledger.tables import LedgerVersion
from trainer.ledger.working_branch import WorkingBranch
from trainer.loop import Trainer
from trainer.shutdown import Stopped

SECONDS = 30.0
"""Longest wait for what must happen beside something else."""


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return write_base(tmp_path / "base")


def until(happened: Callable[[], bool]) -> bool:
    """Wait until something has happened; return whether it has."""
    end = time.monotonic() + SECONDS
    while not happened():
        if time.monotonic() > end:
            return False
        time.sleep(0.002)
    return True


class Slow(FakeOptimizer):
    """Writes a version only once something has happened, and notes the order of passes, updates and writes."""

    def __init__(self, happened: Callable[[int], bool] = lambda _: True) -> None:
        super().__init__()
        self.happened = happened
        self.order: list[str] = []
        self.missed: list[int] = []
        self.at_update: Callable[[], object] = lambda: None

    def step(self, batch: Batch, before_update: Callable[[], None] = lambda: None) -> dict[str, float]:
        number = len(self.batches) + 1
        self.order.append(f"pass {number}")

        def update() -> None:
            before_update()
            self.at_update()
            self.order.append(f"update {number}")

        return super().step(batch, update)

    def write(self, directory: Path) -> None:
        number = int(self.collected)
        if not until(lambda: self.happened(number)):
            self.missed.append(number)
        self.order.append(f"write {number}")
        super().write(directory)


def pending(trainer: Trainer) -> int | None:
    version = trainer.branch.pending
    return version.version if version else None


def test_version_is_written_beside_next_pass_and_committed_before_next_update(tmp_path: Path, base: Path) -> None:
    optimizer = Slow(lambda number: number == 3 or f"pass {number + 1}" in optimizer.order)
    trainer = wired(settings(base, tmp_path), FakeSource([*"abcdef"]), optimizer)
    at_updates: list[tuple[list[int], str | None]] = []
    optimizer.at_update = lambda: at_updates.append((trainer.ledger.committed_versions(), trainer.ledger.holder()))
    trainer.run(follow=False)
    assert optimizer.missed == []
    assert [event for event in optimizer.order if "pass" not in event] == [
        f"{event} {number}" for number in (1, 2, 3) for event in ("update", "write")
    ]
    assert [versions for versions, _ in at_updates] == [[0], [0, 1], [0, 1, 2]]
    assert all(holder for _, holder in at_updates), "leased before its weights change"
    assert [*committed(trainer).values()] == [[], *([f"{a}-{i}" for a in two for i in range(2)] for two in ("ab", "cd", "ef"))]
    for version in trainer.ledger.versions()[1:]:
        path = Path(version.policy_version.path)
        assert load_file(path / "model.safetensors")["weight"].tolist() == [version.version]
        assert version.metrics["seconds_checkpoint"] > 0
        stages = ("load", "credit", "lease", "train", "settle", "collect")
        assert version.metrics["seconds_step"] == pytest.approx(sum(version.metrics[f"seconds_{name}"] for name in stages)), "not the write"


def test_version_at_staleness_0_is_committed_within_its_step(tmp_path: Path, base: Path) -> None:
    optimizer = Slow()
    trainer = wired(settings(base, tmp_path, max_staleness=0), FakeSource([*"ab"]), optimizer)
    loaded = trainer.take()
    assert loaded
    assert trainer.step(loaded)
    assert (pending(trainer), trainer.ledger.committed_versions(), trainer.follow_ups.are_done) == (None, [0, 1], True)
    metrics = trainer.ledger.versions()[-1].metrics
    stages = ("load", "credit", "lease", "train", "settle", "collect", "checkpoint")
    assert metrics["seconds_step"] == pytest.approx(sum(metrics[f"seconds_{name}"] for name in stages))


def test_staleness_bound_counts_pending_version(tmp_path: Path, base: Path) -> None:
    """All calls are of version 0: those of the second batch are one version behind while 1 is pending, and e and f are too old for 2."""
    optimizer = Slow(lambda number: group("e") in trainer.ledger.skips.reasons() if number == 2 else "pass 2" in optimizer.order)
    trainer = wired(settings(base, tmp_path, max_staleness=1), FakeSource([*"abcd"]), optimizer)
    source = trainer.source
    assert isinstance(source, FakeSource)
    source.names += [*"ef"]
    source.changes |= dict.fromkeys("ef", source.changes["a"])
    trainer.run(follow=False)
    assert optimizer.missed == []
    assert [int(batch.staleness.max()) for batch in optimizer.batches] == [0, 1]
    assert trainer.ledger.skips.reasons() == {group("e"): SkipReason.STALE, group("f"): SkipReason.STALE}
    assert [version.metrics["staleness_max"] for version in trainer.ledger.versions()[1:]] == [0, 1]


def test_look_beside_step_compares_with_pending_version(tmp_path: Path, base: Path) -> None:
    source = FakeSource([*"abcd"])

    def happened(number: int) -> bool:
        if "pass 2" in optimizer.order and "odd" not in source.names:
            source.changes |= {"odd": {**source.changes["a"], "Version": 77}}
            source.names += ["odd"]
        return number == 2 or group("odd") in trainer.ledger.skips.reasons()

    optimizer = Slow(happened)
    trainer = wired(settings(base, tmp_path), source, optimizer)
    trainer.run(follow=False)
    assert optimizer.missed == []
    (row,) = trainer.ledger.skips.read()
    assert (row.group, row.reason, row.head) == (group("odd"), SkipReason.UNKNOWN_VERSION, 1)


def test_working_branch_with_pending_version_equals_ledger_after_its_commit(tmp_path: Path, base: Path) -> None:
    chosen = settings(base, tmp_path)
    trainer = wired(chosen, FakeSource([*"abcd"]))
    trainer.run(follow=False)
    branch, ledger, source = WorkingBranch(trainer.ledger), trainer.ledger, trainer.source
    lease = ledger.begin(source.load([group("e"), group("f")]).rollouts)
    assert lease
    again = source.load([group("e")]).rollouts

    def answers() -> tuple[object, ...]:
        head = branch.head()
        consumed = Consumption(ledger, chosen.trainer, SPEC).read(branch.pending_batch)
        names = [version.version for version in branch.newest(9)]
        parent = head.policy_version.parent, head.parent_branch, head.tokenizer_hash
        return head.version, parent, branch.lineage(), names, branch.steps(), branch.is_busy(), [*branch.claimed(again)], consumed

    before = answers()
    newest = branch.head()
    branch.pending = branch.leased(lease, newest, {"loss": 0.5})
    assert branch.newest(1)[-1].metrics == {"loss": 0.5}
    while_pending = answers()
    assert branch.undo_leases(chosen) == [], "its lease is not one of the dead"
    ledger.commit(lease, checksum="", path="", tokenizer_hash=newest.tokenizer_hash, metrics={"loss": 0.5})
    committed_and_pending = answers()
    branch.pending = None
    after = answers()
    assert while_pending == committed_and_pending == after != before
    assert (after[0], after[2], after[4], after[6]) == (3, [0, 1, 2, 3], 3, [group("e")])


@pytest.mark.parametrize(("names", "follow"), [("abcd", False), ("ab", False), ("ab", True)], ids=["in a step", "at the end", "idle"])
def test_version_that_cannot_be_written_is_undone_and_ends_run(tmp_path: Path, base: Path, names: str, follow: bool) -> None:
    class Full(Slow):
        def write(self, directory: Path) -> None:
            super().write(directory)
            raise OSError(28, "No space left on device")

    optimizer = Full(lambda _: "pass 2" in optimizer.order or names == "ab")
    trainer = wired(settings(base, tmp_path), FakeSource([*names]), optimizer)
    with pytest.raises(CheckpointError, match=r"version 1 could not be written to .* \(\[Errno 28\] No space left on device\)"):
        trainer.run(follow=follow)
    assert (optimizer.missed, optimizer.weight) == ([], 1), "no update without the version before"
    assert [version.status for version in trainer.ledger.versions()] == [VersionStatus.COMMITTED, VersionStatus.ORPHANED]
    assert set.union(*trainer.ledger.finished_groups("run", SPEC)) == set()
    assert list(tmp_path.glob("policy/main/*")) == []
    trainer.ledger.close()
    again = wired(settings(base, tmp_path), FakeSource([*names]))
    again.run(follow=False)
    assert [*committed(again).values()][1] == ["a-0", "a-1", "b-0", "b-1"]


def test_step_whose_branch_another_trainer_took_before_its_lease_is_undone(tmp_path: Path, base: Path) -> None:
    optimizer = Slow(lambda number: f"pass {number + 1}" in optimizer.order)
    trainer = wired(settings(base, tmp_path), FakeSource([*"abcd"]), optimizer)
    other = Ledger(tmp_path, "policy", "main", holder="other-host 7 123 other-boot/pid:[1]")
    settle, loads = trainer.commits.settle, list[int]()

    def overtaken(*, seconds: float = SECONDS) -> None:
        settle(seconds=seconds)
        if trainer.ledger.committed_versions() == [0, 1]:
            lease = other.begin(trainer.source.load([group("other")]).rollouts)
            assert lease
            head = trainer.ledger.version(1)
            other.commit(lease, checksum="", path=head.policy_version.path, tokenizer_hash=head.tokenizer_hash, metrics={})

    def load(version: LedgerVersion) -> FakeOptimizer:
        loads.append(version.version)
        return FakeOptimizer(41.0)

    trainer.commits.settle, trainer.load_optimizer = overtaken, load  # type: ignore[method-assign]
    trainer.run(follow=False)
    assert optimizer.order == ["pass 1", "update 1", "pass 2", "write 1"], "the second step changed nothing"
    assert loads == [2]
    assert committed(trainer) == {0: [], 1: ["a-0", "a-1", "b-0", "b-1"], 2: ["other-0", "other-1"], 3: ["c-0", "c-1", "d-0", "d-1"]}
    newest = trainer.ledger.versions()[-1].policy_version
    assert (newest.parent, load_file(Path(newest.path) / "model.safetensors")["weight"].tolist()) == (2, [42.0])


@pytest.mark.parametrize("reason", ["rows", "ledger"])
def test_step_refused_while_version_is_pending_leaves_it(tmp_path: Path, base: Path, reason: str) -> None:
    """A step is refused by a check of its rows before it is leased, or by the ledger, which knows one of its rollouts."""
    seen: list[int | None] = []

    class Refusing(Slow):
        def step(self, batch: Batch, before_update: Callable[[], None] = lambda: None) -> dict[str, float]:
            if len(self.batches) == 1:
                seen.append(pending(trainer))
                self.order.append("pass 2")
            if reason == "rows" and len(self.batches) == 1:
                self.batches.append(batch)
                raise BadRowsError("row 0 differs by 0.4 nats.", {0: "logprob_gap"})
            return super().step(batch, before_update)

    optimizer = Refusing(lambda number: number > 1 or "pass 2" in optimizer.order)
    source = FakeSource([*"abcde"])
    if reason == "ledger":
        load = source.load

        def named_twice(groups: object) -> object:
            loaded = load(groups)  # type: ignore[arg-type]
            for at, rollout in enumerate(loaded.rollouts):
                if rollout.group.group_id == "c":
                    loaded.rollouts[at] = type(rollout)(rollout.group, "a-0" if rollout.rollout_id == "c-0" else "c-1", 0, 0)
            return loaded

        source.load = named_twice  # type: ignore[assignment, method-assign]
    trainer = wired(settings(base, tmp_path), source, optimizer)
    trainer.ledger.claimed = lambda rollouts, pending=None: {}  # type: ignore[method-assign]
    trainer.run(follow=False)
    assert (optimizer.missed, seen) == ([], [1])
    expected = {"rows": SkipReason.LOGPROB_GAP, "ledger": SkipReason.ALREADY_TRAINED}[reason]
    assert trainer.ledger.skips.reasons() == {group("c"): expected}
    assert [*committed(trainer).values()] == [[], ["a-0", "a-1", "b-0", "b-1"], ["d-0", "d-1", "e-0", "e-1"]]


def test_pending_version_is_committed_and_published_without_next_batch(tmp_path: Path, base: Path) -> None:
    trainer = wired(settings(base, tmp_path), FakeSource([*"ab"]))

    class EnoughError(Exception):
        pass

    end = time.monotonic() + SECONDS

    def arrived(seconds: float) -> bool:
        served = json.loads((tmp_path / "served.json").read_text())
        if served[-1] == 1 or time.monotonic() > end:
            raise EnoughError
        time.sleep(0.002)
        return False

    trainer.arrived = arrived
    with pytest.raises(EnoughError):
        trainer.run(follow=True)
    assert json.loads((tmp_path / "served.json").read_text()) == [0, 0, 1]


def test_max_steps_counts_pending_version_and_waits_for_it(tmp_path: Path, base: Path) -> None:
    released = threading.Event()
    optimizer = Slow(lambda _: released.is_set())
    trainer = wired(settings(base, tmp_path, max_steps=1), FakeSource([*"abcd"]), optimizer)
    wait = trainer._conclude
    trainer._conclude = lambda: (released.set(), wait())[1]  # type: ignore[method-assign]
    trainer.run(follow=True)
    assert (optimizer.missed, optimizer.order) == ([], ["pass 1", "update 1", "write 1"])
    assert json.loads((tmp_path / "served.json").read_text())[-1] == 1


def test_failed_step_leaves_pending_version_to_be_committed(tmp_path: Path, base: Path) -> None:
    class Breaking(Slow):
        def step(self, batch: Batch, before_update: Callable[[], None] = lambda: None) -> dict[str, float]:
            if self.batches:
                self.order.append("pass 2")
                raise StoreError("gone")
            return super().step(batch, before_update)

    optimizer = Breaking(lambda _: "pass 2" in optimizer.order)
    trainer = wired(settings(base, tmp_path), FakeSource([*"abcd"]), optimizer)
    with pytest.raises(StoreError, match="gone"):
        trainer.run(follow=False)
    assert (optimizer.missed, pending(trainer), trainer.ledger.committed_versions()) == ([], None, [0, 1])
    assert trainer.ledger.holder() is None


def test_pending_version_is_committed_after_failure_of_earlier_follow_up(tmp_path: Path, base: Path) -> None:
    trainer = wired(settings(base, tmp_path), FakeSource([*"abcd"]), Slow())

    def fail(step: object) -> None:
        raise StoreError("the store is gone")

    trainer._finish = fail  # type: ignore[method-assign, assignment]
    loads: list[int] = []
    for _ in range(2):
        loaded = trainer.take()
        assert loaded
        assert trainer.step(loaded)
        loads.append(len(loaded.rollouts))
    with pytest.raises(StoreError, match="the store is gone"):
        trainer.run(follow=False)
    assert (loads, trainer.ledger.committed_versions()) == ([4, 4], [0, 1, 2])


@pytest.mark.parametrize("in_time", [True, False])
def test_stop_commits_pending_version_that_is_written_in_time_and_undoes_another(
    tmp_path: Path, base: Path, monkeypatch: pytest.MonkeyPatch, in_time: bool
) -> None:
    monkeypatch.setattr(commits, "_STOP_SECONDS", SECONDS if in_time else 0.05)
    released = threading.Event()
    optimizer = Slow(lambda _: trainer.shutdown.requested is not None if in_time else released.is_set())
    trainer = wired(settings(base, tmp_path), FakeSource([*"ab"]), optimizer)

    def arrived(seconds: float) -> bool:
        if threading.current_thread() is threading.main_thread():  # and not the thread that looks beside the step
            os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.002)
        return False

    trainer.arrived = arrived
    with pytest.raises(Stopped), trainer.shutdown.listening():
        trainer.run(follow=True)
    assert (optimizer.missed, pending(trainer), trainer.ledger.holder()) == ([], None, None)
    assert [version.status for version in trainer.ledger.versions()][1:] == [VersionStatus.COMMITTED if in_time else VersionStatus.ORPHANED]
    if not in_time:
        assert set.union(*trainer.ledger.finished_groups("run", SPEC)) == set()
        released.set()
        assert until(lambda: trainer.follow_ups.are_done)
        assert trainer.ledger.committed_versions() == [0], "what is written too late is not committed"
        trainer.ledger.close()
    again = wired(settings(base, tmp_path), FakeSource([*"ab"]))
    again.run(follow=False)
    assert len(committed(again)) == 2
    names = {path.name for path in (tmp_path / "policy/main").iterdir()}
    assert names == {f"v{version}" for version in committed(again) if version}


def test_two_trainers_of_a_branch_with_pending_versions_train_each_group_once(tmp_path: Path, base: Path) -> None:
    """Two trainers in one process, each with its own holder's name, train each group once; one continues where the other leaves room."""
    names = [f"g{at:02}" for at in range(16)]
    both = [wired(settings(base, tmp_path, groups_per_batch=1, max_staleness=99), FakeSource(names), Slow()) for _ in range(2)]
    failures: list[BaseException] = []
    for at, trainer in enumerate(both):
        trainer.ledger._holder = f"host-{at} 7 123 boot-{at}/pid:[1]"
        trainer.publisher = trainer.publishing = None

    def run(trainer: Trainer) -> None:
        try:
            end = time.monotonic() + 3 * SECONDS
            while len(trainer.ledger.committed_versions()) <= len(names) and time.monotonic() < end:
                trainer.run(follow=False)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(trainer,)) for trainer in both]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    trained = [rollouts for rollouts in committed(both[0]).values() if rollouts]
    assert sorted(trained) == [[f"{name}-0", f"{name}-1"] for name in names]
    versions = [version for version in both[0].ledger.versions() if version.status is VersionStatus.COMMITTED]
    assert [version.policy_version.parent for version in versions] == [None, *(version.version for version in versions[:-1])]
    weights = [load_file(Path(version.policy_version.path) / "model.safetensors")["weight"] for version in versions[-3:]]
    assert np.concatenate(weights).tolist() == [len(names) - 2, len(names) - 1, len(names)], "one step a version, whoever made it"
