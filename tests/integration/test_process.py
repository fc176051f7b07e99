"""POST /v1/process: one request, trajectories; through real worker, vLLM, gateway, store and builder, and where parts of these are away."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import subprocess
import time
import uuid
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import jsonschema
import pytest
import sqlalchemy as sa
from pydantic import SecretStr

from runner.process import callbacks, processing
from runner.process.callbacks import CallbackState, signed_headers
from runner.process.openapi import description
from runner.process.processing import Processing
from runner.process.routes import ProcessRoutes
from runner.process.wire import Trajectory
from runner.queue.client import QueueClient
from runner.queue.service import Service
from runner.queue.tables import CALLBACKS
from runner.queue.wire import Failure, RolloutSelector
from spangrad.errors import QueueError
from spangrad.processes import Child, own_command
from spangrad.settings import Settings, StoreSettings
from spangrad.settings.runner import HandlerSettings
from spangrad.store.clickhouse import connect
from spangrad.types import AttemptFailure
from tests.support.otlp import HttpServer
from tests.support.runners import is_true, queue_settings, serving, until
from transition_builder.loop import build_once

GUIDE = Path(__file__).parents[2] / "docs/guides/process.md"
AGENTS = Path(__file__).resolve().parent.parent / "agents"
TASKS = [{"task_id": "lima", "input": {"city": "lima"}, "rollouts": 2}, {"task_id": "rome", "input": {"city": "rome"}}]


def of_run(**fields: Any) -> dict[str, Any]:
    """A request of a run of its own."""
    return {"run_id": uuid.uuid4().hex, "key": "first", "tasks": TASKS, "wait_seconds": 0, **fields}


async def has_runs(client: QueueClient) -> bool:
    return bool(await client.runs())


async def process(settings: Settings, request: dict[str, Any]) -> tuple[int, Any]:
    """Status and body of a response, which is as the route's description says."""
    async with aiohttp.ClientSession(settings.queue.url) as session, session.post("/v1/process", json=request) as answer:
        body = await answer.json()
        responses = description()["paths"]["/v1/process"]["post"]["responses"]
        validate(body, responses[str(answer.status)]["content"]["application/json"]["schema"])
        return answer.status, body


def validate(value: object, schema: dict[str, Any]) -> None:
    """Check a value against a schema of the description."""
    jsonschema.validate(value, {**schema, "components": description()["components"]}, jsonschema.Draft202012Validator)


class Receiver(HttpServer):
    """A URL that is called back: refuses the first requests, and those of one task always, and keeps those that it takes."""

    def __init__(self, refusals: int, too_large: str = "") -> None:
        self.refusals = refusals
        self.too_large = too_large
        self.taken: list[tuple[dict[str, str], bytes]] = []
        super().__init__()

    def answer(self, method: str, path: str, headers: dict[str, str], body: bytes) -> tuple[int, dict[str, str], bytes]:
        if json.loads(body)["task_id"] == self.too_large:
            return 413, {}, b""
        if self.refusals:
            self.refusals -= 1
            return 500, {}, b""
        self.taken.append(({name.lower(): value for name, value in headers.items()}, body))
        return 204, {}, b""


async def lines(settings: Settings, request: dict[str, Any], arrived: Callable[[], None] = lambda: None) -> list[tuple[float, Any]]:
    """Lines of a stream, each with its time of arrival; `arrived` is called at each."""
    headers = {"Accept": "application/x-ndjson"}
    async with aiohttp.ClientSession(settings.queue.url) as session, session.post("/v1/process", json=request, headers=headers) as answer:
        assert (answer.status, answer.content_type) == (200, "application/x-ndjson")
        received: list[tuple[float, Any]] = []
        async for line in answer.content:
            received.append((time.monotonic(), json.loads(line)))
            arrived()
        return received


@pytest.fixture
def settings(store: StoreSettings, tmp_path: Path) -> Settings:
    """A queue beside a store in which nothing is built."""
    settings = queue_settings(f"sqlite:///{tmp_path}/q.db", runner__gateway=False)
    return settings.model_copy(update={"store": store})


