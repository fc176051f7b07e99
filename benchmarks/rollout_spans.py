"""One rollout as OTLP spans: what an agent, its tools and the gateway send.

In: a seed, a mix, how ids are written, and for each rollout its name and its spans' ids. Out: a ResourceSpans.
Invariant: rollouts that are asked for in the same order are the same, byte for byte.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

import msgspec
import numpy as np
from opentelemetry.proto.common.v1.common_pb2 import InstrumentationScope, KeyValue
from opentelemetry.proto.resource.v1.resource_pb2 import Resource
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, ScopeSpans, Span, Status

from spangrad import semconv
from spangrad.encoding.otlp import Value, attribute

TURNS = 6
SPANS_A_TURN = 3
SPANS_A_ROLLOUT = 2 + TURNS * SPANS_A_TURN
SYSTEM_TOKENS, QUESTION_TOKENS, ANSWER_TOKENS, OBSERVATION_TOKENS, ARGUMENT_TOKENS = 80, 30, 40, 28, 8
"""Numbers of tokens in texts of Mix.ROLLOUTS."""
LONE_PROMPT_TOKENS, LONE_ANSWER_TOKENS = 200, 100
"""Numbers of tokens in calls of Mix.LLM and Mix.CALLS."""
_LEAN = frozenset(
    {
        *(semconv.RUN_ID, semconv.ROLLOUT_ID, semconv.ROLLOUT_ATTEMPT, semconv.ROLLOUT_MODE, semconv.POLICY_NAME),
        *(semconv.POLICY_VERSIONS, semconv.GEN_AI_OPERATION, semconv.GEN_AI_REQUEST_MODEL, semconv.GEN_AI_RESPONSE_ID),
        *(semconv.GEN_AI_FINISH_REASONS, semconv.GEN_AI_INPUT_TOKENS, semconv.GEN_AI_OUTPUT_TOKENS),
        *(semconv.REQUEST_JSON, semconv.RESPONSE_JSON),
        *(semconv.INPUT_TOKEN_IDS, semconv.OUTPUT_TOKEN_IDS, semconv.OUTPUT_LOGPROBS, "prompt_token_ids", "response_token_ids"),
    }
)
"""Attributes of Mix.LLM."""

_MODEL = "policy"
_EPOCH_NS = 1_767_614_400_000_000_000  # 2026-01-05 12:00 UTC
_ROLLOUT_INTERVAL_NS, _STEP_NS = 20_000_000, 150_000_000
_VOCABULARY, _CORPUS_TOKENS = 20_000, 1 << 20
_SCOPES = ("spangrad.runner", "openinference.instrumentation.openai", semconv.GATEWAY_SCOPE)
_SDK = {
    "service.name": "agent",
    "telemetry.sdk.language": "python",
    "telemetry.sdk.name": "opentelemetry",
    "telemetry.sdk.version": "1.45.1",
}
_VOWELS = ("a", "e", "i", "o", "u", "er", "in")


SAMPLING: Mapping[str, str | float | bool] = {
    semconv.SAMPLING_CONSTRAINED: False,
    semconv.GEN_AI_REQUEST_TEMPERATURE: 1.0,
    semconv.GEN_AI_REQUEST_TOP_P: 1.0,
    semconv.GEN_AI_REQUEST_TOP_K: 0,
    semconv.SAMPLING_MIN_P: 0.0,
    semconv.GEN_AI_REQUEST_PRESENCE_PENALTY: 0.0,
    semconv.GEN_AI_REQUEST_FREQUENCY_PENALTY: 0.0,
    semconv.SAMPLING_REPETITION_PENALTY: 1.0,
}
"""Attributes of vLLM's own sampling defaults, as the gateway records them."""


class Mix(StrEnum):
    """Kinds of spans in a rollout."""

    ROLLOUTS = "rollouts"
    """A root, an agent, and turns of an LLM call as the agent sees it, the same call as the gateway sees it, and a tool."""
    LLM = "llm"
    """LLM calls alone, with what any tracer writes of one: the model, both texts, token counts, token ids."""
    CALLS = "calls"
    """LLM calls alone, with all that our gateway writes of one."""


class Ids(StrEnum):
    """Format of a call's token ids."""

    BYTES = "bytes"
    """Format of this project's gateway: little-endian uint32 and float32."""
    ARRAYS = "arrays"
    """Format of Agent Lightning's tracer: `prompt_token_ids` and `response_token_ids` as arrays of integers, and no logprobs (it writes
    them, as JSON text, if the agent requested them)."""


