"""Short rollouts as OTLP requests: what the runner, an agent and the gateway send of them, and traces of production beside.

In: a name, a number, how many calls. Out: spans, and the calls that must come of them. Invariant: a rollout is decided by its name and its
number; its calls are sent by the gateway, its tools and its agent by the agent, its root and its stages by the runner, in this order.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, ArrayValue, InstrumentationScope, KeyValue
from opentelemetry.proto.resource.v1.resource_pb2 import Resource
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, ScopeSpans, Span, Status

from benchmarks.rollout_spans import SAMPLING
from spangrad import semconv
from spangrad.types import Mode, Stage, call_id

GROUP_SIZE = 8
MOST_CALLS = 3
PRODUCTION_CALLS = 2
AGENT, TOOL, MODEL = "researcher", "search", "policy"
_PROMPT_TOKENS, _REPLY_TOKENS = 120, 30
_STEP_NS = 10**8
_AGENT_SCOPE = "openinference.instrumentation.langchain"

_Value = str | bool | int | float | bytes | list[str]


@dataclass(frozen=True, slots=True)
class Call:
    """A policy call, as its transition must hold it."""

    call_id: str
    prompt: bytes
    """Little-endian uint32, as are the ids of the response."""
    response: bytes
    logprobs: bytes
    """Little-endian float32."""
    tools: int
    """Number of tools that it caused to run."""

    @property
    def digest(self) -> str:
        """Return a hash of its ids and logprobs."""
        return hashlib.sha256(self.prompt + b"|" + self.response + b"|" + self.logprobs).hexdigest()


class SmallRollout:
    """A rollout of one attempt, or a trace of production, that ends about now."""

    def __init__(self, run: str, number: int, now_ns: int, *, production: bool = False) -> None:
        """Decide on its calls; `now_ns` is the time of its end, in nanoseconds since 1970."""
        seed = hashlib.sha256(f"{run}/{number}/{production}".encode()).digest()
        self.production = production
        self.number = number
        self.name, self.reward = seed[:16].hex(), float(seed[16] % 2)
        self._run, self._trace = run, seed[16:]
        self._random = np.random.default_rng(list(seed[:8]))
        self._begin = now_ns - (2 * MOST_CALLS + 2) * _STEP_NS
        self.count = PRODUCTION_CALLS if production else 1 + number % MOST_CALLS
        ids = [(self._random.random(size) * 30_000).astype("<u4").tobytes() for size in (_PROMPT_TOKENS, _REPLY_TOKENS) * self.count]
        logprobs = [(-self._random.exponential(0.5, _REPLY_TOKENS)).astype("<f4").tobytes() for _ in range(self.count)]
        gateway = [self._span_id(10 + 3 * turn) for turn in range(self.count)]
        self.calls = [
            Call(
                call_id(self._trace.hex(), gateway[turn].hex(), 0), ids[2 * turn], ids[2 * turn + 1], logprobs[turn], turn < self.count - 1
            )
            for turn in range(self.count)
        ]

    def before_root(self) -> list[ResourceSpans]:
        """Return all spans that are sent before the root: of the gateway, of the agent, and the stages of the runner."""
        own: list[Span] = []
        agent = {"openinference.span.kind": "AGENT", "agent.name": AGENT, "input.value": "What is asked of the agent."}
        for turn, call in enumerate(self.calls):
            if self.production:
                own.append(self._span(11 + 3 * turn, 1, "ChatCompletion", (1 + 2 * turn, 2 + 2 * turn), _client()))
            if call.tools:
                used = {"openinference.span.kind": "TOOL", "tool.name": TOOL, "input.value": "a query", "output.value": "a result"}
                own.append(self._span(12 + 3 * turn, 1, TOOL, (2 + 2 * turn, 3 + 2 * turn), used))
        own.append(self._span(1, None if self.production else 0, AGENT, (0, 2 * self.count + 1), agent))
        stages = [self._span(2 + at, 0, stage, (at, at + 1), {}) for at, stage in enumerate(Stage)]
        parts = [_resource("spangrad-gateway", semconv.GATEWAY_SCOPE, self._gateway_spans()), _resource("agent", _AGENT_SCOPE, own)]
        return parts if self.production else [*parts, _resource("spangrad-runner", semconv.RUNNER_SCOPE, stages)]

    def root(self) -> ResourceSpans:
        """Return the root span, which ends the rollout."""
        attributes = {
            semconv.TASK_ID: f"task-{self.number // GROUP_SIZE}",
            semconv.GROUP_ID: f"{self._run}-{self.number // GROUP_SIZE}",
            semconv.GROUP_SIZE: GROUP_SIZE,
            semconv.ROLLOUT_CALLS: self.count,
            semconv.ROLLOUT_FINAL: True,
        }
        span = self._span(0, None, semconv.ROOT_SPAN_NAME, (0, 2 * self.count + 2), attributes)
        score: dict[str, _Value] = {semconv.EVALUATION_NAME: semconv.REWARD_NAME, semconv.EVALUATION_SCORE: self.reward}
        span.events.append(Span.Event(time_unix_nano=span.end_time_unix_nano, name=semconv.EVALUATION_EVENT, attributes=_attributes(score)))
        return _resource("spangrad-runner", semconv.RUNNER_SCOPE, [span])

    def _gateway_spans(self) -> list[Span]:
        spans: list[Span] = []
        for turn, call in enumerate(self.calls):
            attributes: dict[str, _Value] = {
                semconv.GEN_AI_OPERATION: "chat",
                semconv.GEN_AI_PROVIDER: "vllm",
                semconv.GEN_AI_REQUEST_MODEL: MODEL,
                semconv.GEN_AI_RESPONSE_MODEL: MODEL,
                **SAMPLING,
                semconv.GEN_AI_RESPONSE_ID: f"chatcmpl-{self.name[:8]}-{turn}",
                semconv.GEN_AI_FINISH_REASONS: ["stop"],
                semconv.GEN_AI_INPUT_TOKENS: _PROMPT_TOKENS,
                semconv.GEN_AI_OUTPUT_TOKENS: _REPLY_TOKENS,
                semconv.INPUT_TOKEN_IDS: call.prompt,
                semconv.OUTPUT_TOKEN_IDS: call.response,
                semconv.OUTPUT_LOGPROBS: call.logprobs,
                semconv.POLICY_NAME: MODEL,
                semconv.POLICY_VERSIONS: "[[[0,3]]]",
                semconv.TOKENIZER_HASH: "9f2c1d6ab03e57c4",
                semconv.REQUEST_JSON: '{"messages": [{"role": "user", "content": "' + "What is asked. " * 40 + '"}]}',
                semconv.RESPONSE_JSON: '{"choices": [{"message": {"content": "' + "What is answered. " * 10 + '"}}]}',
                semconv.HTTP_STATUS: 200,
            }
            parent = 11 + 3 * turn if self.production else 1
            spans.append(self._span(10 + 3 * turn, parent, f"chat {MODEL}", (1 + 2 * turn, 2 + 2 * turn), attributes))
        return spans

    def _span(self, own: int, parent: int | None, name: str, steps: tuple[int, int], attributes: Mapping[str, _Value]) -> Span:
        """Return a span from one step of the rollout to another."""
        named: dict[str, _Value] = {semconv.PROCESS_ID: f"process-{self.number % 4}", semconv.SEQ: 100 * self.number + own}
        if not self.production:
            named |= {
                semconv.RUN_ID: self._run,
                semconv.ROLLOUT_ID: self.name,
                semconv.ROLLOUT_ATTEMPT: 0,
                semconv.ROLLOUT_MODE: Mode.TRAIN,
            }
        return Span(
            trace_id=self._trace,
            span_id=self._span_id(own),
            parent_span_id=b"" if parent is None else self._span_id(parent),
            name=name,
            start_time_unix_nano=self._begin + steps[0] * _STEP_NS,
            end_time_unix_nano=self._begin + steps[1] * _STEP_NS,
            attributes=_attributes({**named, **attributes}),
            status=Status(code=Status.STATUS_CODE_OK),
        )

    def _span_id(self, own: int) -> bytes:
        return hashlib.sha256(self._trace + bytes([own])).digest()[:8]


def request(parts: Iterable[ResourceSpans]) -> bytes:
    """Return the body of an OTLP request."""
    return ExportTraceServiceRequest(resource_spans=parts).SerializeToString()


def _client() -> dict[str, _Value]:
    return {
        "openinference.span.kind": "LLM",
        "llm.model_name": MODEL,
        "llm.token_count.prompt": _PROMPT_TOKENS,
        "llm.token_count.completion": _REPLY_TOKENS,
    }


def _resource(service: str, scope: str, spans: Sequence[Span]) -> ResourceSpans:
    resource = Resource(attributes=_attributes({"service.name": service, "telemetry.sdk.language": "python"}))
    return ResourceSpans(resource=resource, scope_spans=[ScopeSpans(scope=InstrumentationScope(name=scope), spans=spans)])


def _attributes(values: Mapping[str, _Value]) -> list[KeyValue]:
    return [KeyValue(key=key, value=_any_value(value)) for key, value in values.items()]


def _any_value(value: _Value) -> AnyValue:
    match value:
        # bool before int: True is an int.
        case bool():
            return AnyValue(bool_value=value)
        case int():
            return AnyValue(int_value=value)
        case float():
            return AnyValue(double_value=value)
        case bytes():
            return AnyValue(bytes_value=value)
        case str():
            return AnyValue(string_value=value)
        case _:
            return AnyValue(array_value=ArrayValue(values=[_any_value(item) for item in value]))
