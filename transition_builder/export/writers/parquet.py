"""Transitions as Parquet: all their columns and Return, the weighted sum of the rollout's rewards; a row a call, a row group a part."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

from transition_builder.export.reading import ExportReader, GroupSlice
from transition_builder.schemas import NANOSECONDS, TRANSITIONS

_NOT_WRITTEN = frozenset({"Content"})
"""Columns without a meaning outside the store."""


def _arrow_type(dtype: pl.DataType) -> Any:
    if isinstance(dtype, pl.List):
        return pa.list_(_arrow_type(dtype.inner))  # pyright: ignore[reportArgumentType]  # Polars says DataTypeClass as well
    plain: dict[pl.DataType, Any] = {
        pl.String(): pa.string(),
        pl.Float64(): pa.float64(),
        pl.Float32(): pa.float32(),
        pl.UInt16(): pa.uint16(),
        pl.UInt32(): pa.uint32(),
        pl.UInt64(): pa.uint64(),
        NANOSECONDS: pa.timestamp("ns", tz="UTC"),
    }
    return plain[dtype]


_REWARD = pa.struct(
    [
        (name.removeprefix("Rewards."), _arrow_type(dtype.inner))  # pyright: ignore[reportArgumentType]  # as above
        for name, dtype in TRANSITIONS.items()
        if name.startswith("Rewards.") and isinstance(dtype, pl.List)
    ]
)
SCHEMA = pa.schema(
    [(name, _arrow_type(dtype)) for name, dtype in TRANSITIONS.items() if name not in _NOT_WRITTEN and not name.startswith("Rewards.")]
    + [("Rewards", pa.list_(_REWARD)), ("Return", pa.float64())]
)
"""Columns of the file."""


def write_parquet(reader: ExportReader, out: Path) -> None:
    """Write the transitions to the file `out`."""
    with pq.ParquetWriter(out, SCHEMA.with_metadata(metadata(reader)), compression="zstd") as writer:
        for _, table in tables(reader):
            writer.write_table(table)


def tables(reader: ExportReader) -> Iterator[tuple[GroupSlice, Any]]:
    """Yield parts and their transitions as Arrow tables of SCHEMA; they count as written."""
    for part in reader.parts():
        if part.calls.height:
            reader.tally.write(part.calls.height, rows=part.calls.height, tokens=int(part.calls["ResponseIds"].list.len().sum()))
            yield part, table(part.calls)


def table(calls: pl.DataFrame) -> Any:
    """Return transitions with their Return as a table of SCHEMA."""
    arrow = calls.rechunk().to_arrow(compat_level=pl.CompatLevel.oldest())
    lists = [_list(arrow, f"Rewards.{field.name}") for field in _REWARD]
    fields = [values.values.cast(field.type) for values, field in zip(lists, _REWARD, strict=True)]
    rewards = pa.ListArray.from_arrays(lists[0].offsets.cast(pa.int32()), pa.StructArray.from_arrays(fields, fields=list(_REWARD)))
    return arrow.append_column("Rewards", rewards).select(SCHEMA.names).cast(SCHEMA)


def metadata(reader: ExportReader) -> dict[str, str]:
    """Return the metadata of a file: its dataset, build specification, time and reward weights."""
    request = reader.request
    return {
        "spangrad.dataset": str(reader.dataset),
        "spangrad.build_spec": reader.dataset.build_spec,
        "spangrad.as_of": request.as_of.isoformat() if request.as_of else "",
        "spangrad.reward_weights": json.dumps(dict(request.reward_weights), sort_keys=True),
    }


def _list(arrow: Any, name: str) -> Any:
    """Return a column as one list array that begins with its first value."""
    column = arrow[name].combine_chunks()
    array = column.chunk(0) if isinstance(column, pa.ChunkedArray) else column
    return pa.concat_arrays([array])
