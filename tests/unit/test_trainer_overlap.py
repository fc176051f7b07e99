"""Work beside a step: looks for the next batch, and follow-ups of the last commit; their order, their errors, and waits for them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest

from spangrad.errors import SpangradError, StoreError
from spangrad.types import PolicyVersion
from tests.support.trainers import FakeOptimizer, FakePublisher, FakeSource, committed, group, settings, wired, write_base
from trainer.data.batch import Batch
from trainer.data.source import GroupReader
from trainer.ledger.skips import SkipReason
from trainer.ledger.store_retries import retrying_client
from trainer.overlap import FollowUps, Lookahead
from trainer.retries import Outage, without_retries
from trainer.shutdown import Shutdown, Stopped

SECONDS = 30.0
"""Longest wait for what must happen beside a step."""


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return write_base(tmp_path / "base")


class Watchful(FakeOptimizer):
    """Ends a step only once something has happened beside it."""

    def __init__(self, happened: Callable[[int], bool]) -> None:
        super().__init__()
        self.happened = happened
        self.missed: list[int] = []

    def step(self, batch: Batch, before_update: Callable[[], None] = lambda: None) -> dict[str, float]:
        metrics = super().step(batch, before_update)
        end = time.monotonic() + SECONDS
        while not self.happened(len(self.batches)):
            if time.monotonic() > end:
                self.missed.append(len(self.batches))
                break
            time.sleep(0.005)
        return metrics


def test_next_batch_is_loaded_and_filtered_groups_skipped_while_step_is_under_way(tmp_path: Path, base: Path):
    source = FakeSource([*"ab"])
    loads: list[list[str]] = []
    load = source.load
    source.load = lambda groups: (loads.append([group.group_id for group in groups]), load(groups))[1]  # type: ignore[method-assign]

    def happened(step: int) -> bool:
        if step == 1 and len(source.names) == 2:
            source.names += ["equal", *"cd"]
            shared = source.changes["a"]
            source.changes |= dict.fromkeys("cd", shared) | {"equal": {**shared, "Rewards.Value": [1.0]}}
        return step > 1 or (group("equal") in trainer.ledger.skips.reasons() and len(loads) > 1)

    optimizer = Watchful(happened)
    trainer = wired(settings(base, tmp_path, skip_equal_groups=True), source, optimizer)
    trainer.run(follow=False)
    assert optimizer.missed == []
    assert trainer.ledger.skips.reasons() == {group("equal"): SkipReason.EQUAL}
    assert list(committed(trainer).values()) == [[], ["a-0", "a-1", "b-0", "b-1"], ["c-0", "c-1", "d-0", "d-1"]]
    assert [name for names in loads for name in names] == ["a", "b", "equal", "c", "d"], "each once"


@pytest.mark.parametrize("overlaps", [True, False])
def test_version_is_published_beside_next_step_only_where_rollouts_may_be_older(tmp_path: Path, base: Path, overlaps: bool):
    held = threading.Event()

    class Slow(FakePublisher):
        def publish(self, version: PolicyVersion, *, again: bool = False, weights: object = None) -> float:
            if version.version == 1:
                held.wait(SECONDS if overlaps else 0.01)
            return super().publish(version, again=again, weights=weights)

    def happened(step: int) -> bool:
        if step == 2 and overlaps:
            held.set()
        return True

    source, optimizer = FakeSource([*"ab"]), Watchful(happened)
    trainer = wired(settings(base, tmp_path, max_staleness=1 if overlaps else 0), source, optimizer)
    source.version = lambda: trainer.ledger.committed_versions()[-1]
    publisher = Slow(tmp_path / "served.json")
    assert trainer.publishing
    trainer.publishing.publisher = publisher
    for step in (1, 2):
        batch = trainer.take()
        assert batch
        assert trainer.step(batch)
        if step == 1:
            assert trainer.follow_ups.are_done is not overlaps
            assert publisher.served("policy") == (0 if overlaps else 1)
            source.names, source.changes = [*"cd"], dict.fromkeys("cd", source.changes["a"])
    trainer.follow_ups.wait()
    assert (len(committed(trainer)), publisher.served("policy")) == (3, 2)
    assert [version.version for version in trainer.mirror.written][-2:] == [1, 2], "in the order of the commits"  # type: ignore[attr-defined]


def test_follow_ups_after_failure_are_skipped_and_error_is_raised():
    follow_ups, done = FollowUps(), list[int]()

    def fail() -> None:
        raise StoreError("the store is gone")

    for work in (lambda: done.append(1), fail, lambda: done.append(2)):
        follow_ups.submit(work)
    with pytest.raises(StoreError, match="the store is gone"):
        follow_ups.wait()
    with pytest.raises(StoreError, match="the store is gone"):
        follow_ups.check()
    assert (done, follow_ups.are_done) == ([1], True)
    follow_ups.submit(lambda: done.append(3), always=True)
    follow_ups.submit(lambda: done.append(4))
    follow_ups.settle()
    assert done == [1, 3], "a version is committed, and nothing follows"


def test_follow_ups_settle_ends_early_once_condition_holds_or_time_is_over():
    follow_ups, held, done = FollowUps(), threading.Event(), list[int]()
    follow_ups.submit(lambda: done.append(1))
    follow_ups.submit(lambda: held.wait(SECONDS))  # type: ignore[arg-type, return-value]
    follow_ups.settle(lambda: done == [1])
    assert not follow_ups.are_done
    follow_ups.settle(seconds=0.05)
    assert not follow_ups.are_done
    held.set()
    follow_ups.settle()
    assert follow_ups.are_done


def test_lookahead_during_store_hang_delays_no_stop():
    held, looking = threading.Event(), threading.Event()

    def look() -> None:
        looking.set()
        held.wait(SECONDS)

    def stop() -> None:
        with Lookahead(look, lambda: True).beside():
            looking.wait(SECONDS)
            raise Stopped

    began = time.monotonic()
    with pytest.raises(Stopped):
        stop()
    assert time.monotonic() - began < SECONDS / 2
    held.set()


def test_lookahead_store_outage_is_tolerated_and_other_errors_are_raised_after_step(caplog: pytest.LogCaptureFixture):
    calls = 0

    def look() -> None:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise StoreError("the store does not answer.")
        if calls == 3:
            raise SpangradError("too many groups have failed")

    lookahead = Lookahead(look, lambda: True)
    with lookahead.beside():
        end = time.monotonic() + SECONDS
        while calls < 3 and time.monotonic() < end:
            time.sleep(0.001)
    with pytest.raises(SpangradError, match="too many groups"):
        lookahead.check()
    lookahead.check()
    assert (calls, caplog.text.count("does not answer")) == (3, 1)


def test_lookahead_whose_wait_for_arrivals_fails_looks_again(caplog: pytest.LogCaptureFixture):
    """A store that is not ours is polled, and a poll fails where it does not answer."""
    starts, waits = list[int](), list[int]()

    def arrived() -> bool:
        waits.append(1)
        if len(waits) == 1:
            raise StoreError("the store does not answer.")
        return True

    with Lookahead(lambda: starts.append(1), arrived).beside():
        end = time.monotonic() + SECONDS
        while len(starts) < 2 and time.monotonic() < end:
            time.sleep(0.001)
    assert len(starts) >= 2
    assert caplog.text.count("does not answer") == 1


class HalfAway:
    """A store client that answers queries of transitions, and no others."""

    url = "http://store"

    def __init__(self) -> None:
        self.failures = 0

    def query_arrow(self, query: str, **_: object) -> pa.Table:
        if "FROM spangrad_internal.transitions" in query:
            return pa.table({})
        self.failures += 1
        if self.failures > 1:
            pytest.fail("a failed read of builds was repeated")
        raise StoreError("the store is away.")


def test_load_without_retries_fails_at_first_error_of_either_query(base: Path, tmp_path: Path):
    chosen, client = settings(base, tmp_path / "policies"), HalfAway()
    reader = GroupReader(retrying_client(client, Outage("the span store"), Shutdown()), chosen)  # type: ignore[arg-type]
    with without_retries(), pytest.raises(StoreError, match="the store is away"):
        reader.load([group("a")])
    assert client.failures == 1
