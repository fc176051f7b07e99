"""One call, however many spans tell of it."""

from __future__ import annotations

import fakes
from spangrad.settings import BuilderSettings
from transition_builder.build import build


def concluded(spans: fakes.SpanFactory) -> dict[str, str]:
    """Every call's span, with its reason; empty where it became a transition."""
    spans.evaluation(next(str(row["SpanId"]) for row in spans.roots))
    built = build(spans.frames(), BuilderSettings())
    assert built.transitions.height + built.drops.height == len({*built.transitions["CallId"], *built.drops["CallId"]})
    return dict.fromkeys(built.transitions["SpanId"], "") | dict(built.drops.select("SpanId", "Reason").rows())


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


def test_a_client_that_the_gateway_did_not_see_is_a_call_of_the_plain_road() -> None:
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
    assert built.drops.select("SpanId", "Reason", "Detail").rows() == [(failed, "call_failed", "HTTP 0 APITimeoutError")]


def test_a_plain_call_carries_what_its_answer_and_its_request_say() -> None:
    spans = fakes.SpanFactory()
    client = spans.client(spans.root(), Attributes={"llm.invocation_parameters": '{"model": "m", "temperature": 0.25}'})
    other = spans.client(str(spans.roots[0]["SpanId"]))
    spans.evaluation(str(spans.roots[0]["SpanId"]))
    spans.answer(client, Policy="p", VersionStart=8, VersionEnd=8, Model="", TokenizerHash="h", FinishReason="length")
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
