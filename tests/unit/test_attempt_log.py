"""Logs of attempts on a full disk: what cannot be written is lost, and no attempt fails of it."""

from __future__ import annotations

import os
import sys
from contextvars import Context
from pathlib import Path

import pytest

from spangrad.agent.attempt_log import AttemptLog, begin_log, divide_outputs


def test_print_on_full_disk_raises_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with open("/dev/full", "w", buffering=1) as full:  # noqa: PTH123  # a line at a time, as standard error
        monkeypatch.setattr(sys, "stdout", full)
        monkeypatch.setattr(sys, "stderr", full)
        divide_outputs()
        Context().run(begin_log, AttemptLog("/dev/full/attempt"))
        print("a line")
        print("a line", file=sys.stderr, flush=True)
        os.dup2(os.open(os.devnull, os.O_WRONLY), full.fileno())  # it closes without an error


def test_attempt_log_end_of_program_on_full_disk_raises_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = os.open("/dev/full", os.O_WRONLY)
    AttemptLog(None).end_program(full, b"output")
    os.close(full)
    log = AttemptLog(str(tmp_path))

    def refuse(*_: object, **__: object) -> None:
        raise OSError("read-only")

    monkeypatch.setattr(Path, "unlink", refuse)
    with log.program() as stderr:
        log.end_program(stderr, b"output")
    log.close()
    assert (tmp_path / "output.log").read_bytes() == b"output"
