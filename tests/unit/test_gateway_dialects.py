"""The dialects' readers, fed with what a real vLLM answered (tests/fixtures/gateway, by `python -m tests.support.dialects capture`)."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
from yarl import URL

from gateway.dialects import DIALECTS
from gateway.dialects.answer import EngineAnswer
from gateway.dialects.base import ClientRequest
from spangrad import semconv
from spangrad.processes import free_ports
from tests.support.dialects import comparable
from tests.support.fake_engine import Recorded, uint32s
from tests.support.gateways import Stage, staged

GOLDEN = Path(__file__).parent.parent / "fixtures/gateway"
NAMES = sorted(path.stem for path in GOLDEN.glob("*.json"))
ANSWERED = [name for name in NAMES if json.loads((GOLDEN / f"{name}.json").read_text())["bare"]["status"] == 200]
WITH_IDS = [name for name in ANSWERED if not name.startswith("completions-echo")]


@dataclass
class Heard:
    """Results of a dialect's reading of an answer: the request, the engine's answer, and the bytes for the client."""

    request: ClientRequest
    answer: EngineAnswer
    client: bytes


def golden(name: str) -> dict[str, Any]:
    return json.loads((GOLDEN / f"{name}.json").read_text())


def hear(name: str, at_once: int = 10**9) -> Heard:
    """Have the answer of vLLM with our middleware read, so many bytes at once."""
    given = golden(name)
    dialect = DIALECTS[given["path"]]
    request = dialect.parse(json.dumps(given["request"]).encode())
    body = given["plugged"]["body"].encode()
    if not given["request"].get("stream"):
        return Heard(request, *dialect.read(body, request))
    reader = dialect.stream(request)
    client = b"".join(reader.feed(body[start : start + at_once]) for start in range(0, len(body), at_once)) + reader.rest()
    return Heard(request, reader.answer, client)


@pytest.mark.parametrize("name", ANSWERED)
def test_dialect_client_answer_equals_that_of_plain_vllm(name: str) -> None:
    assert comparable(hear(name).client) == comparable(golden(name)["bare"]["body"].encode())


def test_comparable_ignores_split_of_tokens_into_deltas() -> None:
    def stream(*deltas: str) -> bytes:
        parts = [
            f'event: a.delta\ndata: {{"index": 0, "delta": "{delta}", "logprobs": [], "id": "i{delta}", "type": "a.delta"}}'
            for delta in deltas
        ]
        return "\n\n".join(["event: start\ndata: {}", *parts, 'event: end\ndata: {"type": "end"}', ""]).encode()

    assert comparable(stream("rome", " lima")) == comparable(stream("rome lima")) == comparable(stream("ro", "me", "", " lima"))
    assert comparable(stream("rome", " lima")) != comparable(stream("lima", " rome"))
    assert comparable(stream("rome")) != comparable(stream("rome") + b"event: more\ndata: {}\n\n")
    assert comparable(stream("rome")) != comparable(stream("rome").replace(b'"logprobs": [], ', b""))


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ANSWERED])
def test_dialect_refusals_equal_those_of_plain_vllm(name: str) -> None:
    given = golden(name)
    assert given["plugged"]["status"] == given["bare"]["status"] >= 400
    assert comparable(given["plugged"]["body"].encode()) == comparable(given["bare"]["body"].encode())


@pytest.mark.parametrize("name", [name for name in ANSWERED if name.endswith("-stream")])
def test_dialect_stream_fed_in_small_pieces_is_unchanged(name: str) -> None:
    whole, pieces = hear(name), hear(name, at_once=7)
    assert pieces.client == whole.client
    assert (pieces.answer.prompts, pieces.answer.choices) == (whole.answer.prompts, whole.answer.choices)
    assert whole.client.endswith(b"\n\n")
    assert not whole.answer.failed


@pytest.mark.parametrize("name", WITH_IDS)
def test_dialect_choices_have_ids_and_logprobs_of_their_tokens(name: str) -> None:
    given, answer = golden(name), hear(name).answer
    usage = answer.usage
    choices = answer.ordered()
    assert all(len(choice.token_ids) == len(choice.logprobs) > 0 for choice in choices)
    assert all(prompt for prompt in answer.prompts)
    assert {choice.finish_reason for choice in choices} <= {"stop", "length", "tool_calls"}
    if usage:
        reported = (usage.get("prompt_tokens", usage.get("input_tokens")), usage.get("completion_tokens", usage.get("output_tokens")))
        assert reported == (sum(map(len, answer.prompts)), sum(len(choice.token_ids) for choice in choices))
    assert answer.engine
    assert (answer.engine.policy, answer.engine.versions) == ("policy", [[(0, 0)]] * len(choices))
    assert answer.engine.sampling
    assert answer.engine.sampling.temperature == given["request"]["temperature"]
    assert answer.engine.sampling.constrained == any(
        name in given["request"] for name in ("tools", "response_format", "text", "output_config")
    )


@pytest.mark.parametrize("name", [name for name in WITH_IDS if not name.endswith("-stream")])
def test_dialect_stream_record_equals_that_of_whole_answer(name: str) -> None:
    whole, stream = hear(name).answer, hear(f"{name}-stream").answer
    assert stream.prompts == whole.prompts
    assert [choice.token_ids for choice in stream.ordered()] == [choice.token_ids for choice in whole.ordered()]
    for streamed, expected in zip(stream.ordered(), whole.ordered(), strict=True):
        assert (streamed.finish_reason, streamed.logprobs) == (expected.finish_reason, pytest.approx(expected.logprobs, abs=1e-5))
    assert (stream.model, stream.engine) == (whole.model, whole.engine)


@pytest.mark.parametrize("name", ["responses", "responses-schema", "messages", "messages-named", "messages-schema"])
def test_dialect_stream_response_json_equals_that_of_whole_answer(name: str) -> None:
    whole, stream = hear(name).answer.response_json(), hear(f"{name}-stream").answer.response_json()
    assert whole
    assert stream
    expected = comparable(whole)
    # Whole answers of messages leave out what is null.
    assert {key: value for key, value in comparable(stream).items() if value is not None or key in expected} == expected


@pytest.mark.parametrize("name", ANSWERED)
def test_dialect_response_json_holds_no_ids(name: str) -> None:
    kept = hear(name).answer.response_json()
    assert kept
    for field in (b'"token_ids":[', b'"prompt_token_ids":[', b'"tokens":[', b'"spangrad"'):
        assert field not in kept


def test_dialect_choices_of_several_prompts_are_in_order() -> None:
    for name in ("completions-many", "completions-many-stream"):
        answer = hear(name).answer
        assert len(answer.prompts) == 3
        assert len(answer.ordered()) == 6
        # Greedy: both choices of a prompt are the same, and those of different prompts are not.
        ids = [tuple(choice.token_ids) for choice in answer.ordered()]
        assert ids[0::2] == ids[1::2]
        assert len(set(ids)) > 1
    assert hear("completions-tokens").answer.prompts == [[20, 21, 22], [40, 41]]


def test_dialect_cut_stream_of_several_prompts_keeps_choices_in_place() -> None:
    given = golden("completions-many-stream")
    dialect = DIALECTS[given["path"]]
    reader = dialect.stream(dialect.parse(json.dumps(given["request"]).encode()))
    events = given["plugged"]["body"].encode().split(b"\n\n")
    last = next(event for event in events if b'"index":4' in event)
    reader.feed(last + b"\n\n")
    assert [len(prompt) for prompt in reader.answer.prompts] == [0, 0, 4]
    assert [bool(choice.token_ids) for choice in reader.answer.ordered()] == [False, False, False, False, True, False]


@pytest.mark.parametrize("name", ["completions-echo", "completions-echo-stream"])
def test_dialect_echo_request_asks_no_ids_and_has_none(name: str) -> None:
    recorded = hear(name)
    assert recorded.request.for_engine() == recorded.request.raw
    assert recorded.answer.prompts == []
    assert [choice.token_ids for choice in recorded.answer.ordered()] == [[]]
    assert b"say rome" in recorded.client


@pytest.mark.parametrize("name", ["responses-stream", "responses-tool-stream", "messages-stream", "messages-tool-stream"])
def test_dialect_cut_stream_keeps_tokens_so_far(name: str) -> None:
    given = golden(name)
    dialect = DIALECTS[given["path"]]
    reader = dialect.stream(dialect.parse(json.dumps(given["request"]).encode()))
    events = given["plugged"]["body"].encode().split(b"\n\n")
    reader.feed(b"\n\n".join(events[: len(events) // 2]) + b"\n\n")
    whole = hear(name).answer
    (cut,), (full,) = reader.answer.ordered(), whole.ordered()
    assert reader.answer.prompts == whole.prompts
    assert 0 < len(cut.token_ids) < len(full.token_ids)
    assert full.token_ids[: len(cut.token_ids)] == cut.token_ids
    assert reader.answer.engine
    assert (cut.finish_reason, reader.answer.engine.versions) == (None, None)
    assert reader.answer.response_json()


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages"])
def test_dialect_with_middleware_field_sends_request_unchanged(path: str) -> None:
    raw = b'{ "model":"policy","messages":[],"input" :1.00, "max_tokens":5}'
    assert DIALECTS[path].parse(raw).for_engine() == raw


@pytest.mark.parametrize("path", list(DIALECTS))
@pytest.mark.parametrize("body", [b"[1]", b"nonsense", b"{}", b'{"choices": 3, "content": {}}', b'{"output": 1, "id": 4}'])
def test_dialect_unreadable_answer_raises_value_error(path: str, body: bytes) -> None:
    dialect = DIALECTS[path]
    request = dialect.parse(b"{}")
    try:
        answer, client = dialect.read(body, request)
    except ValueError:
        return
    # Enough of an answer to pass: it passes as it is, and has no ids.
    assert (json.loads(client), answer.prompts) == (json.loads(body), [])


@pytest.mark.parametrize("path", list(DIALECTS))
@pytest.mark.parametrize(
    "event",
    [
        b'data: {"choices": [{}]}',
        b'event: message_start\ndata: {"type": "message_start"}',
        b'event: x\ndata: {"type": "response.output_text.delta", "output_index": 7, "delta": "x"}',
        b"data: {nonsense}",
        b'data: {"error": {"message": "broke"}, "type": "error"}',
        pytest.param(b'data: {"x": ' + b"[" * 100_000, id="deep"),
    ],
)
def test_dialect_unknown_stream_event_passes_unchanged(path: str, event: bytes) -> None:
    dialect = DIALECTS[path]
    reader = dialect.stream(dialect.parse(b"{}"))
    passed = reader.feed(event + b"\n\n: a comment\n\nrest")
    head, *rest = passed.split(b"\n\n")
    if head != event:  # re-encoded, since it could be read
        assert msgspec.json.decode(head.partition(b"data: ")[2]) == msgspec.json.decode(event.partition(b"data: ")[2])
    assert (rest, reader.rest()) == ([b": a comment", b""], b"rest")


def test_messages_stream_whose_tool_input_is_nested_too_deep_keeps_its_text() -> None:
    dialect = DIALECTS["/v1/messages"]
    reader = dialect.stream(dialect.parse(b'{"stream": true, "messages": []}'))
    deep, tool = "[" * 100_000, {"type": "tool_use", "id": "c", "name": "f", "input": {}}
    for event in (
        {"type": "message_start", "message": {"id": "m", "content": []}},
        {"type": "content_block_start", "index": 0, "content_block": tool},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "input_json_delta", "partial_json": deep}},
    ):
        reader.feed(b"data: " + json.dumps(event).encode() + b"\n\n")
    assert json.loads(reader.answer.response_json() or b"")["content"] == [{**tool, "partial_json": deep}]


def test_dialect_stream_whose_first_chunk_has_an_empty_id_takes_the_next() -> None:
    dialect = DIALECTS["/v1/chat/completions"]
    reader = dialect.stream(dialect.parse(b'{"stream": true, "messages": []}'))
    for name in ("", "chatcmpl-9", "other"):
        reader.feed(b"data: " + json.dumps({"id": name, "model": name and "gpt", "choices": []}).encode() + b"\n\n")
    assert (reader.answer.id, reader.answer.model) == ("chatcmpl-9", "gpt")


def test_dialect_error_has_form_of_dialect() -> None:
    openai = {"error": {"message": "why", "type": "kind", "code": 502}}
    assert {path: dialect.error(502, "why", "kind") for path, dialect in DIALECTS.items()} == {
        "/v1/chat/completions": openai,
        "/v1/completions": openai,
        "/v1/responses": openai,
        "/v1/messages": {"type": "error", "error": {"type": "kind", "message": "why"}},
    }


@pytest.mark.parametrize("name", ANSWERED)
def test_dialect_answer_without_ids_passes_byte_for_byte(name: str) -> None:
    given = golden(name)
    dialect = DIALECTS[given["path"]]
    request = dialect.parse(json.dumps(given["request"]).encode())
    body = given["bare"]["body"].encode()
    if given["request"].get("stream"):
        reader = dialect.stream(request)
        client, answer = reader.feed(body) + reader.rest(), reader.answer
    else:
        answer, client = dialect.read(body, request)
    assert client == body
    assert answer.engine is None
    if given["path"] in ("/v1/responses", "/v1/messages"):
        assert [(choice.token_ids, choice.finish_reason) for choice in answer.ordered()] == [([], answer.ordered()[0].finish_reason)]
        assert answer.ordered()[0].finish_reason in {"end_turn", "max_tokens", "stop_sequence", "tool_use", "completed", "incomplete"}
        assert answer.id
        assert answer.usage


async def ask(stage: Stage, name: str, prefix: str = "", headers: dict[str, str] | None = None) -> tuple[int, str, bytes]:
    """Ask the gateway what was asked of vLLM, and have the fake engine answer what vLLM answered."""
    given = golden(name)
    plugged = given["plugged"]
    stage.engine.answers[given["path"]] = Recorded(plugged["body"].encode(), plugged["type"], plugged["status"])
    async with stage.client.post(prefix + given["path"], data=json.dumps(given["request"]), headers=headers) as answer:
        return answer.status, answer.headers["content-type"], await answer.read()


@pytest.mark.parametrize("name", [name for name in NAMES if not name.startswith("chat")])
async def test_gateway_each_dialect_is_answered_and_recorded(name: str) -> None:
    given = golden(name)
    attempt = "/rollout/r1/attempt/3"
    async with staged(relax=[]) as stage:
        await stage.announce(attempt, run_id="run 1")
        status, kind, body = await ask(stage, name, attempt, {"x-api-key": "secret", "authorization": "Bearer secret"})
        (span,) = await stage.spans()
        assert await stage.count(attempt) == (1, False)
    recorded = hear(name) if status == 200 else None
    assert (status, kind) == (given["bare"]["status"], given["bare"]["type"])
    assert comparable(body) == comparable(given["bare"]["body"].encode())
    assert stage.engine.bodies == [DIALECTS[given["path"]].parse(json.dumps(given["request"]).encode()).for_engine()]
    assert "secret" not in str(stage.engine.headers[-1])
    assert span.attributes[semconv.HTTP_ROUTE] == given["path"]
    assert (span.attributes[semconv.ROLLOUT_ID], span.attributes[semconv.ROLLOUT_ATTEMPT]) == ("r1", 3)
    assert json.loads(str(span.attributes[semconv.REQUEST_JSON])) == given["request"]
    if recorded is None:
        assert span.attributes[semconv.ERROR_TYPE] == str(status)
        return
    ids = span.attributes.get(semconv.OUTPUT_TOKEN_IDS)
    assert (uint32s(ids) if isinstance(ids, bytes) else []) == [one for choice in recorded.answer.ordered() for one in choice.token_ids]
    assert json.loads(str(span.attributes.get(semconv.POLICY_VERSIONS))) == [[[0, 0]]] * len(recorded.answer.choices)
    assert span.attributes[semconv.GEN_AI_OPERATION] == ("text_completion" if name.startswith("completions") else "chat")
    assert semconv.ERROR_TYPE not in span.attributes


async def test_gateway_several_prompts_and_choices_record_lengths() -> None:
    async with staged() as stage:
        await ask(stage, "completions-many")
        (span,) = await stage.spans()
    answer = hear("completions-many").answer
    assert span.attributes[semconv.INPUT_LENGTHS] == [len(prompt) for prompt in answer.prompts] == [8, 8, 4]
    assert span.attributes[semconv.OUTPUT_LENGTHS] == [len(choice.token_ids) for choice in answer.ordered()]
    assert span.attributes[semconv.GEN_AI_INPUT_TOKENS] == 20
    assert uint32s(span.attributes[semconv.INPUT_TOKEN_IDS]) == [one for prompt in answer.prompts for one in prompt]  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["responses", "messages-stream"])
async def test_gateway_answer_aborted_by_engine_is_marked_aborted_in_each_dialect(name: str) -> None:
    given = golden(name)
    cut = given["plugged"]["body"].replace('"finish_reason":"length"', '"finish_reason":"abort"')
    async with staged() as stage:
        stage.engine.answers[given["path"]] = Recorded(cut.encode(), given["plugged"]["type"])
        async with stage.client.post(given["path"], data=json.dumps(given["request"])):
            pass
        (span,) = await stage.spans()
    assert (span.attributes[semconv.ABORTED], span.attributes[semconv.GEN_AI_FINISH_REASONS]) == (True, ["abort"])


@pytest.mark.parametrize("name", ["responses-stream", "messages-stream", "completions-stream"])
async def test_gateway_client_leaving_stream_of_each_dialect_records_ids_so_far(name: str) -> None:
    given = golden(name)
    async with staged() as stage:
        stage.engine.go_on.clear()
        stage.engine.stall_after = 5
        stage.engine.answers[given["path"]] = Recorded(given["plugged"]["body"].encode(), given["plugged"]["type"])
        answer = await stage.client.post(given["path"], data=json.dumps(given["request"]))
        for _ in range(5):
            await answer.content.readuntil(b"\n\n")
        answer.close()
        await asyncio.wait_for(stage.engine.left.wait(), 30)
        (span,) = await stage.spans()
    assert span.attributes[semconv.ABORTED] is True
    ids = uint32s(span.attributes[semconv.OUTPUT_TOKEN_IDS])  # type: ignore[arg-type]
    (whole,) = hear(name).answer.ordered()
    assert 0 < len(ids) < len(whole.token_ids)
    assert whole.token_ids[: len(ids)] == ids


async def test_gateway_errors_to_anthropic_client_have_its_form() -> None:
    (nobody,) = free_ports(1)
    async with staged(engine_url=f"http://127.0.0.1:{nobody}") as stage:
        async with stage.client.post("/v1/messages", json={"model": "policy"}) as answer:
            unreachable = await answer.json()
        async with stage.client.post("/v1/messages", data=b"[1]") as answer:
            wrong = await answer.json()
    assert (unreachable["type"], unreachable["error"]["type"]) == ("error", "engine_unreachable")
    assert "Start it with `spangrad engine`" in unreachable["error"]["message"]
    assert (wrong["type"], wrong["error"]["type"]) == ("error", "invalid_request_error")


@pytest.mark.parametrize("prefix", ["", "/rollout/r1/attempt/0"])
@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v1/embeddings"),
        ("POST", "/v1/messages/count_tokens"),
        ("GET", "/v1/responses/resp_1?stream=false&a=%2F"),
        ("GET", "/v1/x%20y"),
    ],
)
async def test_gateway_unknown_route_passes_unrecorded(prefix: str, method: str, path: str) -> None:
    async with staged() as stage:
        async with stage.client.request(method, URL(prefix + path, encoded=True), data=b"{not json") as answer:
            assert (answer.status, await answer.json()) == (418, {"method": method, "path": path})
        assert stage.engine.bodies == [b"{not json"]
        await stage.chat()
        assert len(await stage.spans()) == 1
        assert await stage.count("/rollout/r1/attempt/0") == (None, False)


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("/v1/load_lora_adapter", "only a publication"),
        ("/v1/unload_lora_adapter/", "only a publication"),
        ("/v1/chat/completions/batch", "not be recorded"),
        ("/v1/messages/", "calls go to /v1/messages"),
        ("/v1/chat%2Fcompletions", "calls go to /v1/chat/completions"),
        ("/v1/%2Fchat%2fcompletions", "calls go to /v1/chat/completions"),
        ("/rollout/r1/attempt/0/v1/chat%2Fcompletions", "calls go to /v1/chat/completions"),
        ("/v1/%2e%2e/pause", "leads elsewhere"),
        ("/rollout/v1/attempt/0/v1/load_lora_adapter", "only a publication"),
    ],
)
async def test_gateway_route_that_changes_engine_is_refused(path: str, why: str) -> None:
    async with staged() as stage:
        async with stage.client.post(URL(path, encoded=True), data=b"{}") as answer:
            error = (await answer.json())["error"]
        assert (answer.status, error["type"]) == (403, "permission_error")
    assert why in error["message"]
    assert stage.engine.bodies == []
