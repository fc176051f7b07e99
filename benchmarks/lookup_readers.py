"""One batch of rollouts read from a full store: as the builder reads it, and as the stock exporter's tables allow.

In: a store's URL and process id, and batches of rollouts. Out: what each batch cost both processes, and what was read. Invariant: a
reader runs in a process of its own, and what it reads is compared with a scan that uses no index.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from statistics import median
from typing import Any, TypeVar

import polars as pl

from benchmarks.lookup_data import Workload
from spangrad.settings import Settings, StoreSettings
from spangrad.store.clickhouse import connect
from transition_builder.completeness.complete import decide, facts
from transition_builder.frames import Frames, conform
from transition_builder.schemas import CALLS, SPANS
from transition_builder.source.rollouts import RolloutReader

_Result = TypeVar("_Result")
_TIMES = {"Timestamp": "toUnixTimestamp64Nano(Timestamp) AS Timestamp"}
_SORT = ["RolloutKey", "TraceId", "SpanId", "EventIndex", "RowKind"]


@dataclass(frozen=True, slots=True)
class Cost:
    """Cost of reading one batch, in milliseconds."""

    store_cpu_ms: float
    reader_cpu_ms: float
    wall_ms: float

    @property
    def cpu_ms(self) -> float:
        """CPU of store and reader, in milliseconds."""
        return self.store_cpu_ms + self.reader_cpu_ms


def summary(costs: list[Cost]) -> dict[str, float]:
    """Return the medians, and the least total CPU."""
    figures = {name: median(asdict(cost)[name] for cost in costs) for name in ("store_cpu_ms", "reader_cpu_ms", "wall_ms")}
    total = [cost.cpu_ms for cost in costs]
    return {name: round(value, 2) for name, value in {"cpu_ms": median(total), "cpu_ms_least": min(total), **figures}.items()}


class Meter:
    """CPU of the store's process and of this one."""

    def __init__(self, store_process: int) -> None:
        # The clock of another process's CPU time, in nanoseconds (clock_getcpuclockid).
        self._clock = (~store_process << 3) | 2

    def measure(self, work: Callable[[], _Result]) -> tuple[_Result, Cost]:
        """Run a function; return its result and its cost."""
        store, own, begin = time.clock_gettime(self._clock), time.process_time(), time.perf_counter()
        result = work()
        wall = time.perf_counter() - begin
        own, store = time.process_time() - own, time.clock_gettime(self._clock) - store
        return result, Cost(store * 1000, own * 1000, wall * 1000)


class Reader:
    """Reads batches of a workload."""

    def __init__(self, store: StoreSettings, store_process: int, workload: Workload) -> None:
        """Connect; what an earlier query found out about conditions is not used."""
        self.client = connect(store)
        self.client.set_client_setting("use_query_condition_cache", 0)
        self._settings = Settings(store=store)
        self._source = RolloutReader(self.client, self._settings)
        self._meter = Meter(store_process)
        self._workload = workload

    def names(self, rollouts: Iterable[int]) -> pl.DataFrame:
        """RolloutId and TraceId of rollouts: what the builder knows of them beforehand."""
        chosen = ", ".join(map(str, rollouts))
        sql = f"SELECT {self._workload.id_sql('number')} AS RolloutId, {self._workload.trace_sql('number')} AS TraceId"
        return self._frame(f"{sql} FROM (SELECT arrayJoin([{chosen}]) AS number)")

    def ours(self, batch: pl.DataFrame) -> tuple[Frames, Cost]:
        """Read what the builder judges and builds a batch by. Judging costs extra, and has no part in this."""
        arrivals, first = self._meter.measure(lambda: self._source.arrivals(batch))
        owners, between = self._meter.measure(lambda: self._source.owners(arrivals))
        rollouts = decide(facts(arrivals, owners), datetime.now(UTC), self._settings.builder)
        frames, second = self._meter.measure(lambda: self._source.frames(rollouts, arrivals, owners))
        return frames, Cost(*map(sum, zip(*(asdict(cost).values() for cost in (first, between, second)), strict=True)))

    def stock(self, batch: pl.DataFrame) -> tuple[pl.DataFrame, Cost]:
        """The same question, asked of the exporter's own tables: spans (with their token ids) and log records that name the rollouts."""

        def read() -> pl.DataFrame:
            keys = ", ".join(f"'{key}'" for key in batch["RolloutId"])
            spans = self._frame(_STOCK.format(table="otel_traces", attributes="SpanAttributes", more=_OF_SPANS, keys=keys))
            logs = self._frame(_STOCK.format(table="otel_logs", attributes="LogAttributes", more=_OF_LOGS, keys=keys))
            return pl.concat([spans, logs], how="diagonal")

        return self._meter.measure(read)

    def scanned(self, batch: pl.DataFrame) -> tuple[pl.DataFrame, pl.DataFrame]:
        """The same spans and calls, by reading every row of the tables."""
        named = ", ".join(f"'{key}'" for key in batch["RolloutId"])
        traces = ", ".join(f"'{trace}'" for trace in batch["TraceId"])
        where = f"RolloutKeySource = 'rollout' AND RolloutKey IN ({named}) OR RolloutKeySource != 'rollout' AND TraceId IN ({traces})"
        return tuple(
            self._frame(
                f"SELECT {', '.join(_TIMES.get(name, name) for name in schema)} FROM spangrad_internal.{table} FINAL WHERE {where} "
                "SETTINGS use_primary_key = 0, use_skip_indexes = 0, optimize_move_to_prewhere = 0",
                schema,
            )
            for table, schema in (("rollout_spans", SPANS), ("calls", CALLS))
        )  # type: ignore[return-value]

    def _frame(self, sql: str, schema: Any = None) -> pl.DataFrame:
        frame = pl.from_arrow(self.client.query_arrow(sql, use_strings=True))
        assert isinstance(frame, pl.DataFrame)
        return frame if schema is None else conform(frame, schema)


def differing_rows(left: pl.DataFrame, right: pl.DataFrame) -> int:
    """Return the number of rows that are in only one of two frames."""
    left_rows, right_rows = (set(_rows(frame)) for frame in (left, right))
    return len(left_rows ^ right_rows) + abs(left.height - right.height)


def _rows(frame: pl.DataFrame) -> Iterable[str]:
    columns = frame.sort(name for name in _SORT if name in frame.columns)
    maps = [name for name, dtype in frame.schema.items() if isinstance(dtype, pl.Map)]
    entries = columns.with_columns(pl.col(name).map.entries().list.sort() for name in maps)
    return entries.select(pl.struct(pl.all()).struct.json_encode()).to_series()


_STOCK = """
SELECT Timestamp, TraceId, SpanId, ServiceName, {attributes}, {more}
FROM otel.{table}
WHERE {attributes}['spangrad.rollout.id'] IN ({keys}) AND hasAny(mapValues({attributes}), [{keys}])
"""
_OF_SPANS = "ParentSpanId, SpanName, ScopeName, Duration, StatusCode, StatusMessage, Events.Name, Events.Attributes"
_OF_LOGS = "EventName"
