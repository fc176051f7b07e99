"""Write buffer: spans are acknowledged when a journal has them, and are inserted into the tables many at a time.

Invariant: acknowledged spans are in the tables or in a journal, at any kill point, and `settle` returns when all spans that were
acknowledged before are in the tables.

Each statement that decodes spans costs its analysis, and each part of a table its creation and the merging of its rows: inserts of only
thousands of spans are costly (docs/decisions/0013). So spans wait until there are many, or a query needs them, or their longest wait is
over. There are two pending batches: while one is inserted, new bodies join the other.

Bodies are buffered only while every view that an insert fills is the schema's own, and no table has changed since the start: these never
refuse a span. Otherwise each commit is an insert, and a view's refusal is reported to the sender; so it is for very large bodies.
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
from collector.write.pending_batch import PendingBatch

_TABLES = """
SELECT sum(cityHash64(create_table_query)), countIf(engine = 'MaterializedView' AND NOT (database = 'spangrad_internal'
    AND name IN ({views})))
FROM system.tables
WHERE database IN ('otel', 'spangrad_internal') AND engine LIKE '%MergeTree' OR engine = 'MaterializedView' AND NOT is_temporary"""


class WriteBuffer:
    """Buffer that commits spans to a journal, and inserts them into the tables later."""

    def __init__(self, handles: tuple[Handle, Handle], journals: Path, wait_seconds: float) -> None:
        """Insert the journals' spans into the tables, if that succeeds now, and start the thread.

        The handles must not be shared; the directory of the journals is created if it does not exist. Spans wait no longer than
        `wait_seconds`, unless the database fails; with 0, each commit is an insert.
        """
        journals.mkdir(exist_ok=True)
        self._taking, self._storing = (
            PendingBatch(handle, journals / name) for handle, name in zip(handles, ("first", "second"), strict=True)
        )
        """The batch that new bodies join, and the batch that is being inserted into the tables."""
        self._take_lock, self._store_lock = threading.Lock(), threading.Lock()
        """Locks of the two batches, which are swapped under both locks, taken in this order."""
        self._wait = wait_seconds
        self._initial_tables, _ = self._tables()
        self._unchanged = False
        """True if the tables are as the schema created them."""
        self._changed = True
        """True if the tables must be checked for changes before the next commit."""
        self._woken = threading.Condition()
        self._closing = False
        self.settle()
        self._thread = threading.Thread(target=self._run, name="settle-traces", daemon=True)
        self._thread.start()

    def commit(self, bodies: Sequence[TraceBody]) -> list[Refused]:
        """Take all spans of all bodies: on return they are in a journal, or in the tables.

        Returns:
            The refused spans of each body.

        Raises:
            EngineRefusedError: none of them was taken.
        """
        with self._take_lock:
            self._check_tables()
            deferred = self._unchanged and self._wait > 0
            if not deferred:
                with self._store_lock:
                    _store_before(self._storing, self._taking)
            if not deferred or _are_large(bodies):
                self._taking.insert(bodies)
            else:
                self._make_room()
                self._taking.take(bodies, self._storing.size)
        with self._woken:
            self._woken.notify()
        return [body.refused for body in bodies]

    def settle(self) -> bool:
        """Insert all acknowledged spans into the tables; return whether that succeeded; if not, the log has the reason. Thread-safe."""
        if not (self._taking.size or self._storing.size):
            return True
        try:
            with self._store_lock:
                self._storing.store()
            with self._take_lock, self._store_lock:
                # Else another thread has swapped them: spans acknowledged before are no longer in the batch that bodies join.
                if not self._storing.size:
                    self._swap_batches()
            with self._store_lock:
                self._storing.store()
        except EngineRefusedError:
            return False
        return True

    def recheck(self) -> None:
        """Have the tables checked before the next commit, since a statement may have changed them."""
        for waiting in (self._taking, self._storing):
            waiting.retry_soon()
        self._changed = True

    def close(self) -> None:
        """Insert all spans into the tables, if that succeeds; else the journals keep them."""
        with self._woken:
            self._closing = True
            self._woken.notify()
        self._thread.join()
        self.settle()
        self._taking.close()
        self._storing.close()

    def _make_room(self) -> None:
        """Make sure that bodies can join a batch; called under the first lock."""
        if not self._taking.is_full:
            return
        if self._storing.size:
            # This batch has to wait for the other anyway.
            self._taking.stage()
        with self._store_lock:
            _store_before(self._storing)
            self._swap_batches()

    def _swap_batches(self) -> None:
        """Swap the batch that bodies join with the other one, which is empty; called under both locks."""
        self._taking, self._storing = self._storing, self._taking

    def _check_tables(self) -> None:
        if not self._changed:
            return
        # Before the check: the tables may be changed again meanwhile.
        self._changed = False
        try:
            self._unchanged = self._tables() == (self._initial_tables, 0)
        except EngineRefusedError:
            self._changed = True
            raise

    def _tables(self) -> tuple[int, int]:
        """Return a hash of the tables' definitions, and the number of views that are not the schema's."""
        views = ", ".join(f"'{name}'" for name in materialized_views())
        definitions, others = self._taking.handle.query(_TABLES.format(views=views)).body.split()
        return int(definitions), int(others)

    def _run(self) -> None:
        """Settle whenever spans have waited long enough, or are many enough."""
        while True:
            with self._woken:
                while not (self._closing or self._is_due()):
                    since = self._taking.since
                    self._woken.wait(since + self._wait - time.monotonic() if since else None)
            with self._store_lock:
                # A query may have been storing its batch: the spans that came meanwhile are not due for that.
                is_due = self._is_due()
            if is_due and not self._closing and not self.settle():
                with self._woken:
                    self._woken.wait_for(lambda: self._closing, pending_batch.RETRY_SECONDS)
            if self._closing:
                return

    def _is_due(self) -> bool:
        taking = self._taking
        old = taking.size > 0 and time.monotonic() >= taking.since + self._wait
        return self._storing.size > 0 or taking.is_full or old


def _are_large(bodies: Sequence[TraceBody]) -> bool:
    """Return whether the rows of bodies may be more than memory can hold, which must be reported to their senders."""
    return any(body.size > pending_batch.MAX_BODY for body in bodies) or sum(body.spans for body in bodies) > pending_batch.MAX_SPANS


def _store_before(*batches: PendingBatch) -> None:
    """Store waiting batches, for a body that can only be taken after them."""
    try:
        for waiting in batches:
            waiting.store()
    # The error concerns the waiting spans, not this sender's.
    except EngineRefusedError as error:
        raise EngineRefusedError(f"Code: 425. DB::Exception: spans that came before wait: {error} (SYSTEM_ERROR)", 425) from None
