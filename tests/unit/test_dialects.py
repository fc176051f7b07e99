"""The dialects: golden files, a convention each, and what holds whatever stands in a span."""

from __future__ import annotations

import json

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.dialects import ROOT, ConventionSpan, described, frame_of, golden_files, recorded
from tests.support.spans import SpanFactory
from transition_builder import dialects
from transition_builder.dialects import scopes
from transition_builder.dialects.conventions.others import VOCABULARIES
from transition_builder.dialects.describe import READERS
from transition_builder.frames import empty
from transition_builder.schemas import ANSWERS, NODES, SPANS

GOLDEN = golden_files()
SPANS_OF_FILES = [span for golden in GOLDEN.values() for span in golden.spans]
KEYS = sorted({key for span in SPANS_OF_FILES for key in span.attributes} | {"openinference.span.kind", "k"})
SCOPES = sorted({span.scope for span in SPANS_OF_FILES} | {"openinference.instrumentation.openai", ""})
VALUES = sorted({value for span in SPANS_OF_FILES for value in span.attributes.values()} | {"LLM", "TOOL"})
ANY_VALUE = st.one_of(st.sampled_from(VALUES), st.text(max_size=20), st.just('{"id": 1, "choices": [{}]}'), st.just("[1, 2"))
ANY_SPAN = st.builds(
    ConventionSpan,
    scope=st.sampled_from(SCOPES),
    name=st.one_of(st.text(max_size=10), st.sampled_from(["llm_request", "agentlightning.annotation", "POST"])),
    attributes=st.dictionaries(st.one_of(st.sampled_from(KEYS), st.text(max_size=10)), ANY_VALUE, max_size=8),
    status=st.sampled_from(["Unset", "Ok", "Error", ""]),
)


def frame(*spans: ConventionSpan) -> pl.DataFrame:
    return frame_of(spans)


@pytest.mark.parametrize("name", GOLDEN)
def test_describe_convention_matches_golden_file(name: str) -> None:
    assert described(GOLDEN[name].frame()) == GOLDEN[name].described


def test_golden_files_cover_every_convention() -> None:
    assert {kind["Convention"] for golden in GOLDEN.values() for kind in golden.described} == set(READERS)


@settings(deadline=None)
@given(st.lists(ANY_SPAN, max_size=12))
def test_describe_any_spans_gives_a_row_each_in_order(spans: list[ConventionSpan]) -> None:
    given_spans = frame(*spans)
    nodes = dialects.describe(given_spans)
    assert nodes.select(given_spans.columns).equals(given_spans)
    assert {name: nodes.schema[name] for name in NODES} == dict(NODES)
    roles = nodes.select(pl.sum_horizontal(pl.col("IsClient", "IsModel", "IsEngine").cast(pl.Int8)))
    assert roles.to_series().to_list() == [min(one, 1) for one in roles.to_series()]
    texts = ("Convention", "ToolName")
    assert [
        nodes[name].null_count() for name in ("IsClient", "IsModel", "IsEngine", "IsTool", "IsChain", "IsSuspect", "ToolFailed", *texts)
    ] == [0] * 9
    assert dialects.holds_answer(given_spans).len() == len(spans)
    assert dialects.asked_tools(nodes).columns == ["TraceId", "SpanId", "ToolCallId"]
    assert dialects.calls(nodes, empty(ANSWERS))["SpanId"].to_list() == given_spans["SpanId"].to_list()


@settings(deadline=None)
@given(st.lists(ANY_SPAN, min_size=1, max_size=8), st.randoms())
def test_describe_span_is_independent_of_others(spans: list[ConventionSpan], random: st.DataObject) -> None:
    together = dialects.describe(frame(*spans))
    alone = pl.concat([dialects.describe(frame(one)) for one in spans])
    added = [name for name in together.columns if name not in {*SPANS, "RolloutId"}]
    assert together.select(added).equals(alone.select(added))


