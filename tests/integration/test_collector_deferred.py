"""Spans that wait: acknowledged when the journal has them, and in the tables for every query, whatever fails meanwhile.

The engine is a real one, in this process; what fails is made to fail by views, by settings, or by the journal's disk.
"""

from __future__ import annotations

import errno
import itertools
import threading
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.resource.v1.resource_pb2 import Resource
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, ScopeSpans, Span

from collector.database import EmbeddedDatabase, EngineRefusedError, Handle
from collector.otlp.requests import TraceBody, trace_body
from collector.otlp.rows import encode_traces
from collector.write import pending_batch, span_staging
from collector.write.ingest import Refused
from collector.write.journal import Journal
from collector.write.span_staging import SpanStaging
from collector.write.write_buffer import WriteBuffer
from tests.support.servers import migrated_engine

START = 1_760_000_000_000_000_000
NEVER = 10_000.0
_numbers = itertools.count(1)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedDatabase]:
    with migrated_engine(tmp_path_factory.mktemp("deferred") / "data") as engine:
        yield engine


@pytest.fixture(name="asking")
def _asking(engine: EmbeddedDatabase) -> Iterator[Handle]:
    handle = engine.handle()
    yield handle
    handle.close()


class Store:
    """One life of the store's spans, and the next after a kill."""

    def __init__(self, engine: EmbeddedDatabase, journals: Path, wait_seconds: float = NEVER) -> None:
        self._engine, self._journals, self._wait = engine, journals, wait_seconds
        self._handles: list[Handle] = []
        self.spans = self._begin()

    def kill(self) -> None:
        """Lose all that is in memory."""
        self.spans = self._begin()

    def close(self) -> None:
        """Leave the engine to the next test."""
        self.spans.close()
        for handle in self._handles:
            handle.close()

    def _begin(self) -> WriteBuffer:
        first, second = self._engine.handle(schema_files=True), self._engine.handle(schema_files=True)
        self._handles += (first, second)
        return WriteBuffer((first, second), self._journals, self._wait)


@pytest.fixture(name="store")
def _store(engine: EmbeddedDatabase, tmp_path: Path) -> Iterator[Store]:
    store = Store(engine, tmp_path / "journals")
    yield store
    store.close()


def body(name: str, spans: int = 2) -> TraceBody:
    """Spans of a service of this name, each with an id of its own."""
    built = [
        Span(trace_id=bytes(15) + b"\1", span_id=next(_numbers).to_bytes(8, "big"), name=name, start_time_unix_nano=START)
        for _ in range(spans)
    ]
    resource = Resource()
    resource.attributes.add(key="service.name").value.string_value = name
    request = ExportTraceServiceRequest(resource_spans=[ResourceSpans(resource=resource, scope_spans=[ScopeSpans(spans=built)])])
    return trace_body(request, request.SerializeToString())


def stored(handle: Handle, *names: str, table: str = "spangrad.rollout_spans") -> list[int]:
    """Spans of each service that a reader finds."""
    counts = [handle.query(f"SELECT count() FROM {table} WHERE ServiceName = '{name}'").body for name in names]
    return [int(count) for count in counts]


def names(count: int) -> list[str]:
    return [f"agent {next(_numbers)}" for _ in range(count)]


def fail_on(monkeypatch: pytest.MonkeyPatch, name: str, code: int = 241) -> None:
    def encode(request: ExportTraceServiceRequest, *places: Any) -> Any:
        if name.encode() in request.SerializeToString():
            raise EngineRefusedError(f"Code: {code}. no memory", code)
        return encode_traces(request, *places)

    monkeypatch.setattr(span_staging, "encode_traces", encode)


@contextmanager
def foreign_view(asking: Handle, refuses: str) -> Generator[None]:
    """Create a foreign view over all spans, which refuses those of which a condition holds, and drop it afterwards."""
    asking.query("CREATE TABLE default.seen (n UInt8) ORDER BY n")
    view = f"SELECT throwIf({refuses}, 'bad') AS n FROM otel.otel_traces"
    asking.query(f"CREATE MATERIALIZED VIEW default.picky TO default.seen AS {view}")
    try:
        yield
    finally:
        asking.query("DROP VIEW default.picky")
        asking.query("DROP TABLE default.seen")


