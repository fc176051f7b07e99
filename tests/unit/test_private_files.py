"""Directories and databases that settings name: those that spangrad creates are closed to other users of the machine."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from collector import database
from commands.output_files import make_directory_of
from gateway.pool.registry import BackendRegistry
from gateway.recorder.spill import Spill
from runner.embedded import _directory
from runner.queue.tables import QueueDatabase
from spangrad.settings import RunnerSettings
from spangrad.supervisor.run_directory import RunDirectory
from trainer.ledger.tables import LedgerDatabase
from transition_builder.export.files import made_whole


@pytest.fixture(autouse=True)
def open_umask() -> Iterator[None]:
    before = os.umask(0o022)
    yield
    os.umask(before)


def _run(path: Path) -> None:
    with RunDirectory(path):
        pass


def _export(path: Path) -> None:
    with made_whole(path / "export.jsonl", force=False, directory=False) as temporary:
        temporary.touch()


CREATE: list[Callable[[Path], object]] = [
    database.make_directory,
    Spill,
    lambda path: BackendRegistry(path).write([]),
    lambda path: _directory(RunnerSettings(directory=path)),
    lambda path: LedgerDatabase(path).close(),
    lambda path: QueueDatabase(f"sqlite:///{path}/queue.db").close(),
    _run,
    lambda path: make_directory_of(path / "up.log", "up.directory"),
    _export,
]


@pytest.mark.parametrize("create", CREATE)
def test_directory_that_settings_name_is_created_for_its_user_alone(create: Callable[[Path], object], tmp_path: Path) -> None:
    create(tmp_path / "parent" / "owned")
    assert stat.S_IMODE((tmp_path / "parent" / "owned").stat().st_mode) == 0o700


@pytest.mark.parametrize("create", CREATE)
def test_directory_that_exists_keeps_its_mode(create: Callable[[Path], object], tmp_path: Path) -> None:
    (tmp_path / "owned").mkdir(mode=0o755)
    create(tmp_path / "owned")
    assert stat.S_IMODE((tmp_path / "owned").stat().st_mode) == 0o755


def test_database_file_in_open_directory_is_its_users_alone(tmp_path: Path) -> None:
    queue = QueueDatabase(f"sqlite:///{tmp_path}/queue.db")
    ledger = LedgerDatabase(tmp_path)
    files = [file for file in tmp_path.iterdir() if ".db" in file.name and file.suffix != ".lock"]
    assert {file.name for file in files} == {f"{name}.db{end}" for name in ("queue", "ledger") for end in ("", "-wal", "-shm")}
    assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o600}
    queue.close()
    ledger.close()
