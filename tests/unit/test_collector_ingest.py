"""The queue: company in commits, one bad body alone, and a bound on what is held."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from collector.write.ingest import MAX_INSERT, Budget, Charge, Ingest, Inserter, QueueFullError, Refused


@dataclass(frozen=True)
class Piece:
    """A body of the given name, as large as said."""

    name: str
    size: int = 1


class RecordedCommits:
    """Keeps the names of what was committed together; fails when a body is called `bad`. Waits for `gate`."""

    def __init__(self) -> None:
        self.committed: list[str] = []
        self.gate = threading.Event()
        self.entered = threading.Event()

    def __call__(self, bodies: Sequence[Piece]) -> list[Refused]:
        self.entered.set()
        self.gate.wait(60)
        names = "".join(body.name for body in bodies)
        if "bad" in names:
            raise RuntimeError("refused")
        self.committed.append(names)
        return [Refused(len(body.name), body.name) for body in bodies]


def test_inserter_waiting_bodies_share_an_insert() -> None:
    commits = RecordedCommits()
    inserter = Inserter("test", commits, linger_seconds=0)
    first = inserter.submit(Piece("a"))
    commits.entered.wait(60)
    others = [inserter.submit(Piece(name)) for name in "bcd"]
    assert not first.done()

    commits.gate.set()
    for future in (first, *others):
        future.result(10)

    assert commits.committed == ["a", "bcd"]
    inserter.close()


def test_inserter_bad_body_fails_alone() -> None:
    commits = RecordedCommits()
    commits.gate.set()
    inserter = Inserter("test", commits, linger_seconds=10)
    good, bad, also_good = (inserter.submit(Piece(name)) for name in ("a", "bad", "c"))

    inserter.close()

    assert (good.result(0), also_good.result(0), str(bad.exception(0))) == (Refused(1, "a"), Refused(1, "c"), "refused")
    assert commits.committed == ["a", "c"]


def test_inserter_insert_is_bounded_by_max_insert() -> None:
    commits = RecordedCommits()
    commits.gate.set()
    inserter = Inserter("test", commits, linger_seconds=10)
    futures = [inserter.submit(Piece(name, MAX_INSERT // 2 + 1)) for name in "ab"]
    for future in futures[:1]:
        future.result(10)

    inserter.close()

    assert commits.committed == ["a", "b"]


def test_inserter_close_commits_pending_and_refuses_more() -> None:
    commits = RecordedCommits()
    commits.gate.set()
    inserter = Inserter("test", commits, linger_seconds=60)
    future = inserter.submit(Piece("a"))

    inserter.close()

    assert future.result(0) == Refused(1, "a")
    with pytest.raises(QueueFullError):
        inserter.submit(Piece("b"))


def test_budget_bounds_held_bytes() -> None:
    budget = Budget(100)
    with Charge(budget) as first:
        first.grow_to(60)
        with Charge(budget) as second:
            second.grow_to(40)
            with pytest.raises(QueueFullError):
                second.grow_to(41)
        first.grow_to(100)
        assert budget.held == 100
    assert budget.held == 0


def test_budget_admits_oversized_body_alone() -> None:
    budget = Budget(100)
    with Charge(budget) as large:
        large.grow_to(1000)
        with Charge(budget) as small, pytest.raises(QueueFullError):
            small.grow_to(1)
    with Charge(budget) as small:
        small.grow_to(1)


async def test_ingest_holds_budget_of_queued_bodies_until_committed() -> None:
    commits = RecordedCommits()
    ingest = Ingest(Inserter("test", commits, linger_seconds=0), Inserter("other", commits, linger_seconds=0), queue_bytes=100)
    with Charge(ingest.budget) as charge:
        charge.grow_to(70)
        committed = ingest.traces.submit(Piece("first"))
        charge.release_after(committed)
    assert ingest.budget.held == 70

    commits.gate.set()
    with Charge(ingest.budget) as charge:
        refused = await ingest.store(ingest.traces, lambda: Piece("more"), charge)

    assert refused == Refused(4, "more")
    assert "".join(commits.committed) == "firstmore"
    ingest.close()
    assert ingest.budget.held == 0


def test_inserter_bodies_waiting_during_commit_join_next_one() -> None:
    commits = RecordedCommits()
    inserter = Inserter("test", commits, linger_seconds=0)
    first = inserter.submit(Piece("a"))
    commits.entered.wait(60)
    inserter._linger = 60.0
    inserter.submit(Piece("b"))
    inserter._queue[0].since -= 61  # longer than the linger: when the commit ends, nothing but the commit's own end keeps b waiting
    commits.gate.set()
    first.result(10)
    inserter.submit(Piece("c"))
    inserter.close()

    assert commits.committed == ["a", "bc"]
