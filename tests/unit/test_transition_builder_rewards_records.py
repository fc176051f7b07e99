"""Exceptions, events and log records of tools, as rules see them: from frames alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import polars as pl
import pytest

from spangrad.errors import BuilderError, SettingsError
from spangrad.settings import AirRule, BuilderSettings
from spangrad.settings.sources import load_settings
from spangrad.types import call_id
from tests.support.spans import SpanFactory
from transition_builder.build import build
from transition_builder.rewards.air import check
from transition_builder.rewards.rules.columns import used
from transition_builder.schemas import TOOL_EVENTS, TOOL_LOGS


class Tools:
    """An agent's calls, a tool after each, and what was recorded inside the tools."""

    def __init__(self) -> None:
        self.spans = SpanFactory()
        root = self.spans.root()
        self.spans.evaluation(root, 1)
        self.agent = self.spans.span("agent", root, kind="AGENT")
        self.calls = list[str]()
        self._events, self._logs = list[dict[str, Any]](), list[dict[str, Any]]()

    def call(self) -> None:
        self.calls.append(self.spans.call(self.spans.span("POST", self.agent)))

    def tool(self, name: str = "search", parent: str = "", **attributes: str) -> str:
        return self.spans.span(name, parent or self.agent, kind="TOOL", status="Error", Attributes={"tool.name": name, **attributes})

    def event(self, span: str, name: str, kind: str = "", **attributes: str) -> None:
        pairs = [{"Key": key, "Value": value} for key, value in attributes.items()]
        self._events.append({"TraceId": self._trace(span), "SpanId": span, "Name": name, "ExceptionType": kind, "Attributes": pairs})

    def log(self, span: str, severity: int, body: str, kind: str = "") -> None:
        about = {"TraceId": self._trace(span), "SpanId": span, "Severity": severity, "Body": body}
        self._logs.append({**about, "ExceptionType": kind, "Attributes": []})

    def _trace(self, span: str) -> str:
        return next(str(row["TraceId"]) for row in self.spans.spans if row["SpanId"] == span)

    def rewards(self, *rules: AirRule) -> list[tuple[int, str, float]]:
        """Number of the call, name and value of each AIR reward."""
        frames = replace(
            self.spans.frames(),
            tool_events=pl.DataFrame(self._events, schema=dict(TOOL_EVENTS)),
            tool_logs=pl.DataFrame(self._logs, schema=dict(TOOL_LOGS)),
        )
        rows = build(frames, BuilderSettings(rules=rules)).rewards.filter(pl.col("Source") == "air")
        ids = [call_id(self._trace(span), span, 0) for span in self.calls]
        return sorted((ids.index(call), name, value) for call, name, value in rows.select("CallId", "Name", "Value").rows())


def of_types(types: str, **changes: object) -> AirRule:
    return AirRule.model_validate({"name": types, "kind": "tool_exception", "reward": -1, "tools": ["*"], "types": types, **changes})


def expression(where: str) -> AirRule:
    return AirRule(name="e", kind="expression", reward=1, where=where)


def test_tool_exception_rule_matches_whole_type_once_per_tool_call() -> None:
    tools = Tools()
    tools.call()
    for _ in range(2):
        tools.event(tool := tools.tool(), "exception", "TimeoutError")
        tools.event(tool, "exception", "TimeoutError")
    tools.call()
    tools.event(tools.tool("read"), "exception", "httpx.ReadTimeout")
    tools.event(tools.tool("read"), "retry")
    assert tools.rewards(of_types("TimeoutError")) == [(0, "TimeoutError", -1.0), (0, "TimeoutError", -1.0)]
    assert tools.rewards(of_types("Timeout")) == []
    assert tools.rewards(of_types(".*Timeout.*", tools=["read"])) == [(1, ".*Timeout.*", -1.0)]


