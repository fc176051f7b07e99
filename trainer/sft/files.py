"""Files of examples, row by row: JSON lines and Parquet, as `spangrad export` writes them or as people have them.

In: paths of files and directories. Out: `Source`s with their checksums, and `Row`s. Invariant: a file is known by what is in it, not by
its name; a file that cannot be read to its end is an error that names the place, never a shorter file.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spangrad.errors import TrainerError
from spangrad.types import Mode

_PARQUET = b"PAR1"
_ROWS_AT_ONCE = 1000
_KINDS = (".jsonl", ".parquet")
_TRAINED_MODES = frozenset({"", Mode.TRAIN.value, Mode.PRODUCTION.value})
_HELD_OUT_MODES = frozenset({Mode.VALIDATE.value, Mode.PROBE.value})


@dataclass(frozen=True, slots=True)
class Source:
    """A file that is trained on."""

    path: Path
    checksum: str
    """SHA-256 of its contents, in hex."""
    size: int
    """Bytes."""

    @property
    def name(self) -> str:
        """Without its directory, which says nothing on another machine."""
        return self.path.name


@dataclass(frozen=True, slots=True)
class RolloutOrigin:
    """The attempt of a rollout that a row came from."""

    run_id: str
    mode: str
    group_id: str
    rollout_id: str
    attempt: int
    build_spec: str
    """Empty: the row does not say."""
    revision: int


@dataclass(frozen=True, slots=True)
class Row:
    """One row of a file."""

    source: Source
    number: int
    """From 1; of a JSON lines file, the line."""
    values: Mapping[str, Any]

    @property
    def place(self) -> str:
        """For messages."""
        return f"{self.source.path}, row {self.number}"

    @property
    def origins(self) -> tuple[RolloutOrigin, ...]:
        """The rollouts that it came from, as our exports write them; none: a row of somebody else's."""
        if "RolloutId" in self.values:
            return (_of_transition(self.values),)
        return tuple(_of_meta(one) for one in _metas(self.values) if one.get("rollout"))

    @property
    def tokenizers(self) -> frozenset[str]:
        """Hashes of the tokenizers that its token ids are of; none: it does not say."""
        if "TokenizerHash" in self.values:
            return frozenset({str(self.values["TokenizerHash"])})
        return frozenset(str(name) for one in _metas(self.values) for name in one.get("tokenizers") or ())

    @property
    def unit(self) -> str:
        """What may not be torn apart between training and held-out part: the group of rollouts, else the row."""
        groups = sorted({f"{one.run_id}/{one.group_id}" for one in self.origins if one.group_id})
        return "|".join(groups) or f"{self.source.checksum}:{self.number}"

    @property
    def is_held_out(self) -> bool:
        """Whether a rollout of it was held out."""
        return any(one.mode in _HELD_OUT_MODES for one in self.origins)

    @property
    def is_of_no_use(self) -> bool:
        """Whether a rollout of it is of a mode that is neither trained nor held out: it belongs to a group that is."""
        return any(one.mode not in _TRAINED_MODES | _HELD_OUT_MODES for one in self.origins)


def find_sources(paths: Sequence[Path]) -> list[Source]:
    """The files that are meant, with their checksums; of a directory, every .jsonl and .parquet file in it, by name.

    Raises:
        TrainerError: there is no such file, a directory has none, a file is empty, or two have the same contents.
    """
    found: list[Source] = []
    for path in paths:
        if not path.exists():
            raise TrainerError(f"there is no file {path}. Write one with `spangrad export`.")
        files = sorted(one for one in path.rglob("*") if one.suffix in _KINDS) if path.is_dir() else [path]
        if not files:
            raise TrainerError(f"the directory {path} holds no file named *.jsonl or *.parquet. Name the files themselves.")
        found += [_source(one) for one in files]
    first: dict[str, Source] = {}
    for one in found:
        same = first.setdefault(one.checksum, one)
        if same is not one:
            raise TrainerError(f"{one.path} holds the same as {same.path}. Name it once; tuning.epochs goes through it several times.")
    return found


def read_rows(source: Source) -> Iterator[Row]:
    """All rows of a file, in order.

    Raises:
        TrainerError: it is damaged; the message names the row.
    """
    with source.path.open("rb") as file:
        is_parquet = file.read(len(_PARQUET)) == _PARQUET
    yield from _parquet(source) if is_parquet else _json_lines(source)


def _json_lines(source: Source) -> Iterator[Row]:
    with source.path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                values = json.loads(line)
            except ValueError as error:
                raise TrainerError(f"{source.path}, line {number}, is no JSON ({error}). Mend the file, or write it again.") from None
            if not isinstance(values, dict):
                raise TrainerError(f"{source.path}, line {number}, is no JSON object. A line holds one row: {{...}}.")
            yield Row(source, number, values)


def _parquet(source: Source) -> Iterator[Row]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    number = 0
    try:
        with pq.ParquetFile(source.path) as file:
            for part in file.iter_batches(_ROWS_AT_ONCE):
                for values in part.to_pylist():
                    number += 1
                    yield Row(source, number, _without_nulls(values))
    except (pa.ArrowInvalid, OSError) as error:
        raise TrainerError(f"{source.path} is damaged after row {number} ({error}). Write it again.") from error


def _without_nulls(value: Any) -> Any:
    """Parquet gives every message the keys of all: what is null there was not there."""
    if isinstance(value, dict):
        return {name: _without_nulls(one) for name, one in value.items() if one is not None}
    holds_keys = isinstance(value, list) and any(isinstance(one, dict) for one in value)
    return [_without_nulls(one) for one in value] if holds_keys else value


def _source(path: Path) -> Source:
    digest, size = hashlib.sha256(), 0
    try:
        with path.open("rb") as file:
            while some := file.read(1 << 20):
                digest.update(some)
                size += len(some)
    except OSError as error:
        raise TrainerError(f"{path} cannot be read ({error.strerror or error}).") from error
    if not size:
        raise TrainerError(f"{path} is empty. Write it again with `spangrad export`, and see what the export left out.")
    return Source(path, digest.hexdigest(), size)


def _metas(values: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """What our exports say of a row: of a pair, a mapping for each of the two."""
    meta = values.get("meta")
    if not isinstance(meta, dict):
        return []
    both = [meta.get("chosen"), meta.get("rejected")]
    return [one for one in (both if any(both) else [meta]) if isinstance(one, dict)]


def _of_meta(meta: Mapping[str, Any]) -> RolloutOrigin:
    run, mode, group, rollout, spec = (str(meta.get(name) or "") for name in ("run", "mode", "group", "rollout", "build_spec"))
    return RolloutOrigin(run, mode, group, rollout, int(meta.get("attempt") or 0), spec, int(meta.get("revision") or 0))


def _of_transition(values: Mapping[str, Any]) -> RolloutOrigin:
    run, mode, group, rollout, spec = (str(values.get(name) or "") for name in ("RunId", "Mode", "GroupId", "RolloutId", "BuildSpec"))
    return RolloutOrigin(run, mode, group, rollout, int(values.get("Attempt") or 0), spec, int(values.get("Revision") or 0))
