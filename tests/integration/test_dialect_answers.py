"""Raw answers and model spans in a real store: what ANSWER_SQL types of them, and that MODEL_SPAN_SQL passes over none."""

from __future__ import annotations

import json
import math
import uuid
from typing import Any

import polars as pl
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, InstrumentationScope, KeyValue
from opentelemetry.proto.resource.v1.resource_pb2 import Resource
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, ScopeSpans, Span

from span_processors.otlp_http import Poster
from spangrad import semconv
from spangrad.settings import StoreSettings
from tests.support.dialects import golden_files
from tests.support.servers import client_of
from transition_builder import dialects
from transition_builder.dialects.answers import ANSWER_SQL, with_modality

SAMPLING = {
    "temperature": 0.5,
    "top_p": 1.0,
    "top_k": 3,
    "min_p": 0.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "constrained": True,
}
FIELD: dict[str, Any] = {"policy": "p", "versions": [[[0, 3], [1, 4]], [[0, 4]]], "tokenizer_hash": "tok", "sampling": SAMPLING}
CHOICE: dict[str, Any] = {
    "index": 0,
    "finish_reason": "stop",
    "token_ids": [4, 2**32 - 1],
    "logprobs": {"content": [{"token": "a", "logprob": -0.5}, {"token": "b", "logprob": -1.25}]},
}
COMPLETION = {
    "index": 0,
    "finish_reason": "length",
    "prompt_token_ids": [7],
    "token_ids": [8, 9],
    "logprobs": {"token_logprobs": [-0.5, -0.25], "tokens": ["a", "b"]},
}
GENERATIONS = [
    {"prompt_token_ids": [1, 2], "token_ids": [3], "logprobs": [-0.5], "finish_reason": "stop"},
    {"prompt_token_ids": [1, 2, 3], "token_ids": [9], "logprobs": [-0.25], "finish_reason": None},
]
START = 1_767_225_600_000_000_000
OF_FIELD = ("p", [0, 1], [3, 4], "tok")
SECOND_OF_FIELD = ("p", [0], [4], "tok")
NOBODYS = ("", [], [], "")
ANSWER = {"id": "c", "model": "m", "prompt_token_ids": [1, 70000], "choices": [CHOICE], "spangrad": FIELD}
WEAVE = "agentlightning.operation.output"
LIGHTNING = {
    "prompt_token_ids": "[1,2]",
    "response_token_ids": "[3,4]",
    "logprobs.content": '[{"token":"x","logprob":-0.5},{"token":"y","logprob":-1}]',
    "gen_ai.response.id": "c-1",
    "gen_ai.response.model": "m",
    "gen_ai.response.finish_reasons": '["stop"]',
}
Row = tuple[Any, ...]
NOTHING: Row = (0, *NOBODYS, "", "", [], [], [], "")


def sent(store: StoreSettings, trace: str, spans: list[tuple[str, str, dict[str, str]]]) -> list[str]:
    """Store spans (scope, name, attributes) under one trace; their ids."""
    ids = [uuid.uuid4().hex[:16] for _ in spans]
    resource = ResourceSpans(resource=Resource(attributes=[KeyValue(key="service.name", value=AnyValue(string_value="answers"))]))
    for own, (scope, name, attributes) in zip(ids, spans, strict=True):
        span = Span(
            trace_id=bytes.fromhex(trace), span_id=bytes.fromhex(own), name=name, start_time_unix_nano=START, end_time_unix_nano=START + 9
        )
        span.attributes.extend(KeyValue(key=key, value=AnyValue(string_value=value)) for key, value in attributes.items())
        resource.scope_spans.append(ScopeSpans(scope=InstrumentationScope(name=scope), spans=[span]))
    body = ExportTraceServiceRequest(resource_spans=[resource]).SerializeToString()
    assert Poster(f"{store.otlp_endpoint}/v1/traces", {}, None)(body) == 0
    return ids


