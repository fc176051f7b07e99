"""Transitions as a directory that Hugging Face's `datasets` loads: Parquet shards, a split a mode, and a card that names the splits.

Invariant: `load_dataset(DIRECTORY)` gives the rows of `parquet`, without the library being needed here.
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from transition_builder.export.files import CARD_MARK
from transition_builder.export.reading import ExportReader
from transition_builder.export.writers.parquet import SCHEMA, metadata, tables

SHARD_BYTES = 256 * 2**20
"""Size of a shard in memory, in bytes, from which a new one begins; its file is smaller."""


class _Split:
    """Shards of one mode."""

    def __init__(self, directory: Path, name: str, facts: dict[str, str]) -> None:
        self._directory = directory
        self._name = name
        self._facts = facts
        self._writer: pq.ParquetWriter | None = None
        self._shards = self._bytes = 0

    def write(self, table: Any) -> None:
        if self._writer is None or self._bytes >= SHARD_BYTES:
            self.close()
            path = self._directory / f"{self._name}-{self._shards:05d}.parquet"
            self._writer = pq.ParquetWriter(path, SCHEMA.with_metadata(self._facts), compression="zstd")
            self._shards, self._bytes = self._shards + 1, 0
        self._writer.write_table(table)
        self._bytes += table.nbytes

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


def write_hugging_face(reader: ExportReader, out: Path) -> None:
    """Write the transitions to the directory `out`, which exists and is empty."""
    data = out / "data"
    data.mkdir()
    splits: dict[str, _Split] = {}
    rows = Counter[str]()
    facts = metadata(reader)
    try:
        for part, table in tables(reader):
            for mode in part.calls["Mode"].unique(maintain_order=True):
                name = split_name(mode)
                of_mode = table.filter(pa.array((part.calls["Mode"] == mode).to_list()))
                splits.setdefault(name, _Split(data, name, facts)).write(of_mode)
                rows[name] += of_mode.num_rows
    finally:
        for split in splits.values():
            split.close()
    (out / "README.md").write_text(card(reader, rows))


def split_name(mode: str) -> str:
    """Return a mode as the name of a split: letters, digits and underscores."""
    return re.sub(r"\W", "_", mode) or "unnamed"


def card(reader: ExportReader, rows: Counter[str]) -> str:
    """Return the dataset's card: its head is YAML that `datasets` reads."""
    splits = [line for name in sorted(rows) for line in (f"  - split: {name}", f"    path: data/{name}-*.parquet")]
    facts = metadata(reader)
    head = ["---", "configs:", "- config_name: default", "  data_files:", *splits, "---"]
    body = [
        f"# {facts['spangrad.dataset']}",
        "",
        f"Transitions of language model calls, {CARD_MARK}: a row a call, with the token ids that the engine read and sampled.",
        "",
        f"- build specification: `{facts['spangrad.build_spec']}`",
        *([f"- as of: {facts['spangrad.as_of']}"] if facts["spangrad.as_of"] else []),
        *(f"- split `{name}`: {rows[name]} rows" for name in sorted(rows)),
        "",
        "`Return` is the weighted sum of the rollout's rewards; `Rewards` are those of the call, and the rollout's on its last call.",
    ]
    return "\n".join([*(head if rows else ["---", "---"]), "", *body, ""])
