"""Rows with messages and tools as Parquet, whose columns must have one type.

Invariant: what is read back is what was written, except that a message also has, as null, the keys that only other messages have; a row for
which that does not hold is left out and counted. Rows wait in a file until all keys and tools are known: memory holds the tools alone.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from transition_builder.export.files import JsonLines, read_lines
from transition_builder.export.tally import ExportTally, LeftOut

_ROWS_A_GROUP = 1000
_FUNCTION = pa.struct([("name", pa.string()), ("arguments", pa.string())])
_MESSAGE = {
    "role": pa.string(),
    "content": pa.string(),
    "name": pa.string(),
    "reasoning_content": pa.string(),
    "tool_calls": pa.list_(pa.struct([("id", pa.string()), ("type", pa.string()), ("function", _FUNCTION)])),
    "tool_call_id": pa.string(),
}


class MessageRows:
    """Collects rows that have messages in one column, and optionally tools."""

    def __init__(self, out: Path, messages: str, others: Mapping[str, Any]) -> None:
        """Collect rows for the Parquet file `out`, with a column of `messages` and `others`, `tools` excepted."""
        self._out = out
        self._waiting = out.with_name(out.name + ".rows")
        self._lines = JsonLines(self._waiting)
        self._messages = messages
        self._others = others
        self._keys: set[str] = set()
        self._tools = Counter[str]()

    def add(self, row: Mapping[str, Any], *, tools: Sequence[Mapping[str, Any]] = (), calls: int = 1) -> None:
        """Add a row, with the number of calls that it represents."""
        for message in row[self._messages]:
            self._keys.update(message)
        offered = json.dumps(list(tools)) if tools else ""
        self._tools[offered] += 1
        self._lines.write({"row": row, "tools": offered, "calls": calls})

    def finish(self, tally: ExportTally) -> Iterator[tuple[dict[str, Any], int]]:
        """Write the file; yield each row in it and its number of calls; count the calls of rows whose tools do not fit."""
        self._lines.close()
        fitting, tools_type = fitting_tools(self._tools)
        message = pa.struct([(name, dtype) for name, dtype in _MESSAGE.items() if name in self._keys or name in ("role", "content")])
        fields = [(self._messages, pa.list_(message)), *self._others.items()]
        if tools_type is not None:
            fields.append(("tools", tools_type))
        schema = pa.schema(fields)
        rows = iter(read_lines(self._waiting))
        with pq.ParquetWriter(self._out, schema, compression="zstd") as writer:
            while batch := list(islice(rows, _ROWS_A_GROUP)):
                kept = [buffered for buffered in batch if buffered["tools"] in fitting]
                tally.count_left_out(LeftOut.TOOLS_DIFFER, sum(buffered["calls"] for buffered in batch if buffered["tools"] not in fitting))
                converted = [
                    buffered["row"] | ({"tools": json.loads(buffered["tools"] or "[]")} if tools_type is not None else {})
                    for buffered in kept
                ]
                writer.write_table(pa.Table.from_pylist(converted, schema=schema))
                yield from ((buffered["row"], buffered["calls"]) for buffered in kept)

    def close(self) -> None:
        """Delete the buffered rows."""
        self._lines.close()
        self._waiting.unlink(missing_ok=True)


def fitting_tools(counts: Mapping[str, int]) -> tuple[set[str], Any]:
    """Return the lists of tools that can share a column unchanged, the frequent ones first, and the column's type.

    `counts` has the number of rows with each list, which is written as JSON; empty: none.
    """
    fitting, chosen, column_type = {""}, list[Any](), None
    examples = list[Any]()
    """Lists whose type together is the column's: one more is compared with them, not with all that were chosen."""
    for written in sorted(filter(None, counts), key=lambda written: (-counts[written], written)):
        tools = json.loads(written)
        try:
            tried_type = pa.infer_type([*examples, tools])
            changed = [tools] if tried_type == column_type else [*chosen, tools]
            if not _fits_parquet(tried_type) or pa.array(changed, tried_type).to_pylist() != changed:
                continue
        except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError):  # the last: an integer of more than 64 bits
            continue
        if tried_type != column_type:
            examples.append(tools)
            column_type = tried_type
        chosen.append(tools)
        fitting.add(written)
    return fitting, column_type


def _fits_parquet(dtype: Any) -> bool:
    """Return whether Parquet holds a type: it has no structs without fields, such as the properties of a tool without parameters."""
    if pa.types.is_list(dtype):
        return _fits_parquet(dtype.value_type)
    return not pa.types.is_struct(dtype) or (dtype.num_fields > 0 and all(_fits_parquet(field.type) for field in dtype))
