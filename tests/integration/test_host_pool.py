"""Pools of agent hosts: no process outlives its pool, and no log fills a disk."""

from __future__ import annotations

import asyncio
import os
import stat
import sys
from pathlib import Path

import pytest

from runner.workers import attempt_files
from runner.workers.agent_processes import HostPool
from runner.workers.agents import CallableAgent
from spangrad.errors import AgentError
from spangrad.settings import RunnerSettings
from tests.support.runners import is_true, until
from tests.support.worker_kills import runs

ONE_LOADS = """#!{python}
import os, pathlib, sys, time

directory = pathlib.Path(__file__).parent
try:
    (directory / "loading").touch(exist_ok=False)
except FileExistsError:
    while not (directory / "loading").read_text():
        time.sleep(0.01)
    sys.exit(3)
(directory / "loading").write_text(str(os.getpid()))
time.sleep(1)
print('{{"ready": true}}', flush=True)
sys.stdin.read()
"""


async def test_host_pool_closed_after_a_failed_start_leaves_no_process(tmp_path: Path) -> None:
    host = tmp_path / "host.py"
    host.write_text(ONE_LOADS.format(python=sys.executable))
    host.chmod(0o755)
    pool = HostPool(CallableAgent("any:agent", python=host), RunnerSettings(directory=tmp_path, concurrency=2, workers=2), os.environ)
    with pytest.raises(AgentError, match="the agent cannot be loaded"):
        await pool.start()
    await pool.close()
    loading = int((tmp_path / "loading").read_text())
    await until(lambda: is_true(not runs(loading)))


PRINTS = """#!{python}
import pathlib, sys

print('{{"ready": true}}', flush=True)
for number in range(40):
    sys.stderr.write("x" * 2**20)
sys.stderr.write("last words\\n")
sys.stderr.flush()
pathlib.Path(__file__).with_name("printed").touch()
sys.stdin.read()
"""


async def test_log_of_host_that_prints_without_end_keeps_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempt_files, "FREE_SECONDS", 0.05)
    host = tmp_path / "host.py"
    host.write_text(PRINTS.format(python=sys.executable))
    host.chmod(0o755)
    settings = RunnerSettings(directory=tmp_path / "runner", concurrency=1, workers=1)
    pool = HostPool(CallableAgent("any:agent", python=host), settings, os.environ)
    await pool.start()
    log = tmp_path / "runner" / "logs" / "agent-host-0.log"
    await until(lambda: is_true((tmp_path / "printed").exists()))
    await until(lambda: is_true(log.stat().st_blocks * 512 <= 2 * 2**23))
    assert log.read_bytes().endswith(b"xxxx" + b"last words\n")
    assert stat.S_IMODE((tmp_path / "runner").stat().st_mode) == 0o700
    log.unlink()
    await asyncio.sleep(0.2)
    assert not log.exists(), "a log that was moved away is not made again"
    await pool.close()
