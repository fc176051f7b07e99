"""Canonical calls of spans without a gateway record, and the tool calls that responses requested.

In: described spans, each of them one call, and their answers. Out: canonical calls, a row a choice. Invariant: a fact of a call
is null or empty where its convention has no attribute for it, and never made up.
"""

from __future__ import annotations

import numpy as np
import polars as pl

from spangrad import semconv
from spangrad.types import call_id
from transition_builder.dialects.answers import TEXTS_WITH_TOOL_CALLS
from transition_builder.dialects.describe import READERS
from transition_builder.dialects.reading import AttributeColumns
from transition_builder.schemas import SPAN, VERSIONS

_ASKED_TOOL = (
    r"^(llm\.output_messages\.\d+\.message\.(tool_calls\.\d+|contents\.\d+)\.tool_call\.id|gen_ai\.completion\.\d+\.tool_calls\.\d+\.id)$"
)
_IDS_IN_JSON = r'"(?:id|toolCallId|tool_call_id|call_id)"\s*:\s*"[^"]+"'
_STATUS = (semconv.HTTP_STATUS, "http.status_code")


def calls(spans: pl.DataFrame, answers: pl.DataFrame) -> pl.DataFrame:
    """Make canonical calls of spans without a gateway record.

    Args:
        spans: described spans (NODES), each of them one call.
        answers: ANSWERS; a span without one is a call without ids.

    Returns:
        The spans' columns, a row a choice, with those of CALLS, CallId, ByGateway, and Unfinished: the span shows neither the end of
        the call nor its outcome.
    """
    reported = _reported(spans)
    heavy = [name for name in ("Attributes", "Scores", "ToolArguments", "ToolResult") if name in spans.columns]
    light = spans.drop("Choice", "Model", "ResponseId", *heavy, strict=False).hstack(reported)
    ids = pl.col("ResponseIds").list.len().fill_null(0) > 0
    failed = pl.col("StatusCode") == "Error"
    rows = (
        light.join(answers, on=SPAN, how="left", maintain_order="left")
        .with_columns(
            pl.col("Choice").fill_null(0),
            pl.col("Policy", "TokenizerHash", "Modality").fill_null(""),
            pl.col("PromptIds", "ResponseIds", "Logprobs", *VERSIONS).fill_null([]),
            Model=pl.coalesce(pl.col("Model").replace("", None), "reported_model", pl.lit("")),
            ResponseId=pl.coalesce(pl.col("ResponseId").replace("", None), "reported_id", pl.lit("")),
            FinishReason=pl.coalesce(pl.col("FinishReason").replace("", None), "reported_finish", pl.lit("")),
            ErrorType=pl.when(failed | (pl.col("reported_error").fill_null("") != ""))
            .then(
                pl.coalesce(
                    pl.col("reported_error").replace("", None),
                    pl.col("StatusMessage").str.split(":").list.first().replace("", None),
                    pl.lit("error"),
                )
            )
            .otherwise(pl.lit("")),
            Redacted=pl.lit(False),
            IdsSource=pl.lit("engine"),
            ByGateway=pl.lit(False),
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
        .drop("reported_model", "reported_id", "reported_finish", "reported_error", "reported_tokens")
    )
    names = [call_id(trace, span, choice) for trace, span, choice in rows.select(*SPAN, "Choice").iter_rows()]
    return rows.with_columns(CallId=pl.Series(names, dtype=pl.String))


def _reported(spans: pl.DataFrame) -> pl.DataFrame:
    """Return the facts of calls that the spans report, each by its own dialect: reported_*, HttpStatus."""
    attributes = AttributeColumns(spans)
    beside = spans.select("ScopeName", "SpanName", "StatusCode", "StatusMessage", OfClient=pl.lit(False), SpeaksOfModels=pl.lit(False))
    parts, order = list[pl.DataFrame](), [np.zeros(0, dtype=np.int64)]
    for name in spans["Convention"].unique(maintain_order=True):
        rows = (spans["Convention"] == name).arg_true().to_numpy()
        attributes.forget()
        reading = READERS.get(name, READERS[""])(attributes)
        status = attributes.first(*_STATUS)
        parts.append(
            # The first column has a row a span, however many of the others are literals.
            attributes.frame(beside, rows).select(
                "StatusCode",
                reported_model=reading.model,
                reported_id=reading.response_id,
                reported_finish=reading.finish,
                reported_error=reading.error,
                reported_tokens=reading.output_tokens,
                HttpStatus=status.cast(pl.UInt16, strict=False).fill_null(0),
            )
        )
        order.append(rows)
    if not parts:
        return pl.DataFrame(
            schema={f"reported_{name}": pl.String for name in ("model", "id", "finish", "error", "tokens")} | {"HttpStatus": pl.UInt16}
        )
    place = np.empty(spans.height, dtype=np.int64)
    place[np.concatenate(order)] = np.arange(spans.height)
    return pl.concat(parts)[place].drop("StatusCode")


def asked_tools(nodes: pl.DataFrame) -> pl.DataFrame:
    """Return the tool calls that the responses of calls requested: TraceId, SpanId, ToolCallId; `nodes` are described spans."""
    called = nodes.filter(pl.col("IsClient") | pl.col("IsModel")).select(*SPAN, "Attributes")
    attributes = AttributeColumns(called)
    plain = attributes.entries(_ASKED_TOOL).select("row", ToolCallId="value")
    texts = attributes.entries(rf"^({'|'.join(name.replace('.', chr(92) + '.') for name in TEXTS_WITH_TOOL_CALLS)})$")
    if texts.height:
        ids = texts.select("row", pl.col("value").str.extract_all(_IDS_IN_JSON)).explode("value", empty_as_null=False, keep_nulls=False)
        plain = pl.concat([plain, ids.select("row", ToolCallId=pl.col("value").str.extract(r'"([^"]+)"$'))])
    return called.select(SPAN)[plain["row"]].hstack([plain["ToolCallId"]])