@pytest.mark.parametrize("count", [2, 1200], ids=["by Python", "by the engine"])
def test_write_buffer_several_commits_are_one_insert(store: Store, asking: Handle, count: int) -> None:
    called = names(3)
    for name in called:
        store.spans.commit([body(name, count)])
    assert stored(asking, *called) == [0, 0, 0]

    assert store.spans.settle()

    assert stored(asking, *called) == [count] * 3
    inserts = f"SELECT uniqExact(IngestedAt) FROM spangrad_internal.rollout_spans WHERE ServiceName IN {tuple(called)}"
    assert asking.query(inserts).body == b"1\n"


@pytest.mark.parametrize("count", [2, 1200], ids=["by Python", "by the engine"])
def test_write_buffer_killed_loses_no_commit_and_counts_redelivery_once(store: Store, asking: Handle, tmp_path: Path, count: int) -> None:
    called = names(2)
    for name in called:
        store.spans.commit([body(name, count)])
    journal = (tmp_path / "journals" / "first").read_bytes()
    store.kill()
    assert stored(asking, *called) == [count] * 2

    # Killed again, between the commit and the end of the journal; and the last write is torn.
    (tmp_path / "journals" / "first").write_bytes(journal + journal[-100:])
    store.kill()
    assert stored(asking, *called) == [count] * 2
    assert stored(asking, *called, table="otel.otel_traces") == [2 * count] * 2
    more = names(1)[0]
    store.spans.commit([body(more)])
    store.kill()
    assert stored(asking, *called, more) == [count, count, 2]


