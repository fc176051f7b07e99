"""Real spans of two dozen set-ups as one announced rollout each: how many calls they are, whatever clocks and deliveries did to them."""

from __future__ import annotations

import functools
import json
from dataclasses import replace
from pathlib import Path
from random import Random

import polars as pl
import pytest
from polars.testing import assert_frame_equal

from spangrad.settings import AirRule, BuilderSettings
from tests.support.spans import SpanFactory
from transition_builder import dialects
from transition_builder.build import build
from transition_builder.frames import Built, Frames

SPANS = Path(__file__).parents[1] / "fixtures" / "spans"
SPEC = BuilderSettings(rules=(AirRule(name="tool_error", kind="tool_error", reward=-1, tools=("*",)),))
CALLS = {
    # With the gateway, its spans; else requests that left the agent, or would have.
    "aborted_stream+gateway": (7, {"call_failed": 3}),
    "ai_sdk_6_js+gateway": (4, {}),
    "ai_sdk_6_js_openinference+gateway": (2, {}),
    "ai_sdk_6_js_traceloop+gateway": (2, {}),
    "ai_sdk_6_js_unlinked+gateway": (4, {}),
    "ai_sdk_7_js+gateway": (4, {}),
    "anthropic": (2, {"no_token_ids": 2}),
    "attribute_limit_dropped": (1, {"no_token_ids": 1}),
    "attribute_limit_raised": (1, {}),
    "autogen": (8, {}),
    "clock_skew+gateway": (3, {}),
    "genai_openai_v2": (4, {"no_token_ids": 4}),
    "genai_semconv_span_only": (4, {"no_token_ids": 4}),
    "genkit_js+gateway": (3, {}),
    "http_only_httpx": (2, {"unknown_convention": 2}),
    "langchain": (2, {}),
    "langchain+gateway": (2, {}),
    "langchain_js_openinference+gateway": (4, {}),
    "langchain_js_traceloop+gateway": (4, {}),
    "langchain_linked": (2, {}),
    "langchain_streaming": (2, {}),
    "langgraph_tool_error": (2, {}),
    "litellm": (3, {}),
    "mastra_js+gateway": (4, {}),
    "openai_agents": (4, {}),
    "openai_agents+gateway": (4, {}),
    "openai_agents_js+gateway": (4, {}),
    "openai_agents_responses": (4, {"no_token_ids": 4}),
    "openai_client": (11, {"call_failed": 3, "no_token_ids": 1}),
    "openai_client+gateway": (9, {"call_failed": 2, "no_token_ids": 1}),
    "openai_client_httpx": (6, {}),
    "openai_js_openinference+gateway": (4, {}),
    "openai_js_otel+gateway": (5, {"call_failed": 1}),
    "openai_js_traceloop+gateway": (4, {}),
    "parallel_calls+gateway": (50, {}),
    "raw_http+gateway": (2, {}),
    "traceloop": (11, {"call_failed": 3, "no_token_ids": 8}),
    "traceloop_langchain": (2, {"no_token_ids": 2}),
    "voltagent_js+gateway": (4, {}),
}
"""Calls of each file, and those that drop by reason. LangChain's own trace and the traces of its OpenAI client are apart: one rollout
that names both makes one call of each two spans. docs/reference/fixtures.md, where no span names one, has three rollouts and four calls."""


JAVASCRIPT = {
    "ai_sdk_6_js+gateway": (["breaker", "breaker", "streamer", "streamer"], ["broken"]),
    # What the span processors of OpenInference and of Traceloop's SDK make of the AI SDK's spans.
    "ai_sdk_6_js_openinference+gateway": (["breaker"] * 2, ["broken"]),
    "ai_sdk_6_js_traceloop+gateway": (["breaker"] * 2, ["broken"]),
    # Without an instrumentation of HTTP: response ids alone join the gateway's spans.
    "ai_sdk_6_js_unlinked+gateway": (["breaker", "breaker", "streamer", "streamer"], ["broken"]),
    "ai_sdk_7_js+gateway": (["breaker", "breaker", "agent", "agent"], ["broken"]),
    "genkit_js+gateway": (["planner"] * 3, ["broken"]),
    "langchain_js_openinference+gateway": (["planner"] * 4, ["broken"]),
    # Its spans are linked neither to each other nor to requests, and a tool that failed has the name of its class alone.
    "langchain_js_traceloop+gateway": (["agent"] * 4, ["DynamicStructuredTool"]),
    "mastra_js+gateway": (["planner"] * 4, ["broken"]),
    "openai_agents_js+gateway": (["planner", "planner", "planner", "writer"], ["broken"]),
    "openai_js_openinference+gateway": (["agent"] * 4, []),
    "openai_js_otel+gateway": (["agent"] * 4, []),
    "openai_js_traceloop+gateway": (["agent"] * 4, []),
    "voltagent_js+gateway": (["planner"] * 4, ["broken"]),
}
"""Agents of the calls of JavaScript's files, in order, and the tools that failed. No prompt in them extends a response token by token."""


