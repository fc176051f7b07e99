"""Seeded rollouts as OTLP bodies of every size, and what a store must hold once they are acknowledged.

In: a seed. Out: `Body`s, as many as wanted. Invariant: every id is new; every span and record
carries its own id as an attribute, and a call's token ids follow from its span's, so that a value that strayed to a neighbour is seen.
"""

from __future__ import annotations

import base64
import gzip
import json
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

from google.protobuf import json_format
from google.protobuf.message import Message
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, InstrumentationScope, KeyValue
from opentelemetry.proto.logs.v1.logs_pb2 import LogRecord, ResourceLogs, ScopeLogs
from opentelemetry.proto.resource.v1.resource_pb2 import Resource
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, ScopeSpans, Span

from benchmarks.rollout_spans import key_value
from gateway.recorder.record import SAMPLING_DEFAULTS
from spangrad import semconv
from spangrad.types import call_id

PROTOBUF, JSON = "application/x-protobuf", "application/json"
OWN_ID = "load.id"
_EPOCH_NS = 1_767_614_400_000_000_000
_RUNNER, _AGENT, _GATEWAY = "spangrad.runner", "agent", semconv.GATEWAY_SCOPE
_TURNS = 2
SPANS_A_ROLLOUT = 2 + 2 * _TURNS
_SIZES = (1, 1, 1, 1, 1, 6, 6, 100, 100, 100, 100, 1020)
"""Spans a body, each as likely: one span, one rollout, a batch, and what the engine decodes by itself."""

Call = tuple[list[int], list[int], list[float]]
"""Token ids of prompt and response, and logprobs."""


@dataclass(frozen=True, slots=True)
class Held:
    """Rows that a store must hold of one body, or of several."""

    spans: frozenset[str] = frozenset()
    """Ids."""
    rollouts: frozenset[str] = frozenset()
    """Those whose root is here."""
    calls: Mapping[str, Call] = field(default_factory=dict)
    """Calls by call id."""
    records: frozenset[str] = frozenset()
    """Log records by their own ids."""
    evaluations: frozenset[str] = frozenset()
    """The spans that were judged: by an event on them, or by a log record, which puts `log ` before the id."""

    @staticmethod
    def of(parts: Sequence[Held]) -> Held:
        """All of them together."""
        calls: dict[str, Call] = {}
        for part in parts:
            calls.update(part.calls)
        together = {
            name: frozenset[str]().union(*(getattr(part, name) for part in parts))
            for name in ("spans", "rollouts", "records", "evaluations")
        }
        return Held(calls=calls, **together)


@dataclass(frozen=True, slots=True)
class Body:
    """One request."""

    signal: str
    """traces or logs."""
    plain: bytes
    """Request as protobuf, not packed: the body that gRPC sends."""
    content: bytes
    """Request as HTTP sends it: protobuf, packed or not, or JSON."""
    headers: Mapping[str, str]
    held: Held


