"""Frameworks unknown to the builder: each of their calls becomes a drop with a reason or, with the gateway's spans, a transition."""

from __future__ import annotations

import polars as pl
import pytest

from spangrad.settings import AirRule, BuilderSettings
from tests.support.dialects import framework_runs
from tests.support.spans import SpanFactory
from transition_builder.build import build
from transition_builder.frames import Built

FRAMEWORKS = framework_runs()
TOOL_ERROR = AirRule(name="tool_error", kind="tool_error", reward=-1, tools=("*",))


def built(name: str, *, gateway: bool) -> Built:
    spans = SpanFactory()
    root = spans.root(calls=FRAMEWORKS[name].calls if gateway else None)
    spans.evaluation(root)
    FRAMEWORKS[name].plant(spans, root, gateway=gateway)
    return build(spans.frames(), BuilderSettings(rules=(TOOL_ERROR,)))


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_build_unknown_framework_without_gateway_drops_every_call_with_reason(name: str) -> None:
    drops = built(name, gateway=False).drops.filter(pl.col("CallId") != "")
    assert (drops.height, set(drops["Reason"])) == (FRAMEWORKS[name].calls, set(FRAMEWORKS[name].reasons))
    assert drops["CallId"].is_unique().all()


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_build_unknown_framework_with_gateway_makes_every_call_a_transition(name: str) -> None:
    whole = built(name, gateway=True)
    assert (whole.transitions.height, whole.drops.rows()) == (FRAMEWORKS[name].calls, [])
    assert whole.transitions["Turn"].to_list() == list(range(FRAMEWORKS[name].calls))


AGENTS = {
    "crewai": "Researcher",
    "smolagents": "ToolCallingAgent.run",
    "google_adk": "root",
    "semantic_kernel": "Host",
    "strands": "Weather",
    "beeai": "planner",
    "agno": "News_Agent.run",
    "mastra": "weather-agent",
}


@pytest.mark.parametrize("name", AGENTS)
def test_build_unknown_framework_calls_have_agent_name(name: str) -> None:
    assert set(built(name, gateway=True).transitions["AgentName"]) == {AGENTS[name]}


def test_build_failed_strands_tool_is_rewarded_by_tool_error_rule() -> None:
    spans = SpanFactory()
    root = spans.root(calls=1)
    spans.evaluation(root)
    spans.call(spans.client(root))
    attributes = {"gen_ai.operation.name": "execute_tool", "gen_ai.tool.name": "get_weather", "gen_ai.tool.status": "error"}
    spans.span("execute_tool get_weather", root, scope="strands.telemetry.tracer", Attributes=attributes)
    rewards = build(spans.frames(), BuilderSettings(rules=(TOOL_ERROR,))).rewards
    assert rewards.filter(pl.col("Name") == "tool_error").height == 1
