"""One call, however many spans tell of it."""

from __future__ import annotations

from typing import Any

import polars as pl
import pytest

from spangrad.settings import BuilderSettings
from tests.support.spans import SpanFactory, versions
from transition_builder.build import build

TRACELOOP: dict[str, Any] = {
    "scope": "opentelemetry.instrumentation.openai.v1",
    "Attributes": {"gen_ai.operation.name": "chat", "gen_ai.request.model": "m"},
}
ENGINE: dict[str, Any] = {"scope": "vllm.llm_engine", "process": "vllm"}
REQUEST: dict[str, Any] = {"Attributes": {"http.request.method": "POST", "url.full": "http://host/v1/chat/completions"}}
MILLISECOND = 10**6


def concluded(spans: SpanFactory) -> dict[str, str]:
    """Every call's span, with its reason; empty where it became a transition."""
    spans.evaluation(next(str(row["SpanId"]) for row in spans.roots))
    built = build(spans.frames(), BuilderSettings())
    assert built.transitions.height + built.drops.height == len({*built.transitions["CallId"], *built.drops["CallId"]})
    return dict.fromkeys(built.transitions["SpanId"], "") | dict(built.drops.select("SpanId", "Reason").rows())


def usage(read: int, written: int, model: str = "m") -> dict[str, str]:
    return {"llm.token_count.prompt": str(read), "llm.token_count.completion": str(written), "llm.model_name": model}


def test_call_group_gateway_span_speaks_for_client_and_retries() -> None:
    spans = SpanFactory()
    client = spans.client(spans.span("ChatOpenAI", spans.root(), kind="LLM"))
    posts = [spans.span("POST", client) for _ in range(2)]
    failed, good = spans.call(posts[0], HttpStatus=500), spans.call(posts[1])
    spans.answer(client)
    assert concluded(spans) == {failed: "call_failed", good: ""}


def test_call_group_without_parent_link_is_matched_by_response_id() -> None:
    spans = SpanFactory()
    root = spans.root()
    client = spans.client(root)
    call = spans.call(root)
    spans.answer(client, ResponseId=f"id-{call}")
    assert concluded(spans) == {call: ""}


def test_call_group_client_without_gateway_span_is_direct_mode_call() -> None:
    spans = SpanFactory()
    root = spans.root()
    recorded = spans.call(spans.client(root))
    plain, bare, failed = spans.client(root), spans.client(root), spans.client(root, status="Error")
    spans.answer(plain)
    assert concluded(spans) == {recorded: "", plain: "", bare: "no_token_ids"}
    assert failed not in concluded(spans)


def test_call_group_client_error_without_gateway_drops_as_call_failed() -> None:
    spans = SpanFactory()
    failed = spans.client(spans.root(), status="Error", StatusMessage="APITimeoutError: too late")
    spans.evaluation(str(spans.roots[0]["SpanId"]))
    built = build(spans.frames(), BuilderSettings())
    assert built.drops.select("SpanId", "Reason", "Detail").rows() == [(failed, "call_failed", "APITimeoutError")]


def test_call_group_direct_mode_call_has_facts_of_its_answer() -> None:
    spans = SpanFactory()
    client = spans.client(spans.root(), Attributes={"llm.invocation_parameters": '{"model": "m", "temperature": 0.5}'})
    other = spans.client(str(spans.roots[0]["SpanId"]))
    spans.evaluation(str(spans.roots[0]["SpanId"]))
    spans.answer(client, Policy="p", Model="", TokenizerHash="h", FinishReason="length", Temperature=0.25, **versions((0, 8)))
    spans.answer(other, ChoiceIndex=0)
    spans.answer(other, ChoiceIndex=1, ResponseIds=[9])
    built = build(spans.frames(), BuilderSettings())
    columns = [
        "SpanId",
        "ChoiceIndex",
        "Turn",
        "Policy",
        "Version",
        "Model",
        "TokenizerHash",
        "PromptIds",
        "ResponseIds",
        "Logprobs",
        "Temperature",
        "FinishReason",
    ]
    assert built.transitions.select(columns).rows() == [
        (client, 0, 0, "p", 8, "m", "h", [1, 2], [7], [-0.125], 0.25, "length"),
        (other, 0, 1, "policy", 3, "policy", "tok", [1, 2], [7], [-0.125], 1.0, "stop"),
        (other, 1, 1, "policy", 3, "policy", "tok", [1, 2], [9], [-0.125], 1.0, "stop"),
    ]


