"""Many bodies of spans into one committed insert, the engine decoding what it reads right, Python the rest.

In: `TraceBody`s. Out: for each what was refused, after the commit of all others.
Invariant: both roads give the same rows (tests/integration/test_collector_roads.py); every span of the bodies is counted in the
staged table, or refused by name, before anything is committed.

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
_ALL = "SETTINGS limit = 0, offset = 0, max_threads = 1, output_format_json_escape_forward_slashes = 0"
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

    def commit(self, bodies: Sequence[TraceBody]) -> list[Refused]:
        """Insert all spans of all bodies.

        Returns:
            What could not be stored of each body.

        Raises:
            EngineRefusedError: nothing of the bodies was inserted, unless the engine failed in the middle of its views.
        """
        try:
            left = self._decoded(bodies)
            rows = [encode_traces(body.request, places) for body, places in zip(bodies, left, strict=True)]
            self._store(bodies, rows)
        except EngineRefusedError:
            self._forget()
            raise
        return [Refused(one.rejected, one.reason) for one in rows]

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
            self._forget()
            self._prepare()
            return [None] * len(bodies)
        return [odd[ours.index(place)] if body.wire is not None else None for place, body in enumerate(bodies)]

    def _by_engine(self, bodies: Sequence[TraceBody]) -> list[Places]:
        self._prepare()
        places = resources(bodies)
        if self._handle.send(_PARSE, "ProtobufList", protobuf_list(bodies)) != len(places):
            raise EngineRefusedError("Code: 117. DB::Exception: not every ResourceSpans was read. (INCORRECT_DATA)", 117)
        self._handle.query(_DECODE)
        found = self._handle.query(f"SELECT Resource, Scope - 1, Place - 1 FROM staged WHERE Odd {_ALL}").body
        odd: list[dict[tuple[int, int], list[int]]] = [defaultdict(list) for _ in bodies]
        for line in found.splitlines():
            number, scope, place = map(int, line.split(b"\t"))
            body, resource = places[number]
            odd[body][resource, scope].append(place)
        return [*odd]

    def _store(self, bodies: Sequence[TraceBody], rows: Sequence[Rows]) -> None:
        encoded = sum(one.count for one in rows)
        if encoded:
            self._handle.send(f"INSERT INTO staged ({_COLUMNS})", "RowBinary", b"".join(one.data for one in rows))
        expected = sum(body.spans for body in bodies) - sum(one.rejected for one in rows)
        held = int(self._handle.query(f"SELECT count() FROM staged WHERE NOT Odd {_ALL}").body)
        if held != expected:
            raise EngineRefusedError(
                f"Code: 241. DB::Exception: of {expected} spans {held} could be held: memory is short. Send fewer at once."
                " (MEMORY_LIMIT_EXCEEDED)",
                241,
            )
        if dropped := b"".join(one.dropped for one in rows):
            self._others.insert(DROPPED_INSERT, "RowBinary", dropped, keep_staging=True)
        if held:
            self._handle.query(_STORE)
        for table in ("parsed", "staged"):
            self._handle.query(f"TRUNCATE TABLE {table}")

    def _prepare(self) -> None:
        if not self._ready:
            for name in ("parsed", "staged"):
                self._handle.query((_DECODING / f"{name}.sql").read_text())
            self._ready = True

    def _forget(self) -> None:
        """Drop tables that may still hold rows."""
        self._ready = False
        for table in ("parsed", "staged"):
            self._handle.query(f"DROP TEMPORARY TABLE IF EXISTS {table}")
