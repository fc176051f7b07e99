"""Export formats, and one export from the store to a file or directory."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from spangrad.errors import BuilderError
from spangrad.types import DropReason
from transition_builder.export.files import made_whole
from transition_builder.export.reading import ExportReader, ExportSelection
from transition_builder.export.writers.hugging_face import write_hugging_face
from transition_builder.export.writers.parquet import write_parquet
from transition_builder.export.writers.preferences import write_preferences
from transition_builder.export.writers.sft import write_sft, write_sft_tokens
from transition_builder.export.writers.training_trace import write_training_trace
from transition_builder.export.writers.verl import write_verl, write_verl_sft

if TYPE_CHECKING:
    from clickhouse_connect.driver.client import Client


@dataclass(frozen=True, slots=True)
class ExportFormat:
    """Export format."""

    write: Callable[[ExportReader, Path], None]
    is_directory: bool = False
    takes_dropped: bool = False
    """True if the format can hold calls without token ids."""


FORMATS = {
    "parquet": ExportFormat(write_parquet),
    "huggingface": ExportFormat(write_hugging_face, is_directory=True),
    "verl": ExportFormat(write_verl),
    "verl-sft": ExportFormat(write_verl_sft, takes_dropped=True),
    "sft": ExportFormat(write_sft, takes_dropped=True),
    "sft-tokens": ExportFormat(write_sft_tokens),
    "preferences": ExportFormat(write_preferences),
    "training-trace": ExportFormat(write_training_trace),
}


def require_place(name: str, dropped: Collection[DropReason]) -> None:
    """Raise if dropped calls are requested and the format of FORMATS takes none.

    Raises:
        BuilderError: the format takes none.
    """
    if dropped and not FORMATS[name].takes_dropped:
        able = ", ".join(other for other, about in FORMATS.items() if about.takes_dropped)
        raise BuilderError(f"{name} has no place for calls that were dropped. Leave --dropped out, or take one of {able}.")


def export(
    client: Client,
    name: str,
    request: ExportSelection,
    out: Path,
    *,
    force: bool = False,
    min_margin: float = 0.0,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> ExportReader:
    """Write a dataset in one of FORMATS; return the reader, whose tally has the counts.

    Args:
        client: of the store.
        name: of the format.
        request: the rollouts and calls to export.
        out: the file, or for huggingface the directory.
        force: replace an existing file; or a directory, if it is empty or an export.
        min_margin: of `preferences`: returns that differ by no more are a tie.
        progress: called with the number of rollouts done and of all.

    Raises:
        BuilderError: something exists at `out` that is not to be replaced, or the format does not take the requested calls.
        StoreError: the store failed, or has no such dataset.
    """
    require_place(name, request.dropped)
    chosen = FORMATS[name]
    write = partial(write_preferences, min_margin=min_margin) if name == "preferences" else chosen.write
    with made_whole(out, force=force, directory=chosen.is_directory) as path:
        reader = ExportReader(client, request, progress)
        write(reader, path)
        reader.tally.check()
    return reader
