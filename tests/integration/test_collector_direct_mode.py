"""The table `calls` in direct mode: what the store makes of answers that agents' own spans keep, sound and hostile ones."""

from __future__ import annotations

import json
import uuid
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, InstrumentationScope, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, ScopeSpans, Span, Status

from spangrad.http.otlp_http import Poster
from spangrad.settings import StoreSettings
from spangrad.store.clickhouse import connect
from tests.support import gateways
from tests.support.gateways import COMPLETION, FIELD, GENERATIONS
from transition_builder.dialects.conventions.openinference import OPENAI_SCOPE

CHOICE: dict[str, Any] = {**gateways.CHOICE, "message": {"content": "ab"}}
ANSWER: dict[str, Any] = {"id": "c", "model": "m", "prompt_token_ids": [1, 70000], "choices": [CHOICE], "spangrad": FIELD}
NO_CALLS: list[Any] = []


def span(trace: bytes, output: str, *, scope: str = OPENAI_SCOPE, status: int = 1, **attributes: str) -> bytes:
    """An export request with one openai-level span."""
    values = {"openinference.span.kind": "LLM", "output.value": output, **attributes}
    sent = Span(trace_id=trace, span_id=b"\1" * 8, name="ChatCompletion", start_time_unix_nano=1_700_000_000_000_000_000)
    sent.attributes.extend(KeyValue(key=name, value=AnyValue(string_value=value)) for name, value in values.items())
    sent.status.CopyFrom(Status(code=status))  # pyright: ignore[reportArgumentType]
    scoped = ScopeSpans(scope=InstrumentationScope(name=scope), spans=[sent])
    return ExportTraceServiceRequest(resource_spans=[ResourceSpans(scope_spans=[scoped])]).SerializeToString()


def stored(store: StoreSettings, body: bytes, trace: bytes, columns: str) -> list[tuple[Any, ...]]:
    """The calls of a trace, once its span is committed."""
    assert Poster(f"{store.otlp_endpoint}/v1/traces", {}, None)(body) == 0
    client = connect(store)
    assert client.query(
        "SELECT count() FROM spangrad.rollout_spans WHERE RowKind = 'span' AND TraceId = {t:String}", {"t": trace.hex()}
    ).result_rows == [(1,)]
    asked = f"SELECT {columns} FROM spangrad.calls WHERE TraceId = {{t:String}} ORDER BY Choice"
    return [tuple(row) for row in client.query(asked, {"t": trace.hex()}).result_rows]


