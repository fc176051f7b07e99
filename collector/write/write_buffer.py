"""Spans that are acknowledged when a journal has them, and reach the tables many at a time.

In: `TraceBody`s; whoever is about to read. Out: for each body what was refused of it; tables that hold all that was acknowledged.
Invariant: what was acknowledged is in the tables or in a journal, whatever the kill point, and `settle` returns when all that was
acknowledged before is in the tables.

A statement that decodes spans costs its analysis, a part of a table its making and its rows' merging: inserts of thousands of spans
are dear (docs/decisions/0013). So spans wait until there are many, or somebody asks, or a while has gone by. There are two lots of
them: while one is inserted, what comes joins the other.

Bodies are deferred only while every view that an insert fills is the schema's own, and no table has changed since the start: these
never refuse a span. Otherwise each commit is an insert, and a view's refusal is told to the sender; so is one of very large bodies.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from pathlib import Path

from collector.database import EngineRefusedError, Handle
from collector.otlp.requests import TraceBody
from collector.schema.migrations import materialized_views
from collector.write import pending_batch
from collector.write.ingest import Refused
from collector.write.pending_batch import Lot

_TABLES = """
SELECT sum(cityHash64(create_table_query)), countIf(engine = 'MaterializedView' AND NOT (database = 'otel' AND name IN ({views})))
FROM system.tables
WHERE database = 'otel' AND engine LIKE '%MergeTree' OR engine = 'MaterializedView' AND NOT is_temporary"""


class DeferredSpans:
    """Commits spans, now or later."""

    def __init__(self, handles: tuple[Handle, Handle], journals: Path, wait_seconds: float) -> None:
        """Bring what the journals hold into the tables, if that can be done now, and begin.

        Args:
            handles: nobody else uses them.
            journals: a directory; created where there is none.
            wait_seconds: how long a span waits at most, unless the engine fails. 0: each commit is an insert.
        """
        journals.mkdir(exist_ok=True)
        self._taking, self._storing = (Lot(handle, journals / name) for handle, name in zip(handles, ("first", "second"), strict=True))
        """Which bodies join, and which is on its way into the tables."""
        self._take_lock, self._store_lock = threading.Lock(), threading.Lock()
        """Of either. They change places under both, taken in this order."""
        self._wait = wait_seconds
        self._made, _ = self._tables()
        self._plain = False
        """Whether the tables are as the schema made them."""
        self._changed = True
        """Whether that must be looked at."""
        self._woken = threading.Condition()
        self._closing = False
        self.settle()
        self._thread = threading.Thread(target=self._run, name="settle-traces", daemon=True)
        self._thread.start()

    def commit(self, bodies: Sequence[TraceBody]) -> list[Refused]:
        """Take all spans of all bodies: when it returns they are in a journal, or in the tables.

        Returns:
            What could not be stored of each body.

        Raises:
            EngineRefusedError: none of them was taken.
        """
        with self._take_lock:
            self._look_at_tables()
            deferring = self._plain and self._wait > 0
            if not deferring:
                with self._store_lock:
                    _store_before(self._storing, self._taking)
            if not deferring or _are_large(bodies):
                self._taking.insert(bodies)
            else:
                self._make_room()
                self._taking.take(bodies, self._storing.size)
        with self._woken:
            self._woken.notify()
        return [body.refused for body in bodies]

    def settle(self) -> bool:
        """Bring all that was acknowledged into the tables: whether that could be done; if not, the log says why. Any thread may ask."""
        if not (self._taking.size or self._storing.size):
            return True
        try:
            with self._store_lock:
                self._storing.store()
            with self._take_lock, self._store_lock:
                # Else somebody has done so: what was acknowledged before is not where bodies join.
                if not self._storing.size:
                    self._change_places()
            with self._store_lock:
                self._storing.store()
        except EngineRefusedError:
            return False
        return True

    def recheck(self) -> None:
        """Look at the tables before the next commit: they may have been changed."""
        for waiting in (self._taking, self._storing):
            waiting.retry_soon()
        self._changed = True

    def close(self) -> None:
        """Bring everything into the tables, if that can be done; else the journals keep it."""
        with self._woken:
            self._closing = True
            self._woken.notify()
        self._thread.join()
        self.settle()
        self._taking.close()
        self._storing.close()

    def _make_room(self) -> None:
        """See that bodies can join. Under the first lock."""
        if not self._taking.is_full:
            return
        if self._storing.size:
            # It has to wait for the other anyway.
            self._taking.stage()
        with self._store_lock:
            _store_before(self._storing)
            self._change_places()

    def _change_places(self) -> None:
        """Let what waits be stored, and what comes join the other lot, which is empty. Under both locks."""
        self._taking, self._storing = self._storing, self._taking

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

    def _tables(self) -> tuple[int, int]:
        """What the tables are, as a number, and how many views are not the schema's."""
        views = ", ".join(f"'{name}'" for name in materialized_views())
        made, others = self._taking.handle.query(_TABLES.format(views=views)).body.split()
        return int(made), int(others)

    def _run(self) -> None:
        """Settle what has waited long enough, or is enough."""
        while True:
            with self._woken:
                while not (self._closing or self._is_due()):
                    since = self._taking.since
                    self._woken.wait(since + self._wait - time.monotonic() if since else None)
            if not self._closing and not self.settle():
                with self._woken:
                    self._woken.wait_for(lambda: self._closing, pending_batch.RETRY_SECONDS)
            if self._closing:
                return

    def _is_due(self) -> bool:
        taking = self._taking
        old = taking.size > 0 and time.monotonic() >= taking.since + self._wait
        return self._storing.size > 0 or taking.is_full or old


def _are_large(bodies: Sequence[TraceBody]) -> bool:
    """Whether what is made of bodies may be more than can be held, which their senders must be told."""
    return any(body.size > pending_batch.MAX_BODY for body in bodies) or sum(body.spans for body in bodies) > pending_batch.MAX_SPANS


def _store_before(*lots: Lot) -> None:
    """Store what waits, for a body that can't be taken before."""
    try:
        for waiting in lots:
            waiting.store()
    # Whatever is wrong with what waits, it is not this sender's.
    except EngineRefusedError as error:
        raise EngineRefusedError(f"Code: 425. DB::Exception: spans that came before wait: {error} (SYSTEM_ERROR)", 425) from None
