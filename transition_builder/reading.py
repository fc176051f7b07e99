"""How the builder asks the store: by keys that fit a statement, in Arrow, and nothing later than it was told.

In: a client, SQL, keys. Out: Polars frames. Invariant: with `builder.as_of`, what arrived later does not exist, and it is then.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime
from itertools import islice
from typing import TYPE_CHECKING, Any

import polars as pl

from spangrad.clickhouse import store_errors
from spangrad.datasets import builds_sql
from spangrad.settings import Settings
from transition_builder.frames import BUILT, concat

if TYPE_CHECKING:
    from clickhouse_connect.driver.client import Client

KEYS_A_QUERY = 500
_QUERIES = 20
"""So many are dearer than one that reads everything."""
_WHOLE = {"enable_http_compression": 0, "buffer_size": 16 * 2**20}
"""In one piece, up to so many bytes, and plain: pieces, and what packs and unpacks them, cost both sides more than copies do."""
_NEWEST = """
SELECT RunId, RolloutId, Revision, Content, toUnixTimestamp64Micro(Watermark) AS Watermark, RowsRead,
    toUnixTimestamp64Micro(v.IngestedAt) AS IngestedAt
FROM {builds} AS v
"""


class Reader:
    """Asks for one build specification."""

    def __init__(self, client: Client, settings: Settings) -> None:
        """Ask through `client`; nothing is asked yet."""
        self.client = client
        self.url = settings.store.url
        self.spec = settings.builder.spec
        as_of = settings.builder.as_of
        self.as_of = as_of if as_of is None or as_of.tzinfo else as_of.replace(tzinfo=UTC)

    def now(self) -> datetime:
        """The store's clock, that dates every arrival; the past that is built from, where that is so."""
        if self.as_of:
            return self.as_of
        return self.frame("SELECT toUnixTimestamp64Micro(now64(6)) AS now").select(pl.col("now").cast(pl.Datetime("us", "UTC"))).item()

    def arrived(self, table: str) -> str:
        """A condition over a table: whether a row had arrived."""
        return f"otel.{table}.IngestedAt <= fromUnixTimestamp64Micro({microseconds(self.as_of)})" if self.as_of else "true"

    def built(self, rollouts: Iterable[str]) -> pl.DataFrame:
        """BUILT: the newest revisions of all rollouts of some names, in whatever run."""
        names = list(dict.fromkeys(rollouts))
        if len(names) > _QUERIES * KEYS_A_QUERY:
            return self._newest("BuildSpec = %(spec)s", {})
        where = "BuildSpec = %(spec)s AND RolloutId IN %(keys)s"
        return concat((self._newest(where, {"keys": some}) for some in batches(names)), BUILT)

    def _newest(self, where: str, parameters: Mapping[str, Any]) -> pl.DataFrame:
        return concat([self.frame(_NEWEST.format(builds=builds_sql(where=where)), {"spec": self.spec, **parameters})], BUILT)

    def frame(self, sql: str, parameters: Mapping[str, Any] | None = None) -> pl.DataFrame:
        """An answer.

        Raises:
            StoreError: the store failed.
        """
        with store_errors(self.url):
            table = self.client.query_arrow(sql, parameters=dict(parameters or {}), use_strings=True, settings=_WHOLE)
        frame = pl.from_arrow(_with_plain_map_keys(table))
        assert isinstance(frame, pl.DataFrame)
        return frame

    def insert(self, table: str, rows: pl.DataFrame) -> None:
        """Write rows, which are there when this returns.

        Raises:
            StoreError: the store failed.
        """
        with store_errors(self.url):
            self.client.insert_arrow(f"otel.{table}", rows.rechunk().to_arrow(compat_level=pl.CompatLevel.oldest()))


def microseconds(time: datetime) -> int:
    """Since 1970."""
    return round(time.timestamp() * 1_000_000)


def batches(keys: Iterable[str]) -> Iterator[tuple[str, ...]]:
    """Distinct keys, as many at a time as fit a statement (the engine parses at most 256 KiB)."""
    distinct = iter(keys.unique(maintain_order=True).to_list() if isinstance(keys, pl.Series) else dict.fromkeys(keys))
    while some := tuple(islice(distinct, KEYS_A_QUERY)):
        yield some


def constant(texts: Iterable[str]) -> str:
    """Texts as a constant array in SQL, at least one.

    In hexadecimal, because the store refuses statements with certain words in them, and between bytes that UTF-8 has no use for; and
    without a lambda, which the engine would not evaluate in time to look the keys up in the index.
    """
    between = b"\xff"
    return f"splitByChar('\\xFF', unhex('{between.join(text.encode() for text in texts).hex()}'))"


def _with_plain_map_keys(table: Any) -> Any:
    """The same table: Polars takes a dictionary for any text but the key of a map."""
    import pyarrow as pa

    for place, column in enumerate(table.columns):
        if pa.types.is_map(column.type) and pa.types.is_dictionary(column.type.key_type):
            maps = [pa.MapArray.from_arrays(one.offsets, one.keys.dictionary_decode(), one.items) for one in column.chunks]
            table = table.set_column(place, table.column_names[place], pa.chunked_array(maps, pa.map_(pa.string(), pa.string())))
    return table