def test_an_answer_is_a_row_a_choice(store: StoreSettings) -> None:
    trace = uuid.uuid4().bytes
    other = {**CHOICE, "index": 1, "token_ids": [7], "finish_reason": None, "logprobs": None}
    asked = json.dumps({"model": "m", "temperature": 0.9, "top_p": 0.5})  # of what the client asks nothing is read
    of_rollout = {"spangrad.rollout.id": "plain-view", "spangrad.rollout.attempt": "2", "spangrad.run.id": "r", "spangrad.seq": "9"}
    body = span(trace, json.dumps({**ANSWER, "choices": [CHOICE, other]}), **{"llm.invocation_parameters": asked}, **of_rollout)
    columns = (
        "RunId, RolloutKey, RolloutKeySource, Attempt, Seq, Choice, Policy, `Versions.Start`, `Versions.Version`, TokenizerHash,"
        " Model, ResponseId, IdsSource, PromptIds, ResponseIds, Logprobs, Temperature, TopK, TopP, Constrained, FinishReason, Aborted"
    )
    call = ("r", "plain-view", "rollout", 2, 9)
    of_answer = ("tok", "m", "c", "agent", [1, 70000])
    sampling = (0.5, 3, 1.0, True)
    assert stored(store, body, trace, columns) == [
        (*call, 0, "p", [0, 1], [3, 4], *of_answer, [4, 2**32 - 1], [-0.5, -1.25], *sampling, "stop", False),
        (*call, 1, "p", [0], [4], *of_answer, [7], [], *sampling, "", True),
    ]


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ({"choices": [COMPLETION, {**COMPLETION, "index": 1}]}, [(place, [7], [8, 9], [-0.5, -0.25], "length", False) for place in (0, 1)]),
        (
            {"output": [], "spangrad": {**FIELD, "generations": GENERATIONS}},
            [(0, [1, 2], [3], [-0.5], "stop", False), (1, [1, 2, 3], [9], [-0.25], "", True)],
        ),
        ({"spangrad": {**FIELD, "generations": [GENERATIONS[0]] * 1025}}, NO_CALLS),
    ],
    ids=["completions", "responses", "too many"],
)
def test_completions_and_responses_are_rows_as_well(store: StoreSettings, answer: dict[str, Any], expected: list[Any]) -> None:
    columns = "Choice, PromptIds, ResponseIds, Logprobs, FinishReason, Aborted"
    whole = json.dumps({"id": "c", "model": "m", "spangrad": FIELD, **answer})
    for scope in (OPENAI_SCOPE, "openinference.instrumentation.anthropic"):
        trace = uuid.uuid4().bytes
        assert stored(store, span(trace, whole, scope=scope), trace, columns) == expected


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        (json.dumps(ANSWER), [([1, 70000], [4, 2**32 - 1], [0, 1], [3, 4], 0.5)]),
        (json.dumps({**ANSWER, "spangrad": {"policy": "p"}}), [([1, 70000], [4, 2**32 - 1], [], [], None)]),
        (json.dumps({**ANSWER, "spangrad": "text"}), [([1, 70000], [4, 2**32 - 1], [], [], None)]),
        (json.dumps({**ANSWER, "spangrad": {**FIELD, "versions": {"x": 1}}}), [([1, 70000], [4, 2**32 - 1], [], [], 0.5)]),
        (json.dumps({**ANSWER, "spangrad": {**FIELD, "versions": [[]]}}), [([1, 70000], [4, 2**32 - 1], [], [], 0.5)]),
        (json.dumps({**ANSWER, "spangrad": {**FIELD, "sampling": "hot"}}), [([1, 70000], [4, 2**32 - 1], [0, 1], [3, 4], None)]),
        (json.dumps({**ANSWER, "prompt_token_ids": None}), [([], [4, 2**32 - 1], [0, 1], [3, 4], 0.5)]),
        (json.dumps({**ANSWER, "choices": [{}] * 1024}), NO_CALLS),
        (json.dumps({**ANSWER, "choices": [CHOICE] * 1025}), NO_CALLS),
        (json.dumps({**ANSWER, "choices": [CHOICE] * 100, "prompt_token_ids": [1] * 2**20}), NO_CALLS),
        (json.dumps({**ANSWER, "choices": 5}), NO_CALLS),
        (json.dumps(ANSWER)[:-9], NO_CALLS),
        ('the word "spangrad"', NO_CALLS),
        (json.dumps({name: value for name, value in ANSWER.items() if name != "spangrad"}), NO_CALLS),
        ("", NO_CALLS),
    ],
    ids=[
        "sound",
        "a cut stream",
        "a strange field",
        "strange versions",
        "no versions",
        "strange sampling",
        "no prompt",
        "empty choices",
        "too many choices",
        "a long prompt times many choices",
        "no choices",
        "half an answer",
        "no answer",
        "an answer that the gateway has stripped",
        "nothing",
    ],
)
def test_whatever_a_span_says_the_insert_does_not_fail(store: StoreSettings, output: str, expected: list[Any]) -> None:
    trace = uuid.uuid4().bytes
    found = stored(store, span(trace, output), trace, "PromptIds, ResponseIds, `Versions.Start`, `Versions.Version`, Temperature")
    assert found == expected


def test_failed_calls_and_other_spans_are_none(store: StoreSettings) -> None:
    for other in ({"status": 2}, {"scope": "openinference.instrumentation.langchain"}, {"openinference.span.kind": "EMBEDDING"}):
        trace = uuid.uuid4().bytes
        assert stored(store, span(trace, json.dumps(ANSWER), **other), trace, "*") == []  # type: ignore[arg-type]