def test_pending_batch_undecodable_body_waits_and_is_retried(
    store: Store, asking: Handle, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    before, bad, after = names(3)
    monkeypatch.setattr(pending_batch, "RETRY_SECONDS", 0.0)
    store.spans.commit([body(before)])
    with monkeypatch.context() as patched:
        fail_on(patched, bad)
        store.spans.commit([body(bad)])
        assert not store.spans.settle()
    assert "bytes of acknowledged spans wait in" in caplog.text
    store.spans.commit([body(after)])

    assert store.spans.settle()
    assert stored(asking, before, bad, after) == [2, 2, 2]
    assert stored(asking, before, bad, after, table="otel.otel_traces") == [2, 2, 2]


def test_dead_letter_of_unstorable_body_blocks_no_other_body(
    store: Store, asking: Handle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    called = names(5)
    bad = body(called[2])
    monkeypatch.setattr(pending_batch, "RETRY_SECONDS", 0.0)
    monkeypatch.setattr(WriteBuffer, "_is_due", lambda _: False)
    fail_on(monkeypatch, called[2])
    for name in called:
        store.spans.commit([bad if name == called[2] else body(name)])

    assert not store.spans.settle(), "all of it waits"
    assert stored(asking, *called) == [0] * 5
    assert not store.spans.settle(), "the bad one waits"
    assert stored(asking, *called) == [2, 2, 0, 2, 2]
    store.kill()
    assert stored(asking, *called) == [2, 2, 0, 2, 2], "nothing of it is lost, nor counted twice"
    for settled in (False, True):
        assert store.spans.settle() is settled

    (file,) = (tmp_path / "journals" / pending_batch.DEAD_LETTERS).iterdir()
    assert file.read_bytes() == bad.load()
    assert f"a request with 2 acknowledged spans is in no table, and kept as the dead letter {file}: Code: 241. no memory" in caplog.text
    later = names(1)[0]
    store.spans.commit([body(later)])
    assert store.spans.settle()
    assert stored(asking, later) == [2]


def test_pending_batch_on_full_disk_makes_no_dead_letter(
    store: Store, asking: Handle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    called = names(2)
    monkeypatch.setattr(pending_batch, "RETRY_SECONDS", 0.0)
    with monkeypatch.context() as patched:
        fail_on(patched, called[1], code=243)
        for name in called:
            store.spans.commit([body(name)])
        assert [store.spans.settle() for _ in range(5)] == [False] * 5
    assert not (tmp_path / "journals" / pending_batch.DEAD_LETTERS).exists()
    assert store.spans.settle()
    assert stored(asking, *called) == [2, 2]


def test_pending_batch_with_refusing_table_makes_no_dead_letter(
    store: Store, asking: Handle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    called = names(2)
    monkeypatch.setattr(pending_batch, "RETRY_SECONDS", 0.0)
    for name in called:
        store.spans.commit([body(name)])
    asking.query("ALTER TABLE otel.otel_traces ADD CONSTRAINT never CHECK SpanName = 'nobody''s'")
    assert [store.spans.settle() for _ in range(5)] == [False] * 5
    asking.query("ALTER TABLE otel.otel_traces DROP CONSTRAINT never")

    assert not (tmp_path / "journals" / pending_batch.DEAD_LETTERS).exists()
    assert store.spans.settle()
    assert stored(asking, *called) == [2, 2]


def test_pending_batch_with_refusing_view_is_not_retried_with_every_body(
    store: Store, asking: Handle, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, *called = names(4)
    monkeypatch.setattr(pending_batch, "RETRY_SECONDS", 0.0)
    monkeypatch.setattr(store.spans, "_is_due", lambda: False)
    store.spans.commit([body(before)])
    assert store.spans.settle()
    for name in called:
        store.spans.commit([body(name)])
    with foreign_view(asking, "true"):
        assert [store.spans.settle() for _ in range(5)] == [False] * 5
        left = stored(asking, *called, table="otel.otel_traces")

    assert max(left) <= 2, "rows of the first try at most"
    assert store.spans.settle()
    assert stored(asking, before, *called) == [2] * 4


def test_rollout_spans_view_with_3000_evaluations_needs_memory_once_each(store: Store, asking: Handle) -> None:
    """Were all of them copied to each row, it would take gigabytes, and no insert could hold it."""
    name = names(1)[0]
    span = Span(trace_id=bytes(15) + b"\1", span_id=next(_numbers).to_bytes(8, "big"), name=name, start_time_unix_nano=START)
    for number in range(3000):
        event = span.events.add(name="gen_ai.evaluation.result", time_unix_nano=START + number)
        event.attributes.add(key="gen_ai.evaluation.name").value.string_value = f"judge {number}"
        event.attributes.add(key="gen_ai.evaluation.explanation").value.string_value = "because " * 20
        span.events.add(name="something else", time_unix_nano=START + number)
    resource = Resource()
    resource.attributes.add(key="service.name").value.string_value = name
    request = ExportTraceServiceRequest(resource_spans=[ResourceSpans(resource=resource, scope_spans=[ScopeSpans(spans=[span])])])
    store.spans.commit([trace_body(request, request.SerializeToString())])

    assert store.spans.settle()
    query = f"""SELECT countIf(RowKind = 'span' AND Attributes = map()), uniqExactIf(EventIndex, RowKind = 'evaluation_event'),
        countIf(Attributes['gen_ai.evaluation.name'] = concat('judge ', toString(intDiv(EventIndex - 1, 2))))
        FROM spangrad.rollout_spans WHERE ServiceName = '{name}'"""
    assert asking.query(query).body == b"1\t3000\t3000\n"


@pytest.mark.parametrize(("limit", "value"), [("MAX_BODY", 100), ("MAX_SPANS", 1)])
def test_write_buffer_large_body_is_inserted_at_once_and_answered(
    store: Store, asking: Handle, monkeypatch: pytest.MonkeyPatch, limit: str, value: int
) -> None:
    before, bad, good = names(3)
    store.spans.commit([body(before)])
    monkeypatch.setattr(store.spans, "_is_due", lambda: False)
    monkeypatch.setattr(pending_batch, limit, value)
    with monkeypatch.context() as patched:
        fail_on(patched, bad)
        with pytest.raises(EngineRefusedError, match="no memory"):
            store.spans.commit([body(bad)])
    store.spans.commit([body(good)])
    assert stored(asking, before, bad, good) == [0, 0, 2]

    assert store.spans.settle()
    assert stored(asking, before, bad, good) == [2, 0, 2]


def test_write_buffer_unstorable_span_is_refused_and_not_journaled(store: Store, asking: Handle, tmp_path: Path) -> None:
    (name,) = names(1)
    half = ExportTraceServiceRequest.FromString(body(name).load())
    half.resource_spans[0].scope_spans[0].spans.add(name="short", trace_id=b"\1")
    bad = ExportTraceServiceRequest.FromString(half.SerializeToString())
    del bad.resource_spans[0].scope_spans[0].spans[:2]

    refused = store.spans.commit([trace_body(request, request.SerializeToString()) for request in (bad, half)])

    assert refused == [Refused(1, "span 'short': id 01 has 1 bytes, 16 are right")] * 2
    assert (tmp_path / "journals" / "first").read_bytes().count(b"short") == 1
    store.kill()
    assert stored(asking, name) == [2]


def test_write_buffer_body_that_journal_rejects_is_refused_and_others_kept(
    store: Store, asking: Handle, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: Journal, bodies: Sequence[bytes], others: int) -> None:
        raise OSError(errno.ENOSPC, "no room")

    before, bad, after = names(3)
    store.spans.commit([body(before)])
    with monkeypatch.context() as patched:
        patched.setattr(Journal, "append", full)
        with pytest.raises(EngineRefusedError, match="NOT_ENOUGH_SPACE") as caught:
            store.spans.commit([body(bad)])
    assert not caught.value.of_the_data
    store.spans.commit([body(after)])

    assert store.spans.settle()
    assert stored(asking, before, bad, after) == [2, 0, 2]


def test_write_buffer_with_foreign_view_inserts_each_commit(store: Store, asking: Handle) -> None:
    before, bad, good, after = names(4)
    store.spans.commit([body(before)])
    assert store.spans.settle()
    with foreign_view(asking, f"ServiceName = '{bad}'"):
        store.spans.recheck()
        with pytest.raises(EngineRefusedError) as caught:
            store.spans.commit([body(bad)])
        assert caught.value.of_the_data
        store.spans.commit([body(good)])
        assert stored(asking, before, good) == [2, 2]
    store.spans.recheck()
    store.spans.commit([body(after)])
    assert stored(asking, after) == [0]


def test_write_buffer_with_full_pending_batch_refuses_further_commits(
    store: Store, asking: Handle, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Waiting spans that a view created meanwhile refuses are not reported to senders as bad, and they stay."""
    first, second, third, large = names(4)
    monkeypatch.setattr(pending_batch, "MAX_SPANS", 2)
    monkeypatch.setattr(pending_batch, "RETRY_SECONDS", 0.0)
    monkeypatch.setattr(pending_batch, "MAX_RETRY_SECONDS", 0.0)
    monkeypatch.setattr(store.spans, "_is_due", lambda: False)
    store.spans.commit([body(first)])
    with foreign_view(asking, f"ServiceName = '{first}'"):
        store.spans.commit([body(second)])
        with pytest.raises(EngineRefusedError, match="spans that came before wait: Code: 395") as caught:
            store.spans.commit([body(third)])
        assert not caught.value.of_the_data
        assert not store.spans.settle()
        assert "bytes of acknowledged spans wait in" in caplog.text
        # Rows of the second's spans are made already: they must neither be lost nor join another insert.
        with monkeypatch.context() as patched:
            patched.setattr(pending_batch, "MAX_BODY", 100)
            store.spans.commit([body(large)])
        assert stored(asking, second, third, large) == [0, 0, 2]
    store.spans.commit([body(third)])
    assert store.spans.settle()
    assert stored(asking, first, second, third) == [2, 2, 2]
    assert stored(asking, second, table="otel.otel_traces") == [2]


def test_write_buffer_commit_during_insert_does_not_wait(
    engine: EmbeddedDatabase, tmp_path: Path, asking: Handle, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, third = names(3)
    begun, go_on = threading.Event(), threading.Event()

    def slow(staging: SpanStaging) -> None:
        begun.set()
        assert go_on.wait(60)
        insert(staging)

    insert = SpanStaging.store
    store = Store(engine, tmp_path / "other", wait_seconds=0.05)
    monkeypatch.setattr(pending_batch, "MAX_SPANS", 2)
    monkeypatch.setattr(SpanStaging, "store", slow)
    store.spans.commit([body(first)])
    assert begun.wait(60)

    store.spans.commit([body(second)])
    # It is enough: who comes now waits, as whoever asks does.
    others = [threading.Thread(target=store.spans.commit, args=([body(third)],)), threading.Thread(target=store.spans.settle)]
    for thread in others:
        thread.start()
        thread.join(0.2)
        assert thread.is_alive()
    assert stored(asking, first, second, third) == [0, 0, 0]

    go_on.set()
    for thread in others:
        thread.join(60)
    assert store.spans.settle()
    assert stored(asking, first, second, third) == [2, 2, 2]
    store.close()


def test_write_buffer_commit_during_insert_for_query_waits_for_others(
    engine: EmbeddedDatabase, tmp_path: Path, asking: Handle, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, (first, second) = Store(engine, tmp_path / "other"), names(2)
    begun, go_on = threading.Event(), threading.Event()
    inserting: list[str] = []

    def slow(staging: SpanStaging) -> None:
        inserting.append(threading.current_thread().name)
        begun.set()
        assert go_on.wait(60)
        insert(staging)

    insert = SpanStaging.store
    monkeypatch.setattr(SpanStaging, "store", slow)
    store.spans.commit([body(first)])
    query = threading.Thread(target=store.spans.settle, name="query")
    query.start()
    assert begun.wait(60)
    store.spans.commit([body(second)])
    query.join(0.2)
    assert query.is_alive()
    go_on.set()
    query.join(60)
    assert stored(asking, first, second) == [2, 0]
    store.close()
    assert (inserting, stored(asking, second)) == (["query", threading.current_thread().name], [2])


def test_write_buffer_with_wait_seconds_0_inserts_each_commit(engine: EmbeddedDatabase, tmp_path: Path, asking: Handle) -> None:
    store, (name,) = Store(engine, tmp_path / "other", wait_seconds=0), names(1)
    store.spans.commit([body(name)])
    assert stored(asking, name) == [2]
    store.close()


def test_write_buffer_pending_batch_is_stored_after_wait_seconds(engine: EmbeddedDatabase, tmp_path: Path, asking: Handle) -> None:
    store, (name,) = Store(engine, tmp_path / "other", wait_seconds=0.05), names(1)
    store.spans.commit([body(name)])
    while stored(asking, name) != [2]:
        pass
    store.close()


def test_write_buffer_readers_see_every_acknowledged_commit(store: Store, engine: EmbeddedDatabase) -> None:
    """Three write and each looks for its own at once, while a fourth asks and asks."""
    missing: list[str] = []
    done = threading.Event()

    def write() -> None:
        handle = engine.handle()
        for name in names(5):
            store.spans.commit([body(name)])
            store.spans.settle()
            if stored(handle, name, table="otel.otel_traces") != [2]:
                missing.append(name)
        handle.close()

    def ask() -> None:
        while not done.wait(0.01):
            store.spans.settle()

    writers, asker = [threading.Thread(target=write) for _ in range(3)], threading.Thread(target=ask)
    for thread in (*writers, asker):
        thread.start()
    for thread in writers:
        thread.join()
    done.set()
    asker.join()

    assert missing == []
