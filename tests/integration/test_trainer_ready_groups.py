"""Groups that are ready: what an incremental look says is what a look at everything would say, whatever happened in between."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import sqlalchemy as sa
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from sqlalchemy import event

from spangrad.errors import LedgerError
from tests.support.policies import skip, trainer_settings
from tests.support.trainers import Place
from trainer.data import ready_groups
from trainer.data.ready_groups import ReadyGroups
from trainer.data.source import BatchRollout, Group
from trainer.ledger.demand import Consumption
from trainer.ledger.ledger import BatchLease, Ledger
from trainer.ledger.skips import SkipReason

BASE = {"checksum": "float32:00", "path": "/v0", "tokenizer_hash": "tokenizer", "run_id": "run"}
MADE = {"checksum": "float32:01", "path": "/v1", "tokenizer_hash": "tokenizer", "metrics": {}}
SETTINGS = trainer_settings(run_id="run")
OTHER_HOST = "other-host 7 123 other-boot/pid:[1]"
Ledgers = tuple[Ledger, Ledger]


def group(name: str) -> Group:
    return Group("run", "train", "spec", name)


def rollouts(*names: str) -> list[BatchRollout]:
    return [BatchRollout(group(name), f"{name}-{number}", 0, 0) for name in names for number in range(2)]


class Whole:
    """A source that forgets what is released, and remembers it when it is told to."""

    build_spec = "spec"

    def __init__(self) -> None:
        self.all: list[Group] = []
        self.released: set[Group] = set()
        self.list: list[Group] = []

    def ready(self) -> list[Group]:
        known = [one for one in self.all if one not in self.released]
        if known != self.list:
            self.list = known
        return self.list

    def release(self, groups: Iterable[Group]) -> None:
        self.released |= set(groups)

    def rescan(self) -> None:
        self.released = set()


def begun(place: Path | str, branch: str = "main", holder: str | None = None) -> Ledger:
    ledger = Ledger(place, "policy", branch, holder=holder)
    if ledger.frontier() is None:
        ledger.register_initial(**BASE)
    return ledger


@pytest.fixture
def ledgers(place: Place) -> Iterator[Ledgers]:
    """Yield the ledger as this process has it, and as a trainer on another host."""
    where = place()
    both = begun(where), begun(where, holder=OTHER_HOST)
    yield both
    for ledger in both:
        ledger.close()


def train(ledger: Ledger, *names: str) -> None:
    lease = ledger.begin(rollouts(*names))
    assert lease
    ledger.commit(lease, **MADE)  # type: ignore[arg-type]


def names(groups: Iterable[Group]) -> list[str]:
    return [one.group_id for one in groups]


def test_look_omits_trained_leased_and_skipped_groups_until_undone(ledgers: Ledgers) -> None:
    ledger, other = ledgers
    source, ready = Whole(), ReadyGroups(ledger, SETTINGS)
    source.all = [group(name) for name in "abcdef"]
    assert names(ready.poll(source)) == [*"abcdef"]
    train(other, "a")
    assert names(ready.poll(source)) == [*"bcdef"]
    assert names(source.released) == ["a"]
    lease = other.begin(rollouts("b", "c"))
    assert lease
    assert (names(ready.poll(source)), names(source.released)) == ([*"def"], ["a"]), "what may be undone is not forgotten"
    other.recover()
    assert names(ready.poll(source)) == [*"bcdef"]
    skip(other, [group("d")], SkipReason.EQUAL)
    assert names(ready.poll(source)) == [*"bcef"]
    other.skips.restore()
    assert names(ready.poll(source)) == [*"bcdef"]
    source.released.discard(group("a"))  # a late span made a new revision of it
    assert names(ready.poll(source)) == [*"bcdef"]


def test_look_at_unchanged_ledger_asks_one_statement(place: Place) -> None:
    ledger = begun(place())
    source, ready = Whole(), ReadyGroups(ledger, SETTINGS)
    source.all = [group(name) for name in "abc"]
    train(ledger, "a")
    for _ in range(2):
        ready.poll(source)
    statements: list[str] = []

    def note(_: object, __: object, statement: str, *___: object) -> None:
        statements.append(statement)

    event.listen(ledger.database.engine, "before_cursor_execute", note)
    assert names(ready.poll(source)) == [*"bc"]
    assert [statement for statement in statements if not statement.startswith("BEGIN")] == [
        "SELECT changes.number, changes.freed \nFROM changes"
    ]
    ledger.close()


def test_look_with_commit_between_its_statements_omits_its_groups_at_next(ledgers: Ledgers, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger, other = ledgers
    source, ready = Whole(), ReadyGroups(ledger, SETTINGS)
    source.all = [group(name) for name in "abcd"]
    assert names(ready.poll(source)) == [*"abcd"]
    train(other, "a")
    finished, committed = ready_groups.finished, iter("bc")

    def with_commit(*arguments: Any, **options: Any) -> Any:
        read = finished(*arguments, **options)
        for name in committed:
            train(other, name)
        return read

    monkeypatch.setattr(ready_groups, "finished", with_commit)
    assert names(ready.poll(source)) == [*"bcd"]
    assert names(ready.poll(source)) == ["d"]


def test_look_with_lease_between_its_statements_loses_no_group(ledgers: Ledgers) -> None:
    ledger, other = ledgers
    source, ready, leases = Whole(), ReadyGroups(ledger, SETTINGS), list[BatchLease | None]()
    source.all = [group(name) for name in "ab"]

    def lease_after_leases_are_read(_: object, __: object, statement: str, *___: object) -> None:
        if statement.startswith("SELECT leases.batch_id") and not leases:
            leases.append(other.begin(rollouts("a")))

    event.listen(ledger.database.engine, "after_cursor_execute", lease_after_leases_are_read)
    ready.poll(source)
    assert [lease.version for lease in leases if lease] == [1]
    assert (names(ready.poll(source)), source.released) == (["b"], set()), "what may be undone is not forgotten"
    other.recover()
    assert names(ready.poll(source)) == [*"ab"]


def test_look_at_10000_groups_matches_a_full_read(tmp_path: Path) -> None:
    ledger = begun(tmp_path)
    source, ready = Whole(), ReadyGroups(ledger, SETTINGS)
    source.all = [group(f"{number:05}") for number in range(5000)]
    train(ledger, *(f"{number:05}" for number in range(0, 5000, 2)))
    assert len(ready.poll(source)) == 2500
    source.all += [group(f"{number:05}") for number in range(5000, 10_000)]
    train(ledger, *(f"{number:05}" for number in range(5000, 10_000, 2)))
    assert len(ready.poll(source)) == 5000
    ledger.close()


def test_groups_of_versions_orphaned_elsewhere_are_ready_and_counted_again(ledgers: Ledgers) -> None:
    ledger, other = ledgers
    source, ready, consumption = Whole(), ReadyGroups(ledger, SETTINGS), Consumption(ledger, SETTINGS, "spec")
    source.all += [group(name) for name in "abc"]
    for name in "abc":
        train(ledger, name)
        assert consumption.read().trained == len(ledger.lineage()) - 1
    assert (names(ready.poll(source)), ledger.lineage()) == ([], [0, 1, 2, 3])
    assert other.orphan(other.versions([2, 3]), 1)
    assert (names(ready.poll(source)), ledger.lineage()) == (["b", "c"], [0, 1])
    assert consumption.read() == Consumption(ledger, SETTINGS, "spec").read()
    assert (ledger.committed_versions(), consumption.read().trained) == ([0, 1], 1)


EVENTS = st.lists(
    st.sampled_from(
        ["arrive", "again", "lease", "commit", "undo", "skip", "restore", "elsewhere", "rollback", "orphan", "look", "restart"]
    ),
    max_size=30,
)


@given(EVENTS, st.randoms(use_true_random=False))
@hypothesis_settings(max_examples=60, deadline=None)
def test_look_agrees_with_full_read_after_any_events(events: list[str], random) -> None:  # type: ignore[no-untyped-def]
    """Law: after changes of the ledger by any holder and in any order, no group is missed, and none comes twice or is counted twice."""
    with TemporaryDirectory() as directory:
        ledger, branch = begun(Path(directory)), begun(Path(directory), "elsewhere")
        other = begun(Path(directory), holder=OTHER_HOST)
        source, ready, consumption = Whole(), ReadyGroups(ledger, SETTINGS), Consumption(ledger, SETTINGS, "spec")
        lease: BatchLease | None = None

        def free() -> list[str]:
            finished = set.union(*ledger.finished_groups("run", "spec"))
            return [one.group_id for one in source.all if ("train", one.group_id) not in finished]

        def train_elsewhere(chosen: list[str]) -> None:
            # A group that this branch has trained may be free in the other one.
            if fresh := [name for name in chosen if name not in trained]:
                train(branch, *fresh)
                trained.update(fresh)

        def look() -> None:
            assert names(ready.poll(source)) == free()
            pending = lease.batch_id if lease else None
            assert consumption.read() == Consumption(ledger, SETTINGS, "spec").read()
            assert consumption.read(pending) == Consumption(ledger, SETTINGS, "spec").read(pending)

        def orphan_newest() -> None:
            newest = [version for version in other.versions(other.lineage()) if version.policy_version.batch_id][-random.randint(1, 3) :]
            if newest and not lease:
                other.orphan(newest, newest[0].policy_version.parent or 0)

        trained = set[str]()
        acts: dict[str, Callable[[list[str]], object]] = {
            "skip": lambda chosen: skip(other, [group(name) for name in chosen], SkipReason.STALE),
            "restore": lambda _: other.skips.restore(random.sample([*names(other.skips.reasons())], min(1, len(other.skips.reasons())))),
            "elsewhere": train_elsewhere,
            "orphan": lambda _: orphan_newest(),
            "rollback": lambda _: None if lease else other.rollback(random.choice(other.committed_versions())),
            "arrive": lambda _: source.all.extend([group(f"g{len(source.all) + number}") for number in range(random.randint(1, 3))]),
            "again": lambda _: source.released.difference_update(
                random.sample(sorted(source.released, key=str), min(2, len(source.released)))
            ),
        }
        for name in events:
            chosen = random.sample(free(), min(2, len(free())))
            if name in acts:
                acts[name](chosen)
            elif name == "lease" and not lease and chosen:
                lease = other.begin(rollouts(*chosen))
            elif name == "commit" and lease:
                other.commit(lease, **MADE)  # type: ignore[arg-type]
                lease = None
            elif name == "undo" and lease:
                other.recover()
                lease = None
            elif name == "restart":
                source.released, ready, consumption = set(), ReadyGroups(ledger, SETTINGS), Consumption(ledger, SETTINGS, "spec")
            elif name == "look":
                look()
        look()
        for opened_ledger in (ledger, branch, other):
            opened_ledger.close()


def test_remembered_reads_again_only_after_changes(ledgers: Ledgers) -> None:
    ledger, other = ledgers
    reads: list[int] = []

    def read(connection: sa.Connection) -> int:
        reads.append(1)
        return len(reads)

    assert [ledger.database.remembered("x", read) for _ in range(3)] == [1, 1, 1]
    train(other, "a")
    assert [ledger.database.remembered("x", read) for _ in range(2)] == [2, 2]
    with pytest.raises(LedgerError, match="has no committed version 77"):
        other.pin(77)
    other.recover()
    assert ledger.database.remembered("x", read) == 2, "what was rolled back, or found nothing to do, is no change"
    assert ledger.committed_versions() == [0, 1]
    ledger.rollback(0)
    assert (other.lineage(), other.database.remembered("y", lambda _: 1)) == ([0], 1)