def test_call_group_framework_span_is_call_without_client_or_gateway_span() -> None:
    alone = SpanFactory()
    inner = alone.span("ChatOpenAI", alone.span("generation", alone.root(), kind="LLM"), kind="LLM")
    assert concluded(alone) == {inner: "no_token_ids"}

    beside = SpanFactory()
    root = beside.root()
    beside.span("ChatOpenAI", root, kind="LLM")  # LangChain's span is the client's neighbour, not its parent
    client = beside.client(root)
    beside.answer(client)
    elsewhere = beside.span("ChatOpenAI", root, kind="LLM", process="worker")
    assert concluded(beside) == {client: "", elsewhere: "no_token_ids"}

    recorded = SpanFactory()
    root = recorded.root()
    recorded.span("ChatOpenAI", root, kind="LLM")
    call = recorded.call(root)
    assert concluded(recorded) == {call: ""}


def test_call_group_two_instrumentations_of_client_are_one_call() -> None:
    spans = SpanFactory()
    root = spans.root()
    outer = spans.client(root)
    spans.span("openai.chat", outer, **TRACELOOP)
    spans.answer(outer)
    inner = spans.client(spans.span("openai.chat", root, **TRACELOOP))
    spans.answer(inner)
    bare = spans.span("openai.chat", spans.client(root), **TRACELOOP)
    assert concluded(spans) == {outer: "", inner: "", bare: "no_token_ids"}


def test_call_group_tool_or_agent_between_spans_separates_calls() -> None:
    spans = SpanFactory()
    outer = spans.client(spans.root())
    inner = spans.client(spans.span("search", outer, kind="TOOL"))
    spans.answer(outer)
    spans.answer(inner)
    assert concluded(spans) == {outer: "", inner: ""}


@pytest.mark.parametrize("kept", [(), ("model",), ("model", "tokens")])
def test_call_group_unlinked_framework_and_client_spans_are_one_call(kept: tuple[str, ...]) -> None:
    """LangChain without the link: of calls that overlap, equal token counts tell, else who began first."""
    spans = SpanFactory()
    root = spans.root()
    usages = [usage(3, 4, "m"), usage(5, 6, "n")]
    texts = [
        {
            name: value
            for name, value in attributes.items()
            if ("model" in name and "model" in kept) or ("count" in name and "tokens" in kept)
        }
        for attributes in usages
    ]
    agents = [spans.span(name, root, kind="AGENT") for name in ("first", "second")]
    for agent, attributes in zip(agents, texts, strict=True):
        spans.span("ChatOpenAI", agent, kind="LLM", Attributes=attributes, Duration=10**10)
    order = [1, 0] if kept else [0, 1]
    clients = {place: spans.client(root, Attributes=texts[place], trace=f"trace {place}") for place in order}
    for client in clients.values():
        spans.answer(client)
    built = spans_built(spans)
    assert sorted(built.transitions.select("AgentName", "SpanId").rows()) == [("first", clients[0]), ("second", clients[1])]
    assert built.drops.rows() == []


def test_call_group_framework_span_without_client_within_is_call() -> None:
    spans = SpanFactory()
    root = spans.root()
    other = spans.span("ChatAnthropic", root, kind="LLM", Duration=MILLISECOND)
    spans.span("ChatOpenAI", root, kind="LLM", Duration=5000 * MILLISECOND)
    client = spans.client(root)
    spans.answer(client)
    assert concluded(spans) == {other: "no_token_ids", client: ""}


def test_call_group_response_id_joins_spans_of_two_processes() -> None:
    spans = SpanFactory()
    root = spans.root()
    agent = spans.span("planner", root, kind="AGENT")
    spans.span(
        "chat",
        agent,
        process="orchestrator",
        kind="LLM",
        Attributes={"gen_ai.response.id": "id-x", "llm.response.id": "id-x"},
        ResponseId="x",
    )
    client = spans.client(root, process="worker")
    spans.answer(client, ResponseId="id-x")
    built = spans_built(spans)
    assert built.transitions.select("SpanId", "AgentName").rows() == [(client, "planner")]
    assert built.drops.rows() == []