class Rollouts:
    """Rollouts of one run."""

    def __init__(self, seed: int, run: str) -> None:
        self._random = Random(seed)
        self._run = run
        self._rollouts = 0

    def bodies(self, enough: Callable[[], bool]) -> Iterator[Body]:
        """Bodies of any size and form, of whole rollouts; the spans of one may come in several, in any order."""
        while not enough():
            size = self._random.choice(_SIZES)
            rollouts = [self.rollout() for _ in range(max(1, size // SPANS_A_ROLLOUT))]
            spans = [span for rollout in rollouts for span in rollout[0]]
            self._random.shuffle(spans)
            pieces = [spans[at : at + size] for at in range(0, len(spans), size)]
            for piece in pieces:
                yield self.traces(piece)
            yield self.logs([record for rollout in rollouts for record in rollout[1]])

    def rollout(self) -> tuple[list[tuple[str, Span]], list[LogRecord]]:
        """One rollout: its spans, each with its scope, and two log records, one of which judges it."""
        self._rollouts += 1
        trace, start = self._random.randbytes(16), _EPOCH_NS + self._rollouts * 10**9
        name = f"{self._run}-{self._rollouts}"
        counted = iter(range(1000))

        def span(scope: str, title: str, parent: bytes, **more: Any) -> Span:
            own = self._random.randbytes(8)
            at = next(counted)
            attributes = [
                *(key_value(semconv.RUN_ID, self._run), key_value(semconv.ROLLOUT_ID, name), key_value(semconv.ROLLOUT_MODE, "train")),
                *(
                    key_value(semconv.ROLLOUT_ATTEMPT, 0),
                    key_value(semconv.PROCESS_ID, scope),
                    key_value(semconv.SEQ, at),
                    key_value(OWN_ID, own.hex()),
                ),
                *(key_value(key, value) for key, value in more.items()),
            ]
            added = Span(trace_id=trace, span_id=own, parent_span_id=parent, name=title, attributes=attributes)
            added.start_time_unix_nano = start + at * 10**6
            added.end_time_unix_nano = added.start_time_unix_nano + 500
            spans.append((scope, added))
            return added

        spans: list[tuple[str, Span]] = []
        facts = {semconv.TASK_ID: "t", semconv.GROUP_ID: name, semconv.GROUP_SIZE: 1, semconv.ROLLOUT_CALLS: _TURNS}
        root = span(_RUNNER, semconv.ROOT_SPAN_NAME, b"", **facts, **{semconv.ROLLOUT_FINAL: True, semconv.ROLLOUT_FAILURE: ""})
        score = [key_value(semconv.EVALUATION_NAME, semconv.REWARD_NAME), key_value(semconv.EVALUATION_SCORE, 1.0)]
        root.events.add(name=semconv.EVALUATION_EVENT, time_unix_nano=root.end_time_unix_nano, attributes=score)
        agent = span(_AGENT, "agent", root.span_id)
        for turn in range(_TURNS):
            # One call of two choices, the others of one.
            own = span(_GATEWAY, "chat policy", agent.span_id, **_said(turn == 0))
            own.attributes.extend(_ids(own.span_id, 2 if turn == 0 else 1))
            span(_AGENT, "tool", agent.span_id, **{"tool.name": "search", "output.value": "x" * self._random.randrange(400)})
        named = [key_value(semconv.RUN_ID, self._run), key_value(semconv.ROLLOUT_ID, name), key_value(semconv.ROLLOUT_MODE, "train")]
        judged = [key_value(semconv.EVALUATION_NAME, "quality"), key_value(semconv.EVALUATION_SCORE, 0.5)]
        records = [
            LogRecord(
                time_unix_nano=start,
                trace_id=trace,
                span_id=root.span_id,
                event_name=event,
                body=AnyValue(string_value=f"record of {name}"),
                attributes=[*named, *more, key_value(OWN_ID, f"{event} {root.span_id.hex()}")],
            )
            for event, more in ((semconv.EVALUATION_EVENT, judged), ("note", []))
        ]
        return spans, records

    def traces(self, spans: Sequence[tuple[str, Span]]) -> Body:
        """A request with these spans."""
        scopes: dict[str, ScopeSpans] = {}
        for scope, span in spans:
            scopes.setdefault(scope, ScopeSpans(scope=InstrumentationScope(name=scope))).spans.append(span)
        resource = Resource(attributes=[key_value("service.name", "load")])
        request = ExportTraceServiceRequest(resource_spans=[ResourceSpans(resource=resource, scope_spans=list(scopes.values()))])
        alone = [span for _, span in spans]
        held = Held(
            spans=frozenset(span.span_id.hex() for span in alone),
            rollouts=frozenset(_rollout_of(span) for span in alone if span.name == semconv.ROOT_SPAN_NAME),
            calls={key: value for scope, span in spans if scope == _GATEWAY for key, value in expected_calls(span).items()},
            evaluations=frozenset(span.span_id.hex() for span in alone if span.events),
        )
        return self._body("traces", request, held)

    def logs(self, records: Sequence[LogRecord]) -> Body:
        """A request with these log records."""
        scope = ScopeLogs(scope=InstrumentationScope(name="judge"), log_records=records)
        request = ExportLogsServiceRequest(resource_logs=[ResourceLogs(scope_logs=[scope])])
        held = Held(
            records=frozenset(
                next(attribute.value.string_value for attribute in record.attributes if attribute.key == OWN_ID) for record in records
            ),
            evaluations=frozenset(f"log {record.span_id.hex()}" for record in records if record.event_name == semconv.EVALUATION_EVENT),
        )
        return self._body("logs", request, held)

    def _body(self, signal: str, request: ExportTraceServiceRequest | ExportLogsServiceRequest, held: Held) -> Body:
        plain = request.SerializeToString()
        kind, drawn = PROTOBUF, self._random.random()
        content, headers = plain, dict[str, str]()
        if drawn < 0.1:
            kind, content = JSON, otlp_json(request)
        elif drawn < 0.3:
            content, headers = gzip.compress(plain, 1), {"Content-Encoding": "gzip"}
        return Body(signal, plain, content, {"Content-Type": kind, **headers}, held)


def expected_calls(span: Span) -> dict[str, Call]:
    """Return the calls that the store must hold of a gateway's span, by call id."""
    lengths = next((attribute.value.array_value.values for attribute in span.attributes if attribute.key == semconv.OUTPUT_LENGTHS), ())
    trace, own = span.trace_id.hex(), span.span_id.hex()
    return {call_id(trace, own, choice): _call(span.span_id, choice) for choice in range(max(1, len(lengths)))}


def _call(span_id: bytes, choice: int) -> Call:
    high, low = struct.unpack(">II", span_id)
    return [high, low, 7], [low, choice], [-0.5, -float(choice)]


def _ids(span_id: bytes, choices: int) -> Iterator[KeyValue]:
    calls = [_call(span_id, choice) for choice in range(choices)]
    yield key_value(semconv.INPUT_TOKEN_IDS, struct.pack("<3I", *calls[0][0]))
    yield key_value(semconv.OUTPUT_TOKEN_IDS, b"".join(struct.pack("<2I", *call[1]) for call in calls))
    yield key_value(semconv.OUTPUT_LOGPROBS, b"".join(struct.pack("<2f", *call[2]) for call in calls))
    if choices > 1:
        yield key_value(semconv.OUTPUT_LENGTHS, [2] * choices)


def _said(two: bool) -> dict[str, Any]:
    return {
        semconv.POLICY_NAME: "policy",
        semconv.POLICY_VERSIONS: "[[[0,3]],[[0,3]]]" if two else "[[[0,3]]]",
        semconv.TOKENIZER_HASH: "tok",
        **dict(SAMPLING_DEFAULTS.values()),
        semconv.SAMPLING_CONSTRAINED: False,
        semconv.GEN_AI_REQUEST_MODEL: "policy",
        semconv.GEN_AI_RESPONSE_ID: "id",
        semconv.GEN_AI_FINISH_REASONS: ["stop", "stop"] if two else ["stop"],
        semconv.HTTP_STATUS: 200,
    }


def _rollout_of(span: Span) -> str:
    return next(attribute.value.string_value for attribute in span.attributes if attribute.key == semconv.ROLLOUT_ID)


def otlp_json(request: Message) -> bytes:
    """OTLP/JSON, which writes ids in hex."""
    return json.dumps(_hex_ids(json_format.MessageToDict(request))).encode()


def _hex_ids(node: Any) -> Any:
    if isinstance(node, dict):
        return {
            key: base64.b64decode(value).hex() if key in {"traceId", "spanId", "parentSpanId"} else _hex_ids(value)
            for key, value in node.items()
        }
    return [_hex_ids(child) for child in node] if isinstance(node, list) else node
