"""Checkpoints: whole or not there, and known by their checksum."""

from __future__ import annotations

import json
import stat
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from spangrad.errors import CheckpointError
from spangrad.settings import TrainerSettings
from spangrad.types import VersionStatus
from spangrad.weights.checksums import checksum_directory, tokenizer_hash
from tests.support.processes import left_by_crashes
from trainer.ledger.ledger import BatchLease
from trainer.publish import checkpoint
from trainer.publish.checkpoint import Checkpoint

WEIGHTS = {"embed": np.arange(6, dtype=np.float32).reshape(2, 3), "norm": np.ones(2, np.float32)}


@pytest.fixture
def base(tmp_path: Path) -> Path:
    directory = tmp_path / "base"
    (directory / "folder").mkdir(parents=True)
    (directory / "config.json").write_text("{}")
    (directory / "tokenizer.json").write_text('{"a": 1}')
    (directory / "model.safetensors").write_text("old weights")
    (directory / "optimizer").mkdir()
    (directory / "optimizer/shard").write_text("old state")
    (directory / checkpoint.MARKER).write_text("{}")
    return directory


def save_all(directory: Path) -> None:
    save_file(WEIGHTS, directory / checkpoint.WEIGHTS)
    (directory / "optimizer").mkdir()
    (directory / "optimizer/shard").write_text("state")


def write(directory: Path, base: Path, version: int = 1, save: Callable[[Path], None] = save_all) -> Checkpoint:
    return checkpoint.write(settings_of(directory), BatchLease("b", version, 0), base, save)


def settings_of(directory: Path) -> TrainerSettings:
    return TrainerSettings(directory=directory, policy="org/policy", branch="main")


def test_write_closes_the_directory_that_it_creates_to_other_users(base: Path, tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared").chmod(0o755)  # whatever the umask
    write(tmp_path / "policies", base)
    write(tmp_path / "shared", base)
    assert [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("policies", "shared")] == [0o700, 0o755]


def visible(directory: Path) -> list[str]:
    return sorted(str(path.relative_to(directory)) for path in directory.glob("*/*/*"))


def test_checkpoint_is_model_directory_with_state_and_marker(tmp_path: Path, base: Path):
    written = write(tmp_path / "policies", base)
    assert written.path == tmp_path / "policies/org%2Fpolicy/main/v1"
    assert sorted(path.name for path in written.path.iterdir()) == [
        "STABLE",
        "config.json",
        "model.safetensors",
        "optimizer",
        "tokenizer.json",
    ]
    assert (written.path / "optimizer/shard").read_text() == "state"
    assert (written.checksum, written.tokenizer_hash) == (checksum_directory(written.path), tokenizer_hash(base))
    marker = json.loads((written.path / "STABLE").read_text())
    files = [file for file in written.path.rglob("*") if file.is_file() and file.name != "STABLE"]
    sizes = {file.relative_to(written.path).as_posix(): file.stat().st_size for file in files}
    assert marker == {
        "path": str(written.path), "policy": "org/policy", "branch": "main", "version": 1, "parent": 0, "batch_id": "b",
        "checksum": written.checksum, "tokenizer_hash": written.tokenizer_hash, "files": sizes,
    }  # fmt: skip
    from safetensors.numpy import load_file

    loaded = load_file(written.path / "model.safetensors")
    assert {name: value.tolist() for name, value in loaded.items()} == {name: value.tolist() for name, value in WEIGHTS.items()}
    checkpoint.verify(written.path, written.checksum)


def test_checkpoint_write_killed_before_rename_leaves_nothing_visible(tmp_path: Path, base: Path):
    directory = tmp_path / "policies"
    directory.mkdir()
    boundaries, whole = list[int](), 0
    for boundary in left_by_crashes(lambda: write(directory, base), {checkpoint.__file__: {"write"}}, directory):
        boundaries.append(boundary)
        versions = [name for name in visible(directory) if name.endswith("/v1")]
        if versions:
            whole += 1
            marker = json.loads((directory / versions[0] / "STABLE").read_text())
            checkpoint.verify(directory / versions[0], marker["checksum"])
        checkpoint.sweep(settings_of(directory), lambda: {1: VersionStatus.COMMITTED})
        assert visible(directory) == versions
    assert boundaries[-1] > 30, "the boundaries were not found"
    assert len(boundaries) > 5, "deaths fell before, within and after the files"
    assert whole, "no death fell after the rename"


def test_checkpoint_write_that_fails_leaves_nothing(tmp_path: Path, base: Path):
    def fail(_: Path) -> None:
        raise RuntimeError("disk full")

    with pytest.raises(RuntimeError, match="disk full"):
        write(tmp_path / "policies", base, save=fail)
    assert visible(tmp_path / "policies") == []


def test_checkpoint_write_existing_version_raises(tmp_path: Path, base: Path):
    write(tmp_path / "policies", base)
    with pytest.raises(CheckpointError, match="v1 exists"):
        write(tmp_path / "policies", base)


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer/shard", "tokenizer.json"])
@pytest.mark.parametrize("left", [None, 0, 3])
def test_checkpoint_verify_truncated_or_missing_file_raises(tmp_path: Path, base: Path, name: str, left: int | None):
    written = write(tmp_path / "policies", base)
    file = written.path / name
    if left is None:
        file.unlink()
    else:
        file.write_bytes(file.read_bytes()[:left])
    with pytest.raises(CheckpointError, match=f"{name} is {'missing' if left is None else f'{left} bytes'}"):
        checkpoint.verify(written.path, written.checksum)


@pytest.mark.parametrize("marker", ["", '{"files": {', "[]", "{}"])
def test_checkpoint_with_damaged_marker_raises(tmp_path: Path, base: Path, marker: str) -> None:
    written = write(tmp_path / "policies", base)
    (written.path / "STABLE").write_text(marker)
    uses = (
        lambda: checkpoint.verify(written.path, written.checksum),
        lambda: checkpoint.has_state(written.path),
        lambda: checkpoint.add_state(written.path, lambda _: None),
    )
    for use in uses:
        with pytest.raises(CheckpointError, match=r"STABLE cannot be read .* Restore .*v1 from a copy"):
            use()


def test_checkpoint_verify_other_weights_of_same_size_raises(tmp_path: Path, base: Path):
    written = write(tmp_path / "policies", base)
    file = written.path / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(CheckpointError, match="the ledger says float32:"):
        checkpoint.verify(written.path, written.checksum)
    with pytest.raises(CheckpointError, match="is missing"):
        checkpoint.verify(tmp_path / "nowhere", written.checksum)


def test_checkpoint_prune_removes_old_versions(tmp_path: Path, base: Path):
    for version in (1, 3, 5):
        write(tmp_path / "policies", base, version)
    checkpoint.delete(checkpoint.prune(settings_of(tmp_path / "policies"), [0, 3]))
    assert visible(tmp_path / "policies") == ["org%2Fpolicy/main/v1", "org%2Fpolicy/main/v5"]
