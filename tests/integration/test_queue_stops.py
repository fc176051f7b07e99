"""Attempts that the queue ends: their workers hear of it while they wait, and the gateway ends their calls."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest

from runner.queue.client import LeaseHeartbeats, QueueClient
from runner.queue.wire import AttemptReceipt, Failure, RolloutLease, RolloutSelector, RolloutState
from spangrad.errors import QueueError
from spangrad.processes import free_ports
from spangrad.settings import Settings
from spangrad.types import AttemptFailure
from tests.support.runners import AttemptGateway, done, is_state, is_true, new_rollouts, queue_settings, serving, until

LONG_SECONDS = 120.0
"""Time of a lease whose next heartbeat comes after the test."""


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return of_gateway(tmp_path)


def of_gateway(directory: Path, **changes: object) -> Settings:
    """Settings of a queue; `changes` name the gateway."""
    return queue_settings(f"sqlite:///{directory}/q.db", queue__lease_seconds=LONG_SECONDS, **changes)


class Ended:
    """Endings that a worker hears of."""

    def __init__(self) -> None:
        self.results: dict[str, AttemptReceipt] = {}

    def __call__(self, lease: RolloutLease, result: AttemptReceipt) -> None:
        self.results[lease.rollout_id] = result


async def wait_for_request(client: QueueClient) -> None:
    """Let a request that was begun arrive at the queue."""
    await client.runs()
    await asyncio.sleep(0.1)


async def test_cancel_reaches_worker_long_before_its_heartbeat(settings: Settings) -> None:
    ended = Ended()
    async with serving(settings) as (client, _), LeaseHeartbeats(client, "worker", ended) as beating:
        await client.enqueue("run", new_rollouts(3))
        beating.keep(await client.lease("run", "worker", 2))
        other = await client.lease("run", "other")
        await wait_for_request(client)  # the first heartbeat is over
        began = time.monotonic()
        await client.cancel(RolloutSelector(run_id="run"))
        await until(lambda: is_true(len(ended.results) == 2))
        assert time.monotonic() - began < LONG_SECONDS / 10
        assert {(one.ended, one.state) for one in ended.results.values()} == {(AttemptFailure.CANCELLED, RolloutState.CANCELLED)}
        assert other[0].rollout_id not in ended.results


async def test_cancel_before_the_response_with_the_lease_ends_attempt_at_once(settings: Settings) -> None:
    ended = Ended()
    async with serving(settings) as (client, _), LeaseHeartbeats(client, "worker", ended) as beating:
        await client.enqueue("run", new_rollouts(1))
        leases = await client.lease("run", "worker")
        await wait_for_request(client)
        await client.cancel(RolloutSelector(run_id="run"))
        await until(lambda: is_true(beating._stopped_early))
        assert not ended.results
        beating.keep(leases)
        assert ended.results["r0"].ended is AttemptFailure.CANCELLED


async def test_stopped_names_expired_leases_after_a_position(tmp_path: Path) -> None:
    settings = queue_settings(f"sqlite:///{tmp_path}/q.db", queue__lease_seconds=0.3)
    async with serving(settings) as (client, _):
        await client.enqueue("run", new_rollouts(2, max_attempts=1))
        await client.lease("run", "worker", 2)
        first = await client.stopped("worker", wait_seconds=10)
        second = await client.stopped("worker", after=first.cursor, wait_seconds=0.2)
        assert {(one.rollout_id, one.ended) for one in first.results + second.results} == {
            ("r0", AttemptFailure.LOST), ("r1", AttemptFailure.LOST),
        }  # fmt: skip
        assert (await client.stopped("worker", after=second.cursor)).results == []
        assert (await client.stopped("other")).results == []
        before = second.cursor
    async with serving(settings) as (client, _):
        await client.enqueue("run", new_rollouts(1, "late", max_attempts=1))
        await client.lease("run", "worker")
        assert [one.rollout_id for one in (await client.stopped("worker", after=before, wait_seconds=10)).results] == ["late0"]


async def test_completion_reported_by_worker_stops_nothing(settings: Settings) -> None:
    async with serving(settings) as (client, _):
        await client.enqueue("run", new_rollouts(1))
        leases = await client.lease("run", "worker")
        await client.complete([done(leases[0])])
        assert (await client.stopped("worker")).results == []


@pytest.fixture
async def gateway() -> AsyncGenerator[AttemptGateway]:
    with AttemptGateway() as gateway:
        yield gateway


async def test_failed_attempts_alone_are_closed_at_gateway(tmp_path: Path, gateway: AttemptGateway) -> None:
    async with serving(of_gateway(tmp_path, gateway__url=gateway.url)) as (client, _):
        await client.enqueue("run", new_rollouts(4))
        completed, failed, released, _ = await client.lease("run", "worker", 4)
        await client.complete([done(completed)])
        await client.fail([Failure(rollout_id=failed.rollout_id, attempt=0, reason=AttemptFailure.TIMEOUT)])
        await client.release([released])
        await client.cancel(RolloutSelector(rollout_ids=["r3"]))
        await until(lambda: is_true(len(gateway.closed) == 3))
        assert gateway.closed == {("r1", 0): "timeout", ("r2", 0): "released", ("r3", 0): "cancelled"}


async def test_gateway_that_is_away_gets_orders_when_it_is_back(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (port,) = free_ports(1)
    async with serving(of_gateway(tmp_path, gateway__url=f"http://127.0.0.1:{port}")) as (client, _):
        await client.enqueue("run", new_rollouts(2))
        await client.lease("run", "worker", 2)
        await client.cancel(RolloutSelector(run_id="run"))
        await until(lambda: is_true(bool(caplog.records)))
        with AttemptGateway(port) as gateway:
            await until(lambda: is_true(len(gateway.closed) == 2))
        assert [one.message for one in caplog.records] == [
            f"the gateway at http://127.0.0.1:{port} does not answer (Cannot connect to host 127.0.0.1:{port} ssl:default "
            f"[Connect call failed ('127.0.0.1', {port})]). Start it with `spangrad gateway`, or set gateway.url. "
            "Until then, calls of ended attempts go on until their agents stop."
        ]


async def test_direct_mode_sends_gateway_no_orders(tmp_path: Path, gateway: AttemptGateway) -> None:
    async with serving(of_gateway(tmp_path, gateway__url=gateway.url, runner__gateway=False)) as (client, _):
        await client.enqueue("run", new_rollouts(1))
        await client.lease("run", "worker")
        await client.cancel(RolloutSelector(run_id="run"))
        await until(lambda: is_state(client, "r0", RolloutState.CANCELLED))
        await wait_for_request(client)
        assert gateway.closed == {}


async def test_heartbeats_continue_while_the_queue_is_away(settings: Settings) -> None:
    ended = Ended()
    async with serving(settings) as (client, _):
        await client.enqueue("run", new_rollouts(1))
        leases = await client.lease("run", "worker")
    async with QueueClient.of(settings.queue, retry_seconds=0.1) as client, LeaseHeartbeats(client, "worker", ended) as beating:
        beating.keep(leases)
        with pytest.raises(QueueError):
            await client.stopped("worker")
        async with serving(settings) as (direct, _):
            await direct.cancel(RolloutSelector(run_id="run"))
            await until(lambda: is_true(bool(ended.results)))


async def test_heartbeats_continue_after_request_that_got_no_thread(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    ended, failures = Ended(), [RuntimeError("can't start new thread")] * 2
    beat, stopped = QueueClient.beat, QueueClient.stopped

    async def beat_later(client: QueueClient, leases: Any) -> Any:
        if failures:
            raise failures.pop()
        return await beat(client, leases)

    async def stopped_later(client: QueueClient, *given: Any, **named: Any) -> Any:
        if failures:
            raise failures.pop()
        return await stopped(client, *given, **named)

    monkeypatch.setattr(QueueClient, "beat", beat_later)
    monkeypatch.setattr(QueueClient, "stopped", stopped_later)
    async with serving(settings) as (client, _):
        await client.enqueue("run", new_rollouts(1))
        leases = await client.lease("run", "worker", lease_seconds=0.5)
        async with LeaseHeartbeats(client, "worker", ended) as beating:
            beating.keep(leases)
            await until(lambda: is_true(not failures))
            assert not any(task.done() for task in beating._tasks)
