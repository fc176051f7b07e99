"""From accepted bodies to committed rows: a bounded queue, a short linger, one insert for many bodies.

In: request bodies on the event loop. Out: an answer for each, after its rows are committed.
Invariant: a body is answered only after its own commit or its own failure; the bytes held never exceed the budget by more than one body.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

from collector.rows import Rows

MAX_BODY = 64 * 2**20
"""Bytes of one request's body, unpacked."""
MAX_INSERT = 32 * 2**20
"""Bytes beyond which no further body joins an insert."""
DECODERS = 2


class QueueFullError(Exception):
    """The budget is spent: the sender should come again later."""


class Budget:
    """Bytes accepted and not yet committed."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.held = 0
        self.lock = threading.Lock()

    def charge(self) -> Charge:
        """Start the account of one request."""
        return Charge(self)


class Charge:
    """What one request holds of the budget: until the request ends, or until its queued rows are committed."""

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self._size = 0
        self._queued = False
        self._over = False

    def __enter__(self) -> Charge:
        return self

    def __exit__(self, *_: object) -> None:
        if not self._queued:
            self._release()

    def grow_to(self, size: int) -> None:
        """Hold at least `size` bytes. A request alone may exceed the budget, or a large one could never get in.

        Raises:
            QueueFullError: others hold too much, or the request is over.
        """
        with self._budget.lock:
            more = max(0, size - self._size)
            others = self._budget.held - self._size
            if self._over or (others and self._budget.held + more > self._budget.limit):
                raise QueueFullError
            self._budget.held += more
            self._size += more

    def release_after(self, committed: Future[None]) -> None:
        """Hold on until a commit ends, even when nobody waits for it any longer."""
        self._queued = True
        committed.add_done_callback(lambda _: self._release())

    def _release(self) -> None:
        with self._budget.lock:
            self._budget.held -= self._size
            self._size = 0
            self._over = True


@dataclass(slots=True)
class _Waiting:
    data: bytes
    done: Future[None]
    since: float = field(default_factory=time.monotonic)


class Inserter:
    """A thread that commits waiting rows, many bodies at a time; a body that fails with others is tried alone."""

    def __init__(self, name: str, insert: Callable[[bytes], object], linger_seconds: float) -> None:
        """Start the thread; `insert` commits RowBinary rows or raises, and runs on that thread only."""
        self._insert = insert
        self._linger = linger_seconds
        self._queue: deque[_Waiting] = deque()
        self._queued_bytes = 0
        self._changed = threading.Condition()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, data: bytes) -> Future[None]:
        """Queue rows; the future ends after their commit, or with what the insert raised."""
        waiting = _Waiting(data, Future())
        # Running from the start: whoever stops waiting for it cannot cancel the commit.
        waiting.done.set_running_or_notify_cancel()
        with self._changed:
            if self._closing:
                raise QueueFullError
            self._queue.append(waiting)
            self._queued_bytes += len(data)
            self._changed.notify()
        return waiting.done

    def hurry(self) -> None:
        """Wait for company no more."""
        with self._changed:
            self._linger = 0
            self._changed.notify()

    def close(self) -> None:
        """Commit what is queued, then end the thread."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        while batch := self._next_batch():
            self._commit(batch)

    def _next_batch(self) -> list[_Waiting]:
        """Bodies for one insert; empty at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._closing)
            if not self._queue:
                return []
            left = self._queue[0].since + self._linger - time.monotonic()
            self._changed.wait_for(lambda: self._closing or not self._linger or self._queued_bytes >= MAX_INSERT, timeout=max(0, left))
            batch = [self._queue.popleft()]
            size = len(batch[0].data)
            while self._queue and size + len(self._queue[0].data) <= MAX_INSERT:
                batch.append(self._queue.popleft())
                size += len(batch[-1].data)
            self._queued_bytes -= size
            return batch

    def _commit(self, batch: list[_Waiting]) -> None:
        try:
            self._insert(b"".join(one.data for one in batch))
        # Not swallowed: whoever waits for the future gets it.
        except Exception as error:
            if len(batch) == 1:
                batch[0].done.set_exception(error)
                return
            for one in batch:
                self._commit([one])
            return
        for one in batch:
            one.done.set_result(None)


class Ingest:
    """The way of every OTLP request, whichever protocol brought it."""

    def __init__(
        self, insert_traces: Callable[[bytes], object], insert_logs: Callable[[bytes], object], linger_ms: float, queue_bytes: int
    ) -> None:
        self.budget = Budget(queue_bytes)
        self._decoders = ThreadPoolExecutor(DECODERS, "decode")
        self.traces = Inserter("insert-traces", insert_traces, linger_ms / 1000)
        self.logs = Inserter("insert-logs", insert_logs, linger_ms / 1000)

    async def store(self, inserter: Inserter, prepare: Callable[[], Rows], charge: Charge) -> Rows:
        """Prepare rows on a decoding thread, and wait for their commit.

        Args:
            inserter: `traces` or `logs`.
            prepare: from the body to rows; what it raises is raised here.
            charge: of the request; kept until the rows are committed or failed.

        Raises:
            QueueFullError: the store is stopping.
            EngineRefusedError: the rows could not be committed.
        """
        rows = await asyncio.get_running_loop().run_in_executor(self._decoders, prepare)
        if rows.count:
            committed = inserter.submit(rows.data)
            charge.release_after(committed)
            await asyncio.wrap_future(committed)
        return rows

    def hurry(self) -> None:
        """Commit from now on as soon as may be: the store is stopping."""
        self.traces.hurry()
        self.logs.hurry()

    def close(self) -> None:
        """Commit everything that was accepted."""
        self._decoders.shutdown()
        self.traces.close()
        self.logs.close()
