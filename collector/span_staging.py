"""Many bodies of spans into rows in memory, the engine decoding what it reads right, Python the rest; many such into one insert.

In: `TraceBody`s. Out: for each what was refused, all others staged; and when asked, everything staged committed.
Invariant: both roads give the same rows (tests/integration/test_collector_roads.py); every span of the bodies is counted in the
staged table, or refused by name, before anything is said of them.

The engine's road costs a third of Python's for a span and some twenty milliseconds for a batch: it is taken from ENGINE_FROM spans
on. It marks the spans that it would not read as the Collector writes them (decoding/spans.sql); Python encodes those.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

from collector.bodies import TraceBody, protobuf_list, resources
from collector.engine import EngineRefusedError, Handle
from collector.ingest import Refused
from collector.rows import DROPPED_INSERT, TRACES_INSERT, Rows, encode_traces
from collector.staging import Staging

logger = logging.getLogger(__name__)

ENGINE_FROM = 1000
"""Spans in a batch from which on the engine decodes."""
_DECODING = Path(__file__).parent / "decoding"
_COLUMNS = TRACES_INSERT[TRACES_INSERT.index("(") + 1 : -1]
_SCHEMA = str(_DECODING / "spans.proto").replace("\\", "\\\\").replace("'", "\\'")
_PARSE = f"INSERT INTO parsed SETTINGS format_schema = '{_SCHEMA}', format_schema_message_name = 'ResourceSpans', max_threads = 1"
# Numbers that are others each time stand in one of these statements: compiled, it would cost three times as much.
_ALL = "SETTINGS limit = 0, offset = 0, max_threads = 1, output_format_json_escape_forward_slashes = 0, compile_expressions = 0"
_FLAT = ", ".join(name for name in _COLUMNS.split(", ") if not name.startswith("`"))
"""Columns that the engine fills: not those of events and links."""
_DECODE = f"INSERT INTO staged ({_FLAT}, Resource, Scope, Place, Odd) {(_DECODING / 'spans.sql').read_text()} {_ALL}"

_STORE = (
    f"INSERT INTO otel.otel_traces ({_COLUMNS}) SELECT {_COLUMNS} FROM staged WHERE NOT Odd {_ALL},"
    # What came twice in one insert is told apart by readers and merges, as all that comes twice: looking for it here, row by row, is dear.
    " optimize_on_insert = 0"
)

Places = Mapping[tuple[int, int], Sequence[int]]
"""Places of spans in a request, by those of resource and scope, all from 0."""


class SpanStaging:
    """Inserts spans through one handle."""

    def __init__(self, handle: Handle, engine_from: int = ENGINE_FROM) -> None:
        """Insert through `handle`, which nobody else uses; the engine decodes batches of `engine_from` spans and more."""
        self._handle = handle
        self._others = Staging(handle)
        self._engine_from = engine_from
        self._ready = False
        self.held = 0
        """Spans staged and not committed."""
        self._numbered = 0
        """ResourceSpans that are staged."""

    def commit(self, bodies: Sequence[TraceBody]) -> list[Refused]:
        """Insert all spans of all bodies, and all that were staged before.

        Returns:
            What could not be stored of each body.

        Raises:
            EngineRefusedError: nothing was inserted, unless the engine failed in the middle of its views; nothing is staged any more.
        """
        refused = self.stage(bodies)
        try:
            self.store()
        except EngineRefusedError:
            self.forget()
            raise
        return refused

    def stage(self, bodies: Sequence[TraceBody]) -> list[Refused]:
        """Make rows of all spans of all bodies.

        Returns:
            What can't be stored of each body.

        Raises:
            EngineRefusedError: they can't be held; nothing is staged any more, not even what was before.
        """
        try:
            left = self._decoded(bodies)
            rows = [encode_traces(body.request, places) for body, places in zip(bodies, left, strict=True)]
            self._encoded(bodies, rows)
        except BaseException:
            self.forget()
            raise
        return [Refused(one.rejected, one.reason) for one in rows]

    def store(self) -> None:
        """Commit what is staged.

        Raises:
            EngineRefusedError: it was not inserted, unless the engine failed in the middle of its views; it is still staged.
        """
        if self.held:
            self._handle.query(_STORE)
        self.held = self._numbered = 0
        if self._ready:
            try:
                self._handle.query("TRUNCATE TABLE staged")
            # It is committed: it must not be inserted again.
            except EngineRefusedError:
                self.forget()

    def forget(self) -> None:
        """Stage nothing any more: the tables may hold anything."""
        self._ready = False
        self.held = self._numbered = 0
        for table in ("parsed", "staged"):
            self._handle.query(f"DROP TEMPORARY TABLE IF EXISTS {table}")

    def _decoded(self, bodies: Sequence[TraceBody]) -> list[Places | None]:
        """Stage what the engine decodes; of each body the spans that are left to Python. None: all of them."""
        ours = [place for place, body in enumerate(bodies) if body.wire is not None]
        if sum(bodies[place].spans for place in ours) < self._engine_from:
            self._prepare()
            return [None] * len(bodies)
        try:
            odd = self._by_engine([bodies[place] for place in ours])
        # Protobuf's own parser took all of this, so it is the engine's that is narrower: Python reads the batch.
        except EngineRefusedError as error:
            logger.warning("the engine did not decode a batch of %d bodies, Python does: %s", len(ours), error)
            # What was staged stays: rows come into a table in memory all at once, or not at all.
            self._handle.query("TRUNCATE TABLE parsed")
            return [None] * len(bodies)
        return [odd[ours.index(place)] if body.wire is not None else None for place, body in enumerate(bodies)]

    def _by_engine(self, bodies: Sequence[TraceBody]) -> list[Places]:
        self._prepare()
        places, first = resources(bodies), self._numbered
        if self._handle.send(_PARSE, "ProtobufList", protobuf_list(bodies, first)) != len(places):
            raise EngineRefusedError("Code: 117. DB::Exception: not every ResourceSpans was read. (INCORRECT_DATA)", 117)
        self._handle.query(_DECODE)
        self._handle.query("TRUNCATE TABLE parsed")
        self._numbered += len(places)
        asked = f"SELECT Resource - {first}, Scope - 1, Place - 1 FROM staged WHERE Odd AND Resource >= {first} {_ALL}"
        found = self._handle.query(asked).body
        odd: list[dict[tuple[int, int], list[int]]] = [defaultdict(list) for _ in bodies]
        for line in found.splitlines():
            number, scope, place = map(int, line.split(b"\t"))
            body, resource = places[number]
            odd[body][resource, scope].append(place)
        return [*odd]

    def _encoded(self, bodies: Sequence[TraceBody], rows: Sequence[Rows]) -> None:
        """Stage what Python made, and see that every span is there."""
        encoded = sum(one.count for one in rows)
        if encoded:
            self._handle.send(f"INSERT INTO staged ({_COLUMNS})", "RowBinary", (one.data for one in rows if one.data))
        expected = self.held + sum(body.spans for body in bodies) - sum(one.rejected for one in rows)
        held = int(self._handle.query(f"SELECT count() FROM staged WHERE NOT Odd {_ALL}").body)
        if held != expected:
            raise EngineRefusedError(
                f"Code: 241. DB::Exception: of {expected} spans {held} could be held: memory is short. Send fewer at once."
                " (MEMORY_LIMIT_EXCEEDED)",
                241,
            )
        if dropped := b"".join(one.dropped for one in rows):
            self._others.insert(DROPPED_INSERT, "RowBinary", dropped, keep_staging=True)
        self.held = held

    def _prepare(self) -> None:
        if not self._ready:
            for name in ("parsed", "staged"):
                self._handle.query((_DECODING / f"{name}.sql").read_text())
            self._ready = True
