"""Spans that wait together in a journal, and are inserted at once.

In: `TraceBody`s. Out: when asked, all of them in the tables.
Invariant: what was taken is in the tables or in the journal, whatever the kill point (it may be in both: law 1); what no table takes,
while the tables take others, is put aside.

Storing fails for want of room, or because of a table, and is tried again; what is to be read waits for it. A body that alone cannot be
stored would hold up all others for good: after a failure bodies are stored in ever smaller parts, and from the third try on one that
still fails alone is put aside, if a span that is there already can be inserted at the same time.
"""

from __future__ import annotations

import errno
import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from collector.database import EngineRefusedError, Handle
from collector.otlp.requests import TraceBody, trace_body
from collector.write.dead_letters import put_aside
from collector.write.journal import Journal
from collector.write.span_staging import SpanStaging, store_one_again

logger = logging.getLogger(__name__)

ASIDE = "aside"
"""Directory of what no table takes, beside the journals."""
MAX_SPANS = 20_000
"""Spans that wait together at most, but for those of one commit."""
MAX_BYTES = 96 * 2**20
"""Bytes of bodies that wait together at most, but for those of one commit."""
MAX_BODY = 8 * 2**20
"""Bytes of a body that may wait."""
RETRY_SECONDS, MAX_RETRY_SECONDS = 1.0, 8.0
"""After which storing what waits is tried again, the first time and later."""
_NOT_ENOUGH_SPACE = 243
_TRIES = 3
"""After so many a body that cannot be stored by itself is put aside."""


class Lot:
    """What waits in one journal; used by one thread at a time, but for what it says of itself."""

    def __init__(self, handle: Handle, journal: Path) -> None:
        """Open the journal, and find what it holds; nobody else uses `handle`."""
        self.handle = handle
        self.since = 0.0
        """When the first of what waits came; 0 where nothing waits, or nobody knows."""
        self._staging = SpanStaging(handle)
        self._journal = Journal(journal)
        self._bodies = [
            self._in_journal(trace_body(ExportTraceServiceRequest.FromString(raw), raw), start) for start, raw in self._journal.bodies()
        ]
        """What the journal holds, and only it."""
        self._spans = sum(body.spans for body in self._bodies)
        if self._bodies:
            logger.info("%d requests with acknowledged spans are read from %s", len(self._bodies), journal)
        self._failed: EngineRefusedError | None = None
        """Why what waits could not be stored, the last time."""
        self._tries = 0
        """How often that was tried in vain."""
        self._pause = RETRY_SECONDS
        self._again = 0.0
        """When that is tried again."""

    @property
    def size(self) -> int:
        """Bytes that wait. It grows before an acknowledgement, and is 0 only after the commit: any thread may ask."""
        return self._journal.size

    @property
    def is_full(self) -> bool:
        """Whether no more should join; any thread may ask."""
        return self._spans >= MAX_SPANS or self.size >= MAX_BYTES

    def take(self, bodies: Sequence[TraceBody], others: int) -> None:
        """Let bodies wait: when it returns they are in the journal.

        Args:
            bodies: all or none of them are taken.
            others: bytes that wait elsewhere, and will need room in the tables too.

        Raises:
            EngineRefusedError: none of them was taken.
        """
        storable = [body for body in bodies if body.spans > body.refused.count]
        try:
            starts = self._journal.append([body.load() for body in storable], others)
        except OSError as error:
            raise _refused(error) from None
        self._bodies += map(self._in_journal, storable, starts)
        self._spans += sum(body.spans for body in storable)
        if self.size:
            self.since = self.since or time.monotonic()

    def insert(self, bodies: Sequence[TraceBody]) -> None:
        """Bring bodies into the tables at once, before those that wait.

        Raises:
            EngineRefusedError: none of them was taken.
        """
        self._staging.commit(bodies)

    def store(self) -> None:
        """Bring all that waits into the tables.

        Raises:
            EngineRefusedError: it waits on, and the log says why.
        """
        if not self.size:
            return
        if self._failed and time.monotonic() < self._again:
            raise EngineRefusedError(str(self._failed), self._failed.code)
        try:
            self._try_to_store()
        except EngineRefusedError as error:
            logger.error("%d bytes of acknowledged spans wait in %s: %s", self.size, self._journal.path, error)
            # Each try may leave rows in the first of its tables: fewer and fewer are made.
            self._pause = min(2 * self._pause, MAX_RETRY_SECONDS) if self._failed else RETRY_SECONDS
            self._failed, self._again = error, time.monotonic() + self._pause
            self._tries += 1
            raise
        self._failed, self._tries, self.since = None, 0, 0.0

    def stage(self) -> None:
        """Make the rows, as far as that can be done now, so that storing need not; nothing joins this lot before it is stored."""
        if not self._staging.staged:
            try:
                self._staging.stage(self._bodies)
            # Who stores them tries again, and says what is wrong.
            except (EngineRefusedError, OSError) as error:
                logger.debug("rows of %s are not made ahead: %s", self._journal.path, error)

    def retry_soon(self) -> None:
        """Try again to store what waits, when that is asked for: what was wrong may be mended."""
        self._again = 0.0

    def close(self) -> None:
        """Close the journal; what waits stays in it."""
        self._journal.close()

    def _in_journal(self, body: TraceBody, start: int) -> TraceBody:
        """The same body, read from the journal when it is needed."""
        return replace(body, load=partial(self._journal.read, start, body.size))

    def _try_to_store(self) -> None:
        try:
            if self._tries:
                self._store_apart()
            else:
                if not self._staging.staged:
                    self._staging.stage(self._bodies)
                self._staging.store()
            # What is in the tables already counts once, when it comes again.
            self._journal.clear()
        except OSError as error:
            raise _refused(error) from None
        self._bodies, self._spans = [], 0

    def _store_apart(self) -> None:
        """Store each body that can be stored, and put aside what no try could.

        Raises:
            EngineRefusedError: something waits on: it is too early to give it up, or it is no body's fault.
            OSError: the same; there is no room for what is put aside.
        """
        # First: where the tables take nothing, each try would leave rows of all bodies in the first of them.
        tables_take_spans = store_one_again(self.handle)
        failing = self._store_in_parts(self._bodies)
        self._bodies = [body for body, _ in failing]
        if failing and (self._tries < _TRIES - 1 or not tables_take_spans):
            raise failing[0][1]
        for body, error in failing:
            file = put_aside(self._journal.path.parent / ASIDE, body.load())
            logger.error("a request with %d acknowledged spans is in no table, and put aside as %s: %s", body.spans, file, error)

    def _store_in_parts(self, bodies: Sequence[TraceBody]) -> list[tuple[TraceBody, EngineRefusedError]]:
        """Store bodies, those that alone can't be stored left out: which they are, and why.

        Raises:
            EngineRefusedError: nothing can be stored now.
            OSError: the same.
        """
        try:
            self._staging.commit(bodies)
        except EngineRefusedError as error:
            if error.code == _NOT_ENOUGH_SPACE:
                raise
            if len(bodies) == 1:
                return [(bodies[0], error)]
            middle = len(bodies) // 2
            return [*self._store_in_parts(bodies[:middle]), *self._store_in_parts(bodies[middle:])]
        return []


def _refused(error: OSError) -> EngineRefusedError:
    code, name = (_NOT_ENOUGH_SPACE, "NOT_ENOUGH_SPACE") if error.errno == errno.ENOSPC else (76, "CANNOT_OPEN_FILE")
    return EngineRefusedError(f"Code: {code}. DB::Exception: {error}. ({name})", code)