@pytest.mark.parametrize(
    ("scope", "client"),
    [
        ("openinference.instrumentation.openai", True),
        ("openinference.instrumentation.openai_agents", False),
        ("@arizeai/openinference-instrumentation-openai", True),
        ("opentelemetry.instrumentation.genai.openai", True),
        ("opentelemetry.instrumentation.genai.langchain", False),
        ("opentelemetry.instrumentation.openai_v2", True),
        ("opentelemetry.instrumentation.bedrock", True),
        ("openinference.instrumentation.google_genai", True),
        ("openinference.instrumentation.google_adk", False),
        ("agentops.instrumentation.agentic.openai_agents", False),
        ("agentops.instrumentation.providers.anthropic", True),
        ("com.anthropic.sdk.python", True),
        ("litellm", True),
        ("pydantic-ai", False),
        ("my.service", False),
        ("", False),
    ],
)
def test_is_client_by_scope(scope: str, client: bool) -> None:
    assert scopes.is_client(scope) is client


@pytest.mark.parametrize("kind", ["AGENT", "CHAIN", "RETRIEVER", "EMBEDDING", "RERANKER", "GUARDRAIL", "EVALUATOR", "PROMPT", "TOOL"])
def test_describe_openinference_llm_of_any_scope_is_model_span(kind: str) -> None:
    spans = frame(
        ConventionSpan("anybody", "x", {"openinference.span.kind": kind, "llm.model_name": "m"}),
        ConventionSpan("anybody", "x", {"openinference.span.kind": "LLM"}),
    )
    nodes = dialects.describe(spans)
    assert nodes.select("IsClient", "IsModel", "IsSuspect").rows() == [(False, False, False), (False, True, False)]
    assert nodes["IsTool"].to_list() == [kind == "TOOL", False]


def test_holds_answer_only_for_spans_that_keep_ids() -> None:
    llm = {"openinference.span.kind": "LLM"}
    spans = frame(
        ConventionSpan("openinference.instrumentation.openai", "ChatCompletion", llm),
        ConventionSpan("openinference.instrumentation.openai", "Embedding", {"openinference.span.kind": "EMBEDDING"}),
        ConventionSpan("openinference.instrumentation.langchain", "ChatOpenAI", llm),
        ConventionSpan("openinference.instrumentation.litellm", "completion", llm),
        ConventionSpan("my.own", "ask", llm),
        ConventionSpan("mlflow.tracing.provider", "Completions", {"mlflow.spanType": '"CHAT_MODEL"'}),
        ConventionSpan("mlflow.tracing.provider", "tool", {"mlflow.spanType": '"TOOL"'}),
        ConventionSpan("agentops", "openai.chat.completion", {"gen_ai.request.model": "m"}),
        ConventionSpan("opentelemetry.instrumentation.openai_v2", "chat m", {"gen_ai.request.model": "m"}),
        ConventionSpan("opentelemetry.instrumentation.httpx", "POST"),
        ConventionSpan("spangrad.gateway", "chat"),
    )
    assert dialects.holds_answer(spans).to_list() == [True, False, False, False, True, True, False, True, False, False, False]


def test_describe_gives_request_facts_of_convention() -> None:
    spans = frame(
        ConventionSpan(
            "openinference.instrumentation.openai",
            "ChatCompletion",
            {"openinference.span.kind": "LLM", "llm.invocation_parameters": '{"temperature": 0.5, "tool_choice": "required"}'},
            "Ok",
        ),
        ConventionSpan(
            "a",
            "chat m",
            {
                "gen_ai.request.model": "m",
                "gen_ai.request.top_p": "0.25",
                "gen_ai.response.finish_reasons": '["stop","length"]',
                "error.type": "429",
                "http.response.status_code": "429",
            },
        ),
        ConventionSpan("ai", "x", {"ai.operationId": "ai.streamText.doStream", "ai.settings.topK": "7", "ai.response.id": "r"}),
        ConventionSpan("a", "chat m", {"gen_ai.operation.name": "chat"}, "Error"),
    )
    nodes = dialects.describe(spans.with_columns(StatusMessage=pl.Series(["", "", "", "APITimeoutError: late"])))
    columns = [
        "Convention",
        "Model",
        "ResponseId",
        "FinishReason",
        "ErrorType",
        "HttpStatus",
        "Unfinished",
    ]
    assert dialects.calls(nodes, empty(ANSWERS)).select(columns).rows() == [
        ("openinference", "", "", "", "", 0, False),
        ("gen_ai", "m", "", "stop", "429", 429, False),
        ("vercel", "", "r", "", "", 0, False),
        ("gen_ai", "", "", "", "APITimeoutError", 0, False),
    ]


