"""Leases of the ledger: who may step a branch, when another takes over, and what becomes of the one who was too slow."""

from __future__ import annotations

import errno
import logging
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from hypothesis import given
from hypothesis import strategies as st

from spangrad.errors import LedgerError
from spangrad.leases import LeaseClock, is_dead, shown, this_process
from spangrad.processes import wait_until
from spangrad.types import VersionStatus
from tests.support.processes import ForkedChild
from tests.support.trainers import Place
from trainer.data.source import BatchRollout, Group
from trainer.ledger.ledger import Ledger, ancestry
from trainer.ledger.tables import LEASES, LedgerDatabase
from trainer.step import beating

ELSEWHERE = "other-host 7 123 other-boot/pid:[1]"
FACTS: dict[str, Any] = {"checksum": "float32:01", "path": "/v1", "tokenizer_hash": "tokenizer", "metrics": {}}
BASE = {"checksum": "float32:00", "path": "/v0", "tokenizer_hash": "tokenizer", "run_id": "run"}


def rollouts(*names: str) -> list[BatchRollout]:
    return [BatchRollout(Group("run", "train", "spec", f"group of {name}"), name, 0, 0) for name in names]


def begun(place: Place, **changes: Any) -> Ledger:
    ledger = Ledger(place(), "policy", "main", **changes)
    ledger.register_initial(**BASE)
    return ledger


def test_ledger_begin_while_another_holds_lease_is_refused(place: Place):
    ledger, there = begun(place), Ledger(place(), "policy", "main", holder=ELSEWHERE)
    lease = ledger.begin(rollouts("a"), 0)
    assert lease
    assert (there.begin(rollouts("b"), 0), there.recover(), there.holder()) == (None, [], shown(this_process()))
    ledger.commit(lease, **FACTS)
    assert there.begin(rollouts("b"), 0) is None, "1 is the head by now"
    other_lease = there.begin(rollouts("b"), 1)
    assert other_lease
    assert (other_lease.version, other_lease.parent) == (2, 1)
    there.commit(other_lease, **FACTS)
    with pytest.raises(LedgerError, match="already in another batch"):
        ledger.begin(rollouts("b"))
    assert [(one.version, one.policy_version.parent) for one in ledger.versions()] == [(0, None), (1, 0), (2, 1)]


def test_ledger_expired_lease_is_taken_over_and_cannot_commit(place: Place):
    slow, other = begun(place, lease_seconds=0.01, holder=ELSEWHERE), Ledger(place(), "policy", "main")
    lost = slow.begin(rollouts("a"))
    assert lost
    end = time.monotonic() + 60
    while (taken := other.begin(rollouts("a"), 0)) is None:
        assert time.monotonic() < end
    assert (taken.version, taken.parent) == (2, 0)
    assert [(one.version, one.status) for one in other.versions()] == [
        (0, VersionStatus.COMMITTED), (1, VersionStatus.ORPHANED), (2, None),
    ]  # fmt: skip
    assert not slow.renew(lost)
    with pytest.raises(LedgerError, match=r"the lease of batch \w+ \(version 1\) is gone: it expired and another trainer took over"):
        slow.commit(lost, **FACTS)
    assert slow.recover() == [], "it is not its own any more"
    other.commit(taken, **FACTS)
    assert other.batch(taken.batch_id) == rollouts("a")


def test_ledger_expired_lease_not_taken_over_can_commit(place: Place):
    slow = begun(place, lease_seconds=-1)
    lease = slow.begin(rollouts("a"))
    assert lease
    slow.commit(lease, **FACTS)
    assert slow.committed_versions() == [0, 1]


def test_ledger_heartbeat_extends_lease(place: Place, caplog: pytest.LogCaptureFixture):
    holder, other = begun(place, lease_seconds=0.4, holder=ELSEWHERE), Ledger(place(), "policy", "main")
    lease = holder.begin(rollouts("a"))
    assert lease

    def beats() -> int:
        with holder.database.reading() as connection:
            return connection.execute(sa.select(LEASES.c.beats)).scalar_one()

    now = 0.0
    other._watch = LeaseClock(lambda: now)
    with beating(holder, lease):
        for _ in range(4):  # by the observer's clock, three times as long as a lease
            seen = beats()
            wait_until(lambda seen=seen: beats() > seen, 60, "a heartbeat", poll_seconds=0.01)
            assert other.recover() == []
            now += 0.3
            assert other.recover() == []
    assert other.recover() == []
    now += 0.5
    assert other.recover() == [lease.version]
    caplog.set_level(logging.WARNING)
    with beating(holder, lease):
        wait_until(lambda: "the lease of version 1 is lost" in caplog.text, 60, "the loss of the lease", poll_seconds=0.01)


