"""Rows with messages and tools as Parquet, whose columns must have one type.

In: rows, as they come. Out: a Parquet file. Invariant: what is read back is what was written, but that a message also has, as null, the
keys that only other messages have; a row of which that cannot be said is left out and counted.

Rows wait in a file until all keys and tools are known: memory holds the tools alone, which are few.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from transition_builder.export.files import JsonLines, read_lines

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
    """Collects rows that have messages in one column, and perhaps tools."""

    def __init__(self, out: Path, messages: str, others: Mapping[str, Any]) -> None:
        """Collect.

        Args:
            out: the Parquet file.
            messages: the column of messages.
            others: the other columns, `tools` excepted.
        """
        self._out = out
        self._waiting = out.with_name(out.name + ".rows")
        self._lines = JsonLines(self._waiting)
        self._messages = messages
        self._others = others
        self._keys: set[str] = set()
        self._tools = Counter[str]()

    def add(self, row: Mapping[str, Any], *, tools: Sequence[Mapping[str, Any]] = (), calls: int = 1) -> None:
        """Add a row, and how many calls it stands for."""
        for message in row[self._messages]:
            self._keys.update(message)
        offered = json.dumps(list(tools)) if tools else ""
        self._tools[offered] += 1
        self._lines.write({"row": row, "tools": offered, "calls": calls})

    def finish(self, left_out: Callable[[int], None]) -> Iterator[tuple[dict[str, Any], int]]:
        """Write the file; gives each row that is in it and its calls.

        Args:
            left_out: told the calls of each row whose tools do not fit.
        """
        self._lines.close()
        fitting, tools_type = fitting_tools(self._tools)
        message = pa.struct([(name, dtype) for name, dtype in _MESSAGE.items() if name in self._keys or name in ("role", "content")])
        fields = [(self._messages, pa.list_(message)), *self._others.items()]
        if tools_type is not None:
            fields.append(("tools", tools_type))
        schema = pa.schema(fields)
        rows = iter(read_lines(self._waiting))
        with pq.ParquetWriter(self._out, schema, compression="zstd") as writer:
            while some := list(islice(rows, _ROWS_A_GROUP)):
                kept = [one for one in some if one["tools"] in fitting]
                for one in some:
                    if one["tools"] not in fitting:
                        left_out(one["calls"])
                made = [one["row"] | ({"tools": json.loads(one["tools"] or "[]")} if tools_type is not None else {}) for one in kept]
                writer.write_table(pa.Table.from_pylist(made, schema=schema))
                yield from ((one["row"], one["calls"]) for one in kept)

    def close(self) -> None:
        """Forget the rows that wait."""
        self._lines.close()
        self._waiting.unlink(missing_ok=True)


def fitting_tools(counts: Mapping[str, int]) -> tuple[set[str], Any]:
    """Which lists of tools can share a column without being changed, the frequent ones first, and the column's type.

    Args:
        counts: how many rows have each list, which is written as JSON; empty: none.
    """
    fitting, chosen, found = {""}, list[Any](), None
    for written in sorted((one for one in counts if one), key=lambda one: (-counts[one], one)):
        tried = [*chosen, json.loads(written)]
        try:
            array = pa.array(tried)
        except (pa.ArrowInvalid, pa.ArrowTypeError):
            continue
        if array.to_pylist() == tried:
            chosen, found = tried, array.type
            fitting.add(written)
    return fitting, found