def test_call_group_equal_token_ids_join_client_without_response_id() -> None:
    spans = SpanFactory()
    root = spans.root()
    other = spans.call(root, PromptIds=[9], ResponseIds=[8], Logprobs=[-1.0])
    call = spans.call(root)
    client = spans.client(spans.span("solver", root, kind="AGENT"))
    spans.answer(client, ResponseId="", PromptIds=[1, 2, 3], ResponseIds=[4, 5])
    built = spans_built(spans)
    assert built.transitions.select("SpanId", "AgentName").rows() == [(other, "runner"), (call, "solver")]


def test_call_group_token_counts_join_otherwise_unmatched_spans() -> None:
    spans = SpanFactory()
    root = spans.root()
    calls = [spans.call(root, Model="m", ResponseIds=[4] * (place + 2), Logprobs=[-1.0] * (place + 2)) for place in range(2)]
    for name, written in (("b", 3), ("a", 2)):
        spans.span("ChatOpenAI", spans.span(name, root, kind="AGENT"), kind="LLM", Attributes=usage(3, written))
    built = spans_built(spans)
    assert sorted(built.transitions.select("AgentName", "SpanId").rows()) == [("a", calls[0]), ("b", calls[1])]
    assert built.drops.rows() == []


def test_call_group_token_counts_join_calls_behind_requests() -> None:
    """Mastra exports by a provider of its own, whose spans name another process than those of the HTTP client."""
    spans = SpanFactory()
    root = spans.root()
    calls = [spans.call(spans.span("POST", root, process="http", **REQUEST), Model="m") for _ in range(2)]
    for name in ("a", "b"):
        spans.span("chat m", spans.span(name, root, kind="AGENT"), kind="LLM", Attributes=usage(3, 2))
    assert spans_built(spans).transitions.select("AgentName", "SpanId").rows() == [("a", calls[0]), ("b", calls[1])]


def test_call_group_request_of_same_millisecond_joins_framework_span() -> None:
    """OpenTelemetry for JavaScript cuts starts to whole milliseconds; LangChain's spans are no parents of its client's requests."""
    spans = SpanFactory()
    root = spans.root()
    at = {"Timestamp": SpanFactory.time(100)}
    request = spans.span("POST", root, Duration=MILLISECOND, **at, **REQUEST)
    call = spans.call(request)
    agent = spans.span("solver", root, kind="AGENT", Duration=9 * MILLISECOND, **at)
    spans.span("ChatOpenAI", agent, kind="LLM", Duration=8 * MILLISECOND, **at)
    for row in spans.spans:
        row["ProcessId"] = f"~{row['ProcessId']}"
    assert spans_built(spans).transitions.select("AgentName", "SpanId").rows() == [("solver", call)]


def test_call_group_unmatched_gateway_calls_account_for_as_many_framework_spans() -> None:
    spans = SpanFactory()
    root = spans.root()
    recorded = [spans.call(root) for _ in range(2)]
    frameworks = [spans.span("ChatOpenAI", root, kind="LLM") for _ in range(3)]
    assert concluded(spans) == {**dict.fromkeys(recorded, ""), frameworks[2]: "no_token_ids"}


def test_call_group_engine_span_joins_its_call_or_is_one() -> None:
    spans = SpanFactory()
    root = spans.root()
    client = spans.client(root)
    spans.span("llm_request", client, **ENGINE)
    spans.answer(client)
    recorded = spans.call(spans.span("POST", root))
    spans.span("llm_request", recorded, **ENGINE)
    apart = spans.client(root)
    spans.answer(apart, ResponseId="cmpl-7")
    spans.span("llm_request", root, scope="vllm.llm_engine", process="vllm", Attributes={"gen_ai.request.id": "cmpl-7"})
    assert concluded(spans) == {client: "", recorded: "", apart: ""}

    alone = SpanFactory()
    engine = alone.span("llm_request", alone.span("POST", alone.root(), **REQUEST), **ENGINE)
    assert concluded(alone) == {engine: "no_token_ids"}


