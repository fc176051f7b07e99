"""The tap: ids and logprobs of routes that have no place for them, read where vLLM's engine client gives them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from dataclasses import astuple, dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from gateway.vllm_plugin.continuation import REQUEST_FIELD, Continued, Rendered
from gateway.vllm_plugin.middleware import SpangradMiddleware
from gateway.vllm_plugin.request_fields import CHAT_PATH, MESSAGES_PATH, RESPONSES_PATH
from gateway.vllm_plugin.tap import SAMPLING_PARAMETERS, Tap, open_tap

ASKED = b'{ "model": "policy", "input": "say rome" }'
PROMPTS = [[1, 4, 7], [1, 4, 7, 9, 8]]
SAMPLED = {8: -1.0, 13: float("-inf"), 16: -2.0}
"""The tokens that are sampled, and their logprobs."""


@dataclass
class Sampling:
    """vLLM's sampling parameters, as far as the tap knows them."""

    logprobs: int | None = None
    n: int = 1
    temperature: float = 0.5
    top_p: float = 0.9
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    min_tokens: int = 0
    thinking_token_budget: int | None = None


REPORTED = {name: getattr(Sampling(), name) for name in SAMPLING_PARAMETERS} | {"constrained": False}
LABELLED = [SimpleNamespace(version="default", start=0, end=2), SimpleNamespace(version="7", start=2, end=3)]


def output(prompt: list[int] | None, tokens: list[int], finish_reason: str | None = None) -> SimpleNamespace:
    """Return an output of vLLM's engine: a dictionary of logprobs for each token, in which others may stand before the sampled one."""
    logprobs = [{99: SimpleNamespace(logprob=-0.1), token: SimpleNamespace(logprob=SAMPLED[token])} for token in tokens]
    labels = LABELLED if finish_reason else None
    completion = SimpleNamespace(index=0, token_ids=tuple(tokens), logprobs=logprobs, finish_reason=finish_reason, weight_versions=labels)
    return SimpleNamespace(prompt_token_ids=prompt, outputs=[completion])


class Renderer:
    """vLLM's renderer, as far as the tap knows it."""

    def get_eos_token_id(self) -> int:
        return 16


@dataclass
class EngineClient:
    """vLLM's engine client: two tokens, one at a time, and an end."""

    input_processor: Any = field(
        default_factory=lambda: SimpleNamespace(generation_config_fields={"eos_token_id": [16, 17]}, renderer=Renderer())
    )
    model_config: Any = field(default_factory=lambda: SimpleNamespace(max_model_len=12))
    prompts: list[Any] = field(default_factory=list[Any])
    asked: list[Sampling] = field(default_factory=list[Sampling])
    closed: list[str] = field(default_factory=list[str])
    turn: int = 0

    async def generate(self, prompt: list[int], sampling_params: Sampling, request_id: str, **more: Any) -> AsyncGenerator[Any, None]:
        self.asked.append(sampling_params)
        self.prompts.append(prompt)
        try:
            yield output(prompt, [8])
            yield output(None, [13])
            yield output(None, [16], "stop")
        finally:
            self.closed.append(request_id)


class Vllm:
    """An application with a route that sends an event for each of the engine's outputs but the first, and a last event."""

    def __init__(self) -> None:
        self.state = SimpleNamespace(engine_client=EngineClient())
        self.bodies: list[bytes] = []
        self.prompts: list[Any] = list(PROMPTS)
        self.generations = 1
        self.last = b"response.completed"
        self.whole = False
        self.kept = Sampling()

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        self.bodies.append((await receive())["body"])
        kind = b"application/json" if self.whole else b"text/event-stream"
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", kind)]})
        if not self.whole:
            await self._event(send, b"first", {"n": -1})
        for turn in range(self.generations):
            place = 0
            async for _ in self.state.engine_client.generate(self.prompts[turn], self.kept, f"r{turn}", priority=1):
                if place and not self.whole:
                    await self._event(send, b"delta", {"n": place})
                place += 1
        if self.whole:
            await send({"type": "http.response.body", "body": b'{"id":"x"}'})
        else:
            await self._event(send, b"done", {})
            await self._event(send, self.last, {"n": 9}, more=False)

    async def _event(self, send: Any, name: bytes, data: dict[str, int], *, more: bool = True) -> None:
        body = b"event: " + name + b"\ndata: " + json.dumps(data or {"n": 0}).encode() + b"\n\n"
        await send({"type": "http.response.body", "body": body, "more_body": more})


@pytest.fixture
def vllm() -> Vllm:
    return Vllm()


@pytest.fixture
def middleware(vllm: Vllm, plugin_environment: None) -> SpangradMiddleware:
    return SpangradMiddleware(vllm)


