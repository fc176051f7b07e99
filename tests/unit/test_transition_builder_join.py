"""One call, however many spans tell of it."""

from __future__ import annotations

from typing import Any

import polars as pl
import pytest

from spangrad.settings import BuilderSettings
from tests.support import fakes
from transition_builder.build import build

TRACELOOP: dict[str, Any] = {
    "scope": "opentelemetry.instrumentation.openai.v1",
    "Attributes": {"gen_ai.operation.name": "chat", "gen_ai.request.model": "m"},
}
ENGINE: dict[str, Any] = {"scope": "vllm.llm_engine", "process": "vllm"}
REQUEST: dict[str, Any] = {"Attributes": {"http.request.method": "POST", "url.full": "http://host/v1/chat/completions"}}
MILLISECOND = 10**6


def concluded(spans: fakes.SpanFactory) -> dict[str, str]:
    """Every call's span, with its reason; empty where it became a transition."""
    spans.evaluation(next(str(row["SpanId"]) for row in spans.roots))
    built = build(spans.frames(), BuilderSettings())
    assert built.transitions.height + built.drops.height == len({*built.transitions["CallId"], *built.drops["CallId"]})
    return dict.fromkeys(built.transitions["SpanId"], "") | dict(built.drops.select("SpanId", "Reason").rows())


def usage(read: int, written: int, model: str = "m") -> dict[str, str]:
    return {"llm.token_count.prompt": str(read), "llm.token_count.completion": str(written), "llm.model_name": model}


def test_the_gateways_span_speaks_for_the_client_above_it_and_for_all_its_retries() -> None:
    spans = fakes.SpanFactory()
    client = spans.client(spans.span("ChatOpenAI", spans.root(), kind="LLM"))
    posts = [spans.span("POST", client) for _ in range(2)]
    failed, good = spans.call(posts[0], HttpStatus=500), spans.call(posts[1])
    spans.answer(client)
    assert concluded(spans) == {failed: "call_failed", good: ""}


def test_without_a_parent_link_the_response_id_tells() -> None:
    spans = fakes.SpanFactory()
    root = spans.root()
    client = spans.client(root)
    call = spans.call(root)
    spans.answer(client, ResponseId=f"id-{call}")
    assert concluded(spans) == {call: ""}


def test_a_client_that_the_gateway_did_not_see_is_a_call_of_the_direct_mode() -> None:
    spans = fakes.SpanFactory()
    root = spans.root()
    recorded = spans.call(spans.client(root))
    plain, bare, failed = spans.client(root), spans.client(root), spans.client(root, status="Error")
    spans.answer(plain)
    assert concluded(spans) == {recorded: "", plain: "", bare: "no_token_ids"}
    assert failed not in concluded(spans)


def test_without_a_gateway_a_clients_error_is_a_failed_call() -> None:
    spans = fakes.SpanFactory()
    failed = spans.client(spans.root(), status="Error", StatusMessage="APITimeoutError: too late")
    spans.evaluation(str(spans.roots[0]["SpanId"]))
    built = build(spans.frames(), BuilderSettings())
    assert built.drops.select("SpanId", "Reason", "Detail").rows() == [(failed, "call_failed", "APITimeoutError")]