@pytest.mark.parametrize(
    ("attributes", "expected"),
    [
        ({"output.value": json.dumps(ANSWER)}, [(0, *OF_FIELD, "m", "c", [1, 70000], [4, 2**32 - 1], [-0.5, -1.25], "stop")]),
        ({"mlflow.spanOutputs": json.dumps(ANSWER)}, [(0, *OF_FIELD, "m", "c", [1, 70000], [4, 2**32 - 1], [-0.5, -1.25], "stop")]),
        (
            {"output.value": json.dumps({"id": "c", "model": "m", "choices": [COMPLETION, {**COMPLETION, "index": 1}]})},
            [(place, *NOBODYS, "m", "c", [7], [8, 9], [-0.5, -0.25], "length") for place in (0, 1)],
        ),
        (
            {"output.value": json.dumps({"id": "resp_1", "model": "m", "output": [], "spangrad": {**FIELD, "generations": GENERATIONS}})},
            [
                (0, *OF_FIELD, "m", "resp_1", [1, 2], [3], [-0.5], "stop"),
                (1, *SECOND_OF_FIELD, "m", "resp_1", [1, 2, 3], [9], [-0.25], ""),
            ],
        ),
        (LIGHTNING, [(0, *NOBODYS, "m", "c-1", [1, 2], [3, 4], [-0.5, -1.0], "stop")]),
        (
            {f"{WEAVE}.prompt_token_ids": "[1,2]", f"{WEAVE}.choices.0.token_ids": "[3]", f"{WEAVE}.id": "c-2", f"{WEAVE}.model": "m"},
            [(0, *NOBODYS, "m", "c-2", [1, 2], [3], [], "")],
        ),
        (
            {"output.value": json.dumps({"choices": [{"provider_specific_fields": {"token_ids": [5]}}]})},
            [(0, *NOBODYS, "", "", [], [5], [], "")],
        ),
        ({"output.value": "final answer"}, [NOTHING]),
        ({"output.value": json.dumps({"choices": 7, "spangrad": "text"})}, [NOTHING]),
        ({"output.value": json.dumps(ANSWER)[:-9]}, [NOTHING]),
        ({"output.value": json.dumps({**ANSWER, "choices": [CHOICE] * 1025, "spangrad": None, "id": "", "model": ""})}, [NOTHING]),
        ({"response_token_ids": '["x"]'}, [NOTHING]),
        ({}, [NOTHING]),
    ],
    ids=[
        "chat",
        "mlflow",
        "completions",
        "responses",
        "lightning",
        "weave",
        "litellm",
        "text",
        "odd",
        "cut",
        "too many",
        "no ids",
        "nothing",
    ],
)
def test_answer_sql_reads_ids_of_every_dialect(store: StoreSettings, attributes: dict[str, str], expected: list[Row]) -> None:
    trace = uuid.uuid4().hex
    (own,) = sent(store, trace, [("a", "answered", attributes)])
    parameters = {"services": ("answers",), "names": ("answered",), "traces": (trace,), "spans": (own,), "first": START, "last": START}
    rows = client_of(store).query(ANSWER_SQL, parameters).result_rows
    width = len(NOTHING)
    assert sorted((tuple(row[:2]), tuple(row[2 : 2 + width])) for row in rows) == [((trace, own), _placed(row)) for row in expected]
    sampling = tuple(SAMPLING.values())
    unknown = (None,) * len(sampling)
    assert {tuple(row[2 + width : 2 + width + len(sampling)]) for row in rows} == {sampling if row[1] else unknown for row in expected}


