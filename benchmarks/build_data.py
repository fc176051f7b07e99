"""Rollouts of an agent that asks, calls a tool, and asks again: as our store's rows, and as the peer's own tracer writes them.

In: a seed, how many rollouts, how many calls each has. Out: `Rollout`s, rows of otel.otel_traces, spans for the peer, and what must come of
them. Invariant: a rollout is decided by the seed and its number alone, and both sides get the same calls, ids and rewards.

A prompt is a system message and a question (200 tokens), then for each turn before it the reply (40 tokens) and the tool's observation
(60). One turn in twenty breaks the prefix: a token of the reply before it has changed, as by a template or a tokeniser that does not
round-trip. Every turn is five of our spans: the framework's step, the client's call, its HTTP request, the gateway's call below that,
the tool. The peer's tracer sees two of them, the call and the tool. Every fourth call is graded on its own, and the last one gets the
rollout's reward.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.uint32]

FIRST_TOKENS, REPLY_TOKENS, OBSERVATION_TOKENS = 200, 40, 60
BREAK_SHARE = 0.05
GRADED_EVERY = 4
GROUP_SIZE = 8
SPANS_A_TURN = 5
OTHER_SPANS = 2
"""The runner's root, and the agent."""
RUN, MODEL, VERSION = "run-0", "policy", 3
COLUMNS = (
    "Timestamp",
    "TraceId",
    "SpanId",
    "ParentSpanId",
    "SpanName",
    "SpanKind",
    "ServiceName",
    "ResourceAttributes",
    "ScopeName",
    "SpanAttributes",
    "Duration",
    "StatusCode",
    "StatusMessage",
    "Events.Timestamp",
    "Events.Name",
    "Events.Attributes",
)
"""Columns of otel.otel_traces, in the order of the values in `Rollout.rows`."""
_BEGIN_NS = 1_767_225_600 * 10**9
"""2026-01-01."""
_STEP_NS = 10**9
_VOCABULARY = 50_000
_WORDS = [
    f"{first}{second}{third}" for first in ("ta", "re", "mi", "so") for second in ("lan", "ver", "dor", "kin") for third in "aeiouysn"
]
_OPENAI = "openinference.instrumentation.openai"
_LANGCHAIN = "openinference.instrumentation.langchain"


@dataclass(frozen=True, slots=True)
class Turn:
    """One call."""

    prompt: Ids
    reply: Ids
    logprobs: NDArray[np.float32]
    grade: float | None
    """Its own reward, beside the rollout's."""
    messages: list[dict[str, str]]
    """Messages whose texts the prompt holds."""
    text: str
    observation: str
    breaks: bool
    """True if the prompt does not begin with the previous turn's prompt and reply."""


