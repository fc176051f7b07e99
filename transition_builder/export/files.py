"""Atomic writes of files and directories, and of rows into them.

Invariant: an interrupted export leaves nothing behind under its name, nor beside it; an existing file stays unless it was to be replaced.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import msgspec

from spangrad.errors import BuilderError
from spangrad.processes import make_private

CARD_MARK = "written by spangrad"
"""Text in the card of each directory that an export writes."""

_encoder = msgspec.json.Encoder()


@contextmanager
def made_whole(out: Path, *, force: bool, directory: bool) -> Generator[Path]:
    """Yield a temporary path beside `out`, which is renamed to `out` at the end.

    Args:
        out: the final path; of a symbolic link, its target is replaced.
        force: replace an existing file; or a directory, if it is empty or an export.
        directory: make a directory; else a file, which the caller makes.

    Raises:
        BuilderError: something exists at `out` that is not to be replaced, or the disk refuses.
    """
    _refuse(out, force=force, directory=directory)
    out = out.resolve()
    temporary = out.with_name(f".{out.name}.{os.getpid()}.part")
    try:
        make_private(out.parent)
        if directory:
            temporary.mkdir(mode=0o700)  # not what another process, or one that was killed, left there
        yield temporary
        _refuse(out, force=force, directory=directory)
        if out.is_dir():
            shutil.copymode(out, temporary)
            old = out.with_name(f".{out.name}.{os.getpid()}.old")
            out.rename(old)
            temporary.rename(out)
            shutil.rmtree(old)
        else:
            temporary.replace(out)
    except OSError as error:
        raise BuilderError(f"{out} cannot be written ({error.strerror or error}). Name another place with --out.") from error
    finally:
        if temporary.is_dir():
            shutil.rmtree(temporary, ignore_errors=True)
        else:
            with suppress(OSError):
                temporary.unlink()


def _refuse(out: Path, *, force: bool, directory: bool) -> None:
    """Raise if something exists at `out` that is not to be replaced: whatever is there may be all that is left of a user's work."""
    if not force and (out.exists() or out.is_symlink()):
        raise BuilderError(f"{out} exists. Name another place with --out, or pass --force to replace it.")
    if out.exists() and not (out.is_dir() if directory else out.is_file()):
        raise BuilderError(f"{out} is no {'directory' if directory else 'file'}, as this format writes. Name another place with --out.")
    if out.is_dir() and not _is_replaceable(out):
        raise BuilderError(f"{out} holds files that no export wrote. Name another place with --out, or remove it.")


def _is_replaceable(directory: Path) -> bool:
    """Return whether a directory is empty, or an export with its card and shards and nothing else."""
    try:
        entries = {entry.name for entry in directory.iterdir()}
        if entries != {"README.md", "data"}:
            return not entries
        is_ours = CARD_MARK.encode() in (directory / "README.md").read_bytes()
        return is_ours and all(shard.suffix == ".parquet" for shard in (directory / "data").iterdir())
    except OSError:
        return False


class JsonLines:
    """A file of JSON objects, one a line."""

    def __init__(self, path: Path) -> None:
        self._file: IO[bytes] = path.open("wb")

    def write(self, row: Mapping[str, Any]) -> None:
        """Add a row."""
        self._file.write(_encoder.encode(row) + b"\n")

    def close(self) -> None:
        """Flush the rows to the disk and close the file."""
        if self._file.closed:
            return
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()

    def __enter__(self) -> JsonLines:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a file that JsonLines wrote."""
    with path.open("rb") as file:
        for line in file:
            yield msgspec.json.decode(line)