def test_call_group_unrecognized_model_request_drops_as_unknown_convention() -> None:
    spans = SpanFactory()
    root = spans.root()
    client = spans.client(root)
    spans.span("POST", client, **REQUEST)
    spans.answer(client)
    inner = spans.client(spans.span("POST", root, **REQUEST))
    spans.answer(inner)
    suspect = spans.span("POST", root, **REQUEST)
    spans.span("POST", suspect, **REQUEST)
    assert concluded(spans) == {client: "", inner: "", suspect: "unknown_convention"}


def test_call_group_gateway_span_below_bare_request_is_call() -> None:
    spans = SpanFactory()
    call = spans.call(spans.span("POST", spans.root(), **REQUEST))
    assert concluded(spans) == {call: ""}


@pytest.mark.parametrize(
    ("answered", "used"), [("", 2), (0, 0), (2, 2)], ids=["the last that was answered well", "the one that the client names", "the same"]
)
def test_call_group_retries_drop_except_used_one(answered: Any, used: int) -> None:
    spans = SpanFactory()
    client = spans.client(spans.root())
    posts = [spans.span("POST", client) for _ in range(4)]
    # They reach the gateway in another order than that of the agent's requests.
    calls = dict(sorted({place: spans.call(posts[place], HttpStatus=500 if place == 3 else 200) for place in (2, 0, 3, 1)}.items()))
    if answered != "":
        spans.answer(client, ResponseId=f"id-{calls[answered]}")
    expected = dict.fromkeys(calls.values(), "retried") | {calls[used]: "", calls[3]: "call_failed"}
    assert concluded(spans) == expected


def test_call_group_choices_are_no_retries() -> None:
    spans = SpanFactory()
    call = spans.call(spans.client(spans.root()), choices=3)
    built = spans_built(spans)
    assert built.transitions.select("SpanId", "ChoiceIndex").rows() == [(call, 0), (call, 1), (call, 2)]


def test_call_group_call_recorded_by_two_gateways_is_trained_once() -> None:
    spans = SpanFactory()
    root = spans.root()
    outer = spans.call(spans.client(root), ResponseId="a")
    inner = spans.call(outer, process="second gateway", ResponseId="b")
    mute = spans.call(root, ResponseId="c", PromptIds=[], ResponseIds=[], Logprobs=[])
    with_ids = spans.call(mute, process="second gateway", ResponseId="d")
    far = spans.call(root, process="second gateway", ResponseId="e", trace="another")
    near = spans.call(spans.client(root), ResponseId="e")
    other = spans.call(root, ResponseId="e", PromptIds=[7])
    assert concluded(spans) == {outer: "", inner: "duplicate", mute: "duplicate", with_ids: "", far: "duplicate", near: "", other: ""}


def spans_built(spans: SpanFactory) -> Any:
    spans.evaluation(next(str(row["SpanId"]) for row in spans.roots))
    return build(spans.frames(), BuilderSettings())


def test_call_group_with_dropped_attributes_drops_as_attributes_dropped() -> None:
    spans = SpanFactory()
    root = spans.root()
    client, whole = spans.client(root), spans.client(root)
    spans.evaluation(root)
    frames = spans.frames()
    trace = frames.spans["TraceId"][0]
    dropped = pl.DataFrame({"TraceId": [trace], "SpanId": [client]})
    built = build(type(frames)(frames.rollouts, frames.spans, frames.calls, frames.answers, dropped=dropped), BuilderSettings())
    assert dict(built.drops.select("SpanId", "Reason").rows()) == {client: "attributes_dropped", whole: "no_token_ids"}


def test_call_group_empty_response_id_matches_no_retry() -> None:
    spans = SpanFactory()
    client = spans.client(spans.root())
    posts = [spans.span("POST", client) for _ in range(2)]
    first, last = spans.call(posts[0], ResponseId=""), spans.call(posts[1])
    spans.answer(client, ResponseId="")
    assert concluded(spans) == {first: "retried", last: ""}
