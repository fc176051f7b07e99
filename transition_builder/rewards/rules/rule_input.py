"""Data of calls that rules see: the columns of a call that an expression may use, the tools that ran, the tool calls that were requested.

Invariant: only calls that the agent used and the engine answered are in it: failed calls, unused retries and duplicate records are not
actions of the policy.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import polars as pl

from spangrad import semconv
from transition_builder.calls.retries import failed
from transition_builder.dialects.reading import attribute
from transition_builder.frames import empty
from transition_builder.rewards.rules.columns import COLUMNS, EVENTS, LOGS
from transition_builder.schemas import ATTEMPT, CHOICE, SPAN, TOOL_EVENTS, TOOL_LOGS, Schema

_EVENT = ["Name", "Attributes"]
_LOG = ["Severity", "Body", "Attributes"]

RECORDS: Schema = {
    "ExceptionTypes": pl.List(pl.String()),
    "Events": pl.List(pl.Struct({name: TOOL_EVENTS[name] for name in _EVENT})),
    "Logs": pl.List(pl.Struct({name: TOOL_LOGS[name] for name in _LOG})),
}
"""Records of a tool call; lists are empty where there are none. ExceptionTypes: each once, of `exception` events and of log records; where
neither names one, `error.type` of the tool's spans."""


@dataclass(frozen=True)
class RuleInput:
    """Data that rules see, computed when a rule uses it."""

    placed: pl.DataFrame
    """Placed canonical calls of final attempts that may have rewards."""
    caused: pl.DataFrame
    """Tools and the calls that caused them (`causes`), of any attempts."""
    answers: pl.DataFrame
    """RESPONSES."""
    sql: pl.DataFrame
    """REPORTED rows of SQL files, each of a call."""
    nodes: pl.DataFrame
    """Described spans that `caused` numbers."""
    used_columns: frozenset[str] = frozenset()
    """COLUMNS that some rule uses."""
    tool_events: pl.DataFrame = field(default_factory=lambda: empty(TOOL_EVENTS))
    tool_logs: pl.DataFrame = field(default_factory=lambda: empty(TOOL_LOGS))

    @cached_property
    def used(self) -> pl.DataFrame:
        """Return the calls that rules see: a row a choice."""
        in_use = ~pl.col("Retried") & (pl.col("DuplicateOf") == "")
        return self.placed.filter(~failed() & in_use).select(
            *ATTEMPT, *CHOICE, "CallId", "ParentCallId", "AgentName", "Policy", "Model", "FinishReason", "Temperature", "Order",
            "PromptTokens", "ResponseTokens", Version=pl.col("Versions.Version").list.first(), Seconds=pl.col("Duration") / 1e9,
        )  # fmt: skip

    @cached_property
    def first(self) -> pl.DataFrame:
        """Return the first choice of each call."""
        return self.used.filter(pl.col("ChoiceIndex") == pl.col("ChoiceIndex").min().over(*ATTEMPT, *SPAN))

    @cached_property
    def tools(self) -> pl.DataFrame:
        """Return tools that a call caused to run: columns of `causes`, CallId of the call's first choice."""
        return self.caused.join(self.placed.select("CallId"), on="CallId", how="semi", maintain_order="left")

    @cached_property
    def recorded_tools(self) -> pl.DataFrame:
        """Return the same tools with the columns of RECORDS."""
        return with_records(self.tools, self.nodes, self.tool_events, self.tool_logs)

    @cached_property
    def answered(self) -> pl.DataFrame:
        """Return calls whose responses were recorded: CallId, its span, AgentName, ParentCallId, Text, ToolCalls."""
        identity = self.used[[*CHOICE, "CallId", "ParentCallId", "AgentName"]]
        return identity.join(self.answers, on=CHOICE, maintain_order="left")

    @cached_property
    def columns(self) -> pl.DataFrame:
        """Return COLUMNS of each choice of each call, with CallId, span and attempt; record columns are empty where no rule uses them."""
        executed = self.tools.group_by("CallId", maintain_order=True).agg(
            Tools=pl.col("ToolName"), FailedTools=pl.col("ToolFailed").fill_null(False).sum()
        )
        texts = self.answered.select("CallId", "Text", AskedTools=pl.col("ToolCalls").list.eval(pl.element().struct.field("Name")))
        facts = (
            self.used.join(executed, on="CallId", how="left")
            .join(texts, on="CallId", how="left")
            .join(self._records(), on="CallId", how="left")
            .with_columns(
                pl.col("Tools", "ToolExceptionTypes", "ToolEventNames", "ToolEvents", "ToolLogBodies", "ToolLogs").fill_null([]),
                pl.col("FailedTools").fill_null(0),
                Place=pl.col("Order").rank("dense").over(ATTEMPT).cast(pl.Int64) - 1,
                Calls=pl.col("Order").n_unique().over(ATTEMPT),
            )
        )
        return facts.select(*ATTEMPT, *SPAN, "CallId", *(pl.col(name).cast(dtype) for name, dtype in COLUMNS.items()))

    def _records(self) -> pl.DataFrame:
        """Return CallId and the columns of EVENTS and LOGS, of calls that caused tools to run."""
        if self.used_columns.isdisjoint(EVENTS | LOGS):
            return empty({"CallId": COLUMNS["Text"], **{name: dtype for name, dtype in COLUMNS.items() if name in EVENTS | LOGS}})
        named = pl.col("ToolName").fill_null("").alias("Tool")
        calls = self.recorded_tools.select("CallId").unique(maintain_order=True)
        types = self.recorded_tools.select("CallId", ToolExceptionTypes="ExceptionTypes").explode("ToolExceptionTypes", empty_as_null=False)
        events = self.recorded_tools.select("CallId", named, event="Events").explode("event", empty_as_null=False).unnest("event")
        logs = self.recorded_tools.select("CallId", named, log="Logs").explode("log", empty_as_null=False).unnest("log")
        parts = (
            types.group_by("CallId", maintain_order=True).agg("ToolExceptionTypes"),
            events.group_by("CallId", maintain_order=True).agg(
                ToolEventNames=pl.col("Name"), ToolEvents=pl.struct("Tool", "Name", "Attributes")
            ),
            logs.group_by("CallId", maintain_order=True).agg(
                ToolLogBodies=pl.col("Body"),
                ToolLogSeverity=pl.col("Severity").max(),
                ToolLogs=pl.struct("Tool", "Severity", "Body", "Attributes"),
            ),
        )
        for part in parts:
            calls = calls.join(part, on="CallId", how="left", maintain_order="left")
        return calls