@dataclass(frozen=True, slots=True)
class RolloutName:
    """A rollout, and an attempt at it, as the receiver calls them."""

    rollout: str
    attempt: str


@dataclass(frozen=True, slots=True)
class _Tokens:
    """A text and its token ids."""

    text: str
    ids: bytes


@dataclass(frozen=True, slots=True)
class _Exchange:
    """One call: request and response."""

    messages: Sequence[Mapping[str, str]]
    prompt_ids: bytes
    answer: _Tokens
    response_id: str

    @property
    def prompt_tokens(self) -> int:
        return len(self.prompt_ids) // 4

    @property
    def answer_tokens(self) -> int:
        return len(self.answer.ids) // 4

    @property
    def request(self) -> str:
        return _json({"model": _MODEL, "messages": self.messages, "temperature": 1.0, "max_tokens": 256})

    @property
    def response(self) -> str:
        choice = {"index": 0, "message": {"role": "assistant", "content": self.answer.text}, "finish_reason": "stop"}
        usage = {"prompt_tokens": self.prompt_tokens, "completion_tokens": self.answer_tokens}
        return _json({"id": self.response_id, "object": "chat.completion", "model": _MODEL, "choices": [choice], "usage": usage})


@dataclass(frozen=True, slots=True)
class _Place:
    """Ids, time and context that the spans of one rollout share."""

    index: int
    trace: bytes
    ids: Sequence[bytes]
    context: Mapping[str, Value]

    @property
    def started(self) -> int:
        return _EPOCH_NS + self.index * _ROLLOUT_INTERVAL_NS

    @property
    def agent(self) -> dict[str, Value]:
        return {**self.context, semconv.PROCESS_ID: f"agent-{self.index % 8}"}


