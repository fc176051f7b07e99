"""Insert of many bodies of spans at once, staged as rows in memory; the database decodes most spans, Python the rest.

Invariant: both decoders give the same rows (tests/integration/test_collector_routes.py); every span of the bodies is counted in the staged
table, unless it was refused, before any of them is inserted. A few spans need no table: the statement that inserts them holds their rows.

The database's decoder costs a third of Python's for a span and some twenty milliseconds for a batch: it is used from ENGINE_FROM spans on.
It marks the spans that it would not decode as the Collector does (decoding/spans.sql); Python encodes those.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from collector.database import EngineRefusedError, Handle
from collector.otlp.requests import TraceBody, protobuf_list, resources
from collector.otlp.rows import DROPPED_INSERT, TRACES_INSERT, encode_traces
from collector.write.staging import INLINE_BYTES, Staging, inline, require_held, structure_of

logger = logging.getLogger(__name__)

ENGINE_FROM = 1000
"""Number of spans in a batch from which the database decodes it."""
MAX_BATCH = 64 * 2**20
"""Bytes of bodies beyond which no further one joins a batch: decoding takes several times as much memory."""
_DECODING = Path(__file__).parents[1] / "decoding"
_COLUMNS = TRACES_INSERT[TRACES_INSERT.index("(") + 1 : -1]
_SCHEMA = str(_DECODING / "spans.proto").replace("\\", "\\\\").replace("'", "\\'")
_PARSE = f"INSERT INTO parsed SETTINGS format_schema = '{_SCHEMA}', format_schema_message_name = 'ResourceSpans', max_threads = 1"
# One of these statements has different numbers each time: compiled, it would cost three times as much.
_ALL = "SETTINGS limit = 0, offset = 0, max_threads = 1, output_format_json_escape_forward_slashes = 0, compile_expressions = 0"
_FLAT = ", ".join(name for name in _COLUMNS.split(", ") if not name.startswith("`"))
"""Columns that the database's decoder fills: not those of events and links."""
_DECODE = f"INSERT INTO staged ({_FLAT}, Resource, Scope, Place, Odd) {(_DECODING / 'spans.sql').read_text()} {_ALL}"

_SOUND = "staged WHERE NOT Odd"
"""Rows of the table in memory that are inserted."""
_STORE = (
    # In the table's own order, so that its widest column is not sorted twice, for the table and for its index.
    f"INSERT INTO otel.otel_traces ({_COLUMNS}) SELECT {_COLUMNS} FROM {{staged}}"
    f" ORDER BY ServiceName, SpanName, toDateTime(Timestamp) {_ALL},"
    # Duplicates within one insert are removed by readers and merges, like all others: to search for them here, row by row, is costly.
    " optimize_on_insert = 0"
)
_PARALLEL_VIEWS = ", parallel_view_processing = 1, max_threads = 2"
"""Settings by which the table and its views are written in parallel: if one view fails, the rows of the others are written."""
_OF_FEW = ", query_plan_enable_optimizations = 0"
"""Setting for few spans, of whose insert an optimization of the plan takes more than it saves."""

Places = Mapping[tuple[int, int], Sequence[int]]
"""Indices of spans in a request, by the indices of resource and scope, all from 0."""


