"""Leases of the queue over HTTP: how they hold, how they are lost, given back and cancelled; on both databases where it matters."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from inline_snapshot import snapshot

from runner.queue.client import LeaseHeartbeats, QueueClient
from runner.queue.rows import CHUNK
from runner.queue.tables import ROLLOUTS
from runner.queue.wire import AttemptReceipt, Cancelled, Held, LeaseRequest, RolloutSelector, RolloutState
from spangrad.types import AttemptFailure
from tests.support.runners import done, is_state, is_true, new_rollouts, queue_settings, serving, state, until


async def test_complete_after_lost_lease_is_refused_with_reason(queue_db: str) -> None:
    async with serving(queue_settings(queue_db, queue__lease_seconds=0.3)) as (client, _):
        await client.enqueue("run", new_rollouts(1))
        (slow,) = await client.lease("run", "slow")
        await until(lambda: is_state(client, "r0", RolloutState.QUEUED))
        (late,) = await client.complete([done(slow)])
        assert late == snapshot(
            AttemptReceipt(
                rollout_id="r0",
                attempt=0,
                state=RolloutState.QUEUED,
                refused="attempt 0 of rollout r0 has ended: it failed (lost: no heartbeat of slow for 0.3 s). "
                "Later reports of it are ignored.",
                ended=AttemptFailure.LOST,
            )
        )
    async with serving(queue_settings(queue_db)) as (client, _):  # whose leases hold on a busy machine, too
        (quick,) = await client.lease("run", "quick")
        assert (await client.complete([done(quick, rewards={"reward": 0.5})]))[0].refused is None
        (late,) = await client.complete([done(slow)])
        assert late.refused == snapshot(
            "attempt 0 of rollout r0 has ended: it failed (lost: no heartbeat of slow for 0.3 s); attempt 1 is succeeded. "
            "Later reports of it are ignored."
        )
        (other,) = await client.complete([done(quick, rewards={"reward": 0.25})])
        assert other.refused == snapshot("attempt 1 of rollout r0 has ended: it succeeded. Later reports of it are ignored.")
        assert [one.rewards for one in (await client.rollout("r0")).attempts] == [None, {"reward": 0.5}]
        (unknown, early) = await client.complete([done(Held(rollout_id="x", attempt=0)), done(Held(rollout_id="r0", attempt=7))])
        assert (unknown.refused, early.refused) == snapshot(
            (
                "the queue has no rollout x. Lease one before you end it.",
                "attempt 7 of rollout r0 has not been handed out: the newest is 1. Lease one before you end it.",
            )
        )


async def test_heartbeats_extend_leases_and_report_ended_attempts(tmp_path: Path) -> None:
    async with serving(queue_settings(f"sqlite:///{tmp_path}/q.db", queue__lease_seconds=1.0)) as (client, _):
        await client.enqueue("run", new_rollouts(3))
        leases = await client.lease("run", "worker", 3)
        over: dict[str, AttemptReceipt] = {}
        async with LeaseHeartbeats(client, "worker", lambda lease, result: over.update({lease.rollout_id: result})) as beating:
            beating.keep(leases)
            end = time.monotonic() + 2.2
            while time.monotonic() < end:  # more than twice as long as a lease
                assert (await client.run("run")).states == {RolloutState.RUNNING: 3}
                await asyncio.sleep(0.02)
            assert await client.cancel(RolloutSelector(rollout_ids=["r1"])) == Cancelled(queued=0, running=1)
            await until(lambda: is_true(over))
            assert {name: (one.ended, one.state) for name, one in over.items()} == {
                "r1": (AttemptFailure.CANCELLED, RolloutState.CANCELLED)
            }
            beating.drop(leases[2])
            await until(lambda: is_state(client, "r2", RolloutState.QUEUED))
            assert await state(client, "r0") == RolloutState.RUNNING
            (refused,) = await client.complete([done(leases[1])])
            assert refused.refused
            assert "cancelled" in refused.refused
        assert (await client.complete([done(leases[0])]))[0].refused is None


async def test_heartbeat_connection_that_stalls_loses_no_lease(tmp_path: Path) -> None:
    settings = queue_settings(f"sqlite:///{tmp_path}/q.db", queue__lease_seconds=4.0)
    connections: list[asyncio.Event] = []
    """Set: whatever comes is kept, and nothing is closed, as behind a router that has forgotten the connection."""

    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, silent: asyncio.Event) -> None:
        while (data := await reader.read(65536)) or silent.is_set():
            if not silent.is_set():
                writer.write(data)
            elif not data:
                return
        writer.close()

    async def between(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append(silent := asyncio.Event())
        its_reader, its_writer = await asyncio.open_connection("127.0.0.1", settings.queue.port)
        await asyncio.gather(carry(reader, its_writer, silent), carry(its_reader, writer, silent))

    async with serving(settings) as (direct, _), await asyncio.start_server(between, "127.0.0.1", 0) as relay:
        await direct.enqueue("run", new_rollouts(1))
        url = f"http://127.0.0.1:{relay.sockets[0].getsockname()[1]}"
        async with QueueClient(url) as client, LeaseHeartbeats(client, "worker", lambda lease, result: None) as beating:
            (lease,) = await client.lease("run", "worker")
            connections[0].set()
            beating.keep([lease])
            await until(lambda: is_true(len(connections) > 1))
        (result,) = await direct.complete([done(lease)])
        assert result.refused is None


async def test_attempt_timeout_counts_agent_time_reported_by_worker(tmp_path: Path) -> None:
    async with serving(queue_settings(f"sqlite:///{tmp_path}/q.db", queue__lease_seconds=0.8)) as (client, _):
        await client.enqueue("run", new_rollouts(1, timeout_seconds=0.1, max_attempts=1))
        await client.lease("run", "worker")
        end = time.monotonic() + 1.2  # longer than it may run, and a lease's time
        while time.monotonic() < end:
            assert await client.beat([Held(rollout_id="r0", attempt=0, ran=0.0)]) == []
            await asyncio.sleep(0.05)

        async def over() -> bool:
            return bool(await client.beat([Held(rollout_id="r0", attempt=0, ran=1.0)]))

        await until(over)
        (attempt,) = (await client.rollout("r0")).attempts
        assert (attempt.reason, attempt.detail) == (AttemptFailure.LOST, "it ran for more than 0.1 s, and its worker did not end it")


async def test_extended_lease_needs_no_heartbeat_after_restart(queue_db: str) -> None:
    async with serving(queue_settings(queue_db)) as (client, _):
        await client.enqueue("run", new_rollouts(2))
        (long,) = await client.lease("run", "worker")
        assert await client.extend([long], 600) == []
    settings = queue_settings(queue_db, queue__lease_seconds=0.3)
    async with serving(settings) as (client, _):
        (short,) = await client.lease("run", "worker")
        await until(lambda: is_state(client, "r1", RolloutState.QUEUED))
        assert [one.ended for one in await client.extend([long, short], 500)] == [AttemptFailure.LOST]
    async with serving(settings) as (client, service):
        sweeps = service.sweeps
        await until(lambda: is_true(service.sweeps > sweeps + 4))
        assert (await state(client, "r0"), service.in_flight) == (RolloutState.RUNNING, 1)
        assert (await client.complete([done(long)]))[0].refused is None


async def test_queue_restart_renews_leases_and_keeps_run_time_of_attempts(tmp_path: Path) -> None:
    settings = queue_settings(f"sqlite:///{tmp_path}/q.db", queue__lease_seconds=0.5)
    async with serving(settings) as (client, service):
        await client.enqueue("run", [*new_rollouts(1, "short", timeout_seconds=3600.0), *new_rollouts(1, "long", timeout_seconds=7200.0)])
        leases = await client.lease("run", "worker", 2)
        an_hour_ago = ROLLOUTS.update().values(began=ROLLOUTS.c.began - 3600)
        await service.writer.do(lambda transaction: transaction.execute(an_hour_ago).rowcount)
    await asyncio.sleep(0.8)  # longer than a lease: nobody could renew it
    restarted = time.monotonic()
    async with serving(settings) as (client, service):
        assert service.in_flight == 2
        async with LeaseHeartbeats(client, "worker", lambda lease, result: None) as beating:
            beating.keep(leases)
            await until(lambda: is_state(client, "short0", RolloutState.QUEUED))
            assert time.monotonic() - restarted >= 0.5, "a lease's time more than its timeout, of which nothing was left"
            assert await state(client, "long0") == RolloutState.RUNNING
        (ended,) = (await client.rollout("short0")).attempts
        assert (ended.reason, ended.detail) == (AttemptFailure.LOST, "it ran for more than 3600 s, and its worker did not end it")


@pytest.mark.parametrize("timeout_seconds", [300.0, 0.1])
async def test_queue_server_that_stalled_ends_no_attempt(tmp_path: Path, timeout_seconds: float) -> None:
    async with serving(queue_settings(f"sqlite:///{tmp_path}/q.db", queue__lease_seconds=1.0)) as (client, service):
        await client.enqueue("run", new_rollouts(1, timeout_seconds=timeout_seconds))
        (lease,) = await client.lease("run", "worker")
        time.sleep(1.5)  # noqa: ASYNC251 nothing of this process runs meanwhile, as under SIGSTOP
        sweeps = service.sweeps
        await until(lambda: is_true(service.sweeps > sweeps))
        assert await client.beat([lease]) == []
        await until(lambda: is_state(client, "r0", RolloutState.QUEUED))


async def test_attempt_timeout_excludes_queue_time(tmp_path: Path) -> None:
    async with serving(queue_settings(f"sqlite:///{tmp_path}/q.db", queue__lease_seconds=2.0)) as (client, _):
        await client.enqueue("run", new_rollouts(1, timeout_seconds=0.1))
        await asyncio.sleep(2.6)  # longer than it may run, and a lease's time
        (lease,) = await client.lease("run", "worker")
        assert (await client.complete([done(lease)]))[0].refused is None


async def test_released_lease_does_not_count_as_attempt(queue_db: str) -> None:
    async with serving(queue_settings(queue_db, max_attempts=1)) as (client, _):
        await client.enqueue("run", new_rollouts(1))
        for number in range(3):
            (lease,) = await client.lease("run", "worker")
            assert (lease.attempt, lease.last) == (number, True)
            (result,) = await client.release([lease], "draining")
            assert (result.state, result.refused) == (RolloutState.QUEUED, None)


async def test_lease_of_client_that_left_while_writer_was_blocked_costs_no_attempt(tmp_path: Path) -> None:
    settings = queue_settings(f"sqlite:///{tmp_path}/q.db")
    async with serving(settings) as (client, service):
        await client.enqueue("run", new_rollouts(1))
        before = await client.rollout("r0")
        blocked, entered = threading.Event(), threading.Event()

        def block(_: object) -> None:
            entered.set()
            assert blocked.wait(30)

        blocking = asyncio.create_task(service.writer.do(block))
        await asyncio.to_thread(entered.wait, 30)
        async with QueueClient.of(settings.queue) as other:
            leaving = asyncio.create_task(other.lease("run", "other"))
            await until(lambda: is_true(service.writer._jobs.qsize() == 1))
            leaving.cancel()
            await asyncio.gather(leaving, return_exceptions=True)
        await asyncio.sleep(0.2)  # the server, in this event loop, sees the end of the connection
        blocked.set()
        await blocking
        await until(lambda: is_true(service.writer.requests == 3))
        assert (await client.rollout("r0"), service.in_flight) == (before, 0)
        assert [lease.attempt for lease in await client.lease("run", "worker")] == [0]


async def test_lease_of_client_that_left_during_its_commit_is_released(tmp_path: Path) -> None:
    async with serving(queue_settings(f"sqlite:///{tmp_path}/q.db")) as (client, service):
        await client.enqueue("run", new_rollouts(1))
        before = await client.rollout("r0")
        left = iter([False])
        await service.lease(LeaseRequest(run_id="run", worker="worker", count=1), lambda: next(left, True))
        rollout = await client.rollout("r0")
        assert [attempt.reason for attempt in rollout.attempts] == [AttemptFailure.RELEASED]
        assert (rollout.state, rollout.attempts_left, service.in_flight) == (RolloutState.QUEUED, before.attempts_left, 0)


async def test_dead_worker_of_same_machine_loses_attempts_at_once(tmp_path: Path) -> None:
    async with serving(queue_settings(f"sqlite:///{tmp_path}/q.db", queue__lease_seconds=3600)) as (client, service):
        await client.enqueue("run", new_rollouts(2))
        command = [sys.executable, "-c", "from spangrad.leases import *; print(this_process(), flush=True); input()"]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "cwd": Path(__file__).parents[2]}
        child = await asyncio.create_subprocess_exec(*command, **pipes)
        assert child.stdout
        name = (await child.stdout.readline()).decode().strip()
        (lease,) = await client.lease("run", name)
        (other,) = await client.lease("run", "somewhere else")
        assert await client.beat([lease, other]) == []
        waiting = asyncio.create_task(client.lease("run", name, wait_seconds=30))
        await until(lambda: is_true(service.writer.requests == 4))  # it has found nothing, and waits
        child.kill()
        await child.wait()
        await until(lambda: is_state(client, "r0", RolloutState.QUEUED))
        assert await state(client, "r1") == RolloutState.RUNNING
        assert await waiting == [], "nothing is handed to the dead, though they had asked"
        assert [one.reason for one in (await client.rollout("r0")).attempts] == [AttemptFailure.LOST]


async def test_cancel_with_1000_attempts_in_flight_cancels_all(queue_db: str) -> None:
    async with serving(queue_settings(queue_db)) as (client, service):
        await client.enqueue("run", new_rollouts(1500, group_size=10))
        await client.enqueue("other", new_rollouts(2, "o"))
        leases = [*await client.lease("run", "one", 600), *await client.lease("run", "two", 400)]
        (kept,) = await client.lease("other", "one")
        finished, *rest = leases
        await client.complete([done(finished)])
        assert await client.cancel(RolloutSelector(run_id="run", group_id="r group 0")) == Cancelled(queued=0, running=9)
        assert await client.cancel(RolloutSelector(run_id="run")) == Cancelled(queued=500, running=990)
        over = await client.beat([*rest, kept])
        assert {(one.rollout_id, one.attempt) for one in over} == {(one.rollout_id, one.attempt) for one in rest}
        assert {one.ended for one in over} == {AttemptFailure.CANCELLED}
        late = await client.complete([done(one) for one in rest])
        assert {one.state for one in late if one.refused} == {RolloutState.CANCELLED}
        assert len(late) == len([one for one in late if one.refused]) == 999
        assert await client.lease("run", "one", 10) == []
        assert {one.run_id: one.states for one in await client.runs()} == {
            "other": {RolloutState.QUEUED: 1, RolloutState.RUNNING: 1},
            "run": {RolloutState.SUCCEEDED: 1, RolloutState.CANCELLED: 1499},
        }
        assert service.in_flight == 1


async def test_cancel_counts_an_id_that_is_named_twice_once(tmp_path: Path) -> None:
    async with serving(queue_settings(f"sqlite:///{tmp_path}/q.db")) as (client, _):
        await client.enqueue("run", new_rollouts(1))
        await client.lease("run", "worker")
        names = ["r0", *(f"unknown {number}" for number in range(CHUNK)), "r0"]
        assert await client.cancel(RolloutSelector(rollout_ids=names)) == Cancelled(queued=0, running=1)