@pytest.mark.vllm
async def test_process_answers_with_turns_as_the_engine_sampled_them(gateway: Settings, tmp_path: Path) -> None:
    request = of_run(wait_seconds=240, sampling={"temperature": 0.5, "max_tokens": 3}, limits={"max_calls": 4})
    queue = queue_settings(f"sqlite:///{tmp_path}/q.db")
    settings = gateway.model_copy(update={"queue": queue.queue})
    values = {
        "store.url": settings.store.url,
        "store.otlp_endpoint": settings.store.otlp_endpoint,
        "gateway.url": settings.gateway.url,
        "queue.url": settings.queue.url,
        "runner.run_id": request["run_id"],
        "runner.directory": tmp_path / "runner",
    }
    words = [word for key, value in values.items() for word in ("--set", f"{key}={value}")]
    async with serving(settings):
        worker = Child("worker", own_command("worker", "--agent", "plain_agents:ask", "--directory", str(AGENTS), *words), tmp_path / "log")
        done = asyncio.Event()

        async def build() -> None:
            while not done.is_set():
                await asyncio.to_thread(build_once, settings)
                await asyncio.sleep(0.2)

        building = asyncio.create_task(build())
        try:
            status, answer = await process(settings, request)
            again = await process(settings, request)
            streamed = await lines(settings, request)
        finally:
            done.set()
            await building
            worker.stop()
    assert (status, answer["pending"]) == (200, [])
    assert again == (200, answer), "the same request enqueues nothing, and gets the same"
    assert {line["rollout_id"]: line for _, line in streamed[:-1]} == {each["rollout_id"]: each for each in answer["trajectories"]}
    assert streamed[-1][1] == {"pending": []}
    assert [(each["task_id"], each["state"], each["failure"], each["built"]) for each in answer["trajectories"]] == [
        ("lima", "succeeded", "", True), ("lima", "succeeded", "", True), ("rome", "succeeded", "", True),
    ]  # fmt: skip
    client = connect(settings.store)
    recorded = client.query(
        "SELECT CallId, PromptIds, ResponseIds, Logprobs FROM spangrad.transitions WHERE RunId = {run:String}",
        parameters={"run": request["run_id"]},
    ).result_rows
    client.close()
    turns = [turn for each in answer["trajectories"] for turn in each["turns"]]
    assert len(turns) == 3
    assert {(turn["temperature"], len(turn["response_ids"]) <= 3) for turn in turns} == {(0.5, True)}
    assert {turn["call_id"]: [turn[name] for name in ("prompt_ids", "response_ids", "logprobs")] for turn in turns} == {
        call: [list(array) for array in arrays] for call, *arrays in recorded
    }
    for each in answer["trajectories"]:
        assert each["stage_seconds"].keys() == {"run"}
        assert each["total_reward"] == sum(reward["value"] for reward in each["rewards"])
        assert [reward["name"] for reward in each["rewards"]] == ["reward"]
        assert [turn["loss_mask"] for turn in each["turns"]] == [[1] * len(turn["response_ids"]) for turn in each["turns"]]


async def test_process_names_rollouts_that_have_not_ended(settings: Settings) -> None:
    request = of_run()
    ids = [f"{request['run_id']}/first/{place}/{number}" for place, number in ((0, 0), (0, 1), (1, 0))]
    async with serving(settings) as (client, _):
        for _ in range(2):
            assert await process(settings, request) == (200, {"trajectories": [], "pending": ids})
        leases = await client.lease(request["run_id"], "worker", 9)
        assert [(lease.rollout_id, lease.group_id, lease.group_size) for lease in leases] == [
            (ids[0], "first/0", 2), (ids[1], "first/0", 2), (ids[2], "first/1", 1),
        ]  # fmt: skip
        other = await process(settings, {**request, "key": "second"})
        assert len(other[1]["pending"]) == 3
        assert (await client.run(request["run_id"])).states == {"running": 3, "queued": 3}


