"""Many bodies of spans into one insert: into rows in memory first, the engine decoding what it reads right, Python the rest.

In: `TraceBody`s. Out: rows of otel.otel_traces, of all their spans but the refused ones.
Invariant: both roads give the same rows (tests/integration/test_collector_roads.py); every span of the bodies is counted in the
staged table, unless it was refused, before any of them is inserted.

The engine's road costs a third of Python's for a span and some twenty milliseconds for a batch: it is taken from ENGINE_FROM spans
on. It marks the spans that it would not read as the Collector writes them (decoding/spans.sql); Python encodes those.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from collector.database import EngineRefusedError, Handle
from collector.otlp.requests import TraceBody, protobuf_list, resources
from collector.otlp.rows import DROPPED_INSERT, TRACES_INSERT, encode_traces
from collector.write.staging import Staging, require_held

logger = logging.getLogger(__name__)

ENGINE_FROM = 1000
"""Spans in a batch from which on the engine decodes."""
MAX_BATCH = 64 * 2**20
"""Bytes of bodies beyond which no further one joins a batch: what is made of them on the way has several times as many."""
_DECODING = Path(__file__).parents[1] / "decoding"
_COLUMNS = TRACES_INSERT[TRACES_INSERT.index("(") + 1 : -1]
_SCHEMA = str(_DECODING / "spans.proto").replace("\\", "\\\\").replace("'", "\\'")
_PARSE = f"INSERT INTO parsed SETTINGS format_schema = '{_SCHEMA}', format_schema_message_name = 'ResourceSpans', max_threads = 1"
# Numbers that are others each time stand in one of these statements: compiled, it would cost three times as much.
_ALL = "SETTINGS limit = 0, offset = 0, max_threads = 1, output_format_json_escape_forward_slashes = 0, compile_expressions = 0"
_FLAT = ", ".join(name for name in _COLUMNS.split(", ") if not name.startswith("`"))
"""Columns that the engine fills: not those of events and links."""
_DECODE = f"INSERT INTO staged ({_FLAT}, Resource, Scope, Place, Odd) {(_DECODING / 'spans.sql').read_text()} {_ALL}"

_STORE = (
    # In the table's own order, so that writing it need not put its widest column in order twice, as it is and for the index of it.
    f"INSERT INTO otel.otel_traces ({_COLUMNS}) SELECT {_COLUMNS} FROM staged WHERE NOT Odd"
    f" ORDER BY ServiceName, SpanName, toDateTime(Timestamp) {_ALL},"
    # What came twice in one insert is told apart by readers and merges, as all that comes twice: looking for it here, row by row, is dear.
    " optimize_on_insert = 0"
)
_AT_THE_SAME_TIME = ", parallel_view_processing = 1, max_threads = 2"
"""The table and what its views make of the rows are written side by side: should one of the views fail, the others are there."""

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
        """Whether the tables in memory are there, and those that are hold nothing, or what is staged."""
        self.staged = False
        """Whether rows are made and not stored."""

    def commit(self, bodies: Sequence[TraceBody]) -> None:
        """Insert all spans of all bodies but the refused ones, and nothing that was staged: in any case nothing is staged any more.

        Raises:
            EngineRefusedError: nothing was inserted, unless the engine failed in the middle of its views.
            OSError: the same; a body can't be loaded.
        """
        if self.staged:
            self.forget()
        self.stage(bodies)
        self._store(_STORE)

    def stage(self, bodies: Sequence[TraceBody]) -> None:
        """Make rows of all spans of all bodies but the refused ones, where none are staged.

        Raises:
            EngineRefusedError: they can't be held; nothing is staged.
            OSError: the same; a body can't be loaded.
        """
        first = 0
        try:
            self._prepare()
            for batch in _batches(bodies):
                self._stage(batch, first)
                first += sum(len(body.wire or ()) for body in batch)
            expected = sum(body.spans - body.refused.count for body in bodies)
            require_held(self._handle, "staged WHERE NOT Odd", expected, "spans", "memory is short. Send fewer at once.")
            self.staged = True
        except BaseException:
            self.forget()
            raise

    def store(self) -> None:
        """Insert what is staged, where no view refuses a span; in any case nothing is staged any more.

        Raises:
            EngineRefusedError: it is not in all tables, perhaps in some.
        """
        self._store(_STORE + _AT_THE_SAME_TIME)

    def forget(self) -> None:
        """Stage nothing any more, whatever the tables hold."""
        self._ready = self.staged = False
        for table in ("parsed", "staged"):
            self._handle.query(f"DROP TEMPORARY TABLE IF EXISTS {table}")

    def _store(self, statement: str) -> None:
        try:
            self._handle.query(statement)
        except BaseException:
            self.forget()
            raise
        self.staged = False
        try:
            self._handle.query("TRUNCATE TABLE staged")
        # It is committed: it must not be inserted again.
        except EngineRefusedError:
            self.forget()

    def _stage(self, batch: Sequence[TraceBody], first: int) -> None:
        """Make rows of a batch, its ResourceSpans numbered from `first`."""
        left = self._decoded(batch, first)
        # Most bodies have nothing left for Python.
        rows = [encode_traces(body.request, places) for body, places in zip(batch, left, strict=True) if places is None or places]
        if data := [one.data for one in rows if one.data]:
            self._handle.send(f"INSERT INTO staged ({_COLUMNS})", "RowBinary", data)
        if dropped := b"".join(one.dropped for one in rows):
            self._others.insert(DROPPED_INSERT, "RowBinary", dropped, keep_staging=True)

    def _decoded(self, batch: Sequence[TraceBody], first: int) -> list[Places | None]:
        """Stage what the engine decodes; of each body the spans that are left to Python. None: all of them."""
        ours = [body for body in batch if body.wire is not None]
        if sum(body.spans for body in ours) < self._engine_from:
            return [None] * len(batch)
        try:
            odd = iter(self._by_engine(ours, first))
        # Protobuf's own parser took all of this, so it is the engine's that is narrower: Python reads the batch.
        except EngineRefusedError as error:
            logger.warning("the engine did not decode a batch of %d bodies, Python does: %s", len(ours), error)
            # What was staged stays: rows come into a table in memory all at once, or not at all.
            self._handle.query("TRUNCATE TABLE parsed")
            return [None] * len(batch)
        return [None if body.wire is None else next(odd) for body in batch]

    def _by_engine(self, bodies: Sequence[TraceBody], first: int) -> list[Places]:
        """Stage what the engine decodes, its ResourceSpans numbered from `first`; of each body the spans that are left to Python."""
        places = resources(bodies)
        if self._handle.send(_PARSE, "ProtobufList", protobuf_list(bodies, first)) != len(places):
            raise EngineRefusedError("Code: 117. DB::Exception: not every ResourceSpans was read. (INCORRECT_DATA)", 117)
        self._handle.query(_DECODE)
        self._handle.query("TRUNCATE TABLE parsed")
        asked = f"SELECT Resource - {first}, Scope - 1, Place - 1 FROM staged WHERE Odd AND Resource >= {first} {_ALL}"
        odd: list[dict[tuple[int, int], list[int]]] = [defaultdict(list) for _ in bodies]
        for line in self._handle.query(asked).body.splitlines():
            number, scope, place = map(int, line.split(b"\t"))
            body, resource = places[number]
            odd[body][resource, scope].append(place)
        return [*odd]

    def _prepare(self) -> None:
        if not self._ready:
            for name in ("parsed", "staged"):
                self._handle.query((_DECODING / f"{name}.sql").read_text())
            self._ready = True


def store_one_again(handle: Handle) -> bool:
    """Insert a span that is there already, which counts once; whether there is one.

    Raises:
        EngineRefusedError: the table, or one of its views, takes none.
    """
    handle.query(f"INSERT INTO otel.otel_traces ({_COLUMNS}) SELECT {_COLUMNS} FROM otel.otel_traces LIMIT 1")
    return int(handle.query("SELECT count() FROM (SELECT 1 FROM otel.otel_traces LIMIT 1)").body) == 1


def _batches(bodies: Sequence[TraceBody]) -> Iterator[list[TraceBody]]:
    """Bodies in their order, as many at a time as MAX_BATCH allows, at least one."""
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