def test_a_direct_call_carries_what_its_answer_says() -> None:
    spans = fakes.SpanFactory()
    client = spans.client(spans.root(), Attributes={"llm.invocation_parameters": '{"model": "m", "temperature": 0.5}'})
    other = spans.client(str(spans.roots[0]["SpanId"]))
    spans.evaluation(str(spans.roots[0]["SpanId"]))
    spans.answer(client, Policy="p", Model="", TokenizerHash="h", FinishReason="length", Temperature=0.25, **fakes.versions((0, 8)))
    spans.answer(other, Choice=0)
    spans.answer(other, Choice=1, ResponseIds=[9])
    built = build(spans.frames(), BuilderSettings())
    columns = [
        "SpanId",
        "Choice",
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


def test_a_frameworks_span_is_a_call_only_where_nothing_is_closer_to_the_wire() -> None:
    alone = fakes.SpanFactory()
    inner = alone.span("ChatOpenAI", alone.span("generation", alone.root(), kind="LLM"), kind="LLM")
    assert concluded(alone) == {inner: "no_token_ids"}

    beside = fakes.SpanFactory()
    root = beside.root()
    beside.span("ChatOpenAI", root, kind="LLM")  # LangChain's span is the client's neighbour, not its parent
    client = beside.client(root)
    beside.answer(client)
    elsewhere = beside.span("ChatOpenAI", root, kind="LLM", process="worker")
    assert concluded(beside) == {client: "", elsewhere: "no_token_ids"}

    recorded = fakes.SpanFactory()
    root = recorded.root()
    recorded.span("ChatOpenAI", root, kind="LLM")
    call = recorded.call(root)
    assert concluded(recorded) == {call: ""}


def test_two_instrumentations_of_one_client_are_one_call_named_by_the_one_with_ids() -> None:
    spans = fakes.SpanFactory()
    root = spans.root()
    outer = spans.client(root)
    spans.span("openai.chat", outer, **TRACELOOP)
    spans.answer(outer)
    inner = spans.client(spans.span("openai.chat", root, **TRACELOOP))
    spans.answer(inner)
    bare = spans.span("openai.chat", spans.client(root), **TRACELOOP)
    assert concluded(spans) == {outer: "", inner: "", bare: "no_token_ids"}


def test_a_tool_or_an_agent_between_two_spans_makes_them_two_calls() -> None:
    spans = fakes.SpanFactory()
    outer = spans.client(spans.root())
    inner = spans.client(spans.span("search", outer, kind="TOOL"))
    spans.answer(outer)
    spans.answer(inner)
    assert concluded(spans) == {outer: "", inner: ""}


@pytest.mark.parametrize("kept", [(), ("model",), ("model", "tokens")])
def test_a_frameworks_span_and_a_client_that_is_not_linked_to_it_are_one_call_of_the_frameworks_agent(kept: tuple[str, ...]) -> None:
    """LangChain without the link: of calls that overlap, equal token counts tell, else who began first."""
    spans = fakes.SpanFactory()
    root = spans.root()
    said = [usage(3, 4, "m"), usage(5, 6, "n")]
    texts = [
        {name: value for name, value in one.items() if ("model" in name and "model" in kept) or ("count" in name and "tokens" in kept)}
        for one in said
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


def test_a_frameworks_span_during_which_no_client_began_is_a_call() -> None:
    spans = fakes.SpanFactory()
    root = spans.root()
    other = spans.span("ChatAnthropic", root, kind="LLM", Duration=MILLISECOND)
    spans.span("ChatOpenAI", root, kind="LLM", Duration=5000 * MILLISECOND)
    client = spans.client(root)
    spans.answer(client)
    assert concluded(spans) == {other: "no_token_ids", client: ""}


def test_the_response_id_joins_spans_of_two_processes() -> None:
    spans = fakes.SpanFactory()
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


def test_equal_token_ids_join_a_client_that_names_no_response_id() -> None:
    spans = fakes.SpanFactory()
    root = spans.root()
    other = spans.call(root, PromptIds=[9], ResponseIds=[8], Logprobs=[-1.0])
    call = spans.call(root)
    client = spans.client(spans.span("solver", root, kind="AGENT"))
    spans.answer(client, ResponseId="", PromptIds=[1, 2, 3], ResponseIds=[4, 5])
    built = spans_built(spans)
    assert built.transitions.select("SpanId", "AgentName").rows() == [(other, "runner"), (call, "solver")]


def test_token_counts_join_what_nothing_else_does() -> None:
    spans = fakes.SpanFactory()
    root = spans.root()
    calls = [spans.call(root, Model="m", ResponseIds=[4] * (place + 2), Logprobs=[-1.0] * (place + 2)) for place in range(2)]
    for name, written in (("b", 3), ("a", 2)):
        spans.span("ChatOpenAI", spans.span(name, root, kind="AGENT"), kind="LLM", Attributes=usage(3, written))
    built = spans_built(spans)
    assert sorted(built.transitions.select("AgentName", "SpanId").rows()) == [("a", calls[0]), ("b", calls[1])]
    assert built.drops.rows() == []


def test_calls_of_the_gateway_that_nobody_speaks_for_account_for_as_many_spans() -> None:
    spans = fakes.SpanFactory()
    root = spans.root()
    recorded = [spans.call(root) for _ in range(2)]
    frameworks = [spans.span("ChatOpenAI", root, kind="LLM") for _ in range(3)]
    assert concluded(spans) == {**dict.fromkeys(recorded, ""), frameworks[2]: "no_token_ids"}


def test_an_engines_own_span_is_the_call_that_it_belongs_to_or_a_call_where_nothing_else_tells() -> None:
    spans = fakes.SpanFactory()
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

    alone = fakes.SpanFactory()
    engine = alone.span("llm_request", alone.span("POST", alone.root(), **REQUEST), **ENGINE)
    assert concluded(alone) == {engine: "no_token_ids"}


def test_a_request_to_a_model_that_nobody_recognises_is_dropped_by_name() -> None:
    spans = fakes.SpanFactory()
    root = spans.root()
    client = spans.client(root)
    spans.span("POST", client, **REQUEST)
    spans.answer(client)
    inner = spans.client(spans.span("POST", root, **REQUEST))
    spans.answer(inner)
    suspect = spans.span("POST", root, **REQUEST)
    spans.span("POST", suspect, **REQUEST)
    assert concluded(spans) == {client: "", inner: "", suspect: "unknown_convention"}


def test_the_gateways_span_below_a_bare_request_is_the_call() -> None:
    spans = fakes.SpanFactory()
    call = spans.call(spans.span("POST", spans.root(), **REQUEST))
    assert concluded(spans) == {call: ""}


@pytest.mark.parametrize(
    ("answered", "used"), [("", 2), (0, 0), (2, 2)], ids=["the last that was answered well", "the one that the client names", "the same"]
)
def test_of_a_clients_tries_only_the_one_that_was_used_is_trained(answered: Any, used: int) -> None:
    spans = fakes.SpanFactory()
    client = spans.client(spans.root())
    posts = [spans.span("POST", client) for _ in range(4)]
    # They reach the gateway in another order than that of the agent's requests.
    calls = dict(sorted({place: spans.call(posts[place], HttpStatus=500 if place == 3 else 200) for place in (2, 0, 3, 1)}.items()))
    if answered != "":
        spans.answer(client, ResponseId=f"id-{calls[answered]}")
    expected = dict.fromkeys(calls.values(), "retried") | {calls[used]: "", calls[3]: "call_failed"}
    assert concluded(spans) == expected


def test_choices_are_no_retries() -> None:
    spans = fakes.SpanFactory()
    call = spans.call(spans.client(spans.root()), choices=3)
    built = spans_built(spans)
    assert built.transitions.select("SpanId", "Choice").rows() == [(call, 0), (call, 1), (call, 2)]


def test_a_call_that_two_gateways_recorded_is_trained_once() -> None:
    spans = fakes.SpanFactory()
    root = spans.root()
    outer = spans.call(spans.client(root), ResponseId="a")
    inner = spans.call(outer, process="second gateway", ResponseId="b")
    mute = spans.call(root, ResponseId="c", PromptIds=[], ResponseIds=[], Logprobs=[])
    told = spans.call(mute, process="second gateway", ResponseId="d")
    far = spans.call(root, process="second gateway", ResponseId="e", trace="another")
    near = spans.call(spans.client(root), ResponseId="e")
    other = spans.call(root, ResponseId="e", PromptIds=[7])
    assert concluded(spans) == {outer: "", inner: "duplicate", mute: "duplicate", told: "", far: "duplicate", near: "", other: ""}


def spans_built(spans: fakes.SpanFactory) -> Any:
    spans.evaluation(next(str(row["SpanId"]) for row in spans.roots))
    return build(spans.frames(), BuilderSettings())


def test_a_call_of_which_attributes_were_kept_back_says_so() -> None:
    spans = fakes.SpanFactory()
    root = spans.root()
    client, whole = spans.client(root), spans.client(root)
    spans.evaluation(root)
    frames = spans.frames()
    trace = frames.spans["TraceId"][0]
    dropped = pl.DataFrame({"TraceId": [trace], "SpanId": [client]})
    built = build(type(frames)(frames.rollouts, frames.spans, frames.calls, frames.answers, dropped=dropped), BuilderSettings())
    assert dict(built.drops.select("SpanId", "Reason").rows()) == {client: "attributes_dropped", whole: "no_token_ids"}


def test_an_empty_response_id_tells_no_retry_from_another() -> None:
    spans = fakes.SpanFactory()
    client = spans.client(spans.root())
    posts = [spans.span("POST", client) for _ in range(2)]
    first, last = spans.call(posts[0], ResponseId=""), spans.call(posts[1])
    spans.answer(client, ResponseId="")
    assert concluded(spans) == {first: "retried", last: ""}