async def test_process_docs_curl_command_gets_a_trajectory_of_each_rollout(settings: Settings) -> None:
    if not shutil.which("curl"):
        pytest.skip("curl is not here: install it")
    (command,) = re.findall(r"^curl [^\n]*/v1/process -d '.*?'", GUIDE.read_text(), re.M | re.S)
    local_command = command.replace("http://127.0.0.1:8190", str(settings.queue.url))
    assert local_command != command
    async with serving(settings) as (client, _):
        running = asyncio.create_task(
            asyncio.to_thread(subprocess.run, ["bash", "-c", local_command], capture_output=True, text=True, timeout=120, check=False)
        )
        await until(lambda: has_runs(client))
        await client.cancel(RolloutSelector(run_id="mine"))
        done = await running
    assert (done.returncode, done.stderr) == (0, "")
    answer = json.loads(done.stdout)
    validate(answer, description()["paths"]["/v1/process"]["post"]["responses"]["200"]["content"]["application/json"]["schema"])
    assert [(each["task_id"], each["state"]) for each in answer["trajectories"]] == [("t1", "cancelled")] * 8


async def test_process_answers_without_turns_for_rollouts_that_never_began(settings: Settings) -> None:
    request = of_run(wait_seconds=60)
    async with serving(settings) as (client, _):
        ended = asyncio.Event()
        waiting = asyncio.create_task(lines(settings, request, ended.set))
        await until(lambda: has_runs(client))
        await client.cancel(RolloutSelector(run_id=request["run_id"], group_id="first/1"))
        await asyncio.wait_for(ended.wait(), 30)
        cancelled_at = time.monotonic()
        await client.cancel(RolloutSelector(run_id=request["run_id"]))
        (first, trajectory), *others, (_, last) = await asyncio.wait_for(waiting, 30)
    assert first < cancelled_at, "each line comes when its rollout has ended"
    assert (trajectory["task_id"], trajectory["state"], trajectory["built"], trajectory["turns"]) == ("rome", "cancelled", False, [])
    assert (trajectory["total_reward"], trajectory["attempts"], trajectory["seconds"]) == (None, 0, None)
    assert (len(others), last) == (2, {"pending": []})


async def test_process_waits_for_a_build_for_a_limited_time(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    request = of_run(tasks=TASKS[1:], max_attempts=1)
    async with serving(settings) as (client, _):
        (rollout,) = (await process(settings, request))[1]["pending"]
        await client.lease(request["run_id"], "worker")
        await client.fail([Failure(rollout_id=rollout, attempt=0, reason=AttemptFailure.CRASH, detail="it died")])
        assert (await process(settings, request))[1] == {"trajectories": [], "pending": [rollout]}
        tomorrow = time.time() + 86400
        monkeypatch.setattr(time, "time", lambda: tomorrow)
        assert (await process(settings, request))[1] == {"trajectories": [], "pending": [rollout]}, "a clock that is set forward"
        monkeypatch.setattr(processing, "BUILD_SECONDS", 0.0)
        ((trajectory,), pending) = (await process(settings, request))[1].values()
        assert (pending, trajectory["state"], trajectory["failure"], trajectory["detail"]) == ([], "dead", "crash", "it died")
        assert (trajectory["built"], trajectory["attempts"]) == (False, 1)
        assert (await process(settings, request))[1] == {"trajectories": [trajectory], "pending": []}, "the same answer again"


async def test_process_store_away_keeps_the_rollouts(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    request = of_run(tasks=TASKS[1:], wait_seconds=5)
    away = settings.model_copy(update={"store": StoreSettings(url="http://127.0.0.1:9")})
    async with serving(away) as (client, _):
        await process(away, {**request, "wait_seconds": 0})
        await client.lease(request["run_id"], "worker")
        await client.cancel(RolloutSelector(run_id=request["run_id"]))
        status, refused = await process(away, request)
        ((_, line),) = await lines(away, request)
    assert status == 503
    assert refused["error"].startswith("the rollouts are enqueued, but their trajectories cannot be read: ")
    assert line == refused


async def test_process_stream_reports_a_queue_database_that_is_away(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    async def away(*_: object) -> AsyncGenerator[Trajectory]:
        raise QueueError("the queue's database does not answer.")
        yield

    monkeypatch.setattr(Processing, "trajectories", away)
    async with serving(settings):
        ((_, line),) = await lines(settings, of_run())
    assert line == {"error": "the rollouts are enqueued, but their trajectories cannot be read: the queue's database does not answer."}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"tasks": []}, "length >= 1"),
        ({"tasks": [{"task_id": "t", "input": 1, "rollouts": 600}] * 2}, "the tasks ask for more than 1000 rollouts"),
        ({"wait_seconds": 601}, "<= 600"),
        ({"key": ""}, "length >= 1"),
        ({"run_id": "r" * 512}, "has 522 characters, and 512 are allowed"),
        ({"nonsense": "x"}, "unknown field `nonsense`"),
        ({"prompt": {"name": "a\x00", "version": 1}}, "matching regex"),
        ({"prompt": {"name": "a", "version": 2**31}}, "<= 2147483647"),
        ({"callback": "ftp://127.0.0.1/x"}, "matching regex"),
        ({"callback": "http://127.0.0.1:9/x"}, "queue.callback_hosts of the server does not list 127.0.0.1:9."),
        ({"sampling": {"temperature": 3}}, "<= 2.0"),
        ({"limits": {"max_calls": 3}}, "runner.gateway is false. Leave them out."),
    ],
)
async def test_process_refuses_requests_that_have_no_meaning(settings: Settings, change: dict[str, Any], words: str) -> None:
    request = of_run(**change)
    async with serving(settings) as (client, _):
        status, refused = await process(settings, request)
        assert (status, await client.runs()) == (400, [])
    assert words in refused["error"]