def test_tool_exception_type_prefers_event_then_log_then_span() -> None:
    tools = Tools()
    for attributes, event, log in (
        ({"error.type": "timeout"}, "", ""),
        ({"error.type": "timeout"}, "ValueError", ""),
        ({"error.type": "timeout"}, "", "KeyError"),
        ({}, "ValueError", "ValueError"),
        ({}, "", ""),
    ):
        tools.call()
        span = tools.tool(**attributes)
        if event:
            tools.event(span, "exception", event)
        if log:
            tools.log(span, 17, "failed", log)
    types = [of_types(name) for name in ("timeout", "ValueError", "KeyError")]
    assert tools.rewards(*types) == [(0, "timeout", -1), (1, "ValueError", -1), (2, "KeyError", -1), (3, "ValueError", -1)]
    assert tools.rewards(expression("ARRAY_LENGTH(ToolExceptionTypes)")) == [(call, "e", 1) for call in range(4)]


def test_tool_records_of_nested_spans_belong_to_one_tool_call() -> None:
    tools = Tools()
    tools.call()
    inner = tools.tool(parent=tools.tool())
    tools.event(inner, "exception", "ValueError")
    tools.log(inner, 13, "odd")
    tools.call()
    assert tools.rewards(of_types("ValueError")) == [(0, "ValueError", -1.0)]
    assert tools.rewards(expression("ToolLogSeverity")) == [(0, "e", 13.0)]


def test_tool_records_belong_to_causing_call_in_order() -> None:
    tools = Tools()
    tools.call()
    for body in ("first", "second"):
        span = tools.tool()
        tools.event(span, body)
        tools.log(span, 9, body)
        tools.log(span, 17 if body == "first" else 5, f"{body} again")
    tools.call()
    assert tools.rewards(expression("ARRAY_TO_STRING(ToolLogBodies, ',') = 'first,first again,second,second again'")) == [(0, "e", 1)]
    assert tools.rewards(expression("ARRAY_TO_STRING(ToolEventNames, ',') = 'first,second'")) == [(0, "e", 1)]
    assert tools.rewards(expression("ToolLogSeverity")) == [(0, "e", 17)]
    # Of a call without tools lists are empty, not null.
    assert tools.rewards(expression("CASE WHEN ARRAY_LENGTH(ToolEvents) + ARRAY_LENGTH(ToolLogs) = 0 THEN 1 END")) == [(1, "e", 1)]


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ({"kind": "tool_exception", "reward": -1, "tools": ["*"]}, "needs types. Give it."),
        ({"kind": "tool_exception", "reward": -1, "types": ".*"}, "names no tools"),
        ({"kind": "tool_error", "reward": -1, "tools": ["*"], "types": ".*"}, "does not use types. Leave it out."),
        ({"kind": "python", "reward": -1}, "needs where. Give it."),
        ({"kind": "python", "where": "m:f"}, "its reward is 0"),
        ({"kind": "expression", "reward": -1, "where": "Seconds", "columns": ["Seconds"]}, "does not use columns. Leave it out."),
    ],
)
def test_air_rule_on_records_or_in_python_with_contradictory_fields_raises(rule: dict[str, object], message: str) -> None:
    with pytest.raises(SettingsError) as error:
        load_settings({"builder.rules": [{"name": "r", **rule}]}, env={})
    assert message in str(error.value)


def test_check_tool_exception_types_of_invalid_pattern_raises() -> None:
    with pytest.raises(BuilderError, match=r"the rule '\(' has types = '\(', which is no regular expression: .* Fix it\."):
        check(BuilderSettings(rules=(of_types("("),)))


def test_used_columns_are_those_of_rules() -> None:
    rules = (of_types(".*"), expression("LENGTH(Text) + ToolLogSeverity"))
    assert used(BuilderSettings(rules=rules)) == {"ToolExceptionTypes", "Text", "ToolLogSeverity"}
    assert used(BuilderSettings(rules=(AirRule(name="slow", kind="latency", reward=-1, seconds=1),))) == frozenset()
