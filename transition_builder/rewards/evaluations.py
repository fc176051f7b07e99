"""Final rewards and rewards of single calls, as evaluators give them. Invariant: a score that is no finite number is never read as 0.

Targets. An evaluation on a call's own span (the gateway's, or the client's span of the same call: then the last used call below it, its
first choice), or one that names a response id, is that call's; one on a duplicate's span is of the call that counts. Any other is the
rollout's. A SQL reward may name a tool's span as well: it is
the reward of the call that caused the tool.

Sources. `runner`: an event on the attempt's root. `evaluation_event`: an event on any other span. `evaluation_log`: a log record.
`span_attribute`: a score among a span's attributes, in a convention that defines one.
"""

from __future__ import annotations

import polars as pl

from spangrad import semconv
from spangrad.types import RewardSource
from transition_builder.calls.causes import spans_of
from transition_builder.dialects.reading import attribute
from transition_builder.frames import concat, empty
from transition_builder.rewards.precedence import NO_VALUE, NOT_FINITE, REPORTED, as_reported
from transition_builder.schemas import ATTEMPT, ROLLOUT, SPAN

_ROLE = attribute(semconv.REWARD_ROLE).fill_null("")


def events(rows: pl.DataFrame, rollouts: pl.DataFrame) -> pl.DataFrame:
    """Return the scores of events and logs, the resolved evaluation rows of the final attempts of ROLLOUTS, as REPORTED."""
    if rows.is_empty():
        return empty(REPORTED)
    score = attribute(semconv.EVALUATION_SCORE)
    on_root = (pl.col("TraceId") == pl.col("TraceId_of_root")) & (pl.col("SpanId") == pl.col("SpanId_of_root"))
    scored = (
        rows.filter(score.is_not_null())
        .join(rollouts[[*ROLLOUT, *SPAN, "Mode"]], on=ROLLOUT, suffix="_of_root")
        .with_columns(
            Mode="Mode_of_root",
            Name=attribute(semconv.EVALUATION_NAME).fill_null(semconv.REWARD_NAME),
            Role=_ROLE,
            Value=score.cast(pl.Float64, strict=False),
            ResponseId=attribute(semconv.GEN_AI_RESPONSE_ID),
            Speaker=pl.when(pl.col("ProcessId") != "").then("ProcessId").otherwise("ServiceName"),
            Source=pl.when(pl.col("RowKind") == "evaluation_log")
            .then(pl.lit(RewardSource.EVALUATION_LOG.value))
            .when(on_root)
            .then(pl.lit(RewardSource.RUNNER.value))
            .otherwise(pl.lit(RewardSource.EVALUATION_EVENT.value)),
        )
    )
    return as_reported(scored)


def scores(nodes: pl.DataFrame, rollouts: pl.DataFrame) -> pl.DataFrame:
    """Return the scores in attributes of described spans (`Scores`), as REPORTED; spans of other attempts than ROLLOUTS' are ignored."""
    having = nodes.filter(pl.col("Scores").list.len() > 0)
    if having.is_empty():
        return empty(REPORTED)
    scored = (
        having.select(*ATTEMPT, *SPAN, "Timestamp", "EventIndex", pl.col("Scores").alias("score"), Role=_ROLE)
        .join(rollouts.select(*ATTEMPT, "Mode"), on=ATTEMPT)
        .explode("score")
        .unnest("score")
        .with_columns(Source=pl.lit(RewardSource.SPAN_ATTRIBUTE.value))
    )
    return as_reported(scored)


