"""Spans that wait together, and are inserted at once: in a journal, and staged in the engine's memory.

In: `TraceBody`s. Out: for each what was refused of it; and when asked, all of them in the tables.
Invariant: what was taken is in the tables or in the journal, whatever the kill point (it may be in both: law 1). When rows in memory
are lost, because staging failed in its middle or the process ended, they are made anew from the journal.
"""

from __future__ import annotations

import errno
import logging
import time
from collections.abc import Sequence
from pathlib import Path

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from collector.bodies import TraceBody, trace_body
from collector.engine import EngineRefusedError, Handle
from collector.ingest import MAX_INSERT, Refused
from collector.journal import Journal
from collector.span_staging import SpanStaging

logger = logging.getLogger(__name__)

MAX_SPANS = 20_000
"""Spans that wait together at most, but for those of one commit."""
MAX_BYTES = 96 * 2**20
"""Bytes of bodies that wait together at most, but for those of one commit."""
RETRY_SECONDS, MAX_RETRY_SECONDS = 1.0, 8.0
"""After which storing what waits is tried again, the first time and later."""


class Lot:
    """What waits in one journal; used by one thread at a time, but for what it says of itself."""

    def __init__(self, handle: Handle, journal: Path) -> None:
        """Open the journal, and find what it holds; nobody else uses `handle`."""
        self.handle = handle
        self.since = 0.0
        """When the first of what waits came; 0 where nothing waits, or nobody knows."""
        self._staging = SpanStaging(handle)
        self._journal = Journal(journal)
        self._failed: EngineRefusedError | None = None
        """Why what waits could not be stored, the last time."""
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
        return self._staging.held >= MAX_SPANS or self.size >= MAX_BYTES

    @property
    def is_torn(self) -> bool:
        """Whether rows of what waits were lost, so that nothing can join them."""
        return self.size > 0 and not self._staging.held

    def take(self, bodies: Sequence[TraceBody], others: int) -> list[Refused]:
        """Let bodies wait: when it returns they are in the journal.

        Args:
            bodies: all or none of them are taken.
            others: bytes that wait elsewhere, and will need room in the tables too.

        Returns:
            What can't be stored of each body.

        Raises:
            EngineRefusedError: none of them was taken.
        """
        refused = self._staging.stage(bodies)
        try:
            self._journal.append([body.raw for body, its in zip(bodies, refused, strict=True) if body.spans > its.count], others)
        except OSError as error:
            # What is staged now is more than what is acknowledged.
            self._staging.forget()
            raise _refused(error) from None
        if self.size:
            self.since = self.since or time.monotonic()
        return refused

    def insert(self, bodies: Sequence[TraceBody]) -> list[Refused]:
        """Bring bodies into the tables at once, where nothing waits: what could not be stored of each.

        Raises:
            EngineRefusedError: none of them was taken.
        """
        return self._staging.commit(bodies)

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
            raise
        self._failed, self.since = None, 0.0

    def retry_soon(self) -> None:
        """Try again to store what waits, when that is asked for: what was wrong may be mended."""
        self._again = 0.0

    def close(self) -> None:
        """Close the journal; what waits stays in it."""
        self._journal.close()

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


def _refused(error: OSError) -> EngineRefusedError:
    code, name = (243, "NOT_ENOUGH_SPACE") if error.errno == errno.ENOSPC else (76, "CANNOT_OPEN_FILE")
    return EngineRefusedError(f"Code: {code}. DB::Exception: {error}. ({name})", code)
