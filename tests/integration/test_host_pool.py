"""Pools of agent hosts: no process outlives its pool."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

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