async def call(middleware: SpangradMiddleware, vllm: Vllm, path: str = RESPONSES_PATH, body: bytes = ASKED) -> list[bytes]:
    sent: list[bytes] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: dict[str, Any]) -> None:
        if message["type"] == "http.response.body":
            sent.append(message["body"])

    # Each request runs in a task, and so in a context, of its own.
    await asyncio.create_task(middleware({"type": "http", "method": "POST", "path": path, "headers": [], "app": vllm}, receive, send))
    return sent


def field_of(event: bytes) -> Any:
    return json.loads(event.partition(b"data: ")[2]).get("spangrad")


async def test_tap_whole_answer_reports_prompts_tokens_and_sampling(vllm: Vllm, middleware: SpangradMiddleware) -> None:
    vllm.whole = True
    (body,) = await call(middleware, vllm, MESSAGES_PATH)
    assert json.loads(body) == {
        "id": "x",
        "spangrad": {
            "policy": "policy",
            "tokenizer_hash": middleware.tokenizer_hash,
            "versions": [[[0, 3], [2, 7]]],
            "sampling": REPORTED,
            "generations": [
                {
                    "prompt_token_ids": [1, 4, 7],
                    "token_ids": [8, 13, 16],
                    "logprobs": [-1.0, -9999.0, -2.0],
                    "finish_reason": "stop",
                }
            ],
        },
    }


@pytest.mark.parametrize("last", [b"response.completed", b"message_stop"])
async def test_tap_stream_reports_new_tokens_per_event_and_all_in_last(vllm: Vllm, middleware: SpangradMiddleware, last: bytes) -> None:
    vllm.last = last
    events = await call(middleware, vllm)
    names = [event.partition(b"\n")[0] for event in events]
    assert names == [b"event: " + name for name in (b"first", b"delta", b"delta", b"done", last)]
    first = {"policy": "policy", "tokenizer_hash": middleware.tokenizer_hash}
    two = [{"prompt_token_ids": [1, 4, 7], "token_ids": [8, 13], "logprobs": [-1.0, -9999.0]}]
    three = [{"token_ids": [16], "logprobs": [-2.0], "finish_reason": "stop"}]
    assert [field_of(event) for event in events] == [
        first,
        {**first, "generations": two},
        {**first, "generations": three},
        None,
        {**first, "versions": [[[0, 3], [2, 7]]], "sampling": REPORTED},
    ]


async def test_tap_each_engine_request_is_one_generation(vllm: Vllm, middleware: SpangradMiddleware) -> None:
    """An answer of several engine requests, as where vLLM runs a tool itself, and asks again."""
    vllm.whole, vllm.generations = True, 2
    (body,) = await call(middleware, vllm)
    field = json.loads(body)["spangrad"]
    assert [one["prompt_token_ids"] for one in field["generations"]] == PROMPTS
    assert field["versions"] == [[[0, 3], [2, 7]]] * 2
    vllm.whole = False
    second = next(
        field_of(event) for event in await call(middleware, vllm) if b'"generations": [{}' in event or b'"generations":[{},' in event
    )
    assert second["generations"] == [{}, {"prompt_token_ids": PROMPTS[1], "token_ids": [8, 13], "logprobs": [-1.0, -9999.0]}]


@pytest.mark.parametrize(("asked", "given"), [(None, 0), (0, 0), (3, 3)])
async def test_tap_asks_engine_for_logprobs_where_route_does_not(
    vllm: Vllm, middleware: SpangradMiddleware, asked: int | None, given: int
) -> None:
    vllm.kept.logprobs = asked
    await call(middleware, vllm)
    assert vllm.state.engine_client.asked == [Sampling(given)]
    # The route's own parameters, of which its answer tells, stay as they were.
    assert vllm.kept == Sampling(asked)


async def test_tap_leaves_request_body_unchanged(vllm: Vllm, middleware: SpangradMiddleware) -> None:
    await call(middleware, vllm)
    assert vllm.bodies == [ASKED]


async def test_tap_on_route_with_ids_reports_versions_and_sampling_only(vllm: Vllm, middleware: SpangradMiddleware) -> None:
    await call(middleware, vllm)
    vllm.state.engine_client.asked.clear()
    vllm.whole = True
    (body,) = await call(middleware, vllm, CHAT_PATH)
    field = json.loads(body)["spangrad"]
    assert (field["versions"], field["sampling"], "generations" in field) == ([[[0, 3], [2, 7]]], REPORTED, False)
    assert vllm.state.engine_client.asked[0] is vllm.kept


async def test_tap_other_routes_use_engine_generator(vllm: Vllm, middleware: SpangradMiddleware) -> None:
    await call(middleware, vllm)
    await call(middleware, vllm, "/tokenize")
    assert vllm.state.engine_client.asked[-1] is vllm.kept


