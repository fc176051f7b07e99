"""Queues for tests: served in this process, or in one that can be killed.

In: a database. Out: a running queue and a client of it. Invariant: it never outlives the block.
"""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Iterable
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from pydantic import SecretStr
from sections import service_settings

from runner.queue import server
from runner.queue.client import QueueClient, new_rollout
from runner.queue.service import Service
from runner.queue.tables import QueueDatabase
from runner.queue.wire import Completion, Failure, Held, NewRollout, QueuedRollout, RolloutLease, RolloutState
from spangrad.errors import QueueError
from spangrad.processes import Child, answers, free_ports, own_command, wait_until
from spangrad.settings import Settings
from spangrad.types import AttemptFailure


def queue_settings(db: str, **changes: object) -> Settings:
    """Settings of a queue on a free port; `changes` by key (`settings_by_key`)."""
    (port,) = free_ports(1)
    address = {"queue__port": port, "queue__url": f"http://127.0.0.1:{port}", "queue__db": SecretStr(db)}
    return service_settings(**{**address, **changes})


@asynccontextmanager
async def serving(settings: Settings, patience_seconds: float = 5) -> AsyncGenerator[tuple[QueueClient, Service]]:
    """A queue in this process, and a client of it."""
    async with server.running(settings) as service, QueueClient.of(settings.queue, patience_seconds=patience_seconds) as client:
        yield client, service


def queue_process(settings: Settings, log: Path, env: dict[str, str] | None = None) -> Child:
    """`spangrad queue`, ready; whoever starts it stops it."""
    values = {
        "queue.port": settings.queue.port,
        "queue.db": settings.queue.db.get_secret_value(),
        "queue.lease_seconds": settings.queue.lease_seconds,
        "runner.timeout_seconds": settings.runner.timeout_seconds,
        "runner.max_attempts": settings.runner.max_attempts,
    }
    words = [word for name, value in values.items() for word in ("--set", f"{name}={value}")]
    child = Child("spangrad queue", own_command("queue", *words), log, env, inherit_settings=False)
    try:
        wait_until(lambda: answers(f"{settings.queue.url}/readyz"), 60, "the queue", [child], poll_seconds=0.02)
    except BaseException:
        child.stop()
        raise
    return child


@contextmanager
def queue_server(settings: Settings, log: Path, env: dict[str, str] | None = None) -> Generator[Child]:
    """`spangrad queue` in a process of its own."""
    child = queue_process(settings, log, env)
    try:
        yield child
    finally:
        child.stop()


def some(count: int, prefix: str = "r", group_size: int = 1, **facts: object) -> list[NewRollout]:
    """Rollouts with names: r0, r1, ...; so many a group."""
    return [
        new_rollout(
            f"task {i}", {"question": i}, f"{prefix} group {i // group_size}", rollout_id=f"{prefix}{i}", group_size=group_size, **facts
        )
        for i in range(count)
    ]


def with_mood(mood: str, rollouts: Iterable[NewRollout]) -> list[NewRollout]:
    """Rollouts whose input is a word that the agents of `workers` know."""
    return [msgspec.structs.replace(one, input=msgspec.Raw(json.dumps(mood).encode())) for one in rollouts]


async def until_ended(client: QueueClient, count: int) -> list[QueuedRollout]:
    """The rollouts that have ended, once there are so many."""
    found: list[QueuedRollout] = []
    cursor = 0
    while len(found) < count:
        page = await client.ended("run", after=cursor, limit=1000, wait_seconds=20)
        cursor, found = page.cursor, found + page.rollouts
    return found


@pytest.fixture(params=["sqlite", "postgresql"])
def queue_db(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """URL of a database for a queue, on either kind."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/queue.db"
    schema: Callable[[str], str] = request.getfixturevalue("postgres")
    return schema(f"t{uuid.uuid4().hex}")


async def refuses(url: str) -> bool:
    """Whether another server may not serve from there."""
    try:
        (await asyncio.to_thread(QueueDatabase, url)).close()
    except QueueError as error:
        return "another `spangrad queue` serves from" in str(error)
    return False


def done(lease: RolloutLease | Held, **facts: Any) -> Completion:
    return Completion(
        **{"rollout_id": lease.rollout_id, "attempt": lease.attempt, "rewards": {"reward": 1.0}, "calls": 2, "seconds": 0.5, **facts}
    )


def failed(lease: RolloutLease, reason: AttemptFailure = AttemptFailure.CRASH, **facts: Any) -> Failure:
    return Failure(rollout_id=lease.rollout_id, attempt=lease.attempt, reason=reason, **facts)


async def until(true: Callable[[], Awaitable[bool]], seconds: float = 20) -> None:
    end = time.monotonic() + seconds
    while not await true():
        assert time.monotonic() < end, "it did not come true in time"
        await asyncio.sleep(0.01)


async def state(client: QueueClient, name: str) -> RolloutState:
    return (await client.rollout(name)).state


async def is_state(client: QueueClient, name: str, wanted: RolloutState) -> bool:
    return await state(client, name) == wanted


async def is_true(value: object) -> bool:
    return bool(value)
