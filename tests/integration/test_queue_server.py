"""The queue over HTTP: leases and their ends, cancellation, dead letters, demand, refusals; on both databases."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import aiohttp
import msgspec
import pytest
import sqlalchemy as sa
from inline_snapshot import snapshot
from pydantic import SecretStr

from runner.queue import notifier
from runner.queue.client import QueueClient
from runner.queue.server import serve
from runner.queue.wire import AttemptReceipt, Enqueue, RolloutSelector, RolloutState
from spangrad.errors import QueueError, SpangradError
from spangrad.http.queue_messages import DemandRequest, DemandState
from spangrad.types import Mode
from tests.support.runners import done, failed, is_true, new_rollouts, queue_settings, serving, until


async def test_rollout_lifecycle_over_queue_http(queue_db: str) -> None:
    async with serving(queue_settings(queue_db)) as (client, service):
        assert await client.enqueue("run", new_rollouts(2, priority=3)) == ["r0", "r1"]
        (lease,) = await client.lease("run", "worker one")
        assert msgspec.json.decode(msgspec.json.encode(lease)) == snapshot(
            {
                "run_id": "run",
                "rollout_id": "r0",
                "attempt": 0,
                "last": False,
                "task_id": "task 0",
                "input": {"question": 0},
                "mode": "train",
                "group_id": "r group 0",
                "group_size": 1,
                "priority": 3,
                "timeout_seconds": 300.0,
                "lease_seconds": 30.0,
            }
        )
        assert await client.beat([lease]) == []
        assert await client.fail([failed(lease, detail="it fell", seconds=0.25)]) == [
            AttemptReceipt(rollout_id="r0", attempt=0, state=RolloutState.QUEUED)
        ]
        again, other = await client.lease("run", "worker two", 5)
        assert [(lease.rollout_id, lease.attempt, lease.last) for lease in (again, other)] == [("r0", 1, True), ("r1", 0, False)]
        for _ in range(2):
            assert await client.complete([done(again)]) == [AttemptReceipt(rollout_id="r0", attempt=1, state=RolloutState.SUCCEEDED)]
        rollout = msgspec.to_builtins(await client.rollout("r0"))
        for attempt in rollout["attempts"]:
            assert attempt.pop("ended_at") >= attempt.pop("began_at")
        assert rollout == snapshot(
            {
                "run_id": "run",
                "rollout_id": "r0",
                "task_id": "task 0",
                "mode": "train",
                "group_id": "r group 0",
                "group_size": 1,
                "priority": 3,
                "state": "succeeded",
                "attempts_left": 0,
                "timeout_seconds": 300.0,
                "worker": None,
                "cursor": 1,
                "attempts": [
                    {
                        "attempt": 0,
                        "worker": "worker one",
                        "reason": "crash",
                        "detail": "it fell",
                        "rewards": None,
                        "calls": None,
                        "seconds": 0.25,
                    },
                    {
                        "attempt": 1,
                        "worker": "worker two",
                        "reason": None,
                        "detail": "",
                        "rewards": {"reward": 1.0},
                        "calls": 2,
                        "seconds": 0.5,
                    },
                ],
            }
        )
        assert (await client.run("run")).states == {RolloutState.RUNNING: 1, RolloutState.SUCCEEDED: 1}
        assert service.ended == {"crash": 1, "succeeded": 1}


async def test_dead_rollouts_are_listed_and_retried(queue_db: str) -> None:
    async with serving(queue_settings(queue_db)) as (client, _):
        await client.enqueue("run", new_rollouts(3, max_attempts=2))
        for number in range(2):
            leases = await client.lease("run", "worker", 3)
            assert {lease.attempt for lease in leases} == {number}
            await client.fail([failed(lease, detail=f"poison {number}") for lease in leases])
        assert await client.lease("run", "worker", 3) == []
        dead = (await client.rollouts(run_id="run", state=RolloutState.DEAD)).rollouts
        assert [(rollout.rollout_id, rollout.attempts[0].detail) for rollout in dead] == [(f"r{i}", "poison 1") for i in range(3)]
        assert await client.retry(RolloutSelector(rollout_ids=["r1", "nobody"])) == 1
        (lease,) = await client.lease("run", "worker", 3)
        assert (lease.rollout_id, lease.attempt, lease.last) == ("r1", 2, False)
        (result,) = await client.fail([failed(lease, retry=False)])
        assert result.state == RolloutState.DEAD, "no other attempt would do better"
        assert await client.retry(RolloutSelector(run_id="run")) == 3


async def test_demand_level_never_falls(queue_db: str) -> None:
    settings = queue_settings(queue_db)
    async with serving(settings) as (client, _):
        assert await client.demand("run") == DemandState(groups=0, enqueued=0, cancelled=0, branches=[])
        apart = [
            msgspec.structs.replace(rollout, rollout_id=f"apart {rollout.rollout_id}", mode=Mode.PROBE)
            for rollout in new_rollouts(16, group_size=8)
        ]
        await client.enqueue("run", apart[:8])
        await client.enqueue("run", [*new_rollouts(16, group_size=8), *new_rollouts(4, "held out", mode="validate"), *apart])
        main = DemandRequest(policy="policy", branch="main", groups=12, oldest_version=3, filled=4)
        for _ in range(2):
            assert await client.want("run", main) == DemandState(groups=12, enqueued=2, cancelled=0, branches=[main])
        older = DemandRequest(policy="policy", branch="main", groups=11, oldest_version=2)
        assert (await client.want("run", older)).branches == [main], "older news"
        other = DemandRequest(policy="policy", branch="brevity", groups=20)
        await client.want("another run", DemandRequest(policy="policy", branch="main", groups=99))
        assert await client.want("run", other) == DemandState(groups=20, enqueued=2, cancelled=0, branches=[other, main])
    async with serving(settings) as (client, _):
        await client.cancel(RolloutSelector(rollout_ids=["r3"]))
        assert await client.demand("run") == DemandState(groups=20, enqueued=1, cancelled=1, branches=[other, main]), (
            "that group will never be whole"
        )


async def test_demand_above_level_is_awaited_until_it_rises(queue_db: str) -> None:
    level = partial(DemandRequest, policy="policy", branch="main")
    async with serving(queue_settings(queue_db)) as (client, _), asyncio.timeout(20):
        await client.want("run", level(groups=4))
        assert (await client.demand("run", above=3, wait_seconds=30)).groups == 4
        rising = asyncio.create_task(client.demand("run", above=4, wait_seconds=30))
        await client.want("another run", level(groups=9))
        await client.want("run", level(groups=4, filled=1))
        assert not rising.done()
        await client.want("run", level(groups=5))
        assert (await rising).groups == 5
        assert (await client.demand("run", above=5, wait_seconds=0.01)).groups == 5


async def test_run_id_with_special_characters_is_one_path_segment(tmp_path: Path) -> None:
    async with serving(queue_settings(f"sqlite:///{tmp_path}/q.db")) as (client, _):
        for name in ("a/b c?d#é", "%2F"):
            await client.enqueue(name, new_rollouts(1, name))
            demanded = DemandRequest(policy="p", branch="b", groups=1)
            assert (
                await client.want(name, demanded)
                == await client.demand(name)
                == DemandState(groups=1, enqueued=1, cancelled=0, branches=[demanded])
            )
            assert (await client.run(name)).states == {RolloutState.QUEUED: 1}
            assert (await client.rollout(f"{name}0")).run_id == name


async def test_endings_of_a_burst_come_in_one_response(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notifier, "_GATHER_SECONDS", 3.0)
    async with serving(queue_settings(f"sqlite:///{tmp_path}/q.db")) as (client, service):
        await client.enqueue("run", new_rollouts(3))
        leases = await client.lease("run", "worker", 3)
        watcher = asyncio.create_task(client.ended("run", wait_seconds=30))
        await until(lambda: is_true(service._ends.awaited))
        for lease in leases:
            await client.complete([done(lease)])
        assert len((await watcher).rollouts) == 3


async def test_waiting_requests_are_answered_when_rollouts_arrive(tmp_path: Path) -> None:
    async with serving(queue_settings(f"sqlite:///{tmp_path}/q.db")) as (client, service):
        worker = asyncio.create_task(client.lease("run", "worker", 2, wait_seconds=30))
        watcher = asyncio.create_task(client.ended("run", wait_seconds=30))
        await until(lambda: is_true(len(service._arrivals.awaited) == 1))
        began = time.monotonic()
        await client.enqueue("run", new_rollouts(1))
        (lease,) = await worker
        assert not watcher.done()
        await client.complete([done(lease)])
        ended = await watcher
        assert (await client.run("run")).cursor == ended.cursor > 0
        assert ([rollout.rollout_id for rollout in ended.rollouts], time.monotonic() - began < 10) == (["r0"], True)
        assert (await client.ended("run", after=ended.cursor)).rollouts == []
        assert await client.lease("run", "worker", wait_seconds=0.05) == []


async def test_lease_request_cancelled_while_waiting_gets_no_rollout(tmp_path: Path) -> None:
    settings = queue_settings(f"sqlite:///{tmp_path}/q.db")
    async with serving(settings) as (client, service):
        async with QueueClient.of(settings.queue) as other:
            leaving = asyncio.create_task(other.lease("run", "other", wait_seconds=30))
            await until(lambda: is_true(len(service._arrivals.awaited) == 1))
            leaving.cancel()
            await asyncio.gather(leaving, return_exceptions=True)
        await client.enqueue("run", new_rollouts(1))
        assert [lease.attempt for lease in await client.lease("run", "worker", wait_seconds=30)] == [0]


async def test_writer_batches_requests_into_transactions(tmp_path: Path) -> None:
    async with serving(queue_settings(f"sqlite:///{tmp_path}/q.db")) as (client, service):
        await asyncio.gather(*[client.enqueue("run", new_rollouts(1, f"{i}-")) for i in range(200)])
        leases = await asyncio.gather(*[client.lease("run", f"worker {i}") for i in range(200)])
        assert len({lease.rollout_id for (lease,) in leases}) == 200, "none was handed out twice"
        results = await asyncio.gather(*[client.complete([done(lease)]) for (lease,) in leases])
        assert all(result.refused is None for (result,) in results)
        assert service.writer.requests == 600
        assert service.writer.transactions < 200


def divide(_: sa.Connection) -> None:
    raise ZeroDivisionError


def read_no_table(connection: sa.Connection) -> None:
    connection.exec_driver_sql("SELECT 1 FROM nowhere")


@pytest.mark.parametrize(("fail", "error"), [(divide, ZeroDivisionError), (read_no_table, QueueError)])
async def test_writer_request_that_fails_affects_no_other(
    queue_db: str, fail: Callable[[sa.Connection], None], error: type[Exception]
) -> None:
    async with serving(queue_settings(queue_db)) as (client, service):
        blocked, entered = threading.Event(), threading.Event()

        def block(_: object) -> None:
            entered.set()
            assert blocked.wait(30)

        first = asyncio.create_task(service.writer.do(block))
        await asyncio.to_thread(entered.wait, 30)
        before = asyncio.create_task(service.enqueue(Enqueue(run_id="run", rollouts=new_rollouts(1, "a"))))
        await until(lambda: is_true(service.writer._jobs.qsize() == 1))
        bad = asyncio.create_task(service.writer.do(fail))
        await asyncio.sleep(0)
        after = asyncio.create_task(service.enqueue(Enqueue(run_id="run", rollouts=new_rollouts(1, "b"))))
        await until(lambda: is_true(service.writer._jobs.qsize() == 3))
        blocked.set()
        await asyncio.gather(first, before, after)
        with pytest.raises(error):
            await bad
        assert (await client.run("run")).states == {RolloutState.QUEUED: 2}


async def test_enqueue_rollout_id_of_another_run_is_refused(queue_db: str) -> None:
    async with serving(queue_settings(queue_db)) as (client, _):
        await client.enqueue("run", new_rollouts(2))
        with pytest.raises(QueueError, match=r"\(400\): .*rollout r\d belongs to run run already"):
            await client.enqueue("other", [*new_rollouts(2), *new_rollouts(1, "new")])
        assert [run.run_id for run in await client.runs()] == ["run"], "nothing of it was enqueued"


async def test_queue_refusals_are_sentences(tmp_path: Path) -> None:
    settings = queue_settings(f"sqlite:///{tmp_path}/q.db", queue__token=SecretStr("secret"))
    async with serving(settings) as (client, _), aiohttp.ClientSession(client.url) as session:

        async def ask(method: str, path: str, body: str = "", token: str = "secret") -> tuple[int, str]:
            async with session.request(method, path, data=body, headers={"Authorization": f"Bearer {token}"}) as answer:
                return answer.status, (await answer.json())["error"]

        assert [
            await ask("GET", "/v1/runs", token="guess"),
            await ask("GET", "/v1/nothing"),
            await ask("DELETE", "/v1/rollouts"),
            await ask("GET", "/v1/rollouts/nobody"),
            await ask("GET", "/v1/rollouts?state=odd"),
            await ask("GET", "/v1/rollouts?limit=-1"),
            await ask("GET", "/v1/rollouts?order=odd"),
            await ask("GET", "/v1/runs/run/ended?wait=nan"),
            await ask("POST", "/v1/rollouts", "{"),
            await ask("POST", "/v1/leases", '{"run_id": "run", "worker": "w", "count": 0}'),
            await ask("POST", "/v1/leases", '{"run_id": "run", "worker": "w", "cuont": 1}'),
            await ask("POST", "/v1/leases/fail", '{"failures": [{"rollout_id": "r", "attempt": 0, "reason": "mood"}]}'),
            await ask("POST", "/v1/leases/complete", '{"completions": [{"rollout_id": "r", "attempt": 0, "rewards": {"reward": NaN}}]}'),
            await ask("POST", "/v1/cancel", "{}"),
            await ask("POST", "/v1/cancel", '{"rollout_ids": ["r"], "group_id": "g"}'),
            await ask("PUT", "/v1/runs/run/demand", '{"policy": "p", "branch": "b", "groups": -1}'),
        ] == snapshot(
            [
                (401, "this queue asks for its token: send `Authorization: Bearer` with queue.token."),
                (404, "GET /v1/nothing is not answered here. docs/guides/queue.md lists what is."),
                (405, "DELETE /v1/rollouts is not answered here. docs/guides/queue.md lists what is."),
                (404, "the queue has no rollout nobody."),
                (400, "GET /v1/rollouts: 'odd' is not a valid RolloutState"),
                (400, "GET /v1/rollouts: limit='-1' is no whole number of at most 18 digits."),
                (400, "GET /v1/rollouts: order='odd' is neither oldest nor newest."),
                (400, "GET /v1/runs/run/ended: wait='nan' is no number of seconds from 0 on."),
                (400, "POST /v1/rollouts: Input data was truncated"),
                (400, "POST /v1/leases: Expected `int` >= 1 - at `$.count`"),
                (400, "POST /v1/leases: Object contains unknown field `cuont`"),
                (400, "POST /v1/leases/fail: Invalid enum value 'mood' - at `$.failures[0].reason`"),
                (400, "POST /v1/leases/complete: JSON is malformed: invalid character (byte 73)"),
                (400, "name either rollout_ids, or run_id (and group_id)."),
                (400, "group_id needs the run_id that it belongs to."),
                (400, "PUT /v1/runs/run/demand: Expected `int` >= 0 - at `$.groups`"),
            ]
        )
        assert (await ask("POST", "/v1/rollouts", '{"rollouts": [{"input": ' + "[" * 100_000))[0] == 400
        packed = {"Authorization": "Bearer secret", "Content-Encoding": "gzip"}
        async with session.post("/v1/rollouts", data=b"{}", headers=packed) as answer:
            sentence = (
                "POST /v1/rollouts: the body cannot be read (Can not decode content-encoding: gzip). Send it as its head declares it."
            )
            assert (answer.status, (await answer.json())["error"]) == (400, sentence)
        async with session.get("/healthz") as answer:
            assert (answer.status, await answer.text()) == (200, "ok\n"), "supervisors have no token"
        async with session.get("/readyz", headers={"Authorization": "Bearer secret"}) as answer:
            assert answer.status == 200
        assert await client.runs() == []


async def test_queue_enqueue_of_two_tasks_or_inputs_under_one_id_is_refused(tmp_path: Path) -> None:
    async with serving(queue_settings(f"sqlite:///{tmp_path}/q.db")) as (client, _):
        first, second = new_rollouts(2)
        with pytest.raises(
            QueueError, match=r"rollout r0 is of task task 0 already, not of task 1\. Give rollouts of other tasks or inputs another"
        ):
            await client.enqueue("run", [first, msgspec.structs.replace(second, rollout_id="r0")])
        assert await client.enqueue("run", [first, first]) == ["r0", "r0"]
        with pytest.raises(
            QueueError, match=r"rollout r0 of task task 0 has another input already\. Give rollouts of other tasks or inputs"
        ):
            await client.enqueue("run", [msgspec.structs.replace(first, input=msgspec.Raw(b'"another"'))])
        spaced = msgspec.structs.replace(first, input=msgspec.Raw(b" " + bytes(first.input)))
        assert await client.enqueue("run", [spaced]) == ["r0"], "the same input in other words"
        assert (await client.run("run")).states == {RolloutState.QUEUED: 1}


async def test_queue_metrics_are_prometheus_text(tmp_path: Path) -> None:
    settings = queue_settings(f"sqlite:///{tmp_path}/q.db")
    async with serving(settings) as (client, _), aiohttp.ClientSession(client.url) as session:
        await client.enqueue("run", new_rollouts(4))
        first, second, _ = await client.lease("run", "worker", 3)
        await client.complete([done(first)])
        await client.fail([failed(second)])
        async with session.get("/metrics") as answer:
            lines = [line for line in (await answer.text()).splitlines() if not line.startswith("#") and "seconds" not in line]
    assert lines == snapshot(
        [
            'spangrad_queue_rollouts{state="queued"} 2.0',
            'spangrad_queue_rollouts{state="running"} 1.0',
            'spangrad_queue_rollouts{state="succeeded"} 1.0',
            'spangrad_queue_rollouts{state="failed"} 0.0',
            'spangrad_queue_rollouts{state="dead"} 0.0',
            'spangrad_queue_rollouts{state="cancelled"} 0.0',
            'spangrad_queue_attempts_total{end="succeeded"} 1.0',
            'spangrad_queue_attempts_total{end="crash"} 1.0',
            "spangrad_queue_attempts_in_flight 1.0",
            "spangrad_queue_transactions_total 4.0",
            "spangrad_queue_requests_total 4.0",
        ]
    )


def test_queue_serve_beyond_loopback_without_token_raises(tmp_path: Path) -> None:
    settings = queue_settings(f"sqlite:///{tmp_path}/q.db", queue__host="0.0.0.0")
    with pytest.raises(SpangradError, match=r"'0\.0\.0\.0' would listen beyond this machine without a token"):
        serve(settings)


async def test_queue_client_without_server_raises_with_remedy(tmp_path: Path) -> None:
    settings = queue_settings(f"sqlite:///{tmp_path}/q.db")
    async with QueueClient.of(settings.queue, retry_seconds=0) as client:
        with pytest.raises(QueueError, match=rf"the queue at {client.url} does not answer .* Start it with `spangrad queue`"):
            await client.runs()
