"""Canonical calls of spans that nobody else answers for, and the tool calls that answers asked for.

In: described spans, each of them one call, and what they hold of answers. Out: canonical calls, a row a choice. Invariant: what a call
says of itself is null or empty where its convention has no word for it, and never made up.
"""

from __future__ import annotations

import numpy as np
import polars as pl

from spangrad import semconv
from spangrad.types import call_id
from transition_builder.dialects.answers import TEXTS_WITH_TOOL_CALLS
from transition_builder.dialects.describe import READERS
from transition_builder.dialects.reading import Said
from transition_builder.schemas import VERSIONS

_ASKED_TOOL = (
    r"^(llm\.output_messages\.\d+\.message\.(tool_calls\.\d+|contents\.\d+)\.tool_call\.id|gen_ai\.completion\.\d+\.tool_calls\.\d+\.id)$"
)
_IDS_IN_JSON = r'"(?:id|toolCallId|tool_call_id|call_id)"\s*:\s*"[^"]+"'
_STATUS = (semconv.HTTP_STATUS, "http.status_code")


def calls(spans: pl.DataFrame, answers: pl.DataFrame) -> pl.DataFrame:
    """Canonical calls of spans that nobody else answers for.

    Args:
        spans: described spans (NODES), each of them one call.
        answers: ANSWERS; a span without one is a call without ids.

    Returns:
        The spans' columns, a row a choice, with those of CALLS, CallId, ByGateway, and Unfinished: whether the span says neither that
        the call ended nor what came of it.
    """
    told = _told(spans)
    heavy = [name for name in ("Attributes", "Scores", "ToolArguments", "ToolResult") if name in spans.columns]
    light = spans.drop("Choice", "Model", "ResponseId", *heavy, strict=False).hstack(told)
    ids = pl.col("ResponseIds").list.len().fill_null(0) > 0
    failed = pl.col("StatusCode") == "Error"
    rows = (
        light.join(answers, on=["TraceId", "SpanId"], how="left", maintain_order="left")
        .with_columns(
            pl.col("Choice").fill_null(0),
            pl.col("Policy", "TokenizerHash", "Modality").fill_null(""),
            pl.col("PromptIds", "ResponseIds", "Logprobs", *VERSIONS).fill_null([]),
            Model=pl.coalesce(pl.col("Model").replace("", None), "told_model", pl.lit("")),
            ResponseId=pl.coalesce(pl.col("ResponseId").replace("", None), "told_id", pl.lit("")),
            FinishReason=pl.coalesce(pl.col("FinishReason").replace("", None), "told_finish", pl.lit("")),
            ErrorType=pl.when(failed | (pl.col("told_error").fill_null("") != ""))
            .then(
                pl.coalesce(
                    pl.col("told_error").replace("", None),
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
            & pl.col("told_tokens").is_null()
            & (pl.col("ErrorType") == ""),
        )
        .drop("told_model", "told_id", "told_finish", "told_error", "told_tokens")
    )
    names = [call_id(trace, span, choice) for trace, span, choice in rows.select("TraceId", "SpanId", "Choice").iter_rows()]
    return rows.with_columns(CallId=pl.Series(names, dtype=pl.String))


def _told(spans: pl.DataFrame) -> pl.DataFrame:
    """What the spans say of their calls, each by its own dialect: told_*, HttpStatus."""
    said = Said(spans)
    beside = spans.select("ScopeName", "SpanName", "StatusCode", "StatusMessage", OfClient=pl.lit(False), SpeaksOfModels=pl.lit(False))
    parts, order = list[pl.DataFrame](), [np.zeros(0, dtype=np.int64)]
    for name in spans["Convention"].unique(maintain_order=True):
        rows = (spans["Convention"] == name).arg_true().to_numpy()
        said.forget()
        reading = READERS.get(name, READERS[""])(said)
        status = said.first(*_STATUS)
        parts.append(
            # The first column has a row a span, however many of the others are literals.
            said.frame(beside, rows).select(
                "StatusCode",
                told_model=reading.model,
                told_id=reading.response_id,
                told_finish=reading.finish,
                told_error=reading.error,
                told_tokens=reading.output_tokens,
                HttpStatus=status.cast(pl.UInt16, strict=False).fill_null(0),
            )
        )
        order.append(rows)
    if not parts:
        return pl.DataFrame(
            schema={f"told_{name}": pl.String for name in ("model", "id", "finish", "error", "tokens")} | {"HttpStatus": pl.UInt16}
        )
    place = np.empty(spans.height, dtype=np.int64)
    place[np.concatenate(order)] = np.arange(spans.height)
    return pl.concat(parts)[place].drop("StatusCode")


def asked_tools(nodes: pl.DataFrame) -> pl.DataFrame:
    """Which tool calls the answers of calls asked for: TraceId, SpanId, ToolCallId; `nodes` are described spans."""
    called = nodes.filter(pl.col("IsClient") | pl.col("IsModel")).select("TraceId", "SpanId", "Attributes")
    said = Said(called)
    plain = said.entries(_ASKED_TOOL).select("row", ToolCallId="value")
    texts = said.entries(rf"^({'|'.join(name.replace('.', chr(92) + '.') for name in TEXTS_WITH_TOOL_CALLS)})$")
    if texts.height:
        found = texts.select("row", pl.col("value").str.extract_all(_IDS_IN_JSON)).explode("value", empty_as_null=False, keep_nulls=False)
        plain = pl.concat([plain, found.select("row", ToolCallId=pl.col("value").str.extract(r'"([^"]+)"$'))])
    return called.select("TraceId", "SpanId")[plain["row"]].hstack([plain["ToolCallId"]])