def of_sql(rows: pl.DataFrame, nodes: pl.DataFrame, rollouts: pl.DataFrame) -> pl.DataFrame:
    """Return SQL_REWARDS of ROLLOUTS as REPORTED; rows of calls without a value, and of spans of other attempts, are ignored."""
    if rows.is_empty():
        return empty(REPORTED)
    valued = rows.filter(~pl.col("PerCall") | pl.col("Value").is_not_null()).join(rollouts[[*ATTEMPT, "Mode"]], on=ATTEMPT)
    of_span = valued.filter(pl.col("SpanId") != "")
    if of_span.height:
        spans = nodes[[*ATTEMPT, *SPAN]].rename({"TraceId": "trace"})
        resolved = of_span.join(spans, on=[*ATTEMPT, "SpanId"]).filter((pl.col("TraceId") == "") | (pl.col("TraceId") == pl.col("trace")))
        valued = pl.concat([valued.filter(pl.col("SpanId") == ""), resolved.with_columns(TraceId="trace").select(valued.columns)])
    fault = pl.when(pl.col("Value").is_null()).then(pl.lit(f"{NO_VALUE} by SQL")).otherwise(pl.lit(f"{NOT_FINITE}, by SQL"))
    named = valued.with_columns(Source=pl.lit(RewardSource.SQL.value), Fault=fault, CallId=pl.col("CallId").replace("", None))
    return as_reported(named)


def resolve_targets(reported: pl.DataFrame, calls: pl.DataFrame, nodes: pl.DataFrame, caused: pl.DataFrame) -> pl.DataFrame:
    """Fill in CallId of REPORTED: empty where the reward is the rollout's. Rows that name another attempt's call are left out.

    `calls` are placed canonical calls (Order) of final attempts, `nodes` the spans that they refer to by Node and ClientNode, `caused`
    tools and the calls that caused them (`causes`).
    """
    if reported.is_empty():
        return reported
    of_sql = pl.col("Source") == RewardSource.SQL.value
    # Usually all of them are on roots, and no lookup is needed.
    on_root = (pl.col("Source") == RewardSource.RUNNER.value) & pl.col("ResponseId").is_null()
    elsewhere = reported.filter(~on_root)
    if elsewhere.is_empty():
        return reported.with_columns(CallId=pl.lit(""))
    by_span, by_response = _targets(calls, nodes)
    causing = caused.filter(pl.col("CallId") != "")
    by_tool = spans_of(causing, nodes).join(causing.select(*ATTEMPT, "Tool", by_tool="CallId"), on="Tool").drop("Tool")
    known = calls.select(*ATTEMPT, "CallId", known=pl.lit(True))
    targeted = (
        elsewhere.join(known, on=[*ATTEMPT, "CallId"], how="left")
        .filter(pl.col("CallId").is_null() | pl.col("known"))
        .join(by_span, on=[*ATTEMPT, *SPAN], how="left")
        .join(by_response, on=[*ATTEMPT, "ResponseId"], how="left")
        .join(by_tool, on=[*ATTEMPT, *SPAN], how="left")
        .with_columns(CallId=pl.coalesce("CallId", "by_span", "by_response", pl.when(of_sql).then("by_tool"), pl.lit("")))
    )
    return concat([reported.filter(on_root).with_columns(CallId=pl.lit("")), targeted], REPORTED)


def _targets(calls: pl.DataFrame, nodes: pl.DataFrame) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Return calls by their spans, and by their response ids: the latest call that the agent used, its first choice."""
    counting = pl.when(pl.col("DuplicateOf") != "").then("DuplicateOf").otherwise("CallId")
    identity = calls.select(*ATTEMPT, *SPAN, "Retried", "Order", "ChoiceIndex", "ResponseId", "ClientNode", CallId=counting)
    latest = identity.sort("Retried", "Order", "ChoiceIndex", descending=[False, True, False])
    client = nodes[SPAN].with_row_index("ClientNode").with_columns(pl.col("ClientNode").cast(pl.Int64))
    own = latest.select(*ATTEMPT, *SPAN, pl.col("CallId").alias("by_span"))
    through = latest.select(*ATTEMPT, "ClientNode", pl.col("CallId").alias("by_span")).join(client, on="ClientNode", maintain_order="left")
    by_span = pl.concat([own, through.select(own.columns)]).unique([*ATTEMPT, *SPAN], keep="first", maintain_order=True)
    by_response = (
        latest.filter(pl.col("ResponseId") != "")
        .select(*ATTEMPT, "ResponseId", pl.col("CallId").alias("by_response"))
        .unique([*ATTEMPT, "ResponseId"], keep="first", maintain_order=True)
    )
    return by_span, by_response