class Author:
    """Writes rollouts, one after the other, out of one corpus."""

    def __init__(self, seed: int, mix: Mix, ids: Ids) -> None:
        """Write the corpus: words of a Zipf distribution, a token a word."""
        self._mix, self._ids = mix, ids
        self._run = f"run-{seed}"
        self._random = random.Random(seed)
        self._noise = np.random.default_rng(seed)
        vocabulary = [self._word(rank) for rank in range(_VOCABULARY)]
        weights = 1 / np.arange(2, _VOCABULARY + 2, dtype=np.float64)
        self._tokens = self._noise.choice(_VOCABULARY, _CORPUS_TOKENS, p=weights / weights.sum()).astype("<u4")
        words = [vocabulary[token] for token in self._tokens.tolist()]
        self._text = " ".join(words)
        self._starts: list[int] = np.concatenate(([0], np.cumsum([len(word) + 1 for word in words]))).tolist()

    def rollout(self, index: int, name: RolloutName, trace: bytes, ids: Sequence[bytes]) -> ResourceSpans:
        """All spans of one rollout."""
        context = {semconv.RUN_ID: self._run, semconv.ROLLOUT_ID: name.rollout, semconv.ROLLOUT_ATTEMPT: 0, semconv.ROLLOUT_MODE: "train"}
        place = _Place(index, trace, ids, context)
        resource = {**_SDK, "agentlightning.rollout_id": name.rollout, "agentlightning.attempt_id": name.attempt}
        runner, instrumentor, gateway = (ScopeSpans(scope=InstrumentationScope(name=scope, version="0.1.0")) for scope in _SCOPES)
        if self._mix != Mix.ROLLOUTS:
            gateway.spans.extend(self._lone_calls(place))
            scopes = [gateway]
        else:
            question = self._agent_run(place, instrumentor, gateway)
            runner.spans.append(self._root(place))
            ended = place.started + (3 * TURNS + 2) * _STEP_NS
            agent = {**place.agent, semconv.SEQ: 1, "openinference.span.kind": "AGENT", "agent.name": "researcher", "input.value": question}
            instrumentor.spans.append(_span(place, 1, 0, "researcher", (place.started, ended), agent))
            scopes = [runner, instrumentor, gateway]
        return ResourceSpans(resource=Resource(attributes=_attributes(resource)), scope_spans=scopes)

    def _agent_run(self, place: _Place, instrumentor: ScopeSpans, gateway: ScopeSpans) -> str:
        """The turns; what the agent was asked."""
        system, question = self._message(SYSTEM_TOKENS), self._message(QUESTION_TOKENS)
        messages = [{"role": "system", "content": system.text}, {"role": "user", "content": question.text}]
        prompt_ids = system.ids + question.ids
        for turn in range(TURNS):
            llm, call, tool = range(2 + 3 * turn, 5 + 3 * turn)
            at = place.started + (3 * turn + 1) * _STEP_NS
            answer, observation = self._message(ANSWER_TOKENS), self._message(OBSERVATION_TOKENS)
            exchange = _Exchange(messages, prompt_ids, answer, f"chatcmpl-{place.ids[call].hex()}{place.ids[llm].hex()}")
            asked = {**place.agent, semconv.SEQ: llm, **_llm(exchange)}
            instrumentor.spans.append(_span(place, llm, 1, "ChatCompletion", (at, at + 2 * _STEP_NS), asked, Span.SPAN_KIND_CLIENT))
            gateway.spans.append(self._call(place, call, llm, at, place.index * TURNS + turn, exchange))
            used = {**place.agent, semconv.SEQ: tool, **_tool(self._message(ARGUMENT_TOKENS).text, observation.text)}
            failure = "the search timed out" if self._random.random() < 0.05 else ""
            instrumentor.spans.append(_span(place, tool, 1, "search", (at + 2 * _STEP_NS, at + 3 * _STEP_NS), used, failure=failure))
            messages = [*messages, {"role": "assistant", "content": answer.text}, {"role": "user", "content": observation.text}]
            prompt_ids += answer.ids + observation.ids
        return question.text

    def _lone_calls(self, place: _Place) -> list[Span]:
        spans: list[Span] = []
        for number, span_id in enumerate(place.ids):
            prompt, answer = self._message(LONE_PROMPT_TOKENS), self._message(LONE_ANSWER_TOKENS)
            exchange = _Exchange([{"role": "user", "content": prompt.text}], prompt.ids, answer, f"chatcmpl-{span_id.hex()}")
            at = place.started + number * _STEP_NS
            spans.append(self._call(place, number, None, at, place.index * SPANS_A_ROLLOUT + number, exchange))
        return spans

    def _root(self, place: _Place) -> Span:
        ended = place.started + (3 * TURNS + 2) * _STEP_NS
        score = {semconv.EVALUATION_NAME: semconv.REWARD_NAME, semconv.EVALUATION_SCORE: self._random.random()}
        reward = Span.Event(time_unix_nano=ended, name=semconv.EVALUATION_EVENT, attributes=_attributes(score))
        attributes = {
            **place.agent,
            semconv.SEQ: 0,
            semconv.TASK_ID: f"task-{place.index // 8}",
            semconv.GROUP_ID: f"{self._run}-group-{place.index // 8}",
            semconv.GROUP_SIZE: 8,
            semconv.ROLLOUT_CALLS: TURNS,
            semconv.ROLLOUT_FINAL: True,
        }
        return _span(place, 0, None, semconv.ROOT_SPAN_NAME, (place.started, ended), attributes, events=[reward])

    def _call(self, place: _Place, own: int, parent: int | None, at: int, seq: int, exchange: _Exchange) -> Span:
        """Return the span that the gateway's recorder writes of a call (gateway/recorder/record.py)."""
        attributes: dict[str, Value] = {
            semconv.GEN_AI_OPERATION: "chat",
            semconv.GEN_AI_PROVIDER: "vllm",
            semconv.GEN_AI_REQUEST_MODEL: _MODEL,
            semconv.GEN_AI_REQUEST_MAX_TOKENS: 256,
            **place.context,
            semconv.PROCESS_ID: "gateway-0",
            semconv.SEQ: seq,
            **SAMPLING,
            semconv.GEN_AI_RESPONSE_ID: exchange.response_id,
            semconv.GEN_AI_RESPONSE_MODEL: _MODEL,
            semconv.GEN_AI_FINISH_REASONS: ["stop"],
            semconv.GEN_AI_INPUT_TOKENS: exchange.prompt_tokens,
            semconv.GEN_AI_OUTPUT_TOKENS: exchange.answer_tokens,
            **self._token_ids(exchange),
            semconv.RESPONSE_JSON: exchange.response,
            semconv.POLICY_NAME: _MODEL,
            semconv.POLICY_VERSIONS: "[[[0,3]]]",
            semconv.TOKENIZER_HASH: "9f2c1d6ab03e57c4",
            semconv.REQUEST_JSON: exchange.request,
            semconv.HTTP_STATUS: 200,
        }
        if self._mix == Mix.LLM:
            attributes = {name: value for name, value in attributes.items() if name in _LEAN}
        return _span(place, own, parent, f"chat {_MODEL}", (at + _STEP_NS // 3, at + _STEP_NS), attributes, Span.SPAN_KIND_SERVER)

    def _token_ids(self, exchange: _Exchange) -> dict[str, Value]:
        if self._ids == Ids.BYTES:
            logprobs = -self._noise.exponential(0.5, exchange.answer_tokens).astype("<f4")
            return {
                semconv.INPUT_TOKEN_IDS: exchange.prompt_ids,
                semconv.OUTPUT_TOKEN_IDS: exchange.answer.ids,
                semconv.OUTPUT_LOGPROBS: logprobs.tobytes(),
            }
        return {
            "prompt_token_ids": np.frombuffer(exchange.prompt_ids, "<u4").tolist(),
            "response_token_ids": np.frombuffer(exchange.answer.ids, "<u4").tolist(),
        }

    def _message(self, tokens: int) -> _Tokens:
        """A stretch of the corpus that no other message has whole."""
        at = self._random.randrange(_CORPUS_TOKENS - tokens)
        return _Tokens(self._text[self._starts[at] : self._starts[at + tokens] - 1], self._tokens[at : at + tokens].tobytes())

    def _word(self, rank: int) -> str:
        syllables = 1 + (rank > 60) + (rank > 2000)
        return "".join(self._random.choice("bcdfghjklmnprstvwz") + self._random.choice(_VOWELS) for _ in range(syllables))


def _llm(exchange: _Exchange) -> dict[str, Value]:
    """Return the attributes that OpenInference's instrumentor of openai writes of a call."""
    flat: dict[str, Value] = {}
    for number, message in enumerate(exchange.messages):
        flat[f"llm.input_messages.{number}.message.role"] = message["role"]
        flat[f"llm.input_messages.{number}.message.content"] = message["content"]
    return {
        "openinference.span.kind": "LLM",
        "llm.system": "openai",
        "llm.model_name": _MODEL,
        "llm.invocation_parameters": _json({"model": _MODEL, "temperature": 1.0, "max_tokens": 256}),
        "input.mime_type": "application/json",
        "input.value": exchange.request,
        **flat,
        "output.mime_type": "application/json",
        "output.value": exchange.response,
        "llm.output_messages.0.message.role": "assistant",
        "llm.output_messages.0.message.content": exchange.answer.text,
        "llm.token_count.prompt": exchange.prompt_tokens,
        "llm.token_count.completion": exchange.answer_tokens,
        "llm.token_count.total": exchange.prompt_tokens + exchange.answer_tokens,
    }


def _tool(arguments: str, observation: str) -> dict[str, Value]:
    return {
        "openinference.span.kind": "TOOL",
        "tool.name": "search",
        "tool.parameters": _json({"query": arguments}),
        "input.value": arguments,
        "output.value": observation,
    }


def _span(
    place: _Place,
    own: int,
    parent: int | None,
    name: str,
    lasted: tuple[int, int],
    attributes: Mapping[str, Value],
    kind: Span.SpanKind.ValueType = Span.SPAN_KIND_INTERNAL,
    *,
    failure: str = "",
    events: Sequence[Span.Event] = (),
) -> Span:
    return Span(
        trace_id=place.trace,
        span_id=place.ids[own],
        parent_span_id=b"" if parent is None else place.ids[parent],
        name=name,
        kind=kind,
        flags=1,
        start_time_unix_nano=lasted[0],
        end_time_unix_nano=lasted[1],
        attributes=_attributes(attributes),
        events=events,
        status=Status(code=Status.STATUS_CODE_ERROR, message=failure) if failure else Status(code=Status.STATUS_CODE_OK),
    )


def key_value(key: str, value: Value) -> KeyValue:
    """Return an attribute as protobuf's class."""
    return KeyValue.FromString(attribute(key, value))


def _attributes(values: Mapping[str, Value]) -> list[KeyValue]:
    return [key_value(key, value) for key, value in values.items()]


def _json(value: object) -> str:
    return msgspec.json.encode(value).decode()