async def test_process_refuses_data_sources_without_a_handler(settings: Settings) -> None:
    runner = settings.runner.model_copy(update={"handlers": {"math": HandlerSettings(agent="a:b"), "code": HandlerSettings(agent="a:b")}})
    settings = settings.model_copy(update={"runner": runner})
    async with serving(settings) as (client, _):
        status, refused = await process(settings, of_run(tasks=[{**TASKS[0], "data_source": "chess"}]))
        assert (status, refused["error"]) == (400, "POST /v1/process: no handler for data source 'chess'; runner.handlers has code, math.")
        status, refused = await process(settings, of_run())
        assert (status, "no handler for data source ''" in refused["error"], await client.runs()) == (400, True, [])
        request = of_run(tasks=[{**TASKS[0], "data_source": "code", "image": "org/a:1"}])
        assert (await process(settings, request))[0] == 200
        leases = await client.lease(request["run_id"], "worker", 9)
        assert {(lease.data_source, lease.image) for lease in leases} == {("code", "org/a:1")}


async def test_process_refuses_a_key_of_other_tasks_or_inputs(settings: Settings) -> None:
    request = of_run()
    first, *others = request["tasks"]
    async with serving(settings) as (client, _):
        assert (await process(settings, request))[0] == 200
        enqueued = await client.runs()
        status, refused = await process(settings, {**request, "tasks": [{**first, "task_id": "other"}, *others]})
        words = f"/v1/process: rollout {request['run_id']}/{request['key']}/0/0 is of task {first['task_id']} already, not of other. Give"
        assert (status, words in refused["error"], await client.runs()) == (400, True, enqueued)
        status, refused = await process(settings, {**request, "tasks": [{**first, "input": "another"}, *others]})
        words = f"/v1/process: rollout {request['run_id']}/{request['key']}/0/0 of task {first['task_id']} has another input already."
        assert (status, words in refused["error"], await client.runs()) == (400, True, enqueued)


async def test_process_refuses_ids_of_another_run(settings: Settings) -> None:
    async with serving(settings):
        await process(settings, of_run(run_id="a", key="b/c"))
        status, refused = await process(settings, of_run(run_id="a/b", key="c"))
    assert (status, refused["error"].split(".")[0]) == (400, "POST /v1/process: rollout a/b/c/0/0 belongs to run a already")


