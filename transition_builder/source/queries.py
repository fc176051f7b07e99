"""Queries of the builder: by keys that fit a statement, in Arrow, limited to `builder.as_of`.

Invariant: with `builder.as_of`, later rows are not read, and the clock is that time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import polars as pl

from spangrad.settings import Settings
from spangrad.store import clickhouse
from spangrad.store.clickhouse import KEYS_A_STATEMENT, LONG, SETTLED, constant, microseconds, store_errors
from spangrad.store.datasets import builds_sql
from transition_builder.frames import concat, conform
from transition_builder.schemas import BUILT, MICROSECONDS

if TYPE_CHECKING:
    from clickhouse_connect.driver.client import Client

_QUERIES = 20
"""Number of statements from which one statement that reads everything is cheaper."""
_WHOLE = {**LONG, "enable_http_compression": 0, "buffer_size": 16 * 2**20}
"""Query settings: one uncompressed block up to this many bytes; chunks and compression cost both sides more than copies do."""
_COPIED_BYTES = 2**20
"""Largest size of rows that are copied behind the statement that inserts them, in bytes."""
_OF_REVISION = ("Revision", "Content", "Watermark", "RowsRead")
_NEWEST = """
SELECT RunId, RolloutId, Revision, Content, toUnixTimestamp64Micro(Watermark) AS Watermark, RowsRead,
    toUnixTimestamp64Micro(v.IngestedAt) AS IngestedAt
FROM {builds} AS v
"""


class StoreReader:
    """Runs queries for one build specification."""

    def __init__(self, client: Client, settings: Settings) -> None:
        """Query through `client`; this sends nothing yet."""
        self.client = client
        self.spec = settings.builder.spec
        as_of = settings.builder.as_of
        self.as_of = as_of if as_of is None or as_of.tzinfo else as_of.replace(tzinfo=UTC)

    def now(self) -> datetime:
        """Return the store's clock, which dates every arrival; or `builder.as_of`, where that is set."""
        if self.as_of:
            return self.as_of
        return self.frame("SELECT toUnixTimestamp64Micro(now64(6)) AS now").select(pl.col("now").cast(MICROSECONDS)).item()

    def arrived(self, table: str) -> str:
        """Return a SQL condition that a row of the table had arrived."""
        return f"{table}.IngestedAt <= fromUnixTimestamp64Micro({microseconds(self.as_of)})" if self.as_of else "true"

    def built(self, rollouts: pl.Series) -> pl.DataFrame:
        """Return BUILT: the newest revisions of all rollouts of some names, in any run."""
        of_spec = f"BuildSpec = '{self.spec}'"
        if rollouts.n_unique() > _QUERIES * KEYS_A_STATEMENT:
            return self._newest(of_spec, scans=True).filter(pl.col("RolloutId").is_in(rollouts.implode()))
        return concat((self._newest(f"{of_spec} AND RolloutId IN {constant(some)}") for some in batches(rollouts)), BUILT)

    def _newest(self, where: str, *, scans: bool = False) -> pl.DataFrame:
        return conform(self.frame(_NEWEST.format(builds=builds_sql(where=where, facts=_OF_REVISION)), scans=scans), BUILT)

    def frame(self, sql: str, parameters: Mapping[str, Any] | None = None, *, fresh: bool = False, scans: bool = False) -> pl.DataFrame:
        """Return the result of a query.

        Args:
            sql: statement, with places for parameters.
            parameters: by name.
            fresh: True if it must see every span that was acknowledged before, also where the client's other queries need not.
            scans: True if it reads much: on several threads, which cost a short query a tenth.

        Raises:
            StoreError: the store failed.
        """
        return query(self.client, sql, parameters, headers={SETTLED: "0"} if fresh else None, scans=scans)

    def insert(self, table: str, rows: pl.DataFrame) -> None:
        """Write rows; they are stored when this returns.

        Raises:
            StoreError: the store failed.
        """
        buffer = rows.rechunk().write_ipc_stream(None, compression="lz4", compat_level=pl.CompatLevel.oldest())
        # The driver puts the statement before bytes, and beside another buffer into the URL, which it encodes letter by letter.
        block = buffer.getvalue() if buffer.tell() <= _COPIED_BYTES else buffer.getbuffer()
        with store_errors(self.client):
            self.client.raw_insert(f"spangrad_internal.{table}", rows.columns, block, fmt="ArrowStream")  # pyright: ignore[reportArgumentType]  # any buffer


def query(
    client: Client,
    sql: str,
    parameters: Mapping[str, Any] | None = None,
    *,
    headers: dict[str, str] | None = None,
    scans: bool = True,
) -> pl.DataFrame:
    """Return the result of a query.

    Raises:
        StoreError: the store failed.
    """
    with store_errors(client):
        settings = _WHOLE if scans else {**_WHOLE, "max_threads": 1}
        table = client.query_arrow(sql, parameters=dict(parameters or {}), use_strings=True, settings=settings, transport_settings=headers)
    frame = pl.from_arrow(_with_plain_map_keys(table))
    assert isinstance(frame, pl.DataFrame)
    return frame


def batches(keys: pl.Series) -> Iterator[tuple[bytes, ...]]:
    """Return distinct keys without nulls, as many at a time as fit a statement; as bytes: a store may hold keys that are not UTF-8."""
    if keys.is_empty():
        return iter(())
    return clickhouse.batches(key for key in keys.unique(maintain_order=True).cast(pl.Binary).to_list() if key is not None)


def span_constants(spans: pl.DataFrame) -> Mapping[str, object]:
    """Return the constants that find spans in otel_traces by its sorting key: services, names, traces, spans, the first and last ns.

    Args:
        spans: one or more, no more than fit a statement, as SPANS has them.
    """
    named = {"services": "ServiceName", "names": "SpanName", "traces": "TraceId", "spans": "SpanId"}
    times = spans["Timestamp"].dt.epoch("ns")
    return {name: constant(spans[column].unique()) for name, column in named.items()} | {"first": times.min(), "last": times.max()}


def _with_plain_map_keys(table: Any) -> Any:
    """Decode dictionaries in the keys of maps: Polars reads them everywhere else."""
    import pyarrow as pa

    for index, column in enumerate(table.columns):
        if pa.types.is_map(column.type) and pa.types.is_dictionary(column.type.key_type):
            maps = [pa.MapArray.from_arrays(chunk.offsets, chunk.keys.dictionary_decode(), chunk.items) for chunk in column.chunks]
            table = table.set_column(index, table.column_names[index], pa.chunked_array(maps, pa.map_(pa.string(), pa.string())))
    return table
