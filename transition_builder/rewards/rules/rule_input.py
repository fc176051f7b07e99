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
from transition_builder.schemas import ATTEMPT, CHOICE, SPAN, TOOL_EVENTS, TOOL_LOGS


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
    def tool_spans(self) -> pl.DataFrame:
        """Return the spans of those tools, in their order: Tool, CallId, ToolName, SPAN and ErrorType."""
        spans = self.tools.select("CallId", "Tool", pl.col("ToolName").fill_null(""), Node="Nodes").explode("Node", empty_as_null=False)
        return spans.drop("Node").hstack(self.nodes.select(*SPAN, ErrorType=attribute(semconv.ERROR_TYPE))[spans["Node"]])

    @cached_property
    def exception_types(self) -> pl.DataFrame:
        """Return the types of exceptions in those tools, each once a tool, in their order: Tool, CallId, ExceptionType.

        Types are those of `exception` events and of log records; where neither names one, `error.type` of the tool's spans.
        """
        named = pl.col("ExceptionType").fill_null("") != ""
        of_records = [self._records(records).filter(named) for records in (self.tool_events, self.tool_logs)]
        columns = ["CallId", "Tool", "ExceptionType"]
        recorded = pl.concat([records[columns] for records in of_records])
        reported = self.tool_spans.rename({"ErrorType": "ExceptionType"})[columns].filter(named)
        types = pl.concat([recorded, reported.join(recorded, on="Tool", how="anti", maintain_order="left")])
        in_order = self.tools.select("Tool").join(types, on="Tool", maintain_order="left_right")
        return in_order.unique(["Tool", "ExceptionType"], keep="first", maintain_order=True)

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
            .join(self._of_records(), on="CallId", how="left")
            .with_columns(
                pl.col("Tools", "ToolExceptionTypes", "ToolEventNames", "ToolEvents", "ToolLogBodies", "ToolLogs").fill_null([]),
                pl.col("FailedTools").fill_null(0),
                Place=pl.col("Order").rank("dense").over(ATTEMPT).cast(pl.Int64) - 1,
                Calls=pl.col("Order").n_unique().over(ATTEMPT),
            )
        )
        return facts.select(*ATTEMPT, *SPAN, "CallId", *(pl.col(name).cast(dtype) for name, dtype in COLUMNS.items()))

    def _of_records(self) -> pl.DataFrame:
        """Return CallId and the columns of EVENTS and LOGS, of calls that caused tools to run."""
        if self.used_columns.isdisjoint(EVENTS | LOGS):
            return empty({"CallId": COLUMNS["Text"], **{name: dtype for name, dtype in COLUMNS.items() if name in EVENTS | LOGS}})
        tool, severity = pl.col("ToolName").alias("Tool"), pl.col("Severity").max()
        events, logs = pl.struct(tool, "Name", "Attributes"), pl.struct(tool, "Severity", "Body", "Attributes")
        parts = (
            (self.exception_types, {"ToolExceptionTypes": pl.col("ExceptionType")}),
            (self._records(self.tool_events), {"ToolEventNames": pl.col("Name"), "ToolEvents": events}),
            (self._records(self.tool_logs), {"ToolLogBodies": pl.col("Body"), "ToolLogSeverity": severity, "ToolLogs": logs}),
        )
        calls = self.tools.select("CallId").unique(maintain_order=True)
        for records, columns in parts:
            of_calls = records.group_by("CallId", maintain_order=True).agg(**columns)
            calls = calls.join(of_calls, on="CallId", how="left", maintain_order="left")
        return calls

    def _records(self, records: pl.DataFrame) -> pl.DataFrame:
        """Return TOOL_EVENTS or TOOL_LOGS of those tools, by tool and in order, with the columns of `tool_spans`."""
        return self.tool_spans.join(records, on=SPAN, maintain_order="left_right")
