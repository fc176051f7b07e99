"""Reading of tasks from files: JSON lines, Parquet, and datasets of Hugging Face's library.

In: `FILE.jsonl`, `FILE.parquet`, `DIRECTORY[:SPLIT]` that `Dataset.save_to_disk` wrote, or `hf:OWNER/NAME[:[CONFIG:]SPLIT]` on its hub.
Out: `Task`s, in the order of the rows. Invariant: each row is one task, or the whole is refused with an error that names source, row and
remedy; a task's input is a JSON value.

A row with `task_id` and `input` has both, and may have a `data_source` and demand a sandbox with `least_sandbox`. A row with neither is
itself the input, and its task is named by source and row, `train:17`.
Libraries for Parquet and Hugging Face's datasets are loaded when such a source is read.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from spangrad.errors import JSON_ERRORS, AgentError
from spangrad.text_sanitizer import storable
from spangrad.types import SandboxRung, Task

T = TypeVar("T")
HUB = "hf:"
_SPLIT = "train"
"""Split of a dataset that has several, where none is named."""
_FORMS = "Give JSON lines (.jsonl), Parquet (.parquet), a directory that Dataset.save_to_disk wrote, or hf:OWNER/NAME[:[CONFIG:]SPLIT]."
_JSON = "each line is {'task_id': ..., 'input': ...}, or an object that is itself the input"


def read_tasks(source: Path | str) -> list[Task]:
    """Read tasks.

    Raises:
        AgentError: the source does not exist or cannot be read, or a row is not a task.
    """
    try:
        name, rows = _rows(str(source))
    except OSError as error:  # a name that is too long, a directory that is closed
        raise AgentError(f"{source!s:.100} cannot be read ({error.strerror}). {_FORMS}") from None
    tasks = [_task(row, f"{source}, {position}", f"{name}:{number}") for number, position, row in rows]
    if not tasks:
        raise AgentError(f"{source} holds no task. {_FORMS}")
    return tasks


def tasks_of(rows: Iterable[Task | Mapping[str, object]], name: str) -> list[Task]:
    """Return the tasks of rows in memory; `name` is the prefix of their names.

    Raises:
        AgentError: a row is not a task, or there is none.
    """
    tasks = [_task(row, f"{name}, {position}", f"{name}:{number}") for number, position, row in _numbered(rows)]
    if not tasks:
        raise AgentError(f"{name} data holds no task. {_FORMS}")
    return tasks


def _rows(source: str) -> tuple[str, Iterator[tuple[int, str, object]]]:
    """Return the prefix of the rows' names, and the rows: number from 1, place for messages, content."""
    if source.startswith(HUB):
        name, _, part = source.removeprefix(HUB).partition(":")
        config, _, split = part.rpartition(":")
        return name.rpartition("/")[2], _numbered(_of_hub(source, name, config or None, split or _SPLIT))
    path = Path(source)
    if path.suffix == ".parquet" and path.is_file():
        return path.stem, _numbered(_of_parquet(path))
    if path.is_file():
        return path.stem, _of_lines(path)
    directory, split = (path, "") if path.is_dir() else _split_name(source)
    if directory is not None and directory.is_dir():
        return directory.name, _numbered(_of_directory(source, directory, split))
    raise AgentError(f"{source} is neither a file nor a directory. {_FORMS}")


def _split_name(source: str) -> tuple[Path | None, str]:
    name, colon, split = source.rpartition(":")
    return (Path(name), split) if colon and name and split else (None, "")


def _numbered(rows: Iterable[T]) -> Iterator[tuple[int, str, T]]:
    return ((number, f"row {number}", row) for number, row in enumerate(rows, 1))


def _of_lines(path: Path) -> Iterator[tuple[int, str, object]]:
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise AgentError(f"{path} is no text in UTF-8 ({error.reason} at byte {error.start}). {_FORMS}") from None
    except OSError as error:
        raise AgentError(f"{path} cannot be read ({error.strerror}).") from None
    for number, line in enumerate(text.split("\n"), 1):  # splitlines() would cut JSON at U+2028
        if line.strip():
            try:
                yield number, f"line {number}", json.loads(line)
            except JSON_ERRORS as error:
                fault = f"{error.msg}, column {error.colno}" if isinstance(error, json.JSONDecodeError) else error
                raise AgentError(f"{path}, line {number} is no JSON ({fault}): {_JSON}.") from None


