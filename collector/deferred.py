"""Spans that are acknowledged when the journal has them, and reach the tables many at a time.

In: `TraceBody`s; whoever is about to read. Out: for each body what was refused of it; tables that hold all that was acknowledged.
Invariant: what was acknowledged is in the tables or in the journal, whatever the kill point (it may be in both: law 1), and `settle`
returns when all that was acknowledged before is in the tables.

A part of a table costs its making, and its row's merging, by the part: inserts of thousands of spans are dear (docs/decisions/0013).
So rows wait, staged in the engine's memory, until there are many, or somebody asks, or a while has gone by. When rows in memory are
lost, because staging failed in its middle or the process ended, they are made anew from the journal.

Bodies are deferred only while every view that an insert fills is the schema's own, and no table has changed since the start: these
never refuse a span. Otherwise each commit is an insert, and a view's refusal is told to the sender.
"""

from __future__ import annotations

import errno
import logging
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from collector.bodies import TraceBody, trace_body
from collector.engine import EngineRefusedError, Handle
from collector.ingest import MAX_INSERT, Refused
from collector.journal import Journal
from collector.migrations import materialized_views
from collector.span_staging import SpanStaging

logger = logging.getLogger(__name__)

MAX_SPANS = 20_000
"""Spans that wait at most, but for those of one commit."""
MAX_BYTES = 96 * 2**20
"""Bytes of bodies that wait at most, but for those of one commit."""
RETRY_SECONDS, MAX_RETRY_SECONDS = 1.0, 8.0
"""After which storing what waits is tried again, the first time and later."""
_TABLES = """
SELECT sum(cityHash64(create_table_query)), countIf(engine = 'MaterializedView' AND NOT (database = 'otel' AND name IN ({views})))
FROM system.tables
WHERE database = 'otel' AND engine LIKE '%MergeTree' OR engine = 'MaterializedView' AND NOT is_temporary"""