class SpanStaging:
    """Inserter of spans through one handle."""

    def __init__(self, handle: Handle, decode_from: int = ENGINE_FROM) -> None:
        """Insert through `handle`, which must not be shared; the database decodes batches of `decode_from` spans and more."""
        self._handle = handle
        self._others = Staging(handle)
        self._decode_from = decode_from
        self._ready = False
        """True if the tables in memory exist, and hold nothing but what is staged."""
        self._structure = ""
        """Names and types of the columns of spans."""
        self._rows = b""
        """Rows that are staged here, and not in the table: a few."""
        self.staged = False
        """True if rows are staged and not stored yet."""

    def commit(self, bodies: Sequence[TraceBody]) -> None:
        """Insert all spans of all bodies except the refused ones, and discard what was staged before; afterwards nothing is staged.

        Raises:
            EngineRefusedError: nothing was inserted, unless the database failed in the middle of its views.
            OSError: the same; a body can't be loaded.
        """
        if self.staged:
            self.forget()
        self.stage(bodies)
        self._store(_STORE)

    def stage(self, bodies: Sequence[TraceBody]) -> None:
        """Stage rows of all spans of all bodies except the refused ones; nothing may be staged before.

        Raises:
            EngineRefusedError: memory can't hold them; nothing is staged.
            OSError: the same; a body can't be loaded.
        """
        first = 0
        try:
            self._prepare()
            batches = [*_batches(bodies)]
            for batch in batches:
                self._stage(batch, first, alone=len(batches) == 1)
                first += sum(len(body.wire or ()) for body in batch)
            if not self._rows:
                expected = sum(body.spans - body.refused.count for body in bodies)
                require_held(self._handle, _SOUND, expected, "spans", "memory is short. Send fewer at once.")
            self.staged = True
        except BaseException:
            self.forget()
            raise

    def store(self) -> None:
        """Insert the staged rows; only while no view refuses a span. Afterwards nothing is staged.

        Raises:
            EngineRefusedError: the rows are not in all tables, perhaps in some.
        """
        self._store(_STORE + _PARALLEL_VIEWS)

    def forget(self) -> None:
        """Discard what is staged, by dropping the tables."""
        self._ready = self.staged = False
        self._rows = b""
        for table in ("parsed", "staged"):
            self._handle.query(f"DROP TEMPORARY TABLE IF EXISTS {table}")

    def _store(self, statement: str) -> None:
        if self._rows:
            statement = statement.format(staged=inline(self._structure, "RowBinary", self._rows)) + _OF_FEW
        else:
            statement = statement.format(staged=_SOUND)
        try:
            self._handle.query(statement)
        except BaseException:
            self.forget()
            raise
        self.staged = False
        if self._rows:
            self._rows = b""
            return
        try:
            self._handle.query("TRUNCATE TABLE staged")
        # It is committed: it must not be inserted again.
        except EngineRefusedError:
            self.forget()

    def _stage(self, batch: Sequence[TraceBody], first: int, *, alone: bool) -> None:
        """Stage rows of a batch, its ResourceSpans numbered from `first`; `alone`: no other batch is staged."""
        remaining = self._decode(batch, first)
        # Most bodies have nothing left for Python.
        encoded = [encode_traces(body.request, places) for body, places in zip(batch, remaining, strict=True) if places is None or places]
        data = [rows.data for rows in encoded if rows.data]
        by_python = all(places is None for places in remaining)
        if alone and by_python and sum(map(len, data)) <= INLINE_BYTES:
            self._rows = b"".join(data)
        elif data:
            self._handle.send(f"INSERT INTO staged ({_COLUMNS})", "RowBinary", data)
        if dropped := b"".join(rows.dropped for rows in encoded):
            self._others.insert(DROPPED_INSERT, "RowBinary", dropped, keep_staging=True)

    def _decode(self, batch: Sequence[TraceBody], first: int) -> list[Places | None]:
        """Stage the spans that the database decodes; return those that are left to Python for each body. None: all of them."""
        decodable = [body for body in batch if body.wire is not None]
        if sum(body.spans for body in decodable) < self._decode_from:
            return [None] * len(batch)
        try:
            decoded_by_database = iter(self._decode_in_database(decodable, first))
        # Protobuf's own parser accepted all of this, so that the database's is stricter: Python decodes the batch.
        except EngineRefusedError as error:
            logger.warning("the database did not decode a batch of %d bodies, Python does: %s", len(decodable), error)
            # Earlier batches stay staged: rows come into a table in memory all at once, or not at all.
            self._handle.query("TRUNCATE TABLE parsed")
            return [None] * len(batch)
        return [None if body.wire is None else next(decoded_by_database) for body in batch]

    def _decode_in_database(self, bodies: Sequence[TraceBody], first: int) -> list[Places]:
        """Stage the spans that the database decodes, ResourceSpans numbered from `first`; return those left to Python for each body."""
        places = resources(bodies)
        if self._handle.send(_PARSE, "ProtobufList", protobuf_list(bodies, first)) != len(places):
            raise EngineRefusedError("Code: 117. DB::Exception: not every ResourceSpans was read. (INCORRECT_DATA)", 117)
        self._handle.query(_DECODE)
        self._handle.query("TRUNCATE TABLE parsed")
        query = f"SELECT Resource - {first}, Scope - 1, Place - 1 FROM staged WHERE Odd AND Resource >= {first} {_ALL}"
        decoded_by_database: list[dict[tuple[int, int], list[int]]] = [defaultdict(list) for _ in bodies]
        for line in self._handle.query(query).body.splitlines():
            number, scope, span_index = map(int, line.split(b"\t"))
            body, resource = places[number]
            decoded_by_database[body][resource, scope].append(span_index)
        return [*decoded_by_database]

    def _prepare(self) -> None:
        if not self._ready:
            for name in ("parsed", "staged"):
                self._handle.query((_DECODING / f"{name}.sql").read_text())
            self._structure = structure_of(self._handle, _COLUMNS, "staged")
            self._ready = True


def store_one_again(handle: Handle) -> bool:
    """Insert a stored span again, which counts once; return whether there is one.

    Raises:
        EngineRefusedError: the table, or one of its views, refuses it.
    """
    handle.query(f"INSERT INTO otel.otel_traces ({_COLUMNS}) SELECT {_COLUMNS} FROM otel.otel_traces LIMIT 1")
    return int(handle.query("SELECT count() FROM (SELECT 1 FROM otel.otel_traces LIMIT 1)").body) == 1


def _batches(bodies: Sequence[TraceBody]) -> Iterator[list[TraceBody]]:
    """Yield batches of bodies in their order, each as large as MAX_BATCH allows, with at least one body."""
    batch: list[TraceBody] = []
    size = 0
    for body in bodies:
        if batch and size + body.size > MAX_BATCH:
            yield batch
            batch, size = [], 0
        batch.append(body)
        size += body.size
    if batch:
        yield batch
