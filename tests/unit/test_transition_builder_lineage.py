"""Agents' names and the order of calls, on hand-made trees and on spans that real frameworks made."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from spangrad.settings import AirRule, BuilderSettings
from tests.support.spans import SpanFactory
from transition_builder.build import build
from transition_builder.calls.forest import Mask, SpanForest
from transition_builder.frames import Built

SPANS = Path(__file__).parents[1] / "fixtures" / "spans"


def forest(*parents: int) -> SpanForest:
    """Parents by number; -1 for none."""
    return SpanForest.of(np.array([len(parents) if parent < 0 else parent for parent in parents], dtype=np.int64))


def marked(*names: int, size: int) -> Mask:
    return np.isin(np.arange(size), names)


def test_span_forest_finds_ancestors_at_any_depth() -> None:
    chain = forest(-1, *range(999))
    assert chain.nearest(marked(0, 500, size=1000))[[0, 499, 500, 999]].tolist() == [0, 0, 500, 500]
    assert chain.outermost(marked(3, 500, size=1000))[[2, 3, 499, 999]].tolist() == [1000, 3, 3, 3]
    assert chain.depth[[0, 999, 1000]].tolist() == [1, 1000, 0]
    assert np.flatnonzero(chain.above(marked(3, 500, size=1000))).tolist() == [*range(500)]
    assert (chain.count_below(np.array([3, 500]))[[0, 3, 4, 500, 501]]).tolist() == [2, 2, 1, 1, 0]


def test_span_forest_cuts_cycles() -> None:
    tangled = forest(1, 2, 0, 2, -1, 4, 6)  # 0 > 1 > 2 > 0, 3 hangs on it, 6 is its own parent
    assert tangled.nearest(marked(0, 4, size=7)).tolist() == [0, 7, 7, 7, 4, 4, 7, 7]
    assert tangled.depth.tolist() == [1, 1, 1, 1, 1, 2, 1, 0]
    assert tangled.common_depth(np.array([0, 5, 5]), np.array([1, 4, 5])).tolist() == [0, 1, 2]


def order_of(spans: SpanFactory) -> list[str]:
    built = build(spans.frames(), BuilderSettings())
    return built.transitions.sort("Turn")["SpanId"].to_list()


def ended(spans: SpanFactory) -> str:
    spans.evaluation(root := spans.root())
    return root


def test_call_order_follows_sequence_of_agent_not_gateway_arrivals() -> None:
    spans = SpanFactory()
    root = ended(spans)
    first, second = spans.span("POST", root), spans.span("POST", root)
    late = spans.call(second)
    early = spans.call(first)
    assert order_of(spans) == [early, late]


def test_call_order_ignores_clock_jump_within_process() -> None:
    spans = SpanFactory()
    root = ended(spans)
    posts = [spans.span("POST", root) for _ in range(2)]
    spans.spans[-1]["Timestamp"] = SpanFactory.time(-3600)
    calls = [spans.call(post) for post in posts]
    assert order_of(spans) == calls


def test_call_order_below_one_span_follows_gateway() -> None:
    spans = SpanFactory()
    step = spans.span("step", ended(spans), kind="CHAIN")
    calls = [spans.call(step) for _ in range(3)]
    assert order_of(spans) == calls


def test_call_order_places_worker_process_where_it_was_started() -> None:
    spans = SpanFactory()
    root = ended(spans)
    before, spawn, after = (spans.span(name, root) for name in ("before", "spawn", "after"))
    last = spans.call(after)
    inner = [spans.call(spans.span("POST", spawn, process="worker")) for _ in range(2)]
    first = spans.call(before)
    assert order_of(spans) == [first, *inner, last]


def test_call_order_of_two_workers_follows_first_gateway_call() -> None:
    spans = SpanFactory()
    spawn = spans.span("spawn", ended(spans))
    posts = {name: [spans.span("POST", spawn, process=name) for _ in range(2)] for name in ("a", "b")}
    b = [spans.call(one) for one in posts["b"]]
    a = [spans.call(one) for one in posts["a"]]
    assert order_of(spans) == [*b, *a]


def test_call_order_of_raw_calls_among_instrumented_follows_gateway() -> None:
    spans = SpanFactory(clocks={"gateway": -1000})
    root = ended(spans)
    agent = spans.span("agent", root)
    calls = [spans.call(parent) for parent in (spans.span("POST", agent), root, spans.span("POST", agent), root)]
    assert order_of(spans) == calls


def test_call_order_of_raw_call_beside_worker_keeps_sequence_elsewhere() -> None:
    """Only what branches off where the raw call does is in the gateway's order: one order for all, no cycle."""
    spans = SpanFactory()
    root = ended(spans)
    first, second, spawn = (spans.span(name, root) for name in ("POST", "POST", "spawn"))
    worker = spans.span("POST", spawn, process="worker")
    late = spans.call(second)
    raw = spans.call(spawn)
    inner = spans.call(worker)
    early = spans.call(first)
    assert order_of(spans) == [early, late, raw, inner]


