"""Files that one process owns by a lock: on a file system without locks a sentence names the file, and no other owner."""

from __future__ import annotations

import errno
import fcntl
from collections.abc import Callable
from pathlib import Path

import pytest

from collector import database
from gateway.recorder.spill import Spill
from runner.queue.tables import QueueDatabase
from spangrad.errors import GatewayError, QueueError, SpangradError, StoreError
from spangrad.supervisor.run_directory import LOCK, RunDirectory, owner_of


def _run(path: Path) -> None:
    with RunDirectory(path):
        pass


@pytest.mark.parametrize(
    ("own", "error", "named"),
    [
        (lambda path: database._own(path), StoreError, "store.path"),
        (Spill, GatewayError, "gateway.spill_path"),
        (lambda path: QueueDatabase(f"sqlite:///{path}/queue.db"), QueueError, "queue.db"),
        (_run, SpangradError, LOCK),
    ],
)
def test_lock_without_support_of_the_file_system_names_the_file(
    own: Callable[[Path], object], error: type[SpangradError], named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unsupported(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    with pytest.raises(error, match=rf"{named}.*cannot be locked \(No locks available\).*a file system with locks"):
        own(tmp_path / "owned")


def test_run_directory_that_cannot_be_locked_has_no_owner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / LOCK).write_text("1")

    def unsupported(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    assert owner_of(tmp_path) is None
