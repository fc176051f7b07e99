"""A worker with sandboxes, to be killed: an agent host whose program runs in one, with a service, and sandboxes that stay.

`python -m benchmarks.sandbox_worker ENGINE DIRECTORY MARK` prints `ready` when their programs run.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

from runner.sandboxes.agent_sandbox import open_agent_sandbox
from runner.sandboxes.policy import SandboxLimits, SandboxPolicy
from runner.sandboxes.sandbox import open_sandbox
from runner.workers.agent_processes import AgentHost
from runner.workers.agents import CommandAgent, agent_environment
from runner.workers.jobs import Job
from spangrad.processes import wait_until
from spangrad.settings import RunnerSettings, Settings
from spangrad.types import SandboxRung

LIMITS = SandboxLimits(processes=64, memory_bytes=2**30, disk_bytes=2**26)


async def work(engine: SandboxRung, directory: Path, mark: str) -> None:
    """Start the programs, and wait to be killed."""
    sleeps = f"setsid sleep 600.{mark} & touch $TMPDIR/file; sleep 600.{mark}"
    agent = CommandAgent(("sh", "-c", f"echo begun >&2; {sleeps}"), directory=directory)
    sandbox = {"engine": engine}
    runner = RunnerSettings.model_validate({"directory": directory / "runner", "sandbox": sandbox})
    settings = Settings(runner=runner)
    async with (
        open_agent_sandbox(settings, agent) as confined,
        open_sandbox(SandboxPolicy(directory, (), {}, False, LIMITS, engine=engine)) as staying,
    ):
        assert confined is not None
        log = directory / f"{mark}.log"
        host = await AgentHost.start(agent, runner, agent_environment(os.environ, settings, agent), log, confined.launch)
        host.send(Job("attempt", None, "", "", None).message())
        await asyncio.to_thread(wait_until, lambda: log.exists() and b"begun" in log.read_bytes(), 60, "the program", poll_seconds=0.01)
        running = asyncio.create_task(staying.run(["sh", "-c", sleeps]))
        await asyncio.sleep(0.05)
        print("ready", flush=True)
        await running


if __name__ == "__main__":
    asyncio.run(work(SandboxRung(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]))
