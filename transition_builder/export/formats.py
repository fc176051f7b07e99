"""The formats, and one export from the store to a file or directory.

In: a format's name, what is wanted, where it goes. Out: the file or directory, whole, and a `Tally`. Invariant: nothing appears under the
name before all of it is written and every call is accounted for.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from spangrad.errors import BuilderError
from spangrad.store.datasets import Dataset
from spangrad.types import DropReason
from transition_builder.export.files import made_whole
from transition_builder.export.reading import Reader, Wanted
from transition_builder.export.tally import Tally
from transition_builder.export.writers.hugging_face import write_hugging_face
from transition_builder.export.writers.parquet import write_parquet
from transition_builder.export.writers.preferences import write_preferences
from transition_builder.export.writers.sft import write_sft, write_sft_tokens
from transition_builder.export.writers.verl import write_verl, write_verl_sft

if TYPE_CHECKING:
    from clickhouse_connect.driver.client import Client


@dataclass(frozen=True, slots=True)
class Format:
    """One form of export."""

    write: Callable[[Reader, Path], None]
    is_directory: bool = False
    takes_dropped: bool = False
    """Whether calls without ids have a place in it."""


FORMATS = {
    "parquet": Format(write_parquet),
    "huggingface": Format(write_hugging_face, is_directory=True),
    "verl": Format(write_verl),
    "verl-sft": Format(write_verl_sft, takes_dropped=True),
    "sft": Format(write_sft, takes_dropped=True),
    "sft-tokens": Format(write_sft_tokens),
    "preferences": Format(write_preferences),
}


@dataclass(frozen=True, slots=True)
class Exported:
    """What an export did."""

    dataset: Dataset
    tally: Tally


def require_place(name: str, dropped: Collection[DropReason]) -> None:
    """Raise unless a format of FORMATS takes calls that were dropped, or none are asked for.

    Raises:
        BuilderError: it takes none.
    """
    if dropped and not FORMATS[name].takes_dropped:
        able = ", ".join(other for other, about in FORMATS.items() if about.takes_dropped)
        raise BuilderError(f"{name} has no place for calls that were dropped. Leave --dropped out, or take one of {able}.")


def export(
    client: Client,
    url: str,
    name: str,
    wanted: Wanted,
    out: Path,
    *,
    force: bool = False,
    min_margin: float = 0.0,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Exported:
    """Write a dataset in one of FORMATS.

    Args:
        client: of the store.
        url: of the store, for messages.
        name: of the format.
        wanted: which rollouts and calls.
        out: the file, or for huggingface the directory.
        force: replace what is there.
        min_margin: of `preferences`: returns that differ by no more are a tie.
        progress: told how many rollouts are done, and of how many.

    Raises:
        BuilderError: something stands at `out`, or the format does not take what is wanted.
        StoreError: the store failed, or has no such dataset.
    """
    require_place(name, wanted.dropped)
    chosen = FORMATS[name]
    write = partial(write_preferences, min_margin=min_margin) if name == "preferences" else chosen.write
    with made_whole(out, force=force, directory=chosen.is_directory) as path:
        reader = Reader(client, url, wanted, progress)
        write(reader, path)
        reader.tally.check()
    return Exported(reader.dataset, reader.tally)
