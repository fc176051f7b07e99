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
from transition_builder.build import build
from transition_builder.frames import Built, Frames

SPANS = Path(__file__).parents[1] / "fixtures" / "spans"
SPEC = BuilderSettings(rules=(AirRule(name="tool_error", kind="tool_error", reward=-1, tools=("*",)),))
CALLS = {
    # With the gateway, its spans; else requests that left the agent, or would have.
    "aborted_stream+gateway": (7, {"call_failed": 3}),
    "anthropic": (2, {"no_token_ids": 2}),
    "attribute_limit_dropped": (1, {"no_token_ids": 1}),
    "attribute_limit_raised": (1, {}),
    "autogen": (8, {}),
    "clock_skew+gateway": (3, {}),
    "genai_openai_v2": (4, {"no_token_ids": 4}),
    "genai_semconv_span_only": (4, {"no_token_ids": 4}),
    "http_only_httpx": (2, {"unknown_convention": 2}),
    "langchain": (2, {}),
    "langchain+gateway": (2, {}),
    "langchain_linked": (2, {}),
    "langchain_streaming": (2, {}),
    "langgraph_tool_error": (2, {}),
    "litellm": (3, {}),
    "openai_agents": (4, {}),
    "openai_agents+gateway": (4, {}),
    "openai_agents_responses": (4, {"no_token_ids": 4}),
    "openai_client": (11, {"call_failed": 3, "no_token_ids": 1}),
    "openai_client+gateway": (9, {"call_failed": 2, "no_token_ids": 1}),
    "openai_client_httpx": (6, {}),
    "parallel_calls+gateway": (50, {}),
    "raw_http+gateway": (2, {}),
    "traceloop": (11, {"call_failed": 3, "no_token_ids": 8}),
    "traceloop_langchain": (2, {"no_token_ids": 2}),
}
"""Calls of each file, and those that drop by reason. LangChain's own trace and the traces of its OpenAI client are apart: one rollout
that names both makes one call of each two spans. docs/reference/fixtures.md, where no span names one, has three rollouts and four calls."""


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
