"""Canonical calls of spans without a gateway record, and the tool calls that responses requested.

Invariant: a fact of a call is null or empty where its convention has no attribute for it, and never made up.
"""

from __future__ import annotations

from collections.abc import Callable

import polars as pl

from spangrad import semconv
from spangrad.types import call_id
from transition_builder.dialects.describe import by_dialect
from transition_builder.dialects.reading import AttributeColumns, Reading
from transition_builder.schemas import SPAN, VERSIONS

_ASKED_TOOL = (
    r"^(llm\.output_messages\.\d+\.message\.(tool_calls\.\d+|contents\.\d+)\.tool_call\.id|gen_ai\.completion\.\d+\.tool_calls\.\d+\.id)$"
)
_ASKED_IN_JSON = r"^(gen_ai\.output\.messages|ai\.response\.toolCalls|langfuse\.observation\.output|mlflow\.spanOutputs)$"
_IDS_IN_JSON = r'"(?:id|toolCallId|tool_call_id|call_id)"\s*:\s*"[^"]+"'
_STATUS = (semconv.HTTP_STATUS, "http.status_code")
_REPORTED = ("Model", "ResponseId", "FinishReason")
"""Columns that the span reports where its answer does not."""


def calls(spans: pl.DataFrame, answers: pl.DataFrame) -> pl.DataFrame:
    """Make canonical calls of described spans (NODES) without a gateway record, each of them one call; one without ANSWERS has no ids.

    Returns:
        The spans' columns, a row a choice, with those of CALLS, CallId, ByGateway, and Unfinished: the span shows neither the end of
        the call nor its outcome.
    """
    large_columns = [name for name in ("Attributes", "Scores", "ToolArguments", "ToolResult") if name in spans.columns]
    light = spans.drop(*_REPORTED, *large_columns, strict=False).hstack(_reported(spans))
    ids = pl.col("ResponseIds").list.len().fill_null(0) > 0
    failed = (pl.col("StatusCode") == "Error") | pl.col("reported_error").is_not_null()
    message = pl.col("StatusMessage").str.split(":").list.first().replace("", None)
    rows = (
        light.join(answers, on=SPAN, how="left", maintain_order="left")
        .with_columns(
            pl.col("ChoiceIndex").fill_null(0),
            pl.col("Policy", "TokenizerHash", "Modality").fill_null(""),
            pl.col("PromptIds", "ResponseIds", "Logprobs", *VERSIONS).fill_null([]),
            ErrorType=pl.when(failed).then(pl.coalesce("reported_error", message, pl.lit("error"))).otherwise(pl.lit("")),
            Redacted=pl.lit(False),
            IdsSource=pl.lit("engine"),
            ByGateway=pl.lit(False),
            **{name: pl.coalesce(pl.col(name).replace("", None), f"reported_{name}", pl.lit("")) for name in _REPORTED},
        )
        .with_columns(
            # A stream that its reader closed early: the ids so far, and no finish reason.
            Aborted=(pl.col("FinishReason") == "") & ids,
            Unfinished=(pl.col("FinishReason") == "")
            & ~ids
            & (pl.col("ResponseId") == "")
            & ~pl.col("StatusCode").is_in(["Ok", "Error"])
            & pl.col("reported_tokens").is_null()
            & (pl.col("ErrorType") == ""),
        )
        .drop("reported_error", "reported_tokens", *(f"reported_{name}" for name in _REPORTED))
    )
    names = [call_id(trace, span, choice) for trace, span, choice in rows[[*SPAN, "ChoiceIndex"]].iter_rows()]
    return rows.with_columns(CallId=pl.Series(names, dtype=pl.String))


def _reported(spans: pl.DataFrame) -> pl.DataFrame:
    """Return the facts of calls that the spans report, each by its own dialect: reported_*, HttpStatus."""
    attributes = AttributeColumns(spans)
    read = ["Convention", "ScopeName", "SpanName", "StatusCode", "StatusMessage"]
    beside = spans.select(*read, OfClient=pl.lit(False), SpeaksOfModels=pl.lit(False))

    def columns(_: str, reading: Reading) -> Callable[[pl.DataFrame], pl.DataFrame]:
        status = attributes.first(*_STATUS).cast(pl.UInt16, strict=False).fill_null(0)
        facts = {"Model": reading.model, "ResponseId": reading.response_id, "FinishReason": reading.finish, "tokens": reading.output_tokens}
        reported = {f"reported_{name}": fact for name, fact in facts.items()}
        # The first column has a row a span, however many of the others are literals.
        return lambda frame: frame.select("StatusCode", HttpStatus=status, reported_error=reading.error.replace("", None), **reported)

    return by_dialect(attributes, beside, columns).drop("StatusCode")


def asked_tools(nodes: pl.DataFrame) -> pl.DataFrame:
    """Return the tool calls that the responses of calls requested: TraceId, SpanId, ToolCallId; `nodes` are described spans."""
    called = nodes.filter(pl.col("IsClient") | pl.col("IsModel"))[[*SPAN, "Attributes"]]
    attributes = AttributeColumns(called)
    plain = attributes.entries(_ASKED_TOOL).select("row", ToolCallId="value")
    texts = attributes.entries(_ASKED_IN_JSON)
    if texts.height:
        ids = texts.select("row", pl.col("value").str.extract_all(_IDS_IN_JSON)).explode("value", empty_as_null=False, keep_nulls=False)
        plain = pl.concat([plain, ids.select("row", ToolCallId=pl.col("value").str.extract(r'"([^"]+)"$'))])
    return called[SPAN][plain["row"]].hstack([plain["ToolCallId"]])