IMAGE = {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:" + "A" * 9999}}]}]}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"file": {"type": "string"}, "image": {}}}}}]
MESSAGE = {"role": "assistant", "content": "so", "audio": None}
SPEECH = {**MESSAGE, "audio": {"id": "a", "data": "A" * 9999}}
MANY = {"messages": [{"role": "user", "content": "t"}] * 9999 + IMAGE["messages"]}


@pytest.mark.parametrize(
    ("request_fields", "message", "expected"),
    [
        ({"messages": [{"role": "user", "content": 'of "image" and "file"'}], "tools": TOOLS}, MESSAGE, []),
        (
            {**IMAGE, "tools": TOOLS},
            MESSAGE,
            [{"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "n"}}]}]}],
        ),
        (IMAGE["messages"], MESSAGE, [[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "n"}}]}]]),
        ({"prompt_embeds": "A" * 9999, "model": "m"}, MESSAGE, [{"prompt_embeds": "n"}]),
        ({"prompt": "say"}, SPEECH, [{"choices": [{"message": {**MESSAGE, "audio": {"id": "a", "data": "n"}}}] * 2}]),
        (MANY, MESSAGE, [[{"type": "image_url"}]]),
    ],
    ids=["tools", "image", "messages alone", "embeddings", "speech", "long"],
)
def test_answer_sql_returns_structure_of_content_of_first_choice(
    store: StoreSettings, request_fields: object, message: dict[str, Any], expected: list[Any]
) -> None:
    trace = uuid.uuid4().hex
    answer = {**ANSWER, "choices": [{**CHOICE, "index": index, "message": message} for index in (0, 1)]}
    (own,) = sent(store, trace, [("a", "answered", {"input.value": json.dumps(request_fields), "output.value": json.dumps(answer)})])
    parameters = {"services": ("answers",), "names": ("answered",), "traces": (trace,), "spans": (own,), "first": START, "last": START}
    rows = client_of(store).query(f"SELECT ChoiceIndex, Contents FROM ({ANSWER_SQL}) ORDER BY ChoiceIndex", parameters).result_rows
    assert [(index, [json.loads(text) for text in texts]) for index, texts in rows] == [(0, [[], *expected]), (1, [])]


def test_with_modality_gives_every_choice_the_modality_of_its_span() -> None:
    part = '[{"type":"image"}]'
    rows = pl.DataFrame({"TraceId": ["t"] * 3, "SpanId": ["a", "a", "b"], "ChoiceIndex": [0, 1, 0], "Contents": [[part], [], ["[]"]]})
    assert with_modality(rows)["Modality"].to_list() == ["image", "image", ""]


def _placed(row: Row) -> Row:
    """A row in the order of ANSWERS' columns: the tokenizer's hash stands after the answer's own id."""
    choice, policy, start, end, tokenizer, model, answer, *rest = row
    return (choice, policy, start, end, model, answer, tokenizer, *rest)


def test_model_span_sql_misses_no_call_of_any_dialect(store: StoreSettings) -> None:
    frames = [golden.frame() for golden in golden_files().values()]
    spans = pl.concat(frames)
    nodes = dialects.describe(spans)
    trace = uuid.uuid4().hex
    listed = [
        (scope, name, dict(attributes or {})) for scope, name, attributes in spans.select("ScopeName", "SpanName", "Attributes").iter_rows()
    ]
    renamed = [
        (scope, name, {key: value for key, value in attributes.items() if not key.startswith("spangrad.")})
        for scope, name, attributes in listed
    ]
    ids = sent(store, trace, renamed)
    asked = f"SELECT SpanId FROM spangrad.rollout_spans WHERE TraceId = {{t:String}} AND {dialects.MODEL_SPAN_SQL}"
    selected = {row[0] for row in client_of(store).query(asked, {"t": trace}).result_rows}
    calls = nodes.select(pl.any_horizontal("IsClient", "IsModel", "IsEngine", "IsSuspect")).to_series().to_list()
    missed = [listed[place] for place, own in enumerate(ids) if calls[place] and own not in selected]
    assert missed == []
    clients = [(own, called) for own, called, (scope, *_) in zip(ids, calls, listed, strict=True) if scope != semconv.GATEWAY_SCOPE]
    idle = [own for own, called in clients if not called and own in selected]
    assert len(idle) < math.ceil(0.2 * len(clients))