async def test_process_callback_is_posted_signed_until_it_is_taken(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(callbacks, "_PAUSES", (0.05, 0.1))
    with Receiver(refusals=2) as receiver:
        queue = settings.queue.model_copy(update={"callback_hosts": [f"127.0.0.1:{receiver.port}"], "token": SecretStr("secret")})
        settings = settings.model_copy(update={"queue": queue})
        request = of_run(callback=f"{receiver.url}/done")
        async with serving(settings) as (client, service):
            async with aiohttp.ClientSession(settings.queue.url, headers={"Authorization": "Bearer secret"}) as session:
                for _ in range(2):
                    async with session.post("/v1/process", json=request) as answer:
                        assert answer.status == 200
            await client.cancel(RolloutSelector(run_id=request["run_id"], group_id="first/1"))
            await until(lambda: has_callback(service, CallbackState.DELIVERED))  # not only taken: else it would be posted again
        async with serving(settings) as (client, _):  # the server is started again: the other two are still to be posted
            await client.cancel(RolloutSelector(run_id=request["run_id"]))
            await until(lambda: is_true(len(receiver.taken) == 3))
    trajectories = [json.loads(body) for _, body in receiver.taken]
    for (headers, body), trajectory in zip(receiver.taken, trajectories, strict=True):
        validate(trajectory, {"$ref": "#/components/schemas/Trajectory"})
        expected = signed_headers(trajectory["rollout_id"], int(headers["webhook-timestamp"]), body, "secret")
        assert {name.lower(): value for name, value in expected.items()}.items() <= headers.items()
    assert [(each["task_id"], each["state"]) for each in trajectories] == [(name, "cancelled") for name in ("rome", "lima", "lima")]


async def test_process_callback_that_is_given_up_is_tried_again_on_request(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(callbacks, "GIVE_UP_SECONDS", 0.0)
    with Receiver(refusals=1) as receiver:
        settings = settings.model_copy(update={"queue": settings.queue.model_copy(update={"callback_hosts": ["127.0.0.1"]})})
        request = of_run(tasks=TASKS[1:], callback=receiver.url)
        async with serving(settings) as (client, service):
            (rollout,) = (await process(settings, request))[1]["pending"]
            await client.cancel(RolloutSelector(run_id=request["run_id"]))
            kept = sa.select(CALLBACKS.c.state, CALLBACKS.c.reason)
            await until(lambda: has_callback(service, CallbackState.GIVEN_UP))
            ((state, reason),) = await service.read(lambda connection: connection.execute(kept).all())
            assert (state, reason, receiver.taken) == ("given_up", "HTTP 500", [])
            await process(settings, request)
            await until(lambda: is_true(receiver.taken))
    assert json.loads(receiver.taken[0][1])["rollout_id"] == rollout
    assert "webhook-signature" not in receiver.taken[0][0], "there is no token to sign with"


async def has_callback(service: Service, state: CallbackState) -> bool:
    """Return whether there is a callback in a state."""
    return state in await service.read(lambda connection: connection.execute(sa.select(CALLBACKS.c.state)).scalars().all())


@pytest.mark.parametrize("too_large", ["lima", "rome"])
async def test_process_callback_that_is_always_refused_delays_no_other(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, too_large: str
) -> None:
    monkeypatch.setattr(callbacks, "_PAUSES", (0.05, 0.1))
    tasks = [{"task_id": name, "input": {"city": name}} for name in ("lima", "oslo", "rome")]
    kept = sa.select(CALLBACKS.c.state, CALLBACKS.c.reason)
    with Receiver(refusals=2, too_large=too_large) as receiver:
        settings = settings.model_copy(update={"queue": settings.queue.model_copy(update={"callback_hosts": ["127.0.0.1"]})})
        request = of_run(tasks=tasks, callback=receiver.url)
        async with serving(settings) as (client, service):

            async def states() -> list[tuple[str, str | None]]:
                rows = await service.read(lambda connection: connection.execute(kept).all())
                return sorted((row.state, row.reason) for row in rows)

            async def are(expected: list[tuple[str, str | None]]) -> bool:
                return await states() == expected

            await process(settings, request)
            await client.cancel(RolloutSelector(run_id=request["run_id"]))
            await until(lambda: are([("delivered", None), ("delivered", None), ("open", None)]))
            monkeypatch.setattr(callbacks, "GIVE_UP_SECONDS", 0.0)
            await until(lambda: are([("delivered", None), ("delivered", None), ("given_up", "HTTP 413")]))
    assert sorted(json.loads(body)["task_id"] for _, body in receiver.taken) == sorted({"lima", "oslo", "rome"} - {too_large})


async def test_process_description_is_served(settings: Settings) -> None:
    async with serving(settings), aiohttp.ClientSession(settings.queue.url) as session, session.get("/v1/openapi.json") as answer:
        assert (answer.status, await answer.json()) == (200, description())


def test_process_description_has_every_route() -> None:
    routes = {(route.method.lower(), route.path) for route in ProcessRoutes(None).routes()}  # pyright: ignore[reportArgumentType]
    described = {(method, path) for path, item in description()["paths"].items() for method in item if method != "parameters"}
    assert routes == described | {("get", "/v1/openapi.json")}
