"""What rules see of calls: the columns of a call that an expression may use, the tools that ran, the tool calls that were asked for.

In: placed calls, tools with their causes, answers, SQL. Out: `Seen`. Invariant: only calls that the agent used and the engine answered are
looked at: failed tries, retries and second tellings of a call are not the policy's doing.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import polars as pl

from transition_builder.schemas import Schema

_ATTEMPT = ["RunId", "RolloutId", "Attempt"]
_SPAN = ["TraceId", "SpanId"]

FOUND: Schema = {"CallId": pl.String(), "TraceId": pl.String(), "SpanId": pl.String(), "Value": pl.Float64()}
"""What a rule found: the call that is rewarded, the span that shows why, and what it is worth."""

COLUMNS: Schema = {
    "AgentName": pl.String(),
    "Policy": pl.String(),
    "Version": pl.UInt64(),
    "Model": pl.String(),
    "FinishReason": pl.String(),
    "Temperature": pl.Float64(),
    "Place": pl.Int64(),
    "Calls": pl.Int64(),
    "PromptTokens": pl.Int64(),
    "ResponseTokens": pl.Int64(),
    "Seconds": pl.Float64(),
    "Text": pl.String(),
    "AskedTools": pl.List(pl.String()),
    "Tools": pl.List(pl.String()),
    "FailedTools": pl.Int64(),
}
"""What an expression may use of a call. Place: among the calls of its attempt, from 0; Calls: how many there are. Text and AskedTools (the
names of the tools that its answer asked for) are null where nobody recorded the answer. Tools, FailedTools: those that it caused to run."""


@dataclass(frozen=True)
class Seen:
    """What there is to see, worked out when a rule looks at it."""

    placed: pl.DataFrame
    """Placed canonical calls of final attempts that may have rewards."""
    caused: pl.DataFrame
    """Tools and the calls that caused them (`causes`), of any attempts."""
    answers: pl.DataFrame
    """RESPONSES."""
    sql: pl.DataFrame
    """SAID rows of SQL files, each of a call."""

    @cached_property
    def used(self) -> pl.DataFrame:
        """The calls that are looked at: a row a choice."""
        answered = (pl.col("ErrorType") == "") & (pl.col("HttpStatus") < 400)
        taken = ~pl.col("Retried") & (pl.col("DuplicateOf") == "")
        return self.placed.filter(answered & taken).select(
            *_ATTEMPT, *_SPAN, "Choice", "CallId", "ParentCallId", "AgentName", "Policy", "Model", "FinishReason", "Temperature", "Order",
            "PromptTokens", "ResponseTokens", Version="VersionStart", Seconds=pl.col("Duration") / 1e9,
        )  # fmt: skip

    @cached_property
    def first(self) -> pl.DataFrame:
        """The first choice of each call."""
        return self.used.filter(pl.col("Choice") == pl.col("Choice").min().over(*_ATTEMPT, *_SPAN))

    @cached_property
    def tools(self) -> pl.DataFrame:
        """Tools that a call caused to run: columns of `causes`, CallId of the call's first choice."""
        return self.caused.join(self.placed.select("CallId"), on="CallId", how="semi", maintain_order="left")

    @cached_property
    def answered(self) -> pl.DataFrame:
        """Calls whose answers were recorded: CallId, its span, AgentName, ParentCallId, Text, ToolCalls."""
        slim = self.used.select(*_SPAN, "Choice", "CallId", "ParentCallId", "AgentName")
        return slim.join(self.answers, on=[*_SPAN, "Choice"], maintain_order="left")

    @cached_property
    def columns(self) -> pl.DataFrame:
        """COLUMNS of each choice of each call, with CallId, its span and its attempt."""
        ran = self.tools.group_by("CallId", maintain_order=True).agg(
            Tools=pl.col("ToolName"), FailedTools=pl.col("ToolFailed").fill_null(False).sum()
        )
        said = self.answered.select("CallId", "Text", AskedTools=pl.col("ToolCalls").list.eval(pl.element().struct.field("Name")))
        facts = (
            self.used.join(ran, on="CallId", how="left")
            .join(said, on="CallId", how="left")
            .with_columns(
                pl.col("Tools").fill_null([]),
                pl.col("FailedTools").fill_null(0),
                Place=pl.col("Order").rank("dense").over(_ATTEMPT).cast(pl.Int64) - 1,
                Calls=pl.col("Order").n_unique().over(_ATTEMPT),
            )
        )
        return facts.select(*_ATTEMPT, *_SPAN, "CallId", *(pl.col(name).cast(dtype) for name, dtype in COLUMNS.items()))