def test_call_order_does_not_compare_two_gateways() -> None:
    spans = SpanFactory()
    root = ended(spans)
    posts = [spans.span("POST", root) for _ in range(2)]
    late = spans.call(posts[1])
    raw = spans.call(root, process="other gateway")
    early = spans.call(posts[0])
    assert order_of(spans) == [early, late, raw]


def test_call_order_without_sequence_follows_clock_of_service() -> None:
    spans = SpanFactory(clocks={"gateway": -1000})
    root = ended(spans)
    first, second = (spans.span("POST", root, service="shop", ProcessId="", Seq=0) for _ in range(2))
    late, early = spans.call(second), spans.call(first)
    assert order_of(spans) == [early, late]


def test_call_order_with_huge_sequence_number_is_unchanged() -> None:
    spans = SpanFactory()
    root = ended(spans)
    posts = [spans.span("POST", root) for _ in range(2)]
    spans.spans[-2]["Seq"] = 2**64 - 1
    calls = [spans.call(post) for post in posts]
    assert order_of(spans) == calls


def agents_of(spans: SpanFactory) -> list[str]:
    return build(spans.frames(), BuilderSettings()).transitions.sort("Turn")["AgentName"].to_list()


@pytest.mark.parametrize(
    ("inner", "name"),
    [
        ({"kind": "AGENT"}, "inner"),
        ({"kind": "AGENT", "Attributes": {"agent.name": "Named"}}, "Named"),
        ({"Attributes": {"gen_ai.agent.name": "native"}}, "native"),
        ({"kind": "CHAIN", "Attributes": {"graph.node.id": "node"}}, "node"),
        ({"kind": "CHAIN"}, "outer"),
    ],
)
def test_agent_name_is_of_nearest_agent_ancestor(inner: dict[str, Any], name: str) -> None:
    spans = SpanFactory()
    outer = spans.span("outer", ended(spans), kind="AGENT")
    spans.call(spans.client(spans.span("step", spans.span("inner", outer, **inner), kind="CHAIN")))
    assert agents_of(spans) == [name]


def test_agent_name_without_agents_is_outermost_chain_then_service() -> None:
    spans = SpanFactory()
    root = ended(spans)
    graph = spans.span("LangGraph", root, kind="CHAIN", service="shop")
    spans.call(spans.client(spans.span("model", graph, kind="CHAIN", service="shop"), service="shop"))
    spans.call(spans.span("POST", root, service="shop"))
    spans.call(root)
    spans.call("missing")
    assert agents_of(spans) == ["LangGraph", "shop", "runner", ""]


def captured(name: str) -> tuple[Built, dict[str, str]]:
    """Build what a real framework sent, beside a root of ours; second, the names of all its spans."""
    spans = SpanFactory()
    ended(spans)
    for line in (SPANS / name).read_text().splitlines():
        spans.load_otlp(json.loads(line))
    names = {str(row["SpanId"]): str(row["SpanName"]) for row in spans.spans}
    return build(spans.frames(), BuilderSettings(rules=(AirRule(name="tool_error", kind="tool_error", reward=-1, tools=("*",)),))), names


def summary(built: Built) -> list[tuple[Any, ...]]:
    return built.transitions.select("AgentName", pl.col("ResponseIds").list.len(), "Rewards.Name").rows()


def test_build_langgraph_fixture_with_failing_tool() -> None:
    built, names = captured("langgraph_tool_error.jsonl")
    assert summary(built) == [("agent", 12, ["tool_error"]), ("agent", 5, ["reward"])]
    assert [names[span] for span in built.transitions["SpanId"]] == ["ChatCompletion", "ChatCompletion"]
    assert [names[span] for span in built.rewards.filter(pl.col("Name") == "tool_error")["SpanId"]] == ["broken"]
    assert built.drops.rows() == []


def test_build_langchain_fixture_agent_is_named() -> None:
    built, _ = captured("langchain_linked.jsonl")
    assert summary(built) == [("calc_agent", 7, []), ("calc_agent", 5, ["reward", "tool_error"])]
    assert built.drops.rows() == []


def test_build_openai_agents_fixture_hands_over_between_agents() -> None:
    built, names = captured("openai_agents+gateway.jsonl")
    assert summary(built) == [("Triage", 7, []), ("Triage", 4, []), ("Specialist", 5, ["tool_error"]), ("Specialist", 5, ["reward"])]
    assert {names[span] for span in built.transitions["SpanId"]} == {"chat"}
    assert built.drops.rows() == []


@pytest.mark.parametrize(
    ("name", "calls"), [("parallel_calls+gateway.jsonl", 50), ("clock_skew+gateway.jsonl", 3), ("raw_http+gateway.jsonl", 2)]
)
def test_build_gateway_fixture_calls_count_once_in_order(name: str, calls: int) -> None:
    built, names = captured(name)
    assert [names[span] for span in built.transitions["SpanId"]] == ["chat"] * calls
    assert built.transitions["Turn"].to_list() == list(range(calls))
    assert built.drops.rows() == []
