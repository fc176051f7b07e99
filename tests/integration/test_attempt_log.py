"""Outputs of attempts and disks: what a full one does not take is lost, and fails no attempt; and what a program prints fills none."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import tempfile
from contextvars import Context
from pathlib import Path
from typing import IO

import pytest

from spangrad.agent import command as command_module
from spangrad.agent.attempt_log import AttemptLog, begin_log, divide_outputs
from spangrad.agent.command import AgentCommand, ProgramFailure
from tests.support.runners import is_true, until


def test_print_on_full_disk_raises_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with open("/dev/full", "w", buffering=1) as full:  # noqa: PTH123  # a line at a time, as standard error
        monkeypatch.setattr(sys, "stdout", full)
        monkeypatch.setattr(sys, "stderr", full)
        divide_outputs()
        Context().run(begin_log, AttemptLog("/dev/full/attempt"))
        print("a line")
        print("a line", file=sys.stderr, flush=True)
        os.dup2(os.open(os.devnull, os.O_WRONLY), full.fileno())  # it closes without an error


def test_attempt_log_end_of_program_on_full_disk_raises_nothing(tmp_path: Path) -> None:
    full = os.open("/dev/full", os.O_WRONLY)
    AttemptLog(None).end_program(full, b"output")
    os.close(full)
    log = AttemptLog(str(tmp_path))
    with log.program() as stderr:
        log.end_program(stderr, b"output")
    log.close()
    assert (tmp_path / "output.log").read_bytes() == b"output"


def test_attempt_log_closed_keeps_no_later_output(tmp_path: Path) -> None:
    log, silent = AttemptLog(str(tmp_path / "log")), AttemptLog(str(tmp_path / "silent"))
    assert log.write("in time")
    for each in (log, silent):
        each.close()
        assert not each.write("late"), "a thread that outlived its attempt prints to the process's own output"
    assert (tmp_path / "log" / "output.log").read_text() == "in time"
    assert not (tmp_path / "silent").exists()


@pytest.mark.parametrize("interpreter", ["/bin/true", "/no/interpreter"])
async def test_agent_command_that_prints_nothing_leaves_no_files(tmp_path: Path, interpreter: str) -> None:
    (program := tmp_path / "program").write_text(f"#!{interpreter}\n")
    program.chmod(0o755)
    begin_log(AttemptLog(str(tmp_path / "attempts")))
    with contextlib.suppress(ProgramFailure):
        await AgentCommand([str(program)], tmp_path, instrument=False)({}, None)
    assert not (tmp_path / "attempts").exists()


async def test_agent_command_that_floods_its_output_takes_little_disk_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files: list[IO[bytes]] = []
    create = tempfile.TemporaryFile

    def opened() -> IO[bytes]:
        files.append(create())
        return files[-1]

    def space_is_free() -> bool:
        state = os.fstat(files[1].fileno())
        return state.st_size == 2**26 and state.st_blocks * 512 < 2**24

    monkeypatch.setattr(command_module, "FREE_SECONDS", 0.05)
    monkeypatch.setattr(tempfile, "TemporaryFile", opened)
    end = tmp_path / "end"
    program = (
        "import pathlib, sys, time; sys.stdout.write('x' * (2**26 - 1)); print(flush=True)\n"
        f"while not pathlib.Path({str(end)!r}).exists(): time.sleep(0.02)\n"
        "print('done')"
    )
    attempt = asyncio.create_task(AgentCommand([sys.executable, "-c", program], tmp_path, instrument=False)({}, None))
    await until(lambda: is_true(len(files) > 1 and space_is_free()))
    end.touch()
    assert await attempt == "done"
