"""The queue: company in inserts, one bad body alone, and a bound on what is held."""

from __future__ import annotations

import threading

import pytest

from collector.ingest import MAX_INSERT, Budget, Ingest, Inserter, QueueFullError
from collector.rows import Rows


class RecordedInserts:
    """Keeps what was inserted; fails when the rows hold `bad`. Waits for `gate`."""

    def __init__(self) -> None:
        self.inserted: list[bytes] = []
        self.gate = threading.Event()
        self.entered = threading.Event()

    def __call__(self, rows: bytes) -> None:
        self.entered.set()
        self.gate.wait(10)
        if b"bad" in rows:
            raise RuntimeError("refused")
        self.inserted.append(rows)


def test_waiting_bodies_share_an_insert() -> None:
    inserts = RecordedInserts()
    inserter = Inserter("test", inserts, linger_seconds=0)
    first = inserter.submit(b"a")
    inserts.entered.wait(10)
    others = [inserter.submit(body) for body in (b"b", b"c", b"d")]
    assert not first.done()

    inserts.gate.set()
    for future in (first, *others):
        future.result(10)

    assert inserts.inserted == [b"a", b"bcd"]
    inserter.close()


def test_a_bad_body_fails_alone() -> None:
    inserts = RecordedInserts()
    inserts.gate.set()
    inserter = Inserter("test", inserts, linger_seconds=10)
    good, bad, also_good = (inserter.submit(body) for body in (b"a", b"bad", b"c"))

    inserter.close()

    assert (good.result(0), also_good.result(0), str(bad.exception(0))) == (None, None, "refused")
    assert inserts.inserted == [b"a", b"c"]


def test_an_insert_has_a_bound() -> None:
    inserts = RecordedInserts()
    inserts.gate.set()
    inserter = Inserter("test", inserts, linger_seconds=10)
    half = bytes(MAX_INSERT // 2 + 1)
    futures = [inserter.submit(half), inserter.submit(half)]
    for future in futures[:1]:
        future.result(10)

    inserter.close()

    assert [len(rows) for rows in inserts.inserted] == [len(half), len(half)]


def test_closing_commits_what_waits_and_refuses_more() -> None:
    inserts = RecordedInserts()
    inserts.gate.set()
    inserter = Inserter("test", inserts, linger_seconds=60)
    future = inserter.submit(b"a")

    inserter.close()

    assert future.result(0) is None
    with pytest.raises(QueueFullError):
        inserter.submit(b"b")


def test_the_budget_bounds_what_is_held() -> None:
    budget = Budget(100)
    with budget.charge() as first:
        first.grow_to(60)
        with budget.charge() as second:
            second.grow_to(40)
            with pytest.raises(QueueFullError):
                second.grow_to(41)
        first.grow_to(100)
        assert budget.held == 100
    assert budget.held == 0


def test_a_body_larger_than_the_budget_gets_in_alone() -> None:
    budget = Budget(100)
    with budget.charge() as large:
        large.grow_to(1000)
        with budget.charge() as small, pytest.raises(QueueFullError):
            small.grow_to(1)
    with budget.charge() as small:
        small.grow_to(1)


async def test_queued_rows_are_held_until_committed() -> None:
    inserts = RecordedInserts()
    ingest = Ingest(inserts, inserts, linger_ms=0, queue_bytes=100)
    with ingest.budget.charge() as charge:
        charge.grow_to(70)
        committed = ingest.traces.submit(b"rows")
        charge.release_after(committed)
    assert ingest.budget.held == 70

    inserts.gate.set()
    with ingest.budget.charge() as charge:
        stored = await ingest.store(ingest.traces, lambda: Rows(b"more", 1), charge)

    assert stored == Rows(b"more", 1)
    assert b"".join(inserts.inserted) == b"rowsmore"
    ingest.close()
    assert ingest.budget.held == 0