def with_records(tools: pl.DataFrame, nodes: pl.DataFrame, events: pl.DataFrame, logs: pl.DataFrame) -> pl.DataFrame:
    """Add the columns of RECORDS to tool calls.

    Args:
        tools: rows of `causes`, with Tool and Nodes.
        nodes: the described spans that Nodes number.
        events: TOOL_EVENTS.
        logs: TOOL_LOGS.
    """
    spans = tools.select("Tool", Node="Nodes").explode("Node", empty_as_null=False)
    facts = nodes.select(*SPAN, ErrorType=attribute(semconv.ERROR_TYPE))[spans["Node"]]
    spans = spans.select("Tool").hstack(facts)
    of_events = spans.join(events, on=SPAN, maintain_order="left_right")
    of_logs = spans.join(logs, on=SPAN, maintain_order="left_right")
    recorded = pl.concat([rows[["Tool", "ExceptionType"]] for rows in (of_events, of_logs)]).filter(pl.col("ExceptionType") != "")
    reported = spans.select("Tool", ExceptionType="ErrorType").filter(pl.col("ExceptionType").fill_null("") != "")
    types = pl.concat([recorded, reported.join(recorded, on="Tool", how="anti", maintain_order="left")])
    parts = (
        types.group_by("Tool", maintain_order=True).agg(ExceptionTypes=pl.col("ExceptionType").unique(maintain_order=True)),
        of_events.group_by("Tool", maintain_order=True).agg(Events=pl.struct(_EVENT)),
        of_logs.group_by("Tool", maintain_order=True).agg(Logs=pl.struct(_LOG)),
    )
    whole = tools
    for part in parts:
        whole = whole.join(part, on="Tool", how="left", maintain_order="left")
    return whole.with_columns(pl.col(name).fill_null([]).cast(dtype) for name, dtype in RECORDS.items())
