"""Rollouts as the spans that runner, agent and gateway would send of them.

In: sampled rollouts. Out: bodies of OTLP requests. Invariant: the spans hold nothing that those three would not write; of a rollout's worth
they hold only its evaluations, since credit is assigned by the trainer.

A rollout is the runner's root, a span of each agent, and three spans a call: the client's, the gateway's below it, and the tool's. A graded
call's evaluation stands on the client's span, a rollout's reward on the root. Requests and responses as JSON are left out.
"""

from __future__ import annotations

import random
import struct
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import count
from typing import Any, Protocol

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import InstrumentationScope, KeyValue
from opentelemetry.proto.resource.v1.resource_pb2 import Resource
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, ScopeSpans, Span, Status

from benchmarks.credit_sampling import Call, Sampled
from benchmarks.credit_tasks import ERROR, RESPELLED, WORDS, Turn
from benchmarks.rollout_spans import key_value
from gateway.recorder.record import PROVIDER, SAMPLING_DEFAULTS
from spangrad import semconv
from spangrad.types import Mode

_ROLLOUTS_A_BODY = 64
_RUNNER, _CLIENT, _FRAMEWORK = "spangrad.runner", "openinference.instrumentation.openai", "openinference.instrumentation.langchain"
_SERVICES = {_RUNNER: "spangrad-runner", _CLIENT: "agent", _FRAMEWORK: "agent", semconv.GATEWAY_SCOPE: "spangrad-gateway"}
_TICK_NS = 1000
_CANONICAL = {i: WORDS.index(word.removeprefix(RESPELLED)) for i, word in enumerate(WORDS)}


class Graded(Protocol):
    """Properties of a task that spans depend on."""

    @property
    def group(self) -> int:
        """Rollouts that share a baseline."""
        ...

    @property
    def final(self) -> bool:
        """True if a rollout has a reward at its end: its success."""
        ...

    def success(self, goal: Sequence[str], turns: Sequence[Turn]) -> float:
        """Return the share of a rollout's task that was done, from 0 to 1."""
        ...


@dataclass(frozen=True, slots=True)
class Served:
    """Policy version that answers an agent."""

    policy: str
    version: int
    tokenizer_hash: str
    retokenized: bool = False
    """True if the spans hold the ids of the reply's text in place of the sampled ids."""


class Author:
    """Writes the spans of one run."""

    def __init__(self, run_id: str, task: Graded, seed: int) -> None:
        self._run = run_id
        self._task = task
        self._random = random.Random(f"{run_id} {seed}")
        self._seq = count()

    def bodies(self, rollouts: Sequence[Sampled], step: int, served: Mapping[str, Served]) -> Iterator[bytes]:
        """Yield bodies of a step's rollouts, several whole ones in each; `served` is the policy version of each agent."""
        for first in range(0, len(rollouts), _ROLLOUTS_A_BODY):
            scopes = {name: ScopeSpans(scope=InstrumentationScope(name=name)) for name in _SERVICES}
            for place in range(first, min(first + _ROLLOUTS_A_BODY, len(rollouts))):
                _Rollout(self._run, self._task, rollouts[place], f"{step}-{place}", step, self._random, self._seq, scopes).write(served)
            yield ExportTraceServiceRequest(
                resource_spans=[
                    ResourceSpans(resource=Resource(attributes=[key_value("service.name", _SERVICES[name])]), scope_spans=[spans])
                    for name, spans in scopes.items()
                ]
            ).SerializeToString()


