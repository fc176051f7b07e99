"""Arrivals: a request that waits for rows is answered when some are committed, so that clients need not poll.

In: what was committed, from any thread; waiting requests. Out: positions. Invariant: a position that was answered before an arrival
differs from every position after it, in this process and in any other.
"""

from __future__ import annotations

import asyncio
import re
import threading
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from aiohttp import web

from collector.otlp.requests import TraceBody
from collector.sql.pipe import wake
from collector.write.ingest import Refused
from spangrad import semconv
from spangrad.http.server import json_response, refusal
from spangrad.store.arrivals import LONGEST_SECONDS, Topic

_FINAL = semconv.ROLLOUT_FINAL.encode()
_OF_TABLE = {
    "otel_traces": (Topic.ROOTS, Topic.SPANS),
    "rollout_spans": (Topic.ROOTS, Topic.SPANS),
    "otel_logs": (Topic.SPANS,),
    "builds": (Topic.BUILDS,),
}
_TARGET = re.compile(r'\s*INSERT\s+INTO\s+(?:TABLE\s+)?[\w`".]*?\b(\w+)[`"]?\s*(?:\(|FORMAT|VALUES|SELECT|SETTINGS|WITH|$)', re.IGNORECASE)
_HEAD = 200
B = TypeVar("B")


@dataclass(frozen=True, slots=True)
class _Waiter:
    topics: frozenset[Topic]
    woken: asyncio.Future[None]
    loop: asyncio.AbstractEventLoop


class ArrivalBoard:
    """Counts of arrivals by topic, and requests that wait for more."""

    def __init__(self) -> None:
        self._instance = uuid.uuid4().hex
        self._counts = Counter[Topic]()
        self._lock = threading.Lock()
        self._waiters = set[_Waiter]()
        self._closed = False

    def note(self, *topics: Topic) -> None:
        """Count an arrival, visible to statements from now on, and wake those that wait for it. Thread-safe."""
        with self._lock:
            self._counts.update(topics)
            woken = [waiter for waiter in self._waiters if not waiter.topics.isdisjoint(topics)]
            self._waiters.difference_update(woken)
        _wake(woken)

    def noting(
        self, commit: Callable[[Sequence[B]], Sequence[Refused]], topics: Callable[[Sequence[B]], Sequence[Topic]]
    ) -> Callable[[Sequence[B]], Sequence[Refused]]:
        """Return a function that commits bodies and notes their topics."""

        def commit_and_note(bodies: Sequence[B]) -> Sequence[Refused]:
            arrived = topics(bodies)
            refused = commit(bodies)
            self.note(*arrived)
            return refused

        return commit_and_note

    def note_insert(self, sql: str) -> None:
        """Note a statement that has run, if it inserted into a table of a topic."""
        match = _TARGET.match(sql[:_HEAD])
        if match and (topics := _OF_TABLE.get(match[1])):
            self.note(*topics)

    async def handle(self, request: web.Request) -> web.Response:
        """Answer a request of `spangrad.store.arrivals`: at once if something has arrived since its positions, else when it does."""
        try:
            topics = [Topic(name) for name in request.query["topics"].split(",")]
            since = dict(zip(topics, request.query["since"].split(","), strict=True))
            seconds = min(LONGEST_SECONDS, max(0.0, float(request.query["seconds"])))
        except (KeyError, ValueError):
            return refusal(400, f"send topics (of {', '.join(Topic)}), a position of each as since, and seconds.")
        positions = self.positions(topics)
        if positions == since and seconds:
            await self._wait(since, seconds)
            positions = self.positions(topics)
        return json_response({"positions": positions})

    def close(self) -> None:
        """Answer all that wait, and from now on each at once."""
        with self._lock:
            self._closed = True
            woken, self._waiters = [*self._waiters], set()
        _wake(woken)

    def positions(self, topics: Iterable[Topic]) -> dict[Topic, str]:
        """Return the positions now."""
        with self._lock:
            return {topic: f"{self._instance}:{self._counts[topic]}" for topic in topics}

    async def _wait(self, since: Mapping[Topic, str], seconds: float) -> None:
        loop = asyncio.get_running_loop()
        waiter = _Waiter(frozenset(since), loop.create_future(), loop)
        with self._lock:
            if self._closed:
                return
            self._waiters.add(waiter)
        try:
            # It may have arrived before the waiter was there.
            if self.positions(since) == since:
                await asyncio.wait([waiter.woken], timeout=seconds)
        finally:
            with self._lock:
                self._waiters.discard(waiter)


def topics_of_traces(bodies: Sequence[TraceBody]) -> Sequence[Topic]:
    """Return the topics of bodies of spans."""
    return (Topic.ROOTS, Topic.SPANS) if any(_FINAL in body.load() for body in bodies) else (Topic.SPANS,)


def _wake(waiters: Iterable[_Waiter]) -> None:
    for waiter in waiters:
        waiter.loop.call_soon_threadsafe(wake, waiter.woken)
