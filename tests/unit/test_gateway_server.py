"""The gateway in front of a fake engine: what agents get, and what is recorded of it."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator
from typing import Any

import aiohttp
import pytest

from spangrad import semconv
from spangrad.processes import free_ports
from tests.support.fake_engine import ANSWER_TEXT, PROMPT_IDS, FakeEngine, event, float32s, uint32s
from tests.support.gateways import ASKED, Stage, staged

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TRACEPARENT = f"00-{TRACE}-{PARENT}-00"
BAGGAGE = "spangrad.run.id=run%201,spangrad.rollout.id=r1;p=1, spangrad.rollout.mode=train,spangrad.rollout.attempt=2,other=x"


@pytest.fixture
async def stage() -> AsyncGenerator[Stage]:
    async with staged() as stage:
        yield stage


def bare(answer: dict[str, Any]) -> dict[str, Any]:
    """Return an answer as vLLM gives it without our plugin."""
    return {name: value for name, value in answer.items() if name != "spangrad"}


@pytest.mark.parametrize(
    "extra", [{}, {"logprobs": True}, {"return_token_ids": True}, {"logprobs": True, "return_token_ids": True}, {"n": 2}]
)
async def test_gateway_whole_answer_equals_that_of_vllm(stage: Stage, extra: dict[str, Any]) -> None:
    status, body = await stage.chat(**extra)
    assert (status, json.loads(body)) == (200, bare(stage.engine.whole({**ASKED, **extra})))
    assert stage.engine.requests == [{**ASKED, **extra, "logprobs": True, "return_token_ids": True}]


@pytest.mark.parametrize("tool_call", [False, True])
@pytest.mark.parametrize("silent", [False, True])
@pytest.mark.parametrize(
    "extra", [{}, {"logprobs": True}, {"return_token_ids": True}, {"n": 2}, {"stream_options": {"include_usage": True}}], ids=str
)
async def test_gateway_stream_equals_that_of_vllm_event_by_event(tool_call: bool, silent: bool, extra: dict[str, Any]) -> None:
    async with staged(FakeEngine(tool_call=tool_call, silent_chunks=silent)) as stage:
        _, body = await stage.chat(stream=True, **extra)
        chunks = stage.engine.chunks({**ASKED, **extra})
        assert body == b"".join(map(event, chunks)) + b"data: [DONE]\n\n"


async def test_gateway_call_span_has_attributes_for_training(stage: Stage) -> None:
    status, _ = await stage.chat(headers={"traceparent": TRACEPARENT, "baggage": BAGGAGE}, max_tokens=8)
    (span,) = await stage.spans()
    attributes = dict(span.attributes)
    request, response = json.loads(str(attributes.pop(semconv.REQUEST_JSON))), json.loads(str(attributes.pop(semconv.RESPONSE_JSON)))
    process = attributes.pop(semconv.PROCESS_ID)
    assert status == 200
    assert (span.name, span.trace_id, span.parent_id, span.status) == ("chat policy", TRACE, PARENT, "UNSET")
    assert (span.service, span.scope) == ("spangrad-gateway", "spangrad.gateway")
    assert request == {**ASKED, "max_tokens": 8}
    assert response == bare(stage.engine.whole(ASKED))
    assert isinstance(process, str)
    assert uint32s(attributes.pop(semconv.INPUT_TOKEN_IDS)) == PROMPT_IDS  # type: ignore[arg-type]
    assert uint32s(attributes.pop(semconv.OUTPUT_TOKEN_IDS)) == [9, 12, 2]  # type: ignore[arg-type]
    assert float32s(attributes.pop(semconv.OUTPUT_LOGPROBS)) == [-0.25, -0.5, -0.125]  # type: ignore[arg-type]
    assert attributes == {
        "gen_ai.operation.name": "chat",
        "http.route": "/v1/chat/completions",
        "gen_ai.provider.name": "vllm",
        "spangrad.backend.name": "policy-0",
        "gen_ai.request.model": "policy",
        "gen_ai.response.model": "policy",
        "gen_ai.response.id": "chatcmpl-1",
        "gen_ai.response.finish_reasons": ["stop"],
        "gen_ai.request.max_tokens": 8,
        "gen_ai.usage.input_tokens": 7,
        "gen_ai.usage.output_tokens": 3,
        "spangrad.run.id": "run 1",
        "spangrad.rollout.id": "r1",
        "spangrad.rollout.mode": "train",
        "spangrad.rollout.attempt": 2,
        "spangrad.seq": 0,
        "spangrad.policy.name": "policy",
        "spangrad.policy.versions": "[[[0,0]]]",
        "spangrad.tokenizer.hash": "cafe",
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 1.0,
        "gen_ai.request.top_k": 0,
        "spangrad.sampling.min_p": 0.0,
        "gen_ai.request.presence_penalty": 0.0,
        "gen_ai.request.frequency_penalty": 0.0,
        "spangrad.sampling.repetition_penalty": 1.0,
        "spangrad.sampling.constrained": False,
        "http.response.status_code": 200,
    }
    # The engine's own span would be a child of the call's.
    assert stage.engine.headers[0]["traceparent"] == f"00-{TRACE}-{span.span_id}-01"


async def test_gateway_stream_span_equals_that_of_whole_answer(stage: Stage) -> None:
    await stage.chat()
    await stage.chat(stream=True)
    whole, stream = await stage.spans(2)
    differ = {semconv.SEQ, semconv.REQUEST_JSON, semconv.RESPONSE_JSON}
    assert {k: v for k, v in whole.attributes.items() if k not in differ} == {k: v for k, v in stream.attributes.items() if k not in differ}
    assert json.loads(str(stream.attributes[semconv.RESPONSE_JSON])) == {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "model": "policy",
        "choices": [{"index": 0, "message": {"role": "assistant", "content": ANSWER_TEXT}, "finish_reason": "stop"}],
        "usage": None,
    }


async def test_gateway_several_choices_are_concatenated_in_span(stage: Stage) -> None:
    await stage.chat(n=2, stream=True)
    (span,) = await stage.spans()
    assert uint32s(span.attributes[semconv.OUTPUT_TOKEN_IDS]) == [9, 12, 2, 109, 112, 102]  # type: ignore[arg-type]
    assert span.attributes[semconv.OUTPUT_LENGTHS] == [3, 3]
    assert span.attributes[semconv.GEN_AI_FINISH_REASONS] == ["stop", "stop"]


async def test_gateway_streamed_tool_call_is_assembled() -> None:
    async with staged(FakeEngine(tool_call=True)) as stage:
        await stage.chat(stream=True)
        (span,) = await stage.spans()
    (choice,) = json.loads(str(span.attributes[semconv.RESPONSE_JSON]))["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["tool_calls"] == [{"id": "call-1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]


async def test_gateway_stream_is_not_buffered(stage: Stage) -> None:
    stage.engine.go_on.clear()
    async with stage.client.post("/v1/chat/completions", json={**ASKED, "stream": True}) as answer:
        first = await answer.content.readuntil(b"\n\n")
        assert first == event(stage.engine.chunks(ASKED)[0])
        stage.engine.go_on.set()
        assert (await answer.read()).endswith(b"data: [DONE]\n\n")


async def test_gateway_client_leaving_stream_aborts_engine_and_records_ids_so_far(stage: Stage) -> None:
    await stage.announce("/rollout/r1/attempt/2", run_id="run 1")
    stage.engine.go_on.clear()
    stage.engine.stall_after = 2
    answer = await stage.client.post("/v1/chat/completions", json={**ASKED, "stream": True}, headers={"baggage": BAGGAGE})
    for _ in range(2):
        await answer.content.readuntil(b"\n\n")
    answer.close()
    await asyncio.wait_for(stage.engine.left.wait(), 30)
    (span,) = await stage.spans()
    assert span.attributes[semconv.ABORTED] is True
    assert semconv.ERROR_TYPE not in span.attributes
    assert (span.attributes[semconv.POLICY_NAME], semconv.POLICY_VERSIONS in span.attributes) == ("policy", False)
    assert uint32s(span.attributes[semconv.OUTPUT_TOKEN_IDS]) == [9]  # type: ignore[arg-type]
    assert await stage.count("/rollout/r1/attempt/2") == (1, False)


async def test_gateway_client_leaving_whole_answer_aborts_engine(stage: Stage) -> None:
    stage.engine.go_on.clear()
    call = asyncio.create_task(stage.chat())
    await asyncio.wait_for(stage.engine.arrived.wait(), 30)
    call.cancel()
    await asyncio.wait_for(stage.engine.left.wait(), 30)
    (span,) = await stage.spans()
    assert (span.attributes[semconv.ABORTED], semconv.HTTP_STATUS in span.attributes) == (True, False)


async def test_gateway_engine_refusal_passes_unchanged(stage: Stage) -> None:
    stage.engine.status = 400
    status, body = await stage.chat()
    (span,) = await stage.spans()
    error = {"error": {"message": "the engine says no", "type": "BadRequestError", "param": None, "code": 400}}
    assert (status, json.loads(body)) == (400, error)
    assert (span.status, span.attributes[semconv.ERROR_TYPE], span.attributes[semconv.HTTP_STATUS]) == ("ERROR", "400", 400)
    assert json.loads(str(span.attributes[semconv.RESPONSE_JSON])) == error


DEEP = b'{"x": ' + b"[" * 100_000


@pytest.mark.parametrize(
    "body", [b'{"id": "x", "choices": [{"mess', b"{}", b'{"choices": [{}]}', b'{"choices": 3}', pytest.param(DEEP, id="deep")]
)
async def test_gateway_malformed_answer_passes_and_is_recorded_as_failed(stage: Stage, body: bytes) -> None:
    stage.engine.body = body
    assert await stage.chat() == (200, body)
    (span,) = await stage.spans()
    assert (span.status, span.attributes[semconv.ERROR_TYPE]) == ("ERROR", "malformed_answer")


async def test_gateway_error_within_stream_passes_and_is_recorded_as_failed(stage: Stage) -> None:
    stage.engine.error_after = 2
    _, body = await stage.chat(stream=True)
    (span,) = await stage.spans()
    assert body.endswith(
        b'data: {"error":{"message":"the engine broke","type":"InternalServerError","param":null,"code":500}}\n\ndata: [DONE]\n\n'
    )
    assert (span.attributes[semconv.ERROR_TYPE], uint32s(span.attributes[semconv.OUTPUT_TOKEN_IDS])) == ("engine_error", [9])  # type: ignore[arg-type]


async def test_gateway_stream_broken_by_engine_breaks_for_client(stage: Stage) -> None:
    stage.engine.cut_after = 2
    with pytest.raises(aiohttp.ClientPayloadError):
        await stage.chat(stream=True)
    (span,) = await stage.spans()
    assert (span.status, span.attributes[semconv.ERROR_TYPE]) == ("ERROR", "engine_unreachable")
    assert uint32s(span.attributes[semconv.OUTPUT_TOKEN_IDS]) == [9]  # type: ignore[arg-type]


async def test_gateway_with_dead_engine_answers_502_with_remedy() -> None:
    (nobody,) = free_ports(1)
    async with staged(engine_url=f"http://127.0.0.1:{nobody}") as stage:
        status, body = await stage.chat()
        (span,) = await stage.spans()
        ready = await stage.client.get("/readyz")
    error = json.loads(body)["error"]
    assert (status, error["type"], error["code"]) == (502, "engine_unreachable", 502)
    assert f"http://127.0.0.1:{nobody} does not answer" in error["message"]
    assert "Start it with `spangrad engine`" in error["message"]
    assert (span.status, span.attributes[semconv.ERROR_TYPE], span.attributes[semconv.HTTP_STATUS]) == ("ERROR", "engine_unreachable", 502)
    assert ready.status == 503


async def test_gateway_request_timeout_answers_504() -> None:
    async with staged(request_timeout_seconds=0.2) as stage:
        stage.engine.go_on.clear()
        status, body = await stage.chat()
        (span,) = await stage.spans()
    assert (status, json.loads(body)["error"]["type"], span.attributes[semconv.ERROR_TYPE]) == (504, "timeout", "timeout")


@pytest.mark.parametrize("body", [b"[1]", b"nonsense", b""])
async def test_gateway_request_not_an_object_is_refused_and_not_recorded(stage: Stage, body: bytes) -> None:
    async with stage.client.post("/rollout/r/attempt/0/v1/chat/completions", data=body) as answer:
        assert (answer.status, (await answer.json())["error"]["type"]) == (400, "invalid_request_error")
    assert await stage.count("/rollout/r/attempt/0") == (None, False)
    assert stage.engine.requests == []


@pytest.mark.parametrize("path", ["/v2/embed", "/rollout/r/attempt/x/v1/models"])
async def test_gateway_unsupported_path_answers_404_with_supported_paths(stage: Stage, path: str) -> None:
    async with stage.client.post(path, json={}) as answer:
        message = (await answer.json())["error"]["message"]
    assert (answer.status, message.partition(" is")[0]) == (404, f"POST {path}")
    assert "POST /v1/chat/completions" in message


@pytest.mark.parametrize("prefix", ["", "/rollout/r/attempt/0"])
async def test_gateway_models_route_lists_models_of_engine(stage: Stage, prefix: str) -> None:
    async with stage.client.get(f"{prefix}/v1/models") as answer:
        assert await answer.json() == {"object": "list", "data": [{"id": "policy", "object": "model"}]}


async def test_gateway_headers_pass_except_credentials_and_context(stage: Stage) -> None:
    sent = {"x-request-id": "r-1", "authorization": "Bearer agent's", "baggage": BAGGAGE, "cookie": "a=b"}
    async with stage.client.post("/v1/chat/completions", json=ASKED, headers=sent) as answer:
        assert answer.headers["x-request-id"] == "r-1"
    (got,) = stage.engine.headers
    assert got["x-request-id"] == "r-1"
    assert not {"authorization", "baggage", "cookie", "accept-encoding"} & set(got)


async def test_gateway_rollout_is_named_by_url_then_baggage_and_announcement(stage: Stage) -> None:
    assert await stage.announce("/rollout/r7/attempt/1", run_id="run 7", mode="validate", traceparent=TRACEPARENT) == 200
    own = f"00-{'1' * 32}-{'2' * 16}-01"
    await stage.chat("/rollout/r7/attempt/1")
    await stage.chat("/rollout/r7/attempt/1", {"baggage": BAGGAGE, "traceparent": own})
    await stage.chat("", {"baggage": BAGGAGE})
    await stage.chat("/rollout/r8/attempt/0", {"baggage": BAGGAGE})
    await stage.chat()
    keys = (semconv.RUN_ID, semconv.ROLLOUT_ID, semconv.ROLLOUT_MODE, semconv.ROLLOUT_ATTEMPT)
    spans = sorted(await stage.spans(5), key=lambda span: span.attributes[semconv.SEQ])  # type: ignore[arg-type,return-value]
    assert [tuple(span.attributes.get(key) for key in keys) for span in spans] == [
        ("run 7", "r7", "validate", 1),
        ("run 7", "r7", "validate", 1),
        ("run 1", "r1", "train", 2),
        ("run 1", "r8", "train", 0),
        (None, None, None, None),
    ]
    assert [(span.trace_id, span.parent_id) for span in spans[:2]] == [(TRACE, PARENT), ("1" * 32, "2" * 16)]
    assert [span.parent_id for span in spans[2:]] == ["", "", ""]
    assert len({span.trace_id for span in spans}) == 5


@pytest.mark.parametrize("more", [{"run_id": 1}, {"traceparent": "x"}, {"more": "1"}, {"rollout_id": ""}, {"attempt": 10_000}])
async def test_gateway_malformed_announcement_is_refused(stage: Stage, more: dict[str, object]) -> None:
    valid = {"rollout_id": "r", "attempt": 0, "run_id": "run", "mode": "train"}
    for body in ({}, {"attempts": [valid, valid | {"rollout_id": "other"} | more]}):
        async with stage.client.post("/attempts", json=body) as answer:
            assert answer.status == 400
    assert await stage.count("/rollout/r/attempt/0") == (None, False)


async def test_gateway_odd_sampling_parameters_are_recorded(stage: Stage) -> None:
    path = "/rollout/r1/attempt/0"
    await stage.announce(path)
    assert (await stage.chat(path, max_tokens=10**20, top_k=2**63, temperature=0.001))[0] == 200
    odd = {"baggage": f"{semconv.RUN_ID}=\udcff,{semconv.ROLLOUT_ID}=r1"}
    assert (await stage.chat("", odd))[0] == 200
    first, second = sorted(await stage.spans(2), key=lambda span: span.attributes[semconv.SEQ])  # type: ignore[arg-type,return-value]
    assert first.attributes[semconv.GEN_AI_REQUEST_MAX_TOKENS] == str(10**20)
    assert first.attributes[semconv.GEN_AI_REQUEST_TOP_K] == str(2**63)
    # vLLM samples no colder than this.
    assert first.attributes[semconv.GEN_AI_REQUEST_TEMPERATURE] == 0.01
    assert second.attributes[semconv.RUN_ID] == "run"
    assert await stage.count(path) == (2, False)


async def test_gateway_call_count_waits_for_calls_in_flight(stage: Stage) -> None:
    path = "/rollout/r1/attempt/2"
    await stage.announce(path)
    assert await stage.count(path) == (0, False)
    stage.engine.status = 500
    await stage.chat(path)
    stage.engine.status = 200
    await stage.chat("", {"baggage": BAGGAGE})
    stage.engine.go_on.clear()
    stage.engine.arrived.clear()
    call = asyncio.create_task(stage.chat(path))
    await stage.engine.arrived.wait()
    counting = asyncio.create_task(stage.count(path))
    done, _ = await asyncio.wait({counting}, timeout=0.1)
    assert not done
    stage.engine.go_on.set()
    assert await counting == (3, False)
    assert (await call)[0] == 200
    assert len(await stage.spans(3)) == 3
    assert await stage.count("/rollout/r1/attempt/3") == (None, False)


async def test_gateway_clock_set_back_during_call_leaves_span_its_duration(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    stage.engine.go_on.clear()
    call = asyncio.create_task(stage.chat())
    await stage.engine.arrived.wait()
    set_back = time.time_ns() - 3600 * 10**9
    monkeypatch.setattr(time, "time_ns", lambda: set_back)
    stage.engine.go_on.set()
    assert (await call)[0] == 200
    (span,) = await stage.spans()
    assert 0 < span.seconds < 60


async def test_gateway_call_counts_of_many_attempts_come_in_one_response_without_a_wait(stage: Stage) -> None:
    attempts = [{"rollout_id": f"r{number}", "attempt": 0} for number in range(3)]
    announced = [one | {"run_id": "run", "mode": "train"} for one in attempts[:2]]
    async with stage.client.post("/attempts", json={"attempts": announced}) as answer:
        assert answer.status == 200
    stage.engine.go_on.clear()
    call = asyncio.create_task(stage.chat("/rollout/r1/attempt/0"))
    await stage.engine.arrived.wait()
    async with stage.client.post("/attempts/calls", json={"attempts": attempts, "wait": False}) as answer:
        counted = (await answer.json())["attempts"]
    stage.engine.go_on.set()
    assert (await call)[0] == 200
    assert [tuple(one.values()) for one in counted] == [(0, False, 0, ""), (1, False, 1, ""), (None, False, 0, "")]


async def test_gateway_token_is_required_except_for_health_checks() -> None:
    async with staged(token="secret") as stage:
        assert (await stage.chat())[0] == 200
        status, body = await stage.chat(headers={"Authorization": "Bearer wrong"})
        assert (status, json.loads(body)["error"]["type"]) == (401, "authentication_error")
        assert len(stage.engine.requests) == 1
        for path, expected in (("/healthz", 200), ("/admin/policies/policy", 401)):
            async with stage.client.get(path, headers={"Authorization": "none"}) as answer:
                assert answer.status == expected


async def test_gateway_readiness_waits_for_warm_and_probed_engine() -> None:
    async with staged(FakeEngine(warm=False)) as stage:
        async with stage.client.get("/readyz") as answer:
            assert answer.status == 503
        stage.engine.warm = True
        await stage.readiness("serving")
        assert stage.engine.orders == ["/spangrad/checksum", "probe"]
        async with stage.client.get("/admin/policies/policy") as answer:
            facts = {"policy": "policy", "version": 0, "tokenizer_hash": "cafe", "status": "serving"}
            assert (await answer.json()).items() >= facts.items()
        assert stage.store.spans == []


@pytest.mark.parametrize(
    ("engine", "reason"),
    [
        (FakeEngine(ids_missing=True), "has no token ids"),
        (FakeEngine(policy="other"), "serves policy 'other', this gateway 'policy'"),
        (FakeEngine(paused=True), "it is paused"),
    ],
)
async def test_gateway_unfit_engine_is_not_admitted(engine: FakeEngine, reason: str) -> None:
    async with staged(engine) as stage:
        await stage.readiness(reason)
        status, body = await stage.chat()
        (span,) = await stage.spans()
    assert (status, reason in json.loads(body)["error"]["message"]) == (503, True)
    assert (span.attributes[semconv.ERROR_TYPE], span.attributes[semconv.HTTP_STATUS]) == ("engine_down", 503)