@dataclass(frozen=True)
class Rollout:
    """One rollout of one attempt."""

    number: int
    name: str
    trace: str
    turns: list[Turn]
    reward: float

    def rewards(self) -> list[float | None]:
        """Return the reward of each call; the rollout's own reward is added to that of the last call."""
        grades = [turn.grade for turn in self.turns]
        return [*grades[:-1], self.reward + (grades[-1] or 0.0)]

    def span(self, place: int) -> str:
        """The id of a span: 0 the root, 1 the agent, then each turn's."""
        return f"{self.number + 1:08x}{place:08x}"

    def rows(self) -> Iterator[list[Any]]:
        """Rows of otel.otel_traces, in the order of COLUMNS."""
        begin = _BEGIN_NS + self.number * 10**6
        seq = iter(range(10**9))
        end = begin + (3 * len(self.turns) + 2) * _STEP_NS
        named = {
            "spangrad.run.id": RUN,
            "spangrad.rollout.mode": "train",
            "spangrad.rollout.id": self.name,
            "spangrad.rollout.attempt": "0",
        }

        def row(place: int, parent: int | None, name: str, kind: str, scope: str, at: int, lasts: int, own: dict[str, str], **facts: Any):
            service = facts.get("service", "agent")
            process = {"spangrad.process.id": f"{service}-{self.number % 16}", "spangrad.seq": str(facts.get("seq") or next(seq))}
            resource = {"service.name": service, "telemetry.sdk.language": "python"}
            events = facts.get("events", [])
            above = "" if parent is None else self.span(parent)
            span = [at, self.trace, self.span(place), above, name, kind, service, resource, scope, named | process | own, lasts]
            return [*span, facts.get("status", "Ok"), "", [at + lasts for _ in events], ["gen_ai.evaluation.result"] * len(events), events]

        root = {
            "spangrad.task.id": f"task-{self.number // GROUP_SIZE}",
            "spangrad.group.id": f"group-{self.number // GROUP_SIZE}",
            "spangrad.group.size": str(GROUP_SIZE),
            "spangrad.rollout.calls": str(len(self.turns)),
            "spangrad.rollout.final": "true",
        }
        given = [_score(self.reward)]
        yield row(0, None, "rollout", "Internal", "spangrad.runner", begin, end - begin, root, service="spangrad-runner", events=given)
        agent = {"openinference.span.kind": "AGENT", "input.value": self.turns[0].messages[-1]["content"]}
        yield row(1, 0, "researcher", "Internal", _LANGCHAIN, begin + 1000, end - begin - 2000, agent)
        for number, turn in enumerate(self.turns):
            first = OTHER_SPANS + number * SPANS_A_TURN
            at = begin + (3 * number + 1) * _STEP_NS
            step = {"openinference.span.kind": "CHAIN", "metadata": json.dumps({"langgraph_step": 2 * number, "langgraph_node": "model"})}
            yield row(first, 1, "model", "Internal", _LANGCHAIN, at, 2 * _STEP_NS, step)
            graded = [] if turn.grade is None else [_score(turn.grade)]
            yield row(
                first + 1, first, "ChatCompletion", "Internal", _OPENAI, at + 1000, 2 * _STEP_NS - 2000, self._client(turn), events=graded
            )
            http = {
                "http.request.method": "POST",
                "url.full": "http://gateway:8000/v1/chat/completions",
                "http.response.status_code": "200",
            }
            yield row(first + 2, first + 1, "POST", "Client", "opentelemetry.instrumentation.httpx", at + 2000, 2 * _STEP_NS - 4000, http)
            call = self._call(turn, number)
            count = self.number * len(self.turns) + number + 1
            where = {"service": "spangrad-gateway", "status": "Unset", "seq": count}
            yield row(first + 3, first + 2, f"chat {MODEL}", "Server", "spangrad.gateway", at + 3000, 2 * _STEP_NS - 6000, call, **where)
            tool = {
                "openinference.span.kind": "TOOL",
                "tool.name": "search",
                "input.value": turn.text[:60],
                "output.value": turn.observation,
            }
            yield row(first + 4, 1, "search", "Internal", _LANGCHAIN, at + 2 * _STEP_NS + 1000, _STEP_NS // 2, tool)

    def response_id(self, number: int) -> str:
        """The engine's name of a turn's answer."""
        return f"chatcmpl-{self.number:08x}{number:08x}"

    def _client(self, turn: Turn) -> dict[str, str]:
        """Return the attributes that OpenInference's instrumentation of OpenAI's client writes."""
        flat = {f"llm.input_messages.{at}.message.{key}": text for at, one in enumerate(turn.messages) for key, text in one.items()}
        asked = {"model": MODEL, "temperature": 1.0, "max_tokens": 256}
        return {
            "openinference.span.kind": "LLM",
            "llm.system": "openai",
            "llm.model_name": MODEL,
            "llm.invocation_parameters": json.dumps(asked),
            "input.mime_type": "application/json",
            "input.value": json.dumps({"messages": turn.messages, **asked}),
            **flat,
            "output.mime_type": "application/json",
            "llm.output_messages.0.message.role": "assistant",
            "llm.output_messages.0.message.content": turn.text,
            "llm.token_count.prompt": str(len(turn.prompt)),
            "llm.token_count.completion": str(len(turn.reply)),
            "llm.token_count.total": str(len(turn.prompt) + len(turn.reply)),
        }

    def _call(self, turn: Turn, number: int) -> dict[str, str]:
        """Return the attributes that the gateway's recorder writes, without the bodies."""
        return {
            "gen_ai.operation.name": "chat",
            "gen_ai.provider.name": "vllm",
            "gen_ai.request.model": MODEL,
            "gen_ai.request.max_tokens": "256",
            "spangrad.sampling.constrained": "false",
            "gen_ai.request.temperature": "1",
            "gen_ai.request.top_p": "1",
            "gen_ai.request.top_k": "0",
            "spangrad.sampling.min_p": "0",
            "gen_ai.request.presence_penalty": "0",
            "gen_ai.request.frequency_penalty": "0",
            "spangrad.sampling.repetition_penalty": "1",
            "gen_ai.response.id": self.response_id(number),
            "gen_ai.response.model": MODEL,
            "gen_ai.response.finish_reasons": '["stop"]',
            "gen_ai.usage.input_tokens": str(len(turn.prompt)),
            "gen_ai.usage.output_tokens": str(len(turn.reply)),
            "spangrad.policy.name": MODEL,
            "spangrad.policy.versions": f"[[[0,{VERSION}]]]",
            "spangrad.tokenizer.hash": "0123456789abcdef",
            "spangrad.input.token_ids": base64.b64encode(turn.prompt.astype("<u4").tobytes()).decode(),
            "spangrad.output.token_ids": base64.b64encode(turn.reply.astype("<u4").tobytes()).decode(),
            "spangrad.output.logprobs": base64.b64encode(turn.logprobs.astype("<f4").tobytes()).decode(),
            "http.response.status_code": "200",
        }

    def peer_spans(self) -> list[dict[str, Any]]:
        """The same rollout as Agent Lightning's tracer (AgentOps, patched for token ids) writes it: keyword arguments of its Span."""
        spans: list[dict[str, Any]] = []

        def add(place: int, parent: int | None, name: str, first: float, last: float, attributes: dict[str, Any]) -> None:
            above = None if parent is None else self.span(parent)
            own = {"trace_id": self.trace, "span_id": self.span(place), "parent_id": above, "name": name, "attributes": attributes}
            spans.append({"sequence_id": len(spans) + 1, "start_time": first, "end_time": last, **own})

        turns, first, at = len(self.turns), 0, 0.0
        add(0, None, "run.session", 1.0, 2.0 + 3 * turns, {"agentops.span.kind": "session"})
        add(1, 0, "researcher.agent", 1.1, 1.9 + 3 * turns, {"agentops.span.kind": "agent", "operation.name": "researcher"})
        for number, turn in enumerate(self.turns):
            first, at = OTHER_SPANS + number * SPANS_A_TURN, 2.0 + 3 * number
            add(first + 1, 1, "openai.chat.completion", at, at + 1, self._peer_call(turn, number))
            if turn.grade is not None:
                add(first + 2, 1, "agentlightning.annotation", at + 1.1, at + 1.1, _peer_score(turn.grade))
            tool_attributes = {"agentops.span.kind": "tool", "operation.name": "search", "agentops.entity.output": turn.observation}
            add(first + 4, 1, "search.tool", at + 1.2, at + 1.8, tool_attributes)
        add(first + 3, 1, "agentlightning.annotation", at + 1.85, at + 1.85, _peer_score(self.reward))
        return spans

    def _peer_call(self, turn: Turn, number: int) -> dict[str, Any]:
        prompt = {f"gen_ai.prompt.{at}.{key}": text for at, one in enumerate(turn.messages) for key, text in one.items()}
        tokens = zip(_spell(turn.reply), turn.logprobs.tolist(), strict=True)
        content = [{"token": token, "logprob": logprob, "bytes": list(token.encode()), "top_logprobs": []} for token, logprob in tokens]
        return {
            "gen_ai.request.type": "chat",
            "gen_ai.system": "OpenAI",
            "gen_ai.request.model": MODEL,
            "gen_ai.request.temperature": 1.0,
            "gen_ai.request.max_tokens": 256,
            **prompt,
            "gen_ai.response.id": self.response_id(number),
            "gen_ai.response.model": MODEL,
            "gen_ai.usage.prompt_tokens": len(turn.prompt),
            "gen_ai.usage.completion_tokens": len(turn.reply),
            "gen_ai.usage.total_tokens": len(turn.prompt) + len(turn.reply),
            "gen_ai.completion.0.finish_reason": "stop",
            "gen_ai.completion.0.role": "assistant",
            "gen_ai.completion.0.content": turn.text,
            "prompt_token_ids": turn.prompt.tolist(),
            "response_token_ids": turn.reply.tolist(),
            "logprobs.content": json.dumps(content),
        }


@dataclass(frozen=True)
class Workload:
    """Everything that decides the rollouts."""

    seed: int
    rollouts: int
    """A multiple of GROUP_SIZE."""
    calls: int
    """Number of calls of each rollout."""

    @property
    def total(self) -> int:
        """Calls in all."""
        return self.rollouts * self.calls

    def __iter__(self) -> Iterator[Rollout]:
        return (self.rollout(number) for number in range(self.rollouts))

    def rollout(self, number: int) -> Rollout:
        """One of them."""
        random = np.random.default_rng([self.seed, self.calls, number])
        system, question = (self._tokens(random, FIRST_TOKENS // 2) for _ in range(2))
        messages = [{"role": "system", "content": _text(system)}, {"role": "user", "content": _text(question)}]
        prompt, turns = np.concatenate([system, question]), list[Turn]()
        for at in range(self.calls):
            breaks = at > 0 and random.random() < BREAK_SHARE
            if breaks:
                prompt = prompt.copy()
                changed = len(prompt) - OBSERVATION_TOKENS - 1 - int(random.integers(REPLY_TOKENS))
                prompt[changed] = _VOCABULARY  # No token that was sampled, so that the prefix certainly ends.
            reply, observation = self._tokens(random, REPLY_TOKENS), self._tokens(random, OBSERVATION_TOKENS)
            logprobs = -random.exponential(0.5, REPLY_TOKENS).astype(np.float32)
            grade = round(float(random.random()), 3) if at % GRADED_EVERY == GRADED_EVERY - 1 and at < self.calls - 1 else None
            text, seen = _text(reply), _text(observation)
            turns.append(Turn(prompt, reply, logprobs, grade, messages, text, seen, breaks))
            messages = [*messages, {"role": "assistant", "content": text}, {"role": "tool", "content": seen}]
            prompt = np.concatenate([prompt, reply, observation])
        name = random.bytes(16).hex()
        return Rollout(number, name, random.bytes(16).hex(), turns, float(random.random() < 0.5))

    @staticmethod
    def _tokens(random: np.random.Generator, count: int) -> Ids:
        """Frequent ones more often."""
        return (_VOCABULARY ** random.random(count)).astype(np.uint32)


def _text(ids: Ids) -> str:
    return " ".join(_spell(ids))


def _spell(ids: Ids) -> list[str]:
    return [_WORDS[one % len(_WORDS)] for one in ids.tolist()]


def _score(value: float) -> dict[str, str]:
    return {"gen_ai.evaluation.name": "reward", "gen_ai.evaluation.score.value": str(value)}


def _peer_score(value: float) -> dict[str, Any]:
    return {"agentlightning.reward.0.name": "primary", "agentlightning.reward.0.value": value}