def test_ledger_lease_of_dead_process_is_taken_over_at_once(place: Place):
    ledger = begun(place)
    child = subprocess.Popen([sys.executable, "-c", "from spangrad.leases import *; print(this_process(), flush=True); input()"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2])  # fmt: skip
    assert child.stdin
    assert child.stdout
    holder = child.stdout.readline().strip()
    child_ledger = Ledger(place(), "policy", "main", holder=holder)
    assert child_ledger.begin(rollouts("a"))
    assert (is_dead(holder), ledger.recover()) == (False, [])
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert is_dead(holder), "a corpse that nobody has collected is dead as well"
    child.wait()
    assert (is_dead(holder), ledger.recover()) == (True, [1])


def test_is_dead_with_hidden_proc_asks_by_signal(monkeypatch: pytest.MonkeyPatch):
    """hidepid=2: the files of a live process are not there for another user."""
    holder = this_process()
    child = subprocess.Popen([sys.executable, "-c", "pass"])
    child.wait()
    monkeypatch.setattr("spangrad.leases.process_start", lambda pid: None)
    assert not is_dead(holder), "its number is in use"
    host, _, started, table = holder.split(" ")
    assert is_dead(f"{host} {child.pid} {started} {table}")

    def forbidden(pid: int, signal: int) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "kill", forbidden)
    assert not is_dead(holder), "a process of another user"


def test_is_dead_without_free_descriptor_is_false(monkeypatch: pytest.MonkeyPatch):
    holder = this_process()

    def refused(*_: object, **__: object) -> str:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(Path, "read_text", refused)
    monkeypatch.setattr(Path, "readlink", refused)
    assert not is_dead(holder)


def test_is_dead_for_other_process_tables_is_false():
    host, pid, started, table = this_process().split(" ")
    assert (host, pid) == (socket.gethostname(), str(os.getpid()))
    assert is_dead(f"{host} {pid} {int(started) - 1} {table}"), "its number was given to another process"
    assert not is_dead(f"{host} {pid} {int(started) - 1} {table}0")
    assert not is_dead(f"clone-of-{host} {pid} {int(started) - 1} {table}"), "a clone of a running machine shares boot and table"
    assert not is_dead(ELSEWHERE)
    assert shown(ELSEWHERE) == "process 7 on other-host"


@given(st.lists(st.tuples(st.floats(0, 100), st.booleans()), min_size=1), st.floats(0.1, 100))
def test_watch_lease_is_over_when_not_renewed_within_its_time(story: list[tuple[float, bool]], seconds: float):
    """An observer ends a lease, with any past, exactly when it saw no new heartbeat for the lease's seconds by its own clock."""
    now, beat, since = 0.0, 0, 0.0
    watch = LeaseClock(lambda: now)
    assert not watch.observe("lease", beat, seconds)
    for passed, renewed in story:
        now += passed
        if renewed:
            beat, since = beat + 1, now
        assert watch.observe("lease", beat, seconds) == (since + seconds <= now)
        assert watch.expired() == (["lease"] if since + seconds <= now else [])


@given(st.data())
def test_ancestry_leads_from_the_first_weights_to_any_head(data: st.DataObject):
    """A tree of versions, each made from one before it: the ancestors of a head are what its parents say, and nothing else."""
    count = data.draw(st.integers(1, 12))
    parents: dict[tuple[str, int], tuple[str, int | None]] = {("main", 0): ("", None)}
    for version in range(1, count):
        parents["main", version] = ("main", data.draw(st.integers(0, version - 1)))
    head = data.draw(st.integers(0, count - 1))
    ancestors = ancestry(parents, "main", head)
    assert (ancestors[0], ancestors[-1]) == (0, head)
    assert [parents["main", one][1] for one in ancestors] == [None, *ancestors[:-1]]


def test_ledger_rollback_moves_head_and_continues_numbers(place: Place):
    ledger = begun(place)
    for name in ("a", "b", "c"):
        ledger.commit(ledger.begin(rollouts(name)), **{**FACTS, "path": f"/{name}"})  # type: ignore[arg-type]
    lost = ledger.begin(rollouts("d"))
    assert lost
    back = Ledger(place(), "policy", "main", holder=ELSEWHERE).rollback(1)
    assert (back.version, back.policy_version.path) == (1, "/a")
    with pytest.raises(LedgerError, match="the branch was rolled back"):
        ledger.commit(lost, **FACTS)
    assert (ledger.frontier(), ledger.lineage(), ledger.committed_versions()) == (back, [0, 1], [0, 1, 2, 3])
    assert set.union(*ledger.finished_groups("run", "spec")) == {("train", f"group of {name}") for name in "abc"}, (
        "d is free, b and c are used"
    )
    assert ledger.begin(rollouts("d"), 3) is None, "whoever still holds the weights of 3 must load 1"
    again = ledger.begin(rollouts("d"), 1)
    assert again
    assert (again.version, again.parent) == (5, 1)
    ledger.commit(again, **FACTS)
    assert ledger.lineage() == [0, 1, 5]
    assert [(one.version, one.policy_version.parent, one.status) for one in ledger.versions()] == [
        (0, None, "committed"), (1, 0, "committed"), (2, 1, "committed"), (3, 2, "committed"), (4, 3, "orphaned"), (5, 1, "committed"),
    ]  # fmt: skip
    ledger.rollback(3)
    assert ledger.lineage() == [0, 1, 2, 3]
    for version in (4, 9):
        with pytest.raises(LedgerError, match=f"branch main of policy has committed no version {version}"):
            ledger.rollback(version)