@functools.cache
def captured(name: str) -> Frames:
    """The spans of a file, all of one rollout that ended and was rewarded."""
    spans = SpanFactory()
    spans.evaluation(spans.root(calls=None))
    for line in (SPANS / f"{name}.jsonl").read_text().splitlines():
        spans.load_otlp(json.loads(line))
    return spans.frames()


@functools.cache
def concluded(name: str) -> Built:
    return build(captured(name), SPEC)


def assert_same(first: Built, second: Built) -> None:
    """The same rows but for the clocks' times: ids, turns, branches, parents, rewards, reasons."""
    for left, right in ((first.transitions, second.transitions), (first.drops, second.drops), (first.rewards, second.rewards)):
        dated = [column for column in ("Timestamp",) if column in left.columns]
        assert_frame_equal(left.drop(dated), right.drop(dated))


def test_fixture_files_are_all_counted() -> None:
    assert {file.stem for file in SPANS.glob("*.jsonl")} == set(CALLS)


@pytest.mark.parametrize("name", sorted(CALLS))
def test_build_fixture_has_calls_of_its_agent(name: str) -> None:
    built = concluded(name)
    named = built.drops.filter(pl.col("CallId") != "")
    calls = [*built.transitions["CallId"], *named["CallId"]]
    assert len(calls) == len(set(calls))
    assert (len(calls), dict(named.group_by("Reason").len().rows())) == CALLS[name]
    assert built.drops.height == named.height


@pytest.mark.parametrize("name", sorted(CALLS))
def test_build_fixture_is_independent_of_process_clocks(name: str) -> None:
    frames = captured(name)
    processes = frames.spans["ProcessId"].unique().sort().to_list()
    assert len(processes) > 1  # the runner's among them
    for process in processes:
        for seconds in (-30, 30):
            off = pl.when(pl.col("ProcessId") == process).then(pl.duration(seconds=seconds)).otherwise(pl.duration(seconds=0))
            shifted = {
                table: getattr(frames, table).with_columns(Timestamp=(pl.col("Timestamp") + off).cast(frames.spans.schema["Timestamp"]))
                for table in ("spans", "calls")
            }
            assert_same(concluded(name), build(replace(frames, **shifted), SPEC))


@pytest.mark.parametrize("name", sorted(CALLS))
def test_build_fixture_is_independent_of_deliveries(name: str) -> None:
    frames, random = captured(name), Random(name)
    mixed = {}
    for table in ("spans", "calls", "answers"):
        rows = getattr(frames, table)
        places = [*range(rows.height)] * 2
        random.shuffle(places)
        mixed[table] = rows[places]
    assert_same(concluded(name), build(replace(frames, **mixed), SPEC))


def test_javascript_fixtures_are_all_described() -> None:
    assert {name for name in CALLS if "_js" in name} == set(JAVASCRIPT)


@pytest.mark.parametrize("name", JAVASCRIPT)
def test_build_javascript_fixture_has_agents_parents_and_failed_tools(name: str) -> None:
    calls = concluded(name).transitions.sort("Turn")
    failed = dialects.describe(captured(name).spans.with_columns(RolloutId="RolloutKey")).filter("ToolFailed")
    assert (calls["AgentName"].to_list(), failed["ToolName"].to_list()) == JAVASCRIPT[name]
    assert calls["ParentCallId"].to_list() == ["", *calls["CallId"][:-1]]
    assert set(calls["Branch"]) == {0}
    blamed = concluded(name).rewards.filter(pl.col("Name") == "tool_error")["CallId"].to_list()
    assert blamed == [calls["CallId"][0]] * len(failed)
