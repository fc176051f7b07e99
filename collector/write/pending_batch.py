"""Pending batch: spans that wait together in a journal, and are inserted at once.

Invariant: spans that were taken are in the tables or in the journal, at any kill point (they may be in both: law 1); a body that no table
takes, while the tables take others, becomes a dead letter.

Storing fails for lack of space, or because of a table, and is retried; until then queries see what the tables hold. A body that alone
cannot be stored would block all others for good: after a failure bodies are stored in ever smaller parts, and from the third try on one
that still fails alone becomes a dead letter, if a span that is already stored can be inserted at the same time.
"""

from __future__ import annotations

import errno
import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from hashlib import sha256
from pathlib import Path

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from collector.database import EngineRefusedError, Handle
from collector.otlp.requests import TraceBody, trace_body
from collector.write.journal import Journal
from collector.write.span_staging import SpanStaging, store_one_again

logger = logging.getLogger(__name__)

DEAD_LETTERS = "aside"
"""Name of the directory of dead letters, beside the journals."""
MAX_SPANS = 20_000
"""Most spans that wait together; those of the last commit may exceed it."""
MAX_BYTES = 96 * 2**20
"""Most bytes of bodies that wait together; those of the last commit may exceed it."""
MAX_BODY = 8 * 2**20
"""Most bytes of a body that may wait."""
RETRY_SECONDS, MAX_RETRY_SECONDS = 1.0, 8.0
"""Back-off after which a failed store of the batch is retried: the first one, and the longest."""
_NOT_ENOUGH_SPACE = 243
_TRIES = 3
"""Number of tries after which a body that cannot be stored by itself becomes a dead letter."""


class PendingBatch:
    """A pending batch in one journal; used by one thread at a time, except for the properties that any thread may read."""

    def __init__(self, handle: Handle, journal: Path) -> None:
        """Open the journal, and read the bodies that it holds; `handle` must not be shared."""
        self.handle = handle
        self.since = 0.0
        """Time (monotonic) at which the first waiting body came; 0 if none waits, or if it is not known."""
        self._staging = SpanStaging(handle)
        self._journal = Journal(journal)
        self._bodies = [
            self._in_journal(trace_body(ExportTraceServiceRequest.FromString(raw), raw), start) for start, raw in self._journal.bodies()
        ]
        """Bodies that the journal holds, each read from it on demand."""
        self._spans = sum(body.spans for body in self._bodies)
        if self._bodies:
            logger.info("%d requests with acknowledged spans are read from %s", len(self._bodies), journal)
        self._failed: EngineRefusedError | None = None
        """Error of the last try to store the batch. None: it did not fail."""
        self._tries = 0
        """Number of failed tries to store the batch."""
        self._pause = RETRY_SECONDS
        self._retry_at = 0.0
        """Time (monotonic) before which the batch is not tried again."""

    @property
    def size(self) -> int:
        """Return the bytes that wait. It grows before an acknowledgement, and is 0 only after the commit; any thread may read it."""
        return self._journal.size

    @property
    def is_full(self) -> bool:
        """Return whether no more bodies should join; any thread may read it."""
        return self._spans >= MAX_SPANS or self.size >= MAX_BYTES

    def take(self, bodies: Sequence[TraceBody], others: int) -> None:
        """Add bodies to the batch, all or none: on return they are in the journal.

        Other journals hold `others` bytes, which will need space in the tables too.

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
        """Insert bodies into the tables at once, before those that wait.

        Raises:
            EngineRefusedError: none of them was taken.
        """
        self._staging.commit(bodies)

    def store(self) -> None:
        """Insert all waiting bodies into the tables.

        Raises:
            EngineRefusedError: some still wait; the log has the reason.
        """
        if not self.size:
            return
        if self._failed and time.monotonic() < self._retry_at:
            raise EngineRefusedError(str(self._failed), self._failed.code)
        try:
            self._try_to_store()
        except EngineRefusedError as error:
            logger.error("%d bytes of acknowledged spans wait in %s: %s", self.size, self._journal.path, error)
            # Each try may leave rows in the first of its tables: back off.
            self._pause = min(2 * self._pause, MAX_RETRY_SECONDS) if self._failed else RETRY_SECONDS
            self._failed, self._retry_at = error, time.monotonic() + self._pause
            self._tries += 1
            raise
        self._failed, self._tries, self.since = None, 0, 0.0

    def stage(self) -> None:
        """Stage the rows ahead of the store, if that succeeds now; no body may join this batch before it is stored."""
        if not self._staging.staged:
            try:
                self._staging.stage(self._bodies)
            # The store tries again, and reports the error.
            except (EngineRefusedError, OSError) as error:
                logger.debug("rows of %s are not made ahead: %s", self._journal.path, error)

    def retry_soon(self) -> None:
        """Let the next store try again at once, since the cause of the failure may be fixed."""
        self._retry_at = 0.0

    def close(self) -> None:
        """Close the journal; waiting bodies stay in it."""
        self._journal.close()

    def _in_journal(self, body: TraceBody, start: int) -> TraceBody:
        """Return the same body, read from the journal on demand."""
        return replace(body, load=partial(self._journal.read, start, body.size))

    def _try_to_store(self) -> None:
        try:
            if self._tries:
                self._store_separately()
            else:
                if not self._staging.staged:
                    self._staging.stage(self._bodies)
                self._staging.store()
            # Spans that are already in the tables count once when they are inserted again.
            self._journal.clear()
        except OSError as error:
            raise _refused(error) from None
        self._bodies, self._spans = [], 0

    def _store_separately(self) -> None:
        """Store each body that can be stored, and make dead letters of those that failed in all tries.

        Raises:
            EngineRefusedError: some bodies still wait: it is too early to give them up, or the cause is not in a body.
            OSError: the same; there is no space for a dead letter.
        """
        # Before all else: if the tables take nothing, each try would leave rows of all bodies in the first of them.
        tables_take_spans = store_one_again(self.handle)
        failing = self._store_in_parts(self._bodies)
        self._bodies = [body for body, _ in failing]
        if failing and (self._tries < _TRIES - 1 or not tables_take_spans):
            raise failing[0][1]
        for body, error in failing:
            file = _write_dead_letter(self._journal.path.parent / DEAD_LETTERS, body.load())
            logger.error("a request with %d acknowledged spans is in no table, and kept as the dead letter %s: %s", body.spans, file, error)

    def _store_in_parts(self, bodies: Sequence[TraceBody]) -> list[tuple[TraceBody, EngineRefusedError]]:
        """Store bodies, except those that can't be stored alone; return these, with their errors."""
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


def _write_dead_letter(directory: Path, body: bytes) -> Path:
    """Write a body to a file that can be sent again over OTLP/HTTP as it is; return its path. The same body twice is one file.

    Raises:
        OSError: there is no room, or the disk fails.
    """
    directory.mkdir(exist_ok=True)
    file = directory / f"{sha256(body).hexdigest()[:32]}.otlp"
    part = file.with_suffix(".part")
    part.write_bytes(body)
    part.replace(file)
    return file