@dataclass(slots=True)
class _Rollout:
    """Writer of one rollout's spans."""

    run: str
    task: Graded
    sampled: Sampled
    name: str
    step: int
    random: random.Random
    seq: Iterator[int]
    scopes: Mapping[str, ScopeSpans]

    def write(self, served: Mapping[str, Served]) -> None:
        trace = self.random.randbytes(16)
        begun = time.time_ns()
        named = [
            key_value(semconv.RUN_ID, self.run),
            key_value(semconv.ROLLOUT_ID, f"{self.run}-{self.name}"),
            key_value(semconv.ROLLOUT_MODE, Mode.TRAIN.value),
            key_value(semconv.ROLLOUT_ATTEMPT, 0),
        ]
        calls, ticks = self.sampled.calls, 4 * len(self.sampled.calls) + 2

        def span(scope: str, title: str, parent: bytes, at: int, lasts: int, own: Iterable[KeyValue], kind: Any = Span.SPAN_KIND_INTERNAL):
            added = self.scopes[scope].spans.add(
                trace_id=trace,
                span_id=self.random.randbytes(8),
                parent_span_id=parent,
                name=title,
                kind=kind,
                start_time_unix_nano=begun + at * _TICK_NS,
                end_time_unix_nano=begun + (at + lasts) * _TICK_NS,
                attributes=named,
            )
            # One process of each kind writes everything of a run, and counts.
            added.attributes.append(key_value(semconv.SEQ, next(self.seq)))
            added.attributes.extend([_constant(semconv.PROCESS_ID, f"{_SERVICES[scope]}-{self.run}"), *own])
            return added

        root = span(_RUNNER, semconv.ROOT_SPAN_NAME, b"", 0, ticks, self._root(len(calls)))
        if self.task.final:
            _evaluate(root, semconv.REWARD_NAME, self.task.success(self.sampled.goal, self.sampled.turns()))
        kind = semconv.OPENINFERENCE_KIND
        agents: dict[str, Span] = {}
        for number, call in enumerate(calls):
            at, turn, served_by = 4 * number + 2, call.turn, served[call.agent]
            if call.agent not in agents:
                named_agent = (_constant(kind, "AGENT"), _constant(semconv.OPENINFERENCE_AGENT_NAME, call.agent))
                agents[call.agent] = span(_FRAMEWORK, call.agent, root.span_id, at - 1, ticks - at, named_agent)
            agent = agents[call.agent]
            of_client = (_constant(kind, "LLM"), _constant("llm.model_name", served_by.policy))
            client = span(_CLIENT, "ChatCompletion", agent.span_id, at, 2, of_client)
            client.status.CopyFrom(Status(code=Status.STATUS_CODE_OK))
            if turn.grade is not None:
                _evaluate(client, semconv.REWARD_NAME, turn.grade)
            span(
                *(semconv.GATEWAY_SCOPE, f"chat {served_by.policy}", client.span_id, at, 1),
                *(_answer(call, served_by), Span.SPAN_KIND_SERVER),
            )
            if turn.tool is not None:
                facts = {kind: "TOOL", semconv.OPENINFERENCE_TOOL_NAME: turn.tool, semconv.OPENINFERENCE_OUTPUT: turn.state.status}
                of_tool = [_constant(key, value) for key, value in facts.items()]
                tool = span(_FRAMEWORK, turn.tool, agent.span_id, at + 3, 1, of_tool)
                failed = turn.state.status == ERROR
                tool.status.CopyFrom(Status(code=Status.STATUS_CODE_ERROR if failed else Status.STATUS_CODE_OK))

    def _root(self, calls: int) -> list[KeyValue]:
        attributes = {
            semconv.TASK_ID: " ".join(self.sampled.goal),
            semconv.GROUP_ID: f"{self.step}-{self.sampled.group}",
            semconv.GROUP_SIZE: self.task.group,
            semconv.ROLLOUT_CALLS: calls,
            semconv.ROLLOUT_FINAL: True,
        }
        return [key_value(key, value) for key, value in attributes.items()]


def _evaluate(span: Span, name: str, value: float) -> None:
    attributes = [key_value(semconv.EVALUATION_NAME, name), key_value(semconv.EVALUATION_SCORE, float(value))]
    span.events.add(name=semconv.EVALUATION_EVENT, time_unix_nano=span.end_time_unix_nano, attributes=attributes)


def _answer(call: Call, served: Served) -> list[KeyValue]:
    """Return the attributes that the gateway writes of an answered call."""
    reply = [_CANONICAL[token] for token in call.reply] if served.retokenized else call.reply
    own = {
        semconv.GEN_AI_INPUT_TOKENS: len(call.prompt),
        semconv.GEN_AI_OUTPUT_TOKENS: len(reply),
        semconv.INPUT_TOKEN_IDS: struct.pack(f"<{len(call.prompt)}I", *call.prompt),
        semconv.OUTPUT_TOKEN_IDS: struct.pack(f"<{len(reply)}I", *reply),
        semconv.OUTPUT_LOGPROBS: struct.pack(f"<{len(call.logprobs)}f", *call.logprobs),
    }
    return [*_every_answer(served), *(key_value(key, value) for key, value in own.items())]


@lru_cache(maxsize=8)
def _every_answer(served: Served) -> list[KeyValue]:
    attributes = {
        semconv.GEN_AI_OPERATION: "chat",
        semconv.GEN_AI_PROVIDER: PROVIDER,
        semconv.GEN_AI_REQUEST_MODEL: served.policy,
        semconv.SAMPLING_CONSTRAINED: False,
        **dict(SAMPLING_DEFAULTS.values()),
        semconv.GEN_AI_RESPONSE_MODEL: served.policy,
        semconv.GEN_AI_FINISH_REASONS: ["stop"],
        semconv.POLICY_NAME: served.policy,
        semconv.POLICY_VERSIONS: f"[[[0,{served.version}]]]",
        semconv.TOKENIZER_HASH: served.tokenizer_hash,
        semconv.HTTP_STATUS: 200,
    }
    return [key_value(key, value) for key, value in attributes.items()]


@lru_cache(maxsize=1024)
def _constant(key: str, value: str) -> KeyValue:
    """An attribute that many spans have: made once."""
    return key_value(key, value)
