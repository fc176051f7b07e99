"""Ingest of accepted bodies into committed rows: a bounded queue, a short linger, one insert for many bodies.

Invariant: a body is answered only after its own commit or its own failure; the bytes held never exceed the budget by more than one body.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

MAX_BODY = 64 * 2**20
"""Most bytes of one request's body, unpacked."""
MAX_INSERT = 32 * 2**20
"""Bytes beyond which no further body joins an insert."""
DECODERS = 2
MAX_LINGERS = 20
"""Longest wait of a body, as a multiple of the linger."""


class QueueFullError(Exception):
    """The budget is spent: the sender should retry later."""


class Budget:
    """Budget of the bytes that are accepted and not yet committed."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.held = 0
        self.lock = threading.Lock()


class Charge:
    """Bytes of the budget that one request holds: until the request ends, or until its queued rows are committed."""

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self._size = 0
        self._queued = False
        self._closing = False

    def __enter__(self) -> Charge:
        return self

    def __exit__(self, *_: object) -> None:
        if not self._queued:
            self._release()

    def grow_to(self, size: int) -> None:
        """Hold at least `size` bytes. A request alone may exceed the budget, or a large one could never get in.

        Raises:
            QueueFullError: other requests hold too much, or the request has ended.
        """
        with self._budget.lock:
            more = max(0, size - self._size)
            others = self._budget.held - self._size
            if self._closing or (others and self._budget.held + more > self._budget.limit):
                raise QueueFullError
            self._budget.held += more
            self._size += more

    def release_after(self, committed: Future[Any]) -> None:
        """Keep the bytes until a commit ends, even if the request ends before."""
        self._queued = True
        committed.add_done_callback(lambda _: self._release())

    def _release(self) -> None:
        with self._budget.lock:
            self._budget.held -= self._size
            self._size = 0
            self._closing = True


@dataclass(frozen=True, slots=True)
class Refused:
    """Number of spans or records of one body that could not be stored, and the reason."""

    count: int = 0
    """Number of spans or records."""
    reason: str = ""
    """Reason for the first of them; empty when there is none."""


class Body(Protocol):
    """Content of one request, to be committed."""

    @property
    def size(self) -> int:
        """Return the approximate number of bytes of its insert."""
        ...


B = TypeVar("B", bound=Body)


@dataclass(slots=True)
class _Waiting(Generic[B]):
    body: B
    done: Future[Refused]
    since: float = field(default_factory=time.monotonic)


class Inserter(Generic[B]):
    """A thread that commits waiting bodies, many at a time; a body that fails with others is tried alone."""

    def __init__(self, name: str, commit: Callable[[Sequence[B]], Sequence[Refused]], linger_seconds: float) -> None:
        """Start the thread.

        Args:
            name: of the thread.
            commit: commits bodies, all or none, and returns what it refused of each; runs on that thread only.
            linger_seconds: time without a new body, and since the last commit, after which the waiting bodies are committed: the more
                a commit takes, the less each body costs. While bodies keep coming, a body waits MAX_LINGERS times as long.
        """
        self._commit_all = commit
        self._linger = linger_seconds
        self._queue: deque[_Waiting[B]] = deque()
        self._queued_bytes = 0
        self._free_since = 0.0
        self._changed = threading.Condition()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, body: B) -> Future[Refused]:
        """Queue a body; the future ends after its commit, or with what the commit raised.

        Raises:
            QueueFullError: the inserter is closing.
        """
        waiting = _Waiting(body, Future[Refused]())
        # Running from the start, so that a caller that stops waiting for it cannot cancel the commit.
        waiting.done.set_running_or_notify_cancel()
        with self._changed:
            if self._closing:
                raise QueueFullError
            self._queue.append(waiting)
            self._queued_bytes += body.size
            self._changed.notify()
        return waiting.done

    def flush_now(self) -> None:
        """Commit bodies from now on without a linger."""
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
            self._free_since = time.monotonic()

    def _next_batch(self) -> list[_Waiting[B]]:
        """Wait for the bodies of the next insert, and return them; empty at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._closing)
            if not self._queue:
                return []
            while not self._closing and self._queued_bytes < MAX_INSERT:
                quiet = max(self._queue[-1].since, self._free_since) + self._linger
                latest = max(self._queue[0].since, self._free_since) + MAX_LINGERS * self._linger
                remaining = min(quiet, latest) - time.monotonic()
                if remaining <= 0:
                    break
                self._changed.wait(remaining)
            batch = [self._queue.popleft()]
            size = batch[0].body.size
            while self._queue and size + self._queue[0].body.size <= MAX_INSERT:
                batch.append(self._queue.popleft())
                size += batch[-1].body.size
            self._queued_bytes -= size
            return batch

    def _commit(self, batch: list[_Waiting[B]]) -> None:
        try:
            refused = self._commit_all([waiting.body for waiting in batch])
        # Not swallowed: the future passes it on.
        except Exception as error:
            if len(batch) == 1:
                batch[0].done.set_exception(error)
                return
            for waiting in batch:
                self._commit([waiting])
            return
        for waiting, refusal in zip(batch, refused, strict=True):
            waiting.done.set_result(refusal)


class Ingest:
    """Pipeline of every OTLP request, of either protocol: decoding threads, inserters and the budget."""

    def __init__(self, traces: Inserter[Any], logs: Inserter[Any], queue_bytes: int) -> None:
        """Commit through two inserters; at most `queue_bytes` are held."""
        self.budget = Budget(queue_bytes)
        self.traces = traces
        self.logs = logs
        self._decoders = ThreadPoolExecutor(DECODERS, "decode")

    async def store(self, inserter: Inserter[B], prepare: Callable[[], B], charge: Charge) -> Refused:
        """Prepare a body on a decoding thread, whose errors are raised here, and wait for its commit, until which the charge is kept.

        Raises:
            QueueFullError: the store is stopping.
            EngineRefusedError: the body could not be committed.
        """
        body = await asyncio.get_running_loop().run_in_executor(self._decoders, prepare)
        committed = inserter.submit(body)
        charge.release_after(committed)
        return await asyncio.wrap_future(committed)

    def flush_now(self) -> None:
        """Commit bodies from now on without a linger, since the store is stopping."""
        self.traces.flush_now()
        self.logs.flush_now()

    def close(self) -> None:
        """Commit everything that was accepted."""
        self._decoders.shutdown()
        self.traces.close()
        self.logs.close()