def _of_parquet(path: Path) -> Iterator[dict[str, Any]]:
    try:
        import polars as pl
    except ImportError:
        raise _missing(str(path), "polars") from None
    try:
        frame = pl.read_parquet(path)
    except (pl.exceptions.PolarsError, OSError) as error:
        raise AgentError(f"{path} cannot be read as Parquet: {str(error).splitlines()[0]}. Write it again, or give JSON lines.") from None
    return frame.iter_rows(named=True)


def _of_directory(source: str, directory: Path, split: str) -> Iterable[object]:
    datasets = _library(source)
    try:
        dataset = datasets.load_from_disk(str(directory))
    except Exception as error:
        raise AgentError(f"{directory} cannot be read as a dataset ({_first_line(error)}). {_FORMS}") from None
    if isinstance(dataset, Mapping):  # a DatasetDict
        splits: Mapping[str, Iterable[object]] = dataset
        chosen = split or _SPLIT
        if chosen not in splits:
            raise AgentError(f"{source}: there is no split {chosen!r}, only {', '.join(map(str, splits))}. Name one: {directory}:SPLIT.")
        return splits[chosen]
    if split:
        raise AgentError(f"{source}: the dataset has no splits. Leave {':' + split!r} out.")
    return dataset


def _of_hub(source: str, name: str, config: str | None, split: str) -> Iterable[object]:
    datasets = _library(source)
    if not name:
        raise AgentError(f"{source!r} names no dataset. Give hf:OWNER/NAME or hf:OWNER/NAME:SPLIT.")
    try:
        return datasets.load_dataset(name, config, split=split)
    except Exception as error:  # any error of the hub, the network and the library
        raise AgentError(
            f"{source} cannot be loaded, split {split!r} ({_first_line(error)}). Check name, split and network, or save it with "
            "Dataset.save_to_disk where there is one, and name the directory."
        ) from None


def _library(source: str) -> Any:
    try:
        import datasets
    except ImportError:
        raise _missing(source, "datasets") from None
    return datasets


def _missing(source: str, package: str) -> AgentError:
    return AgentError(f"{source} needs the package {package}. Install it (pip install 'spangrad-server[data]'), or give JSON lines.")


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def _task(row: object, where: str, name: str) -> Task:
    if isinstance(row, Task):
        given = {key: getattr(row, key) for key in ("task_id", "input", "least_sandbox", "data_source")}
        return replace(_task(given, where, name), prompt=row.prompt)
    if not isinstance(row, Mapping):
        raise AgentError(f"{where} is {type(row).__name__}, not an object: {_JSON}.")
    fields: dict[str, object] = {str(key): value for key, value in row.items()}
    named = fields.keys() & {"task_id", "input"}
    if len(named) == 1:
        (there,) = named
        missing_key = "input" if there == "task_id" else "task_id"
        raise AgentError(f"{where} has {there!r} and no {missing_key!r}: give both; or neither, and the whole row is the input.")
    if not named:
        _require_json(fields, where)
        return Task(name, fields)
    task_id = fields["task_id"]
    if not isinstance(task_id, str | int) or task_id == "":
        raise AgentError(f"{where} has task_id {task_id!r:.100}: give a text that is not empty, or a whole number.")
    if storable(str(task_id)) != str(task_id):
        raise AgentError(f"{where} has task_id {task_id!r:.100}: leave out null characters and halves of surrogate pairs.")
    source = fields.get("data_source", "")
    if not isinstance(source, str) or storable(source) != source:
        raise AgentError(f"{where} has data_source {source!r:.100}: give a text without null characters, or leave it out.")
    least = _least_sandbox(fields.get("least_sandbox"), where)
    _require_json({"input": fields["input"]}, where)
    return Task(str(task_id), fields["input"], least_sandbox=least, data_source=source)


def _least_sandbox(value: object, where: str) -> SandboxRung | None:
    try:
        return None if value is None else SandboxRung(value)
    except ValueError:
        raise AgentError(f"{where} has least_sandbox {value!r:.100}: give one of {', '.join(SandboxRung)}, or leave it out.") from None


def _require_json(fields: Mapping[str, object], where: str) -> None:
    """Refuse fields that an agent cannot get as its input.

    Raises:
        AgentError: one is not a JSON value.
    """
    for name, value in fields.items():
        try:
            json.dumps({name: value}, allow_nan=False, ensure_ascii=False, sort_keys=True).encode()  # half of a surrogate pair has no UTF-8
        except (TypeError, ValueError, RecursionError):
            raise AgentError(
                f"{where}: {name!r} is {value!r:.100}, which JSON has no value for. Make it text or finite numbers, with texts as keys, or "
                "leave it out."
            ) from None
