"""Files of examples, row by row: JSON lines and Parquet, as `spangrad export` writes them or in common formats.

In: paths of files and directories. Out: `ExampleFile`s with their checksums, and `FileRow`s. Invariant: a file is known by what is in it,
not by its name; a file that cannot be read to its end is an error that names the place, never a shorter file.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spangrad.errors import JSON_ERRORS, TrainerError
from spangrad.types import Mode
from trainer.data.source import BatchRollout, Group
from trainer.sft.rendering import UnfitRowError

_PARQUET = b"PAR1"
_ROWS_AT_ONCE = 1000
_KINDS = (".jsonl", ".parquet")
_OF_META = ("run", "mode", "group", "rollout", "build_spec"), ("attempt", "revision")
_OF_TRANSITION = ("RunId", "Mode", "GroupId", "RolloutId", "BuildSpec"), ("Attempt", "Revision")
_TRAINED_MODES = frozenset({"", Mode.TRAIN.value, Mode.PRODUCTION.value})
_HELD_OUT_MODES = frozenset({Mode.VALIDATE.value, Mode.PROBE.value})


@dataclass(frozen=True, slots=True)
class ExampleFile:
    """File that is trained on."""

    path: Path
    checksum: str
    """SHA-256 of its contents, in hexadecimal."""
    size: int
    """Size of the file, in bytes."""

    @property
    def name(self) -> str:
        """Return the file's name, without its directory, which has no meaning on another machine."""
        return self.path.name


@dataclass(frozen=True, slots=True)
class FileRow:
    """Row of a file."""

    source: ExampleFile
    number: int
    """Number of the row, from 1; of a JSON lines file, the line."""
    values: Mapping[str, Any]

    @property
    def origins(self) -> tuple[BatchRollout, ...]:
        """Return the rollouts that it came from, as spangrad's exports name them; empty: the row is from another program.

        Raises:
            UnfitRowError: it names a rollout in another form.
        """
        if "RolloutId" in self.values:
            return (_origin(self.values, _OF_TRANSITION),)
        return tuple(_origin(meta, _OF_META) for meta in _metas(self.values) if meta.get("rollout"))

    @property
    def tokenizers(self) -> frozenset[str]:
        """Return the hashes of the tokenizers of its token ids; empty: it names none."""
        if "TokenizerHash" in self.values:
            return frozenset({str(self.values["TokenizerHash"])} - {""})
        named = [meta.get("tokenizers") or [] for meta in _metas(self.values)]
        return frozenset(str(name) for names in named for name in (names if isinstance(names, list) else [names]))

    @property
    def unit(self) -> str:
        """Return the unit that is trained or held out as a whole: the group of rollouts, else the rollout, else the row."""
        names = {(origin.group.run_id, origin.group.group_id or origin.rollout_id) for origin in self.origins}
        return "|".join(sorted(f"{run}/{name}" for run, name in names if name)) or f"{self.source.checksum}:{self.number}"

    @property
    def is_held_out(self) -> bool:
        """Return whether a rollout of it was held out."""
        return any(origin.group.mode in _HELD_OUT_MODES for origin in self.origins)

    @property
    def is_of_no_use(self) -> bool:
        """Return whether a rollout of it has a mode that is neither trained nor held out: it belongs to a group that is."""
        return any(origin.group.mode not in _TRAINED_MODES | _HELD_OUT_MODES for origin in self.origins)


def find_sources(paths: Sequence[Path]) -> list[ExampleFile]:
    """Return the files at some paths, with their checksums; of a directory, every .jsonl and .parquet file in it, by name.

    Raises:
        TrainerError: there is no such file, a directory has none, a file is empty, or two have the same contents.
    """
    sources: list[ExampleFile] = []
    for path in paths:
        if not path.exists():
            raise TrainerError(f"there is no file {path}. Write one with `spangrad export`.")
        files = sorted(file for file in path.rglob("*") if file.suffix in _KINDS and file.is_file()) if path.is_dir() else [path]
        if not files:
            raise TrainerError(f"the directory {path} holds no file named *.jsonl or *.parquet. Name the files themselves.")
        sources += [_source(file) for file in files]
    first: dict[str, ExampleFile] = {}
    for source in sources:
        same = first.setdefault(source.checksum, source)
        if same is not source:
            raise TrainerError(f"{source.path} holds the same as {same.path}. Name it once; finetune.epochs goes through it several times.")
    return sources


def read_rows(source: ExampleFile) -> Iterator[FileRow]:
    """Yield all rows of a file, in order.

    Raises:
        TrainerError: it is damaged; the message names the row.
    """
    with source.path.open("rb") as file:
        is_parquet = file.read(len(_PARQUET)) == _PARQUET
    yield from _parquet(source) if is_parquet else _json_lines(source)


def _json_lines(source: ExampleFile) -> Iterator[FileRow]:
    with source.path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                values = json.loads(line)
            except JSON_ERRORS as error:
                raise TrainerError(f"{source.path}, line {number}, is no JSON ({error}). Fix the file, or write it again.") from None
            if not isinstance(values, dict):
                raise TrainerError(f"{source.path}, line {number}, is no JSON object. A line holds one row: {{...}}.")
            yield FileRow(source, number, values)


def _parquet(source: ExampleFile) -> Iterator[FileRow]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    number = 0
    try:
        with pq.ParquetFile(source.path) as file:
            for part in file.iter_batches(_ROWS_AT_ONCE):
                for values in part.to_pylist():
                    number += 1
                    yield FileRow(source, number, _without_nulls(values))
    except (pa.ArrowException, ValueError, OSError) as error:  # a text that is no UTF-8 is a ValueError
        raise TrainerError(f"{source.path} is damaged after row {number} ({error}). Write it again.") from error


def _without_nulls(value: Any) -> Any:
    """Return a value without keys whose value is null: Parquet gives every message the keys of all."""
    if isinstance(value, dict):
        return {name: _without_nulls(item) for name, item in value.items() if item is not None}
    holds_keys = isinstance(value, list) and any(isinstance(item, dict) for item in value)
    return [_without_nulls(item) for item in value] if holds_keys else value


def _source(path: Path) -> ExampleFile:
    digest, size = hashlib.sha256(), 0
    try:
        with path.open("rb") as file:
            while chunk := file.read(1 << 20):
                digest.update(chunk)
                size += len(chunk)
    except OSError as error:
        raise TrainerError(f"{path} cannot be read ({error.strerror or error}).") from error
    if not size:
        raise TrainerError(f"{path} is empty. Write it again with `spangrad export`, and see what the export left out.")
    return ExampleFile(path, digest.hexdigest(), size)


def _metas(values: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the metadata that spangrad's exports add to a row: for a pair, one mapping for each of the two."""
    meta = values.get("meta")
    if not isinstance(meta, dict):
        return []
    both = [meta.get("chosen"), meta.get("rejected")]
    return [item for item in (both if any(both) else [meta]) if isinstance(item, dict)]


def _origin(values: Mapping[str, Any], names: tuple[Sequence[str], Sequence[str]]) -> BatchRollout:
    """Return the attempt that some values name, given the names of its texts and numbers.

    Raises:
        UnfitRowError: a text cannot be written down, or a number is none.
    """
    run, mode, group, rollout, spec = texts = [str(values.get(name) or "") for name in names[0]]
    try:
        "".join(texts).encode()
        attempt, revision = (int(values.get(name) or 0) for name in names[1])
    except (TypeError, ValueError, OverflowError) as error:
        raise UnfitRowError("unknown_origin") from error
    return BatchRollout(Group(run, mode, spec, group), rollout, attempt, revision)
