"""Checkpoints: directories with a Hugging Face model that any engine can serve, or an adapter, and the optimizer's state beside it.

In: a function that writes weights and state. Out: `<directory>/<policy>/<branch>/v<version>`, and its checksum.
Invariant: a directory of that name is whole. It is written under a temporary name, every file is synced to disk, the marker
`STABLE` is written last, and one rename makes it visible. Weights are float32, whichever dtype config.json names: training resumes from
them, and an engine casts them as it loads. The base model of adapters below the same directory is not pruned.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from spangrad.errors import JSON_ERRORS, CheckpointError
from spangrad.processes import make_private
from spangrad.settings import TrainerSettings
from spangrad.types import VersionStatus
from spangrad.weights import adapters
from spangrad.weights.adapters import AdapterFacts
from spangrad.weights.checksums import checksum_directory, tokenizer_hash
from spangrad.weights.shards import TensorSums, checksum_of

if TYPE_CHECKING:
    from trainer.ledger.ledger import BatchLease

MARKER = "STABLE"
WEIGHTS = "model.safetensors"
STATE = "optimizer"
"""Directory of the optimizer's state, into which each rank writes its shards."""
TRAINED_CALLS = "trained_calls.parquet"
"""Calls of the batch that made a version, with the advantage of each; the store's copy is made of it."""
Save = Callable[[Path], Mapping[str, TensorSums] | None]
"""Function that writes into a directory, and returns the sums of the float32 weights that it wrote. None: they are read from the files."""
_TEMPORARY = ".writing-"
_TEMPORARY_STATE = ".state-"
"""Beginning of the name under which a state is written that is added to a version; `sweep` of another trainer leaves it."""
_NOT_COPIED = (".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json", ".pt", ".pth", ".gguf", ".h5", ".msgpack")
"""Suffixes of weights and optimizer states, which each version has of its own."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Directory of a version that was written."""

    path: Path
    checksum: str
    """Checksum of the weights (`spangrad.weights.checksums.checksum_directory`)."""
    tokenizer_hash: str


def branch_directory(settings: TrainerSettings) -> Path:
    """Return the directory of the versions of a trainer's branch; names are quoted, so that a slash in one makes no directory."""
    return settings.directory.absolute() / quote(settings.policy, safe="") / quote(settings.branch, safe="")


def version_directory(settings: TrainerSettings, version: int) -> Path:
    """Return the directory of a version, which exists once the version is whole."""
    return branch_directory(settings) / f"v{version}"


def write(settings: TrainerSettings, lease: BatchLease, base: Path, save: Save, adapter: AdapterFacts | None = None) -> Checkpoint:
    """Write the version that a lease makes: the files of `base` but its weights, and what `save` writes, a whole model or an adapter.

    Raises:
        CheckpointError: the version exists already, or cannot be written, for instance because the disk is full.
    """
    from safetensors import SafetensorError, safe_open

    final = version_directory(settings, lease.version)
    if final.exists():
        raise CheckpointError(f"{final} exists, and version {lease.version} was only now handed out. Move it away, and start again.")
    temporary = final.with_name(f"{_TEMPORARY}{final.name}")
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        make_private(settings.directory)
        temporary.mkdir(parents=True)
        for file in sorted(base.iterdir()):
            if file.is_file() and file.name not in {MARKER, TRAINED_CALLS, adapters.CONFIG} and not file.name.endswith(_NOT_COPIED):
                shutil.copyfile(file, temporary / file.name)
        sums = save(temporary)
        if adapter:
            with safe_open(temporary / adapters.WEIGHTS, "numpy") as opened:
                adapters.write_config(temporary, adapter, opened.keys())
        # An adapter's checksum is also of its base.
        checksum = checksum_of(sums, "float32") if sums and not adapter else checksum_directory(temporary)
        written = Checkpoint(final, checksum, tokenizer_hash(temporary))
        names = {"path": str(final), "policy": settings.policy, "branch": settings.branch, **asdict(lease)}
        facts = {**asdict(written), **names, "files": _synced(temporary)}
        (temporary / MARKER).write_text(json.dumps(facts, indent=2) + "\n")
        _sync(temporary / MARKER)
        _sync(temporary)
        temporary.rename(final)
        _sync(final.parent)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"version {lease.version} could not be written to {final.parent} ({error}). Make room there and start again: what was trained "
            f"up to version {lease.parent} is kept, and the batch is trained again."
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return written


def verify(path: Path, checksum: str) -> None:
    """Check that a model directory holds the weights that the ledger names.

    Raises:
        CheckpointError: it is missing, a file is truncated, or the weights are different.
    """
    if not path.is_dir():
        raise CheckpointError(f"the model directory {path} is missing. Restore it from a copy, or begin a new trainer.branch.")
    if (marker := path / MARKER).exists():
        for name, size in _marked(marker)["files"].items():
            file = path / name
            if not file.exists() or file.stat().st_size != size:
                state = f"{file.stat().st_size} bytes" if file.exists() else "missing"
                raise CheckpointError(f"{file} is {state}, and was written with {size}. Restore {path} from a copy.")
    actual = checksum_directory(path)
    if actual != checksum:
        raise CheckpointError(
            f"{path} holds weights with checksum {actual}, and the ledger says {checksum}. Restore the directory from a copy."
        )


