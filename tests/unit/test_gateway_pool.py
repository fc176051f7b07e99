"""Several backends behind one gateway: which answers, who comes and goes, and upstreams that are not ours."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from aiohttp import web
from safetensors.numpy import save_file

from spangrad import semconv
from spangrad.processes import free_ports
from spangrad.weights.checksums import checksum_directory
from tests.support.fake_engine import FakeEngine
from tests.support.gateways import ASKED, all_serve, ask, backends, several, staged


@asynccontextmanager
async def upstream(answers: dict[str, tuple[int, Any]]) -> AsyncGenerator[tuple[str, list[tuple[str, dict[str, str], Any]]]]:
    """Run a foreign server that answers each path with a status and a body, and yield its address and the requests it got."""
    asked: list[tuple[str, dict[str, str], Any]] = []

    async def handle(request: web.Request) -> web.Response:
        asked.append((request.path, {name.lower(): value for name, value in request.headers.items()}, await request.json()))
        status, answer = answers[request.path]
        return web.json_response(answer, status=status)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handle)
    runner = web.AppRunner(app)
    await runner.setup()
    (port,) = free_ports(1)
    await web.TCPSite(runner, "127.0.0.1", port).start()
    try:
        yield f"http://127.0.0.1:{port}", asked
    finally:
        await runner.cleanup()


async def test_pool_calls_go_to_least_busy_engine_and_rollout_stays() -> None:
    engines = [FakeEngine(), FakeEngine()]
    async with several(*engines) as stage:
        for _ in range(3):
            await stage.chat("/rollout/a/attempt/0")
        assert [len(engine.requests) for engine in engines] == [3, 0]
        engines[0].go_on.clear()
        held = asyncio.create_task(stage.chat("/rollout/a/attempt/0"))
        await engines[0].arrived.wait()
        await stage.chat("/rollout/b/attempt/0")
        await stage.chat("/rollout/b/attempt/0")
        assert [len(engine.requests) for engine in engines] == [4, 2]
        engines[0].go_on.set()
        await held
        assert [(backend["calls"], backend["in_flight"]) for backend in await backends(stage)] == [(4, 0), (2, 0)]


async def test_pool_call_that_cannot_connect_is_retried_at_another_engine_as_one_span() -> None:
    engines = [FakeEngine(), FakeEngine()]
    async with several(*engines) as stage:
        await stage.chat("/rollout/a/attempt/0")
        await stage.engine_stops()
        status, _ = await stage.chat("/rollout/a/attempt/0")
        assert (status, [len(engine.requests) for engine in engines]) == (200, [1, 1])
        assert [span.status for span in await stage.spans(2)] == ["UNSET", "UNSET"]
        first, second = await backends(stage)
        assert (first["status"], "does not answer" in first["reason"], second["status"]) == ("down", True, "serving")
        again = FakeEngine(port=engines[0].port)
        async with again.running():
            await all_serve(stage, 2)
            assert again.orders == ["/spangrad/checksum", "probe"]


async def test_pool_call_whose_engine_began_to_answer_is_not_retried() -> None:
    engines = [FakeEngine(cut_after=2), FakeEngine()]
    async with several(*engines) as stage:
        with pytest.raises(Exception, match="payload is not completed"):
            await stage.chat(stream=True)
        (span,) = await stage.spans()
    assert [len(engine.requests) for engine in engines] == [1, 0]
    assert span.attributes[semconv.ERROR_TYPE] == "engine_unreachable"


async def test_pool_calls_beyond_limit_wait_and_beyond_queue_are_refused() -> None:
    engine = FakeEngine()
    listed = [{"url": f"http://127.0.0.1:{engine.port}", "limit": 1}]
    async with staged(engine, backends=listed, queue_limit=1) as stage:
        await all_serve(stage, 1)
        engine.go_on.clear()
        first = asyncio.create_task(stage.chat())
        await engine.arrived.wait()
        second = asyncio.create_task(stage.chat())
        async with asyncio.timeout(30):
            while "waiting" not in (await ask(stage, "GET", "/admin/policies/policy"))[1]:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        for path in ("/v1/chat/completions", "/v1/embeddings"):
            async with stage.client.post(path, json=ASKED) as answer:
                assert (answer.status, (await answer.json())["error"]["type"]) == (503, "pool_full")
                assert answer.headers["Retry-After"] == "1"
        assert len(engine.requests) == 1
        engine.go_on.set()
        assert [(await first)[0], (await second)[0]] == [200, 200]
        kinds = [span.attributes.get(semconv.ERROR_TYPE) for span in await stage.spans(3)]
        assert sorted(map(str, kinds)) == ["None", "None", "pool_full"]


async def test_backends_are_added_and_removed_at_run_time() -> None:
    async with staged() as stage:
        await all_serve(stage, 1)
        second = FakeEngine(version=0)
        async with second.running():
            url = f"http://127.0.0.1:{second.port}"
            status, added = await ask(stage, "POST", "/admin/backends", {"url": f"{url}/v1", "limit": 4})
            added.pop("reason")
            assert (status, added) == (
                201,
                {
                    "name": "policy-1",
                    "url": url,
                    "policy": "policy",
                    "kind": "engine",
                    "status": "down",
                    "version": None,
                    "checksum": "",
                    "uncompared": "",
                    "topology": None,
                    "in_flight": 0,
                    "calls": 0,
                    "limit": 4,
                    "has_key": False,
                    "configured": False,
                },
            )
            await all_serve(stage, 2)

            second.go_on.clear()
            await stage.chat("/rollout/a/attempt/0")
            in_flight = asyncio.create_task(stage.chat("/rollout/b/attempt/0"))
            await second.arrived.wait()
            leaving = asyncio.create_task(ask(stage, "DELETE", "/admin/backends/policy-1"))
            async with asyncio.timeout(30):
                while (await backends(stage))[1]["status"] != "draining":  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            assert (await stage.chat("/rollout/b/attempt/0"))[0] == 200
            assert not leaving.done()
            second.go_on.set()
            assert (await in_flight)[0] == 200
            assert await leaving == (200, {"name": "policy-1", "status": "removed"})
            assert [backend["name"] for backend in await backends(stage)] == ["policy-0"]
            assert len(second.requests) == 1

            # Its name and URL are free again; and with now=true nothing is waited for.
            assert (await ask(stage, "POST", "/admin/backends", {"url": url}))[0] == 201
            await all_serve(stage, 2)
            stage.engine.go_on.clear()
            second.go_on.clear()
            calls = [asyncio.create_task(stage.chat()) for _ in range(2)]
            async with asyncio.timeout(30):
                while [backend["in_flight"] for backend in await backends(stage)] != [1, 1]:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            assert (await ask(stage, "DELETE", "/admin/backends/policy-1?now=true"))[0] == 200
            stage.engine.go_on.set()
            second.go_on.set()
            assert [(await call)[0] for call in calls] == [200, 200]
        assert (await ask(stage, "DELETE", "/admin/backends/policy-0"))[0] == 200
        status, body = await stage.chat()
        assert (status, "policy 'policy' has no backend" in json.loads(body)["error"]["message"]) == (503, True)
        async with stage.client.get("/readyz") as answer:
            assert answer.status == 503


async def test_llm_servers_are_added_and_cleared_by_their_aliases() -> None:
    engines = [FakeEngine(), FakeEngine()]
    async with staged(engines[0]) as stage, engines[1].running():
        await all_serve(stage, 1)
        address = {"address": f"http://127.0.0.1:{engines[1].port}/"}
        for _ in range(2):
            status, state = await ask(stage, "POST", "/add_llm_server", address)
            assert (status, state["name"], state["policy"], state["kind"]) == (201, "policy-1", "policy", "engine")
        await all_serve(stage, 2)
        assert await ask(stage, "POST", "/clear_llm_server", {"policy": "nobody"}) == (404, {"error": mock.ANY})
        assert await ask(stage, "POST", "/clear_llm_server", {}) == (200, {"removed": ["policy-0", "policy-1"]})
        assert (await backends(stage), (await stage.chat())[0]) == ([], 503)
        await ask(stage, "POST", "/add_llm_server", address)
        await all_serve(stage, 1)
        assert (await stage.chat())[0] == 200
    assert (len(engines[0].requests), len(engines[1].requests)) == (0, 1)


async def test_backend_removed_while_publishing_gets_no_call(tmp_path: Path) -> None:
    save_file({"w": np.arange(6, dtype=np.float32)}, tmp_path / "model.safetensors")
    first, second = FakeEngine(), FakeEngine()
    async with several(first, second) as stage:
        second.go_on.clear()
        in_flight = [asyncio.create_task(stage.chat(f"/rollout/r{number}/attempt/0")) for number in range(2)]
        await second.arrived.wait()
        second.hold_reload.clear()
        body = {"version": 1, "path": str(tmp_path), "checksum": checksum_directory(tmp_path)}
        publishing = asyncio.create_task(ask(stage, "POST", "/admin/policies/policy/versions", body))
        await second.reloading.wait()
        leaving = asyncio.create_task(ask(stage, "DELETE", "/admin/backends/policy-1"))
        async with asyncio.timeout(30):
            while (await backends(stage))[1]["status"] != "draining":  # noqa: ASYNC110 - there is no event
                await asyncio.sleep(0.01)
        second.hold_reload.set()
        assert (await publishing)[0] == 200
        assert [backend["status"] for backend in await backends(stage)] == ["serving", "draining"]
        # Its own attempt's calls too.
        assert [(await stage.chat(f"/rollout/r{number}/attempt/0"))[0] for number in range(2)] == [200, 200]
        second.go_on.set()
        assert await leaving == (200, {"name": "policy-1", "status": "removed"})
        assert [status for status, _ in await asyncio.gather(*in_flight)] == [200, 200]
        assert len(second.requests) == 1


@pytest.mark.parametrize(
    ("body", "status", "reason"),
    [
        ({"url": "127.0.0.1:1"}, 400, "the backend's url cannot be right"),
        ({"url": "http://key@host"}, 400, "the backend's url cannot be right"),
        ({"url": "http://127.0.0.1:1*"}, 400, "the backend's url cannot be right"),
        ({"url": "http://host", "limit": 0}, 400, "the backend's limit cannot be right"),
        ({"url": "http://host", "kind": "vllm"}, 400, "Invalid enum value 'vllm'"),
        ({"url": "http://host", "restart_command": ["rm"]}, 400, "Object contains unknown field `restart_command`"),
        ({}, 400, "Object missing required field `url`"),
        ({"url": "http://host", "kind": "openai"}, 409, "policy 'policy' has backends of kind 'engine'"),
        ({"url": "ENGINE"}, 409, "is a backend of policy 'policy' already: policy-0."),
        ({"url": "ENGINE", "policy": "other"}, 409, "serves another policy already"),
    ],
)
async def test_backends_add_invalid_request_is_refused_with_reason(body: dict[str, Any], status: int, reason: str) -> None:
    async with staged() as stage:
        if body.get("url") == "ENGINE":
            body = {**body, "url": f"http://127.0.0.1:{stage.engine.port}/"}
        answer_status, answer = await ask(stage, "POST", "/admin/backends", body)
        assert (answer_status, reason in answer["error"]["message"]) == (status, True), answer
        assert len(await backends(stage)) == 1
        policies = (await ask(stage, "GET", "/admin/policies"))[1]["policies"]
        assert [policy["policy"] for policy in policies] == ["policy"], "a backend that is refused leaves no policy"


async def test_admin_orders_to_unknown_backend_or_policy_are_refused_with_reason() -> None:
    async with staged() as stage:
        for method, path, status, reason in (
            ("DELETE", "/admin/backends/nobody", 404, "there is no backend 'nobody'. There are: policy-0."),
            ("DELETE", "/admin/backends/policy-0?now=yes", 400, "now = 'yes' is neither true nor false."),
            ("POST", "/admin/backends/policy-0/wake_up", 409, "not asleep."),
            ("POST", "/admin/policies/other/rollback", 404, "policy 'other' is not served here. This gateway serves 'policy'."),
        ):
            answer_status, answer = await ask(stage, method, path)
            assert (answer_status, reason in answer["error"]["message"]) == (status, True), answer


@pytest.mark.parametrize("suffix", ["/v1", "/"])
async def test_backend_listed_by_another_spelling_replaces_the_first(suffix: str) -> None:
    engine = FakeEngine()
    url = f"http://127.0.0.1:{engine.port}"
    async with staged(engine, backends=[{"url": url + suffix, "limit": 3}]) as stage:
        assert [(backend["url"], backend["limit"]) for backend in await backends(stage)] == [(url, 3)]


async def test_pass_through_of_an_alias_names_the_engines_model() -> None:
    async with staged(models={"gpt-4o": "policy"}) as stage:
        await all_serve(stage, 1)
        for model in ("gpt-4o", "policy", "other"):
            async with stage.client.post("/v1/embeddings", json={"input": ["a"], "model": model}) as answer:
                assert answer.status == 418
        assert [json.loads(body)["model"] for body in stage.engine.bodies] == ["policy", "policy", "other"]
        assert stage.engine.bodies[1] == b'{"input": ["a"], "model": "policy"}', "what needs no other name passes as it is"


async def test_models_setting_maps_names_to_policies() -> None:
    engines = [FakeEngine(), FakeEngine(policy="critic")]
    listed = [{"url": f"http://127.0.0.1:{engines[1].port}", "policy": "critic"}]
    async with several(*engines, backends=listed, models={"gpt-4o": "critic"}) as stage:
        for model in ("policy", "critic", "gpt-4o", "nobody"):
            assert (await stage.chat(model=model))[0] == 200
        assert [[request["model"] for request in engine.requests] for engine in engines] == [["policy", "nobody"], ["critic", "critic"]]
        spans = sorted(await stage.spans(4), key=lambda span: int(str(span.attributes[semconv.SEQ])))
        assert [span.attributes[semconv.POLICY_NAME] for span in spans] == ["policy", "critic", "critic", "policy"]
        # The record holds what the client asked.
        assert json.loads(str(spans[2].attributes[semconv.REQUEST_JSON])) == {**ASKED, "model": "gpt-4o"}
        _, models = await ask(stage, "GET", "/v1/models")
        assert [model["id"] for model in models["data"]] == ["policy", "critic", "gpt-4o"]
        _, answer = await ask(stage, "GET", "/admin/policies")
        times = [(state.pop("busy_seconds"), state.pop("engine_seconds")) for state in answer["policies"]]
        assert all(0 < busy < seconds < 60 for busy, seconds in times), times
        facts = {"version": 0, "tokenizer_hash": "cafe", "status": "serving"}
        assert answer == {"policies": [{"policy": name, **facts} for name in ("policy", "critic")]}


WHOLE = {
    "id": "c-1",
    "object": "chat.completion",
    "created": 1,
    "model": "judge-large",
    "choices": [{"index": 0, "message": {"role": "assistant", "content": "good"}, "logprobs": None, "finish_reason": "stop"}],
    "usage": {"prompt_tokens": 5, "completion_tokens": 1, "total_tokens": 6},
}
KEY = "sk-0123456789-secret"


async def test_openai_upstream_is_asked_with_own_key_and_recorded_without_ids(caplog: pytest.LogCaptureFixture) -> None:
    async with upstream({"/v1/chat/completions": (200, WHOLE)}) as (url, asked):
        judge = {"url": f"{url}/v1", "policy": "judge", "kind": "openai", "key": KEY, "model": "judge-large"}
        async with several(FakeEngine(), backends=[judge]) as stage:
            status, body = await stage.chat(model="judge", headers={"Authorization": "Bearer agent's"})
            assert (status, json.loads(body)) == (200, WHOLE)
            (path, headers, request) = asked[0]
            assert (path, headers["authorization"], request) == ("/v1/chat/completions", f"Bearer {KEY}", {**ASKED, "model": "judge-large"})
            assert "traceparent" not in headers
            (span,) = await stage.spans()
            given = dict(span.attributes)
            assert json.loads(str(given.pop(semconv.RESPONSE_JSON))) == WHOLE
            assert json.loads(str(given.pop(semconv.REQUEST_JSON))) == {**ASKED, "model": "judge"}
            assert {name: value for name, value in given.items() if name.startswith("spangrad.")}.keys() == {
                semconv.BACKEND_NAME,
                semconv.PROCESS_ID,
                semconv.SEQ,
            }
            assert (given["gen_ai.provider.name"], given["gen_ai.request.model"], given["gen_ai.usage.output_tokens"]) == (
                "openai",
                "judge",
                1,
            )
            _, published = await ask(stage, "POST", "/admin/policies/judge/versions", {"version": 1, "path": "/x", "checksum": "float32:0"})
            assert "policy 'judge' has no engine to publish to" in published["error"]["message"]
            exposed = json.dumps([await backends(stage), [str(span) for span in stage.store.spans]]) + caplog.text
            assert (KEY in exposed, (await backends(stage))[1]["has_key"]) == (False, True)


async def test_upstream_key_quoted_in_error_is_scrubbed() -> None:
    refusal = {"error": {"message": f"Incorrect API key provided: {KEY}", "type": "invalid_request_error"}}
    async with upstream({"/v1/chat/completions": (401, refusal)}) as (url, _):
        judge = {"url": url, "policy": "judge", "kind": "openai", "key": KEY}
        async with several(FakeEngine(), backends=[judge]) as stage:
            status, body = await stage.chat(model="judge")
            (span,) = await stage.spans()
    assert (status, json.loads(body)["error"]["message"]) == (401, "Incorrect API key provided: ***")
    assert KEY not in str(span)


async def test_anthropic_upstream_gets_key_version_and_messages_only() -> None:
    message = {
        "id": "m-1",
        "type": "message",
        "role": "assistant",
        "model": "claude",
        "content": [{"type": "text", "text": "good"}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {"input_tokens": 5, "output_tokens": 1},
    }
    asked_for = {"model": "claude", "max_tokens": 5, "messages": [{"role": "user", "content": "judge"}]}
    async with upstream({"/v1/messages": (200, message)}) as (url, asked):
        listed = [{"url": url, "policy": "claude", "kind": "anthropic", "key": KEY}]
        async with several(FakeEngine(), backends=listed) as stage:
            assert await ask(stage, "POST", "/v1/messages", asked_for) == (200, message)
            (path, headers, request) = asked[0]
            assert (path, headers["x-api-key"], headers["anthropic-version"], request) == ("/v1/messages", KEY, "2023-06-01", asked_for)
            status, answer = await stage.chat(model="claude")
            assert (status, "answers /v1/messages alone" in json.loads(answer)["error"]["message"]) == (400, True)
            (span, _) = await stage.spans(2)
    assert (span.attributes["gen_ai.provider.name"], span.attributes["gen_ai.usage.output_tokens"]) == ("anthropic", 1)
    assert semconv.OUTPUT_TOKEN_IDS not in span.attributes


async def test_frozen_upstream_unreachable_is_rested_and_retried() -> None:
    (port,) = free_ports(1)
    judge = {"url": f"http://127.0.0.1:{port}", "policy": "judge", "kind": "openai"}
    async with several(FakeEngine(), backends=[judge]) as stage:
        assert (await stage.chat(model="judge"))[0] == 502
        status, body = await stage.chat(model="judge")
        assert (status, "It is tried again within 1 s." in json.loads(body)["error"]["message"]) == (503, True)
        async with stage.client.get("/readyz") as answer:
            assert answer.status == 503
        await all_serve(stage, 2)
        assert (await stage.chat(model="judge"))[0] == 502