@pytest.mark.parametrize(
    ("reasons", "reason"),
    [
        *((reasons, "") for reasons in ("[]", "[ ]", '[""]', "[null]", "null", "", "[")),
        *((reasons, "stop") for reasons in ('["stop"]', '[ "stop", null]', "stop", '"stop"', "[stop]")),
    ],
)
def test_calls_with_empty_list_of_finish_reasons_are_aborted(reasons: str, reason: str) -> None:
    spans = SpanFactory()
    span = spans.client("", Attributes={"gen_ai.response.finish_reasons": reasons})
    spans.answer(span, FinishReason="")
    frames = spans.frames()
    calls = dialects.calls(dialects.describe(frames.spans.with_columns(RolloutId="RolloutKey")), frames.answers)
    assert calls.select("FinishReason", "Aborted").rows() == [(reason, not reason)]


def test_calls_with_empty_list_of_finish_reasons_report_another_attribute() -> None:
    attributes = {"gen_ai.request.model": "m", "gen_ai.response.finish_reasons": "[]", "gen_ai.completion.0.finish_reason": "length"}
    calls = dialects.calls(dialects.describe(frame(ConventionSpan("a", "chat m", attributes))), empty(ANSWERS))
    assert calls["FinishReason"].to_list() == ["length"]


def test_asked_tools_gives_tool_calls_of_answers() -> None:
    parts = (
        '[{"role":"assistant","parts":[{"type":"tool_call","id":"call_2","name":"f","arguments":{}},{"type":"tool_call","id":"call_3"}]}]'
    )
    spans = frame(
        ConventionSpan("a", "x", {"openinference.span.kind": "LLM", "llm.output_messages.0.message.tool_calls.1.tool_call.id": "call_1"}),
        ConventionSpan("a", "x", {"gen_ai.request.model": "m", "gen_ai.output.messages": parts}),
        ConventionSpan("a", "x", {"llm.request.type": "chat", "gen_ai.completion.0.tool_calls.0.id": "call_4"}),
        ConventionSpan("ai", "x", {"ai.operationId": "ai.streamText.doStream", "ai.response.toolCalls": '[{"toolCallId": "call_5"}]'}),
        ConventionSpan("a", "x", {"openinference.span.kind": "TOOL", "tool_call.id": "call_1"}),
    )
    asked = dialects.asked_tools(dialects.describe(spans))
    places = {span: place for place, span in enumerate(spans["SpanId"])}
    assert sorted((places[span], tool) for span, tool in asked.select("SpanId", "ToolCallId").rows()) == [
        (0, "call_1"),
        (1, "call_2"),
        (1, "call_3"),
        (2, "call_4"),
        (3, "call_5"),
    ]


def test_describe_bare_http_to_model_is_suspect() -> None:
    nodes = dialects.describe(recorded(ROOT / "tests/fixtures/spans/http_only_httpx.jsonl"))
    assert nodes.select("IsSuspect", "IsClient", "IsModel", "Convention").rows() == [(True, False, False, "")] * 2


def test_describe_langchain_tool_message_gives_call_and_failure() -> None:
    message = {"type": "tool", "data": {"content": "boom", "tool_call_id": "call_9", "status": "error"}}
    spans = frame(
        ConventionSpan(
            "openinference.instrumentation.langchain", "f", {"openinference.span.kind": "TOOL", "output.value": json.dumps(message)}, "Ok"
        )
    )
    assert dialects.describe(spans).select("ToolFailed", "ToolCallId").rows() == [(True, "call_9")]


def test_vocabularies_have_distinct_marks() -> None:
    assert len({words.mark for words in VOCABULARIES.values()}) == len(VOCABULARIES)


def test_describe_span_factory_frame_matches_store_schema() -> None:
    factory = SpanFactory()
    factory.client(factory.root())
    assert dialects.describe(pl.DataFrame(factory.spans, schema=dict(SPANS)))["IsClient"].to_list() == [False, True]
