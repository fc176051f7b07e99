"""Kills of a queue, of its workers and of what they have started, and the checks that hold after any of them."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Iterable

import psutil

from runner.queue.client import QueueClient
from runner.queue.wire import RolloutState
from spangrad import semconv
from spangrad.processes import Child, wait_until
from spangrad.settings import Settings
from spangrad.types import AttemptFailure
from tests.support.runners import RunnerServices, kill, queue_process, until_ended

WORKERS = 3


async def until_true(what: str, true: Callable[[], bool]) -> None:
    await asyncio.to_thread(wait_until, true, 180, what)


async def require_no_orphan(services: RunnerServices) -> None:
    """Nothing that a host has started outlives the workers."""
    for child in services.children:
        child.stop(60)
    await asyncio.to_thread(wait_until, lambda: not services.left() and not services.processes(), 60, "the end of what hosts have started")
    assert services.hosts() == []


async def require_once(client: QueueClient, services: RunnerServices, names: Iterable[str]) -> dict[tuple[str, int], AttemptFailure | None]:
    """Each rollout has succeeded once; each attempt has its root, and the newest of each rollout the final mark. Attempts by reason."""
    expected = Counter(names)
    ended = await until_ended(client, len(expected))
    # Differences alone: pytest would take minutes to tell two large mappings apart.
    assert Counter(rollout.rollout_id for rollout in ended) - expected == Counter(), "ended twice"
    assert expected - Counter(rollout.rollout_id for rollout in ended) == Counter(), "lost"
    assert {rollout.state for rollout in ended} == {RolloutState.SUCCEEDED}
    whole = [await client.rollout(rollout.rollout_id) for rollout in ended]
    attempts = {(rollout.rollout_id, attempt.attempt): attempt.reason for rollout in whole for attempt in rollout.attempts}
    assert Counter(name for (name, _), reason in attempts.items() if reason is None) - expected == Counter(), "completed twice"
    await until_true("the last roots", lambda: services.roots().keys() >= attempts.keys())
    roots = services.roots()
    assert [key for key in roots if key not in attempts] == []
    newest = {name: max(number for other, number in attempts if other == name) for name in expected}
    assert [key for key in newest.items() if not roots[key][semconv.ROLLOUT_FINAL]] == []
    return attempts


class Victims:
    """Everything that may die: each is replaced, or replaces itself."""

    def __init__(self, services: RunnerServices, settings: Settings, chance: random.Random, start_worker: Callable[[], object]) -> None:
        self._services, self._settings, self._chance, self._start_worker = services, settings, chance, start_worker
        self.killed: Counter[str] = Counter()
        self.server = self._serve()

    def kill_one(self) -> None:
        """Kill one that is there, of a kind drawn first."""
        kinds: dict[str, list[int]] = {
            "server": [self.server.process.pid],
            "worker": [child.process.pid for child in self._services.children if child.running],
            "host": self._services.hosts(),
            "program": self._services.programs(),
        }
        kind = self._chance.choice([name for name, pids in kinds.items() if pids])
        victim = self._chance.choice(kinds[kind])
        kill(victim)
        self.killed[kind] += 1
        for child in (*self._services.children, self.server):
            if child.process.pid == victim:
                child.process.wait()  # a corpse may count as running, and then nobody takes its place
        if not self.server.running:
            self.server = self._serve()
        for _ in range(WORKERS - sum(child.running for child in self._services.children)):
            self._start_worker()

    def _serve(self) -> Child:
        return queue_process(self._settings, self._services.directory / "queue.log")


def lives(process: psutil.Process) -> bool:
    """Return whether a process runs; a killed one that is still a zombie does not."""
    return process.is_running() and runs(process.pid)


def runs(pid: int) -> bool:
    """Return whether there is a process of this number that is no zombie."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
