"""Limits of attempts' files on disk: the newest rollouts stay, with any characters in their ids."""

from __future__ import annotations

import errno
import hashlib
import os
from pathlib import Path

import pytest

from runner.workers.attempt_files import LOG_TAIL_BYTES, AttemptFiles


def test_attempt_files_prune_keeps_newest_rollouts_of_any_id(tmp_path: Path) -> None:
    files = AttemptFiles(tmp_path, 20)
    names = [hashlib.sha256(str(number).encode()).hexdigest() for number in range(100)]
    for number, name in enumerate(names):
        _print(files, name, 0, "crashed")
        os.utime(tmp_path / "attempts" / name, (number, number))
    _print(files, names[0], 1, "crashed")
    files.ended(199)
    assert len(list((tmp_path / "attempts").iterdir())) == 100
    files.ended(1)
    assert {path.name for path in (tmp_path / "attempts").iterdir()} == {names[0], *names[-19:]}, "a new attempt makes a rollout new"
    assert list(files.logs(names[0])) == [0, 1]


def test_attempt_files_tail_is_the_end_of_a_log(tmp_path: Path) -> None:
    files = AttemptFiles(tmp_path, 1)
    _print(files, "r/1", 0, "x" * LOG_TAIL_BYTES + "\0é the end")
    assert files.tail("r/1", 0).endswith("xé the end")
    assert len(files.tail("r/1", 0).encode()) < LOG_TAIL_BYTES
    assert files.tail("r/1", 1) == ""
    assert AttemptFiles(tmp_path, 0).tail("r/1", 0) == ""


def test_attempt_files_of_long_ids_that_end_differently_lie_apart(tmp_path: Path) -> None:
    files = AttemptFiles(tmp_path, 2)
    for number in range(2):
        _print(files, f"run/{'k' * 500}/0/{number}", 0, f"output {number}")
    assert [files.tail(f"run/{'k' * 500}/0/{number}", 0) for number in range(2)] == ["output 0", "output 1"]


def test_attempt_files_that_cannot_be_listed_are_kept_and_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    files = AttemptFiles(tmp_path, 1)
    files.ended(200)
    _print(files, "r", 0, "crashed")
    with monkeypatch.context() as patch:
        patch.setattr(os, "listdir", _refuse)
        patch.setattr(os, "scandir", _refuse)
        files.ended(200)
    assert "are kept, since it cannot be listed: Too many open files" in caplog.text
    assert files.tail("r", 0) == "crashed"


def _refuse(*_: object) -> list[str]:
    raise OSError(errno.EMFILE, "Too many open files")


def _print(files: AttemptFiles, rollout_id: str, attempt: int, text: str) -> None:
    directory = Path(files.directory(rollout_id, attempt) or "")
    directory.mkdir(parents=True)
    (directory / "output.log").write_text(text)
