"""Worker processes of a client: `spangrad worker`, several times, as long as the client has work for them.

In: an agent by its name, a run, how many. Out: processes that serve the run. Invariant: none outlives the block, or the client's thread;
one that cannot begin is an error with the end of its log, one that dies later is started again.
"""

from __future__ import annotations

import signal
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

_YOUNG_SECONDS = 20.0
"""A worker that ends before has not begun: what it says is shown, and it is not started again."""
_END_SECONDS = 30.0
"""After the drain, for hosts and spans."""


@dataclass(frozen=True, slots=True)
class Work:
    """What workers are told."""

    run_id: str
    agent: str
    """`module:function` or `file.py:function`."""
    stages: Mapping[str, str]
    """What `--evaluator` and `--environment` are given, if anything."""
    directory: Path
    """Where the agent's modules are looked for first."""
    environment: Mapping[str, str]
    """Added to ours: settings, which may hold tokens and so stand on no command line."""
    logs: Path
    follow: str | None
    """Name of the tasks that the first worker enqueues as trainers want them. None: somebody else enqueues."""

    def command(self, number: int) -> list[str]:
        """The command line of the n-th worker."""
        words = ["--run-id", self.run_id, "--agent", self.agent, "--directory", str(self.directory)]
        words += [word for name, reference in self.stages.items() for word in (f"--{name}", reference)]
        if self.follow is not None and number == 0:
            return own_command("run", "--follow-demand", "--tasks", STORED + self.follow, *words)
        return own_command("worker", *words)


class Workers:
    """The processes; a context manager."""

    def __init__(self, work: Work, count: int, drain_seconds: float) -> None:
        """Start none yet.

        Args:
            work: what they do.
            count: how many.
            drain_seconds: that their attempts may go on when they are told to end.
        """
        self._work = work
        self._count = count
        self._drain = drain_seconds
        self._children: dict[int, tuple[Child, float]] = {}

    def __enter__(self) -> Self:
        """Start them."""
        try:
            for number in range(self._count):
                self._start(number)
        except BaseException:
            self.kill()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Drain them, unless something broke; at Ctrl-C as well, where a second one ends them at once."""
        try:
            if kind is None or issubclass(kind, KeyboardInterrupt):
                if kind is not None:
                    told = f"attempts may end for {self._drain:g} s; what is not done by then stays in the queue"
                    print(f"spangrad: {told}. Ctrl-C again ends them now.", file=sys.stderr, flush=True)
                self._end()
        finally:
            self.kill()

    def check(self) -> None:
        """Start again what has died.

        Raises:
            AgentError: a worker cannot begin.
        """
        for number, (child, began) in list(self._children.items()):
            if child.running:
                continue
            lived = time.monotonic() - began
            if lived < _YOUNG_SECONDS:
                raise AgentError(f"{child.name} ended with exit code {child.process.returncode}. The end of {child.log}:\n{child.tail()}")
            print(f"spangrad: {child.name} died after {lived:.0f} s and is started again ({child.log})", file=sys.stderr, flush=True)
            self._start(number)

    def kill(self) -> None:
        """End what is left of them."""
        for child, _ in self._children.values():
            child.stop(0)

    def _start(self, number: int) -> None:
        log = self._work.logs / f"client-worker-{number}.log"
        child = Child(f"worker {number}", self._work.command(number), log, self._work.environment)
        self._children[number] = child, time.monotonic()

    def _end(self) -> None:
        """Tell them to end, and wait for it."""
        for child, _ in self._children.values():
            if child.running:
                child.process.send_signal(signal.SIGTERM)
        end = time.monotonic() + self._drain + _END_SECONDS
        for child, _ in self._children.values():
            try:
                child.process.wait(max(0.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                print(f"spangrad: {child.name} did not end in time and is killed", file=sys.stderr, flush=True)
