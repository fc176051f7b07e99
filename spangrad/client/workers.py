"""Worker processes of a client: `spangrad worker`, several times, as long as the client has work for them.

In: an agent's reference, a run, a number of processes. Out: processes that serve the run. Invariant: none outlives the block, or the
client's thread; one that cannot start is an error with the end of its log, one that dies later is restarted.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from spangrad.client.task_store import STORED
from spangrad.errors import AgentError
from spangrad.processes import Child, own_command
from spangrad.settings.runner import END_SECONDS

_START_SECONDS = 20.0
"""Time in seconds before which a worker that ends counts as unable to start: its log is shown, and it is not restarted."""


@dataclass(frozen=True, slots=True)
class Work:
    """Arguments of workers."""

    run_id: str
    agent: str
    """Reference of the agent: `module:function` or `file.py:function`."""
    stages: Mapping[str, str]
    """Values of `--evaluator` and `--environment`, by name; empty where there are none."""
    directory: Path
    """Directory in which the agent's modules are looked for first."""
    environment: Mapping[str, str]
    """Further environment variables: settings, which may hold tokens and so appear on no command line."""
    logs: Path
    follow: str | None
    """Name of the tasks that the first worker enqueues as trainers request them. None: the workers enqueue nothing."""

    def command(self, number: int) -> list[str]:
        """Return the command line of the n-th worker."""
        words = ["--run-id", self.run_id, "--agent", self.agent, "--directory", str(self.directory)]
        words += [word for name, reference in self.stages.items() for word in (f"--{name}", reference)]
        if self.follow is not None and number == 0:
            return own_command("run", "--follow-demand", "--tasks", STORED + self.follow, *words)
        return own_command("worker", *words)


class WorkerProcesses:
    """Worker processes of a client; a context manager."""

    def __init__(self, work: Work, count: int, drain_seconds: float) -> None:
        """Store the arguments; attempts may continue for `drain_seconds` when workers are asked to end."""
        self._work = work
        self._count = count
        self._drain = drain_seconds
        self._children: dict[int, tuple[Child, float]] = {}

    def __enter__(self) -> Self:
        try:
            for number in range(self._count):
                self._start(number)
        except BaseException:
            self.kill()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Drain the workers, unless an error occurred; at Ctrl-C as well, where a second one kills them at once."""
        try:
            if kind is None or issubclass(kind, KeyboardInterrupt):
                if kind is not None:
                    notice = f"attempts may end for {self._drain:g} s; what is not done by then stays in the queue"
                    print(f"spangrad: {notice}. Ctrl-C again ends them now.", file=sys.stderr, flush=True)
                self._end()
        finally:
            self.kill()

    def check(self) -> None:
        """Restart workers that have died.

        Raises:
            AgentError: a worker cannot start.
        """
        for number, (child, began) in list(self._children.items()):
            if child.running:
                continue
            uptime = time.monotonic() - began
            if uptime < _START_SECONDS:
                raise AgentError(f"{child.name} ended with exit code {child.process.returncode}. The end of {child.log}:\n{child.tail()}")
            print(f"spangrad: {child.name} died after {uptime:.0f} s and is started again ({child.log})", file=sys.stderr, flush=True)
            self._start(number)

    def kill(self) -> None:
        """Kill the workers that are left."""
        for child, _ in self._children.values():
            child.stop(0)

    def _start(self, number: int) -> None:
        log = self._work.logs / f"client-worker-{number}.log"
        child = Child(f"worker {number}", self._work.command(number), log, self._work.environment)
        self._children[number] = child, time.monotonic()

    def _end(self) -> None:
        for child, _ in self._children.values():
            child.ask_to_end()
        end = time.monotonic() + self._drain + END_SECONDS
        for child, _ in self._children.values():
            try:
                child.process.wait(max(0.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                print(f"spangrad: {child.name} did not end in time and is killed", file=sys.stderr, flush=True)