@pytest.mark.parametrize(
    ("labels", "versions"),
    [
        (None, []),
        ([], []),
        ([("7", 0, 3)], [(0, 7)]),
        ([("default", 0, 1), ("3", 1, 3)], [(0, 3)]),
        ([("default", 0, 1), ("4", 1, 2), ("12", 2, 3)], [(0, 3), (1, 4), (2, 12)]),
        # A stop string has cut off the last token, and its span with it.
        ([("7", 0, 2), ("8", 2, 2)], [(0, 7)]),
        # Somebody else's label: nobody knows which weights these are.
        ([("7", 0, 2), ("night build", 2, 3)], []),
        ([("-1", 0, 3)], []),
    ],
    ids=str,
)
def test_tap_versions_follow_weight_versions_of_tokens(
    middleware: SpangradMiddleware, labels: list[tuple[str, int, int]] | None, versions: list[tuple[int, int]]
) -> None:
    tap = Tap(reads_ids=False)
    spans = labels and [SimpleNamespace(version=version, start=start, end=end) for version, start, end in labels]
    place = tap.begin(Sampling(n=2))
    tap.end(place, SimpleNamespace(index=1, weight_versions=spans))
    assert middleware.facts(tap, False, True)["versions"] == [[], versions]


@pytest.mark.parametrize(
    ("changes", "constrained"),
    [({}, False), ({"min_tokens": 4}, True), ({"thinking_token_budget": 8}, True), ({"thinking_token_budget": -1}, False)],
    ids=str,
)
def test_tap_sampling_is_reported_as_vllm_samples(middleware: SpangradMiddleware, changes: dict[str, Any], constrained: bool) -> None:
    tap = Tap(reads_ids=False)
    tap.begin(Sampling(**changes))
    assert middleware.facts(tap, False, True)["sampling"] == {**REPORTED, "constrained": constrained}
    assert middleware.facts(tap, True, True)["sampling"]["constrained"], "a request may say what the parameters do not show"
    assert "sampling" not in middleware.facts(tap, False, False)


async def test_tap_prompt_of_continued_call_begins_with_its_tokens(middleware: SpangradMiddleware, vllm: Vllm) -> None:
    """The second prompt renders token 12 of the first reply as 13."""
    vllm.whole, rendered = True, [[1, 4], [1, 4, 13, 16, 7]]
    continued: dict[str, Any] = {}
    for turn in (0, 1):
        prompt = {"type": "token", "prompt_token_ids": rendered[turn], "prompt": "text", "priority": 1}
        vllm.prompts = [prompt]
        (answer,) = await call(middleware, vllm, body=json.dumps({"input": "say rome", REQUEST_FIELD: continued}).encode())
        described = Rendered.of(rendered[turn], {16, 17})
        assert json.loads(answer)["spangrad"]["rendered"] == list(astuple(described))
        continued = Continued([*rendered[0], 12, 16], described).field()
    first, second = vllm.state.engine_client.prompts
    assert first == {"type": "token", "prompt_token_ids": [1, 4], "prompt": "text", "priority": 1}
    assert second == {"type": "token", "prompt_token_ids": [1, 4, 12, 16, 7], "priority": 1}
    assert [json.loads(body) for body in vllm.bodies] == [{"input": "say rome"}] * 2, "vLLM knows no such field"


@pytest.mark.parametrize(
    "prompt",
    [
        {"type": "multimodal", "prompt_token_ids": [1, 4, 13, 16, 7]},
        {"type": "token", "prompt_token_ids": [1, 5, 13, 16, 7]},
        {"type": "token", "prompt_token_ids": [1, 4, 13, 16, *range(20, 28)]},
    ],
    ids=["images", "another conversation", "longer than the model's context"],
)
async def test_tap_prompt_that_cannot_continue_is_left_as_rendered(
    middleware: SpangradMiddleware, vllm: Vllm, prompt: dict[str, Any]
) -> None:
    vllm.whole, vllm.prompts = True, [prompt]
    continued = Continued([1, 4, 12, 16], Rendered.of([1, 4], {16}))
    await call(middleware, vllm, body=json.dumps({"input": "say rome", REQUEST_FIELD: continued.field()}).encode())
    assert vllm.state.engine_client.prompts == [prompt]


async def test_tap_malformed_continuation_is_refused(middleware: SpangradMiddleware, vllm: Vllm) -> None:
    (answer,) = await call(middleware, vllm, body=json.dumps({"input": "say rome", REQUEST_FIELD: {"ids": 1}}).encode())
    assert REQUEST_FIELD in json.loads(answer)["error"]
    assert vllm.bodies == []


async def test_tap_concurrent_requests_are_separate(vllm: Vllm, middleware: SpangradMiddleware) -> None:
    vllm.whole = True
    bodies = await asyncio.gather(*(call(middleware, vllm) for _ in range(8)))
    assert {len(json.loads(body)["spangrad"]["generations"][0]["token_ids"]) for (body,) in bodies} == {3}


async def test_tap_route_that_closes_ends_generation_of_engine(vllm: Vllm) -> None:
    client = vllm.state.engine_client

    async def leave() -> None:
        open_tap(client, reads_ids=True)
        generator = client.generate([1], Sampling(), "left")
        await anext(generator)
        await generator.aclose()

    await asyncio.create_task(leave())
    assert client.closed == ["left"]