def has_state(path: Path) -> bool:
    """Return whether a version's directory holds the optimizer's state.

    Raises:
        CheckpointError: its marker cannot be read.
    """
    marker = path / MARKER
    return any(_is_state(name) for name in _marked(marker)["files"]) if marker.exists() else (path / STATE).exists()


def _marked(marker: Path) -> dict[str, Any]:
    """Return what a version's marker says of it.

    Raises:
        CheckpointError: it cannot be read.
    """
    try:
        facts: dict[str, Any] = json.loads(marker.read_text())
        return facts | {"files": dict(facts["files"])}
    except (OSError, *JSON_ERRORS, LookupError, TypeError) as error:
        raise CheckpointError(f"{marker} cannot be read ({error!r}). Restore {marker.parent} from a copy.") from error


def add_state(path: Path, write: Save) -> None:
    """Add the optimizer's state, which `write` writes into a directory, to a version that was written without it.

    Raises:
        CheckpointError: it cannot be written, or the version's marker cannot be read; the version is as before.
    """
    temporary = path.with_name(f"{_TEMPORARY_STATE}{path.name}")
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
        write(temporary)
        facts = _marked(path / MARKER)
        facts["files"] |= {name: size for name, size in _synced(temporary).items() if _is_state(name)}
        (temporary / MARKER).write_text(json.dumps(facts, indent=2) + "\n")
        _sync(temporary / MARKER)
        shutil.rmtree(path / STATE, ignore_errors=True)  # of an end that was cut off
        for name in (STATE, MARKER):  # the marker last: it makes the state count
            (temporary / name).replace(path / name)
            _sync(path)
    except OSError as error:
        raise CheckpointError(
            f"the optimizer's state could not be written to {path} ({error}). Make room there: the next start replays the last steps."
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _hide(paths: Iterable[Path]) -> list[Path]:
    """Rename versions, and return the new paths: under its final name, a half-removed directory would look complete."""
    hidden = list[Path]()
    for path in paths:
        target = path.with_name(f"{_TEMPORARY}{path.name}")
        shutil.rmtree(target, ignore_errors=True)
        with contextlib.suppress(FileNotFoundError):  # another trainer of the branch tidies up as well
            path.rename(target)
            hidden.append(target)
    return hidden


def delete(paths: Iterable[Path]) -> None:
    """Delete hidden directories, unless `sweep` was faster."""
    for path in paths:
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(path)


def prune(settings: TrainerSettings, old: Collection[int]) -> list[Path]:
    """Hide versions, but base models of adapters below the same directory; return the hidden directories, for `delete`."""
    adapted = _adapted(settings.directory) if old else ()
    return _hide(path for version in old if (path := version_directory(settings, version)) not in adapted)


def _adapted(directory: Path) -> set[Path]:
    bases = set[Path]()
    for config in directory.absolute().glob(f"*/*/v*/{adapters.CONFIG}"):
        with contextlib.suppress(CheckpointError):  # no engine can serve it
            if facts := adapters.adapter_facts(config.parent):
                bases.add(facts.base)
    return bases


def sweep(settings: TrainerSettings, statuses: Callable[[], Mapping[int, VersionStatus | None]]) -> None:
    """Remove half-written and half-removed versions that a crash left, and versions that were never committed.

    The branch's statuses, None where a step is under way, are asked once the directories have been listed: versions that another trainer
    writes by then are under way or committed.
    """
    left = sorted(branch_directory(settings).glob(f"{_TEMPORARY}v*"))
    whole = sorted(branch_directory(settings).glob("v*"))
    known = statuses()
    for path in left:
        if known.get(_number(path), VersionStatus.ORPHANED) is not None:
            with contextlib.suppress(FileNotFoundError):
                shutil.rmtree(path)
    delete(_hide(path for path in whole if known.get(_number(path)) is VersionStatus.ORPHANED))


def sweep_states(settings: TrainerSettings) -> None:
    """Remove half-written states that a crash left; the caller ensures that no trainer of the branch runs."""
    for path in branch_directory(settings).glob(f"{_TEMPORARY_STATE}v*"):
        shutil.rmtree(path, ignore_errors=True)  # what is left is removed before a state is written there


def versions_on_disk(settings: TrainerSettings) -> list[int]:
    """Return the numbers of the branch's versions whose directories are there, in order."""
    return sorted(number for path in branch_directory(settings).glob("v*") if (number := _number(path)) >= 0)


def _number(path: Path) -> int:
    """Return the number of the version that a directory is named after; -1 where it is named after none."""
    digits = path.name.rpartition("v")[2]
    return int(digits) if digits.isdecimal() else -1


def _is_state(name: str) -> bool:
    return name.startswith(f"{STATE}/")


def _synced(directory: Path) -> dict[str, int]:
    """Return the size of each file below a directory, all of which are on the disk then."""
    below = sorted(directory.rglob("*"))
    for path in below:
        _sync(path)
    return {path.relative_to(directory).as_posix(): path.stat().st_size for path in below if path.is_file()}


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
