"""From accepted bodies to committed rows: a bounded queue, a short linger, one insert for many bodies.

In: request bodies on the event loop. Out: for each what was refused of it, after the rest is committed.
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
"""Bytes of one request's body, unpacked."""
MAX_INSERT = 32 * 2**20
"""Bytes beyond which no further body joins an insert."""
DECODERS = 2
MAX_LINGERS = 20
"""How many times the linger a body waits at most."""


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

    def release_after(self, committed: Future[Any]) -> None:
        """Hold on until a commit ends, even when nobody waits for it any longer."""
        self._queued = True
        committed.add_done_callback(lambda _: self._release())

    def _release(self) -> None:
        with self._budget.lock:
            self._budget.held -= self._size
            self._size = 0
            self._over = True


@dataclass(frozen=True, slots=True)
class Refused:
    """What could not be stored of one body."""

    count: int = 0
    """Spans or records."""
    reason: str = ""
    """Why, for the first of them; empty when there is none."""


class Body(Protocol):
    """What one request brings to be committed."""

    @property
    def size(self) -> int:
        """About how many bytes an insert of it has."""
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
            commit: commits bodies, all or none, and says what it refused of each; runs on that thread only.
            linger_seconds: how long the queue must be quiet, after the last commit too, before a commit takes what waits: the more
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
        # Running from the start: whoever stops waiting for it cannot cancel the commit.
        waiting.done.set_running_or_notify_cancel()
        with self._changed:
            if self._closing:
                raise QueueFullError
            self._queue.append(waiting)
            self._queued_bytes += body.size
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
            self._free_since = time.monotonic()

    def _next_batch(self) -> list[_Waiting[B]]:
        """Bodies for one insert; empty at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._closing)
            if not self._queue:
                return []
            while not self._closing and self._queued_bytes < MAX_INSERT:
                quiet = max(self._queue[-1].since, self._free_since) + self._linger
                latest = max(self._queue[0].since, self._free_since) + MAX_LINGERS * self._linger
                left = min(quiet, latest) - time.monotonic()
                if left <= 0:
                    break
                self._changed.wait(left)
            batch = [self._queue.popleft()]
            size = batch[0].body.size
            while self._queue and size + self._queue[0].body.size <= MAX_INSERT:
                batch.append(self._queue.popleft())
                size += batch[-1].body.size
            self._queued_bytes -= size
            return batch

    def _commit(self, batch: list[_Waiting[B]]) -> None:
        try:
            refused = self._commit_all([one.body for one in batch])
        # Not swallowed: whoever waits for the future gets it.
        except Exception as error:
            if len(batch) == 1:
                batch[0].done.set_exception(error)
                return
            for one in batch:
                self._commit([one])
            return
        for one, its in zip(batch, refused, strict=True):
            one.done.set_result(its)


class Ingest:
    """The way of every OTLP request, whichever protocol brought it."""

    def __init__(self, traces: Inserter[Any], logs: Inserter[Any], queue_bytes: int) -> None:
        """Commit through two inserters; at most `queue_bytes` are held."""
        self.budget = Budget(queue_bytes)
        self.traces = traces
        self.logs = logs
        self._decoders = ThreadPoolExecutor(DECODERS, "decode")

    async def store(self, inserter: Inserter[B], prepare: Callable[[], B], charge: Charge) -> Refused:
        """Prepare a body on a decoding thread, and wait for its commit.

        Args:
            inserter: `traces` or `logs`.
            prepare: from the bytes to what the inserter takes; what it raises is raised here.
            charge: of the request; kept until the body is committed or failed.

        Raises:
            QueueFullError: the store is stopping.
            EngineRefusedError: the body could not be committed.
        """
        body = await asyncio.get_running_loop().run_in_executor(self._decoders, prepare)
        committed = inserter.submit(body)
        charge.release_after(committed)
        return await asyncio.wrap_future(committed)

    def hurry(self) -> None:
        """Commit from now on as soon as may be: the store is stopping."""
        self.traces.hurry()
        self.logs.hurry()

    def close(self) -> None:
        """Commit everything that was accepted."""
        self._decoders.shutdown()
        self.traces.close()
        self.logs.close()
