"""Reconstruction of rollouts: parent calls, branches, the spans around a call, and the call that caused each tool call."""

from __future__ import annotations

from random import Random
from typing import Any

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spangrad.settings import BuilderSettings
from tests.support.spans import SpanFactory
from transition_builder.build import build, read
from transition_builder.calls.reconstruct import Reconstructed, reconstruct
from transition_builder.frames import Frames

SECOND = 10**9
LONG = {"Duration": 100 * SECOND}
SHORT = {"Duration": SECOND // 1000}


def place(spans: SpanFactory | Frames) -> Reconstructed:
    frames = spans.frames() if isinstance(spans, SpanFactory) else spans
    nodes, recorded = read(frames, frames.owners)
    return reconstruct(nodes, recorded, frames.answers, frames.dropped)


def lines(spans: SpanFactory) -> dict[str, tuple[str, int]]:
    """The parent's span and the branch of each call's span."""
    calls = place(spans).calls
    named = dict(calls.select("CallId", "SpanId").rows()) | {"": ""}
    return {span: (named[parent], branch) for span, parent, branch in calls.sort("Order").select("SpanId", "ParentCallId", "Branch").rows()}


def ran(spans: SpanFactory) -> dict[str, str]:
    """The span of the call that caused each tool span."""
    placed = place(spans)
    named = dict(placed.calls.select("CallId", "SpanId").rows()) | {"": ""}
    return {tool: named[call] for tool, call in placed.caused.select("SpanId", "CallId").rows()}


def ids(*tokens: int) -> dict[str, Any]:
    """Token ids of a prompt; the response is one token, 0."""
    return {"PromptIds": list(tokens), "ResponseIds": [0], "Logprobs": [-1.0]}


def alone(number: int) -> dict[str, Any]:
    """Token ids that continue nothing."""
    return ids(1000 + number)


def test_reconstruct_sequential_calls_are_one_branch() -> None:
    spans = SpanFactory()
    agent = spans.span("solver", spans.root(), kind="AGENT")
    first, second, third = (spans.call(spans.client(spans.span("turn", agent, kind="CHAIN")), **alone(number)) for number in range(3))
    assert lines(spans) == {first: ("", 0), second: (first, 0), third: (second, 0)}


def test_reconstruct_calls_inside_one_framework_span_are_one_branch() -> None:
    """VoltAgent's `llm:generateText`, which asks, runs the tool that was asked for, and asks again."""
    spans = SpanFactory()
    function = spans.span("llm:generateText", spans.root(), scope="@voltagent/core", Attributes={"span.type": "llm"}, **LONG)
    first = spans.call(spans.client(function, **SHORT), **alone(1))
    tool = spans.span("tool", function, kind="TOOL", **SHORT)
    second = spans.call(spans.client(function, **SHORT), **alone(2))
    assert lines(spans) == {first: ("", 0), second: (first, 0)}
    assert ran(spans) == {tool: first}


@pytest.mark.parametrize("retries", [0, 1])
def test_reconstruct_framework_span_around_retries_is_that_of_one_call(retries: int) -> None:
    spans = SpanFactory()
    root = spans.root()
    client = spans.client(spans.span("ChatOpenAI", root, kind="LLM", **LONG), **SHORT)
    failed = [spans.call(client, HttpStatus=500) for _ in range(retries)]
    first = spans.call(client, **alone(1))
    second = spans.call(spans.client(root, **SHORT), **alone(2))
    assert {span: line for span, line in lines(spans).items() if span not in failed} == {first: ("", 0), second: ("", 1)}, "they overlap"


@pytest.mark.parametrize(("begins", "precedes"), [(0.005, True), (0.004, False), (0.0055, False)])
def test_reconstruct_start_in_whole_milliseconds_may_be_later(begins: float, precedes: bool) -> None:
    """OpenTelemetry for JavaScript: a span starts at a whole millisecond and ends at a nanosecond, so that the next seems to overlap it."""
    spans = SpanFactory()
    root = spans.root()
    first = spans.call(spans.client(root, Timestamp=SpanFactory.time(100), Duration=5_700_000), **alone(1))
    second = spans.call(spans.client(root, Timestamp=SpanFactory.time(100 + begins), **SHORT), **alone(2))
    for row in spans.spans:
        row["ProcessId"] = f"~{row['ProcessId']}"
    assert lines(spans)[second] == ((first, 0) if precedes else ("", 1))


def test_reconstruct_parallel_calls_share_parent_and_open_branches() -> None:
    spans = SpanFactory()
    root = spans.root()
    first = spans.call(spans.client(root, **SHORT))
    clients = [spans.client(root, **LONG) for _ in range(3)]
    calls = [spans.call(client) for client in clients]
    last = spans.call(spans.client(root, Timestamp=SpanFactory.time(1000), **SHORT))
    assert lines(spans) == {first: ("", 0), calls[0]: (first, 0), calls[1]: (first, 1), calls[2]: (first, 2), last: (calls[2], 2)}


def test_reconstruct_prompt_continuing_a_response_separates_parallel_threads() -> None:
    """Two conversations of one agent at once, whose calls take turns: the latest call is the other conversation's."""
    spans = SpanFactory()
    root = spans.root()
    calls = [
        spans.call(spans.client(root, **SHORT), **tokens) for tokens in (ids(1), ids(2), ids(1, 0, 5), ids(2, 0, 6), ids(1, 0, 5, 0, 7))
    ]
    a, b, a2, b2, a3 = calls
    assert lines(spans) == {a: ("", 0), b: (a, 0), a2: (a, 1), b2: (b, 0), a3: (a2, 1)}


def test_reconstruct_parent_is_choice_that_prompt_continues() -> None:
    spans = SpanFactory()
    root = spans.root()
    first = spans.call(spans.client(root), choices=2, PromptIds=[1])
    spans.calls[-1] |= {"ResponseIds": [9], "Logprobs": [-1.0]}
    spans.call(spans.client(root), PromptIds=[1, 9, 3])
    chosen = next(str(row["CallId"]) for row in spans.calls if row["SpanId"] == first and row["ChoiceIndex"] == 1)
    assert place(spans).calls.sort("Order", "ChoiceIndex")["ParentCallId"].to_list() == ["", "", chosen]


def test_reconstruct_sub_agent_begins_after_call_that_caused_its_tool() -> None:
    spans = SpanFactory()
    planner = spans.span("planner", spans.root(), kind="AGENT")
    before = spans.call(spans.client(planner))
    cause = spans.call(spans.client(planner))
    tools = [spans.span("ask", planner, kind="TOOL") for _ in range(2)]
    writers = [spans.span("writer", tool, kind="AGENT") for tool in tools]
    inner = [[spans.call(spans.client(writer)) for _ in range(2)] for writer in writers]
    after = spans.call(spans.client(planner))
    assert lines(spans) == {
        before: ("", 0),
        cause: (before, 0),
        inner[0][0]: (cause, 1),
        inner[0][1]: (inner[0][0], 1),
        inner[1][0]: (cause, 2),
        inner[1][1]: (inner[1][0], 2),
        after: (cause, 0),
    }
    assert ran(spans) == {tools[0]: cause, tools[1]: cause}


def test_reconstruct_sub_agent_without_tool_begins_after_call_of_caller() -> None:
    spans = SpanFactory()
    planner = spans.span("planner", spans.root(), kind="AGENT")
    first = spans.call(spans.client(planner))
    first_writer = spans.call(spans.client(spans.span("writer", planner, kind="AGENT")))
    second_writer = spans.call(spans.client(spans.span("writer", planner, kind="AGENT")))
    last = spans.call(spans.client(planner))
    assert lines(spans) == {first: ("", 0), first_writer: (first, 1), second_writer: (first, 2), last: (first, 0)}


def test_reconstruct_hand_over_continues_branch() -> None:
    spans = SpanFactory()
    workflow = spans.span("workflow", spans.root(), kind="CHAIN")
    triage = spans.span("triage", workflow, kind="AGENT")
    first, second = (spans.call(spans.client(triage)) for _ in range(2))
    third = spans.call(spans.client(spans.span("specialist", workflow, kind="AGENT")))
    assert lines(spans) == {first: ("", 0), second: (first, 0), third: (second, 0)}


def test_reconstruct_alternating_agents_keep_their_branches() -> None:
    spans = SpanFactory()
    chat = spans.span("round robin", spans.root(), kind="CHAIN")
    a, b, a2, b2 = (spans.call(spans.client(spans.span(name, chat, kind="AGENT"))) for name in "abab")
    assert lines(spans) == {a: ("", 0), b: (a, 1), a2: (a, 0), b2: (b, 1)}


def test_reconstruct_failed_or_unused_calls_are_no_parents() -> None:
    spans = SpanFactory()
    root = spans.root()
    failed = spans.call(spans.client(root), HttpStatus=500)
    first = spans.call(spans.client(root))
    client = spans.client(root)
    unused, used = spans.call(client), spans.call(client)
    again = spans.call(spans.client(root), HttpStatus=500)
    last = spans.call(spans.client(root))
    expected = {failed: ("", 0), first: ("", 0), unused: (first, 0), used: (first, 0), again: (used, 0), last: (used, 0)}
    assert lines(spans) == expected


def test_reconstruct_calls_of_two_workers_are_not_ordered() -> None:
    spans = SpanFactory(clocks={"a": 100, "b": -100})
    root = spans.root()
    first = spans.call(spans.client(root))
    spawn = spans.span("spawn", root)
    workers = [[spans.call(spans.client(spawn, process=name)) for _ in range(2)] for name in "ab"]
    assert lines(spans) == {
        first: ("", 0),
        workers[0][0]: (first, 0),
        workers[0][1]: (workers[0][0], 0),
        workers[1][0]: (first, 1),
        workers[1][1]: (workers[1][0], 1),
    }


def test_reconstruct_clocks_of_two_hosts_are_not_compared() -> None:
    spans = SpanFactory()
    root = spans.root()
    hosts = {name: {"process": name, "service": "shop", "ProcessId": f"~{name}", "Seq": 0} for name in ("one", "two")}
    early = [spans.client(root, **hosts["one"], **SHORT) for _ in range(2)]
    late = spans.client(root, **hosts["two"], **SHORT)
    assert lines(spans) == {early[0]: ("", 0), early[1]: (early[0], 0), late: ("", 1)}


def test_reconstruct_gateway_calls_without_clients_follow_sequence_number() -> None:
    spans = SpanFactory()
    root = spans.root()
    calls = [spans.call(root) for _ in range(3)]
    assert lines(spans) == {calls[0]: ("", 0), calls[1]: (calls[0], 0), calls[2]: (calls[1], 0)}


def test_reconstruct_call_within_span_of_another_follows_it() -> None:
    spans = SpanFactory()
    outer = spans.span("generate", spans.root(), kind="LLM", **LONG)
    inner = spans.call(spans.client(spans.span("search", outer, kind="TOOL")))
    assert lines(spans) == {outer: ("", 0), inner: (outer, 1)}


def test_reconstruct_rollout_within_call_of_another_begins_own_tree() -> None:
    spans = SpanFactory()
    outer = spans.client(spans.root("outer", trace="shared"), rollout="outer", trace="shared", **LONG)
    tool = spans.span("run", outer, kind="TOOL", rollout="outer", trace="shared")
    root = spans.root("within", trace="shared")
    spans.spans[-1]["ParentSpanId"] = tool
    inner = spans.client(root, rollout="within", trace="shared")
    assert lines(spans) == {outer: ("", 0), inner: ("", 0)}


def test_reconstruct_components_and_tools_are_ordered() -> None:
    spans = SpanFactory()
    root = spans.root()
    graph = spans.span("graph", root, kind="CHAIN")
    agent = spans.span("AgentExecutor", graph, kind="AGENT", Attributes={"agent.name": "solver"})
    call = spans.call(spans.span("POST", spans.client(spans.span("ChatOpenAI", agent, kind="LLM"))))
    search = spans.span("run", agent, kind="TOOL", Attributes={"tool.name": "search"})
    inner = spans.call(spans.client(search))
    spans.span("sum", agent, kind="TOOL")
    bare = spans.call(spans.client(root))
    spans.evaluation(root)
    columns = ["SpanId", "Components", "Tools"]
    expected = [(call, ["graph", "solver"], ["search", "sum"]), (inner, ["graph", "solver", "search"], []), (bare, [], [])]
    assert build(spans.frames(), BuilderSettings()).transitions.select(columns).rows() == expected


def test_reconstruct_tool_call_id_names_causing_call() -> None:
    spans = SpanFactory()
    agent = spans.span("solver", spans.root(), kind="AGENT")
    asking = {"llm.output_messages.0.message.tool_calls.0.tool_call.id": "call_0"}
    asked = [spans.call(spans.client(agent, Attributes=asking)) for _ in range(2)]
    other = spans.call(spans.client(agent))
    named = spans.span("search", agent, kind="TOOL", Attributes={"tool_call.id": "call_0"})
    unnamed = spans.span("search", agent, kind="TOOL")
    strange = spans.span("search", agent, kind="TOOL", Attributes={"tool_call.id": "call_9"})
    later = spans.call(spans.client(agent, Attributes=asking))
    assert ran(spans) == {named: asked[1], unnamed: other, strange: other}
    assert later in lines(spans)
    assert place(spans).caused.select("SpanId", "Asked").rows() == [(named, True), (unnamed, False), (strange, False)]


def test_reconstruct_nested_spans_of_one_tool_call_are_one_and_failed_if_any() -> None:
    spans = SpanFactory()
    agent = spans.span("solver", spans.root(), kind="AGENT")
    call = spans.call(spans.client(agent))
    outer = spans.span("solver.add", agent, kind="TOOL", Attributes={"tool.name": "add"})
    native = {"gen_ai.operation.name": "execute_tool", "gen_ai.tool.name": "add", "gen_ai.tool.call.id": "call_7"}
    spans.span("execute_tool add", outer, status="Error", Attributes=native)
    other = spans.span("fetch", outer, kind="TOOL")
    facts = place(spans).caused.select("SpanId", "ToolName", "ToolFailed", "ToolCallId", "AgentName", "CallId").rows()
    cause = spans.calls[0]["CallId"]
    assert facts == [(outer, "add", True, "call_7", "solver", cause), (other, "fetch", False, None, "solver", cause)]
    assert call in lines(spans)


def test_reconstruct_tool_call_before_every_call_has_no_cause() -> None:
    spans = SpanFactory()
    root = spans.root()
    tool = spans.span("search", root, kind="TOOL")
    spans.call(spans.client(root))
    elsewhere = spans.span("search", spans.root("empty"), kind="TOOL", rollout="empty")
    assert ran(spans) == {tool: "", elsewhere: ""}


KINDS = st.sampled_from(["AGENT", "CHAIN", "TOOL", "client", "LLM", "call", "POST"])
SHAPES = st.lists(
    st.tuples(KINDS, st.integers(0, 30), st.sampled_from(["agent", "worker"]), st.integers(0, 5), st.integers(0, 3)), max_size=25
)


def forest(shape: list[tuple[str, int, str, int, int]]) -> SpanFactory:
    """Any forest of spans: each with a parent among those before it."""
    spans = SpanFactory()
    span_ids = [spans.root()]
    spans.evaluation(span_ids[0])
    for kind, parent, process, seconds, token in shape:
        above = span_ids[parent % len(span_ids)]
        if kind == "call":
            span_ids.append(spans.call(above, **ids(*range(token + 1))))
            continue
        more: dict[str, Any] = {"process": process, "Duration": seconds * SECOND}
        if kind == "client":
            span_ids.append(spans.client(above, **more))
        elif kind == "POST":
            span_ids.append(spans.span("POST", above, **more))
        else:
            span_ids.append(spans.span(f"{kind} {token}", above, kind=kind, **more))
    return spans


def shuffled_alike(spans: SpanFactory, random: Any) -> None:
    """Place calls, shuffle the rows, and place them again."""
    by = ["CallId"]
    columns = ["CallId", "SpanId", "AgentName", "Order", "ParentCallId", "Branch", "Components", "Tools", "Retried", "DuplicateOf"]
    first = place(spans)
    random.shuffle(spans.spans)
    random.shuffle(spans.calls)
    second = place(spans)
    assert first.calls.select(columns).sort(by).rows() == second.calls.select(columns).sort(by).rows()
    assert first.caused.drop("Tool", "Nodes").rows() == second.caused.drop("Tool", "Nodes").rows()


@settings(max_examples=80, deadline=None)
@given(SHAPES, st.randoms(use_true_random=False))
def test_reconstruct_is_independent_of_row_order(shape: list[tuple[str, int, str, int, int]], random: Any) -> None:
    shuffled_alike(forest(shape), random)


@pytest.mark.parametrize("seed", range(6))
def test_reconstruct_tools_of_two_processes_without_calls_have_stable_order(seed: int) -> None:
    shape = [("TOOL", 0, "agent", 0, 0), ("TOOL", 0, "worker", 0, 0), ("AGENT", 0, "agent", 0, 0), ("AGENT", 0, "agent", 0, 0)]
    shuffled_alike(forest([*shape, ("call", 0, "agent", 0, 0), ("call", 1, "agent", 0, 0)]), Random(seed))


@pytest.mark.parametrize("seed", range(6))
def test_reconstruct_client_beside_equally_deep_spans_is_below_first(seed: int) -> None:
    shape = [("LLM", 0, "agent", 0, 0), ("LLM", 1, "agent", 0, 1), ("client", 0, "agent", 1, 1), ("LLM", 1, "agent", 0, 0)]
    shuffled_alike(forest(shape), Random(seed))


@settings(max_examples=80, deadline=None)
@given(SHAPES, st.sampled_from([-30.0, 30.0]))
def test_reconstruct_puts_parents_first_and_ignores_clocks_of_other_processes(
    shape: list[tuple[str, int, str, int, int]], skew: float
) -> None:
    spans = forest(shape)
    calls = place(spans).calls
    place_of = dict(calls.select("CallId", "Order").rows())
    for order, parent in calls.select("Order", "ParentCallId").rows():
        assert parent == "" or place_of[parent] < order
    assert sorted(calls["Order"].unique()) == list(range(calls["Node"].n_unique()))
    branches = calls.sort("Order")["Branch"].to_list()
    assert all(branch <= max(branches[:at], default=-1) + 1 for at, branch in enumerate(branches))
    for row in [*spans.spans, *spans.calls]:
        if row["ProcessId"] == "gateway":
            row["Timestamp"] = pl.Series([row["Timestamp"]]).dt.offset_by(f"{int(skew)}s")[0]
    assert place(spans).calls.drop("Timestamp").sort("CallId").equals(calls.drop("Timestamp").sort("CallId"))


@pytest.mark.parametrize("size", [300])
def test_reconstruct_300_parallel_calls_opens_a_branch_each(size: int) -> None:
    spans = SpanFactory()
    root = spans.root()
    for client in [spans.client(root, Duration=10_000 * SECOND) for _ in range(size)]:
        spans.call(client)
    assert [row[1] for row in lines(spans).values()] == list(range(size))