def test_ledger_pins_belong_to_policy(place: Place):
    ledger, other = begun(place), Ledger(place(), "policy", "other")
    for _ in range(2):
        other.pin(0)
    assert (ledger.pinned(), Ledger(place(), "another", "main").pinned()) == ({0}, set())
    with pytest.raises(LedgerError, match="policy has no committed version 1"):
        ledger.pin(1)
    for _ in range(2):
        ledger.unpin(0)
    assert other.pinned() == set()


@pytest.mark.parametrize(
    ("url", "sentence"),
    [
        ("mysql://host/name", "trainer.ledger_url names 'mysql', which the ledger does not know. Give sqlite:///FILE or postgresql://"),
        ("nonsense", "trainer.ledger_url is no URL of a database."),
        ("postgresql://me:secret@127.0.0.1:9/x", r"the ledger postgresql\+psycopg://me:\*\*\*@127.0.0.1:9/x failed \(connection failed"),
        ("sqlite:////nowhere/x.db", r"the ledger sqlite:////nowhere/x.db failed \(unable to open database file\)"),
    ],
)
def test_ledger_database_with_invalid_url_raises_without_secret(url: str, sentence: str):
    with pytest.raises(LedgerError, match=sentence) as caught:
        LedgerDatabase(url)
    assert "secret" not in str(caught.value)


RACE = """
import os
import sys
from pathlib import Path
from tests.integration.test_trainer_leases import race
place, names, *outputs = sys.argv[1:]
for output in map(Path, outputs):
    if not os.fork():
        with output.open("w") as sys.stdout:
            race(place, output.parent.name, names)
        os._exit(0)
sys.exit(any([os.wait()[1] for _ in outputs]))
"""
"""Program of racers, a process for each output, in a directory of its branch's name: what a process imports costs more than its race."""


def race(place: str, branch: str, names: str) -> None:
    """Train every rollout that is left on a branch, until none is; say which version was made of which."""
    ledger = Ledger(Path(place) if place.startswith("/") else place, "policy", branch)
    while left := [
        name for name in names.split(",") if ("train", f"group of {name}") not in set.union(*ledger.finished_groups("run", "spec"))
    ]:
        try:
            lease = ledger.begin(rollouts(left[0]))
        except LedgerError:
            if not set.union(*ledger.finished_groups("run", "spec")) >= {("train", f"group of {left[0]}")}:
                raise
            continue  # another process was faster
        if lease:
            with beating(ledger, lease):
                ledger.commit(lease, **FACTS)
            print(lease.version, left[0], flush=True)


def test_ledger_racing_trainers_train_each_rollout_once(place: Place, tmp_path: Path):
    """Four processes, two on each of two branches."""
    names = [f"r{i}" for i in range(20)]
    branches = ("main", "other")
    for branch, base in zip(branches, ("00", "99"), strict=True):
        Ledger(place(), "policy", branch).register_initial(**{**BASE, "checksum": f"float32:{base}"})
        (tmp_path / branch).mkdir()
    outputs = [tmp_path / branch / str(number) for branch in branches for number in range(2)]
    env = {"PYTHONPATH": str(Path(__file__).parents[2])}
    racers = ForkedChild("racers", ["-c", RACE, str(place()), ",".join(names), *map(str, outputs)], tmp_path / "log", env)
    try:
        assert racers.process.wait(120) == 0, racers.log.read_text()
    finally:
        racers.stop(grace_seconds=0)  # those that hang would outlive us: only the process that forked them ends with ours
    trained: dict[str, list[tuple[int, str]]] = {branch: [] for branch in branches}
    for output in outputs:
        lines = [line.split() for line in output.read_text().splitlines()]
        trained[output.parent.name] += [(int(version), name) for version, name in lines]
    numbers = sorted(version for branch in branches for version, _ in trained[branch])
    assert numbers == list(range(2, 2 + 2 * len(names))), "a number was handed out twice, or a rollout trained twice"
    for branch in branches:
        assert sorted(name for _, name in trained[branch]) == sorted(names)
        ledger = Ledger(place(), "policy", branch)
        versions = ledger.versions()
        assert [one.policy_version.parent for one in versions] == [None, *(one.version for one in versions[:-1])], "one line, no fork"
        assert {one.version: [row.rollout_id for row in ledger.batch(one.policy_version.batch_id or "")] for one in versions[1:]} == {
            version: [name] for version, name in trained[branch]
        }