class DeferredSpans:
    """Commits spans through one handle, now or later."""

    def __init__(self, handle: Handle, journal: Path, wait_seconds: float) -> None:
        """Bring what the journal holds into the tables, if that can be done now, and begin.

        Args:
            handle: nobody else uses it.
            journal: a file; created where there is none.
            wait_seconds: how long a span waits at most, unless the engine fails. 0: each commit is an insert.
        """
        self._handle = handle
        self._staging = SpanStaging(handle)
        self._journal = Journal(journal)
        self._wait = wait_seconds
        self._lock = threading.Lock()
        """Of all of the above."""
        self._made, _ = self._tables()
        self._plain = False
        """Whether the tables are as the schema made them."""
        self._changed = True
        """Whether that must be looked at."""
        self._failed: EngineRefusedError | None = None
        """Why what waits could not be stored, the last time."""
        self._pause = RETRY_SECONDS
        self._again = 0.0
        """When that is tried again."""
        self._since = 0.0
        self._woken = threading.Condition()
        self._closing = False
        self.settle()
        self._thread = threading.Thread(target=self._run, name="settle-traces", daemon=True)
        self._thread.start()

    def commit(self, bodies: Sequence[TraceBody]) -> list[Refused]:
        """Take all spans of all bodies: when it returns they are in the journal, or in the tables.

        Returns:
            What could not be stored of each body.

        Raises:
            EngineRefusedError: none of them was taken.
        """
        with self._lock:
            self._look_at_tables()
            deferring = self._plain and self._wait > 0
            if self._journal.size and (not deferring or self._is_full() or not self._staging.held):
                self._store_others()
            return self._defer(bodies) if deferring else self._staging.commit(bodies)

    def settle(self) -> bool:
        """Bring all that was acknowledged into the tables: whether that could be done; if not, the log says why. Any thread may ask."""
        # It grows before an acknowledgement, and is empty only after the commit.
        if not self._journal.size:
            return True
        with self._lock:
            try:
                self._store()
            except EngineRefusedError:
                return False
        return True

    def recheck(self) -> None:
        """Look at the tables before the next commit: they may have been changed."""
        self._again = 0.0
        self._changed = True

    def close(self) -> None:
        """Bring everything into the tables, if that can be done; else the journal keeps it."""
        with self._woken:
            self._closing = True
            self._woken.notify()
        self._thread.join()
        self.settle()
        self._journal.close()

    def _look_at_tables(self) -> None:
        if not self._changed:
            return
        # First: they may be changed again meanwhile.
        self._changed = False
        try:
            self._plain = self._tables() == (self._made, 0)
        except EngineRefusedError:
            self._changed = True
            raise

    def _defer(self, bodies: Sequence[TraceBody]) -> list[Refused]:
        refused = self._staging.stage(bodies)
        try:
            self._journal.append([body.raw for body, its in zip(bodies, refused, strict=True) if body.spans > its.count])
        except OSError as error:
            # What is staged now is more than what is acknowledged.
            self._staging.forget()
            raise _refused(error) from None
        with self._woken:
            if self._journal.size and (not self._since or self._is_full()):
                self._since = self._since or time.monotonic()
                self._woken.notify()
        return refused

    def _store_others(self) -> None:
        """Store what waits, for a body that can't be taken before."""
        try:
            self._store()
        # Whatever is wrong with what waits, it is not this sender's.
        except EngineRefusedError as error:
            raise EngineRefusedError(f"Code: 425. DB::Exception: spans that came before wait: {error} (SYSTEM_ERROR)", 425) from None

    def _store(self) -> None:
        """Bring all that the journal holds into the tables."""
        if not self._journal.size:
            return
        if self._failed and time.monotonic() < self._again:
            raise EngineRefusedError(str(self._failed), self._failed.code)
        try:
            self._try_to_store()
        except EngineRefusedError as error:
            logger.error("%d bytes of acknowledged spans wait in %s: %s", self._journal.size, self._journal.path, error)
            # Each try may leave rows in the first of its tables: fewer and fewer are made.
            self._pause = min(2 * self._pause, MAX_RETRY_SECONDS) if self._failed else RETRY_SECONDS
            self._failed, self._again = error, time.monotonic() + self._pause
            raise
        self._failed, self._since = None, 0.0

    def _try_to_store(self) -> None:
        try:
            if not self._staging.held:
                self._restage()
            self._staging.store()
            self._journal.clear()
        except OSError as error:
            # What is in the tables already counts once, when it comes again.
            raise _refused(error) from None

    def _restage(self) -> None:
        """Make the rows anew, which were lost: all of them, or none."""
        batch: list[TraceBody] = []
        size = 0
        try:
            for raw in self._journal.bodies():
                batch.append(trace_body(ExportTraceServiceRequest.FromString(raw), raw))
                size += len(raw)
                if size >= MAX_INSERT:
                    self._staging.stage(batch)
                    batch, size = [], 0
            self._staging.stage(batch)
        except BaseException:
            self._staging.forget()
            raise
        logger.info("%d acknowledged spans are read from %s", self._staging.held, self._journal.path)

    def _tables(self) -> tuple[int, int]:
        """What the tables are, as a number, and how many views are not the schema's."""
        views = ", ".join(f"'{name}'" for name in materialized_views())
        made, others = self._handle.query(_TABLES.format(views=views)).body.split()
        return int(made), int(others)

    def _run(self) -> None:
        """Settle what has waited long enough, or is enough."""
        while True:
            with self._woken:
                while not (self._closing or self._is_due()):
                    self._woken.wait(self._since + self._wait - time.monotonic() if self._since else None)
            if not self._closing and not self.settle():
                with self._woken:
                    self._woken.wait_for(lambda: self._closing, RETRY_SECONDS)
            if self._closing:
                return

    def _is_due(self) -> bool:
        return self._journal.size > 0 and (self._is_full() or time.monotonic() >= self._since + self._wait)

    def _is_full(self) -> bool:
        return self._staging.held >= MAX_SPANS or self._journal.size >= MAX_BYTES


def _refused(error: OSError) -> EngineRefusedError:
    code, name = (243, "NOT_ENOUGH_SPACE") if error.errno == errno.ENOSPC else (76, "CANNOT_OPEN_FILE")
    return EngineRefusedError(f"Code: {code}. DB::Exception: {error}. ({name})", code)
