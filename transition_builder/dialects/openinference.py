"""OpenInference's instrumentations: of OpenAI's client, LangChain and LangGraph, the Agents SDK, AutoGen and others.

In: spans with their attributes. Out: what each span is (`describe`), the calls of the plain road, and the tool
calls that an answer asked for. Invariant: text is never read for token ids; only the engine's own extras are.

The openai-level span (scope `openinference.instrumentation.openai`) is the only one that keeps the engine's extras,
in `output.value`: prompt_token_ids, choices[].token_ids, choices[].logprobs.content[].logprob, and the field
`spangrad`. That value is long, so that the lean span table leaves it out and ANSWER_SQL reads it where it lies.
"""

from __future__ import annotations

import polars as pl

from spangrad import semconv
from spangrad.types import call_id
from transition_builder.frames import SAMPLING

OPENAI_SCOPE = "openinference.instrumentation.openai"
IS_OF_SCOPE = pl.col("ScopeName") == OPENAI_SCOPE
INVOCATION_PARAMETERS = "llm.invocation_parameters"
TOOL_CALL_ID_NAMES = ("tool_call.id", "tool.id", "gen_ai.tool.call.id")
"""Where a tool's span may say which tool call it answers."""
_SAMPLING_FIELDS = {
    "Temperature": "temperature",
    "TopP": "top_p",
    "TopK": "top_k",
    "MinP": "min_p",
    "PresencePenalty": "presence_penalty",
    "FrequencyPenalty": "frequency_penalty",
    "RepetitionPenalty": "repetition_penalty",
}
_ASKED_TOOL = r"^llm\.output_messages\.\d+\.message\.tool_calls\.\d+\.tool_call\.id$"

_OUTPUT = f"SpanAttributes['{semconv.OPENINFERENCE_OUTPUT}']"
_CHOICE = "Tuple(index UInt16, finish_reason String, token_ids Array(UInt32), logprobs Tuple(content Array(Tuple(logprob Float32))))"
_FIELD = "Tuple(policy String, version_start Nullable(UInt64), version_end Nullable(UInt64), tokenizer_hash String)"
ANSWER_SQL = f"""
WITH JSONExtract({_OUTPUT}, '{semconv.ANSWER_FIELD}', '{_FIELD}') AS said
SELECT
    TraceId, SpanId,
    choice.1 AS Choice,
    said.1 AS Policy, said.2 AS VersionStart, said.3 AS VersionEnd,
    JSONExtractString({_OUTPUT}, 'model') AS Model,
    JSONExtractString({_OUTPUT}, 'id') AS ResponseId,
    said.4 AS TokenizerHash,
    JSONExtract({_OUTPUT}, 'prompt_token_ids', 'Array(UInt32)') AS PromptIds,
    choice.3 AS ResponseIds,
    arrayMap(token -> token.1, choice.4.1) AS Logprobs,
    choice.2 AS FinishReason
FROM otel.otel_traces
LEFT ARRAY JOIN JSONExtract({_OUTPUT}, 'choices', 'Array({_CHOICE})') AS choice
WHERE ServiceName IN %(services)s AND SpanName IN %(names)s AND ScopeName = '{OPENAI_SCOPE}'
    AND Timestamp BETWEEN fromUnixTimestamp64Nano(%(first)s) AND fromUnixTimestamp64Nano(%(last)s)
    AND TraceId IN %(traces)s AND SpanId IN %(spans)s
LIMIT 1 BY TraceId, SpanId, Choice
"""
"""The engine's extras, typed where they lie: a row a choice, one empty row where the value is not an answer."""


def attribute(name: str) -> pl.Expr:
    """A span's attribute; null where it has none."""
    return pl.col("Attributes").map.get(name)


def is_openai() -> pl.Expr:
    """Whether a span is openai-level."""
    return (IS_OF_SCOPE & (attribute(semconv.OPENINFERENCE_KIND) == "LLM")).fill_null(False)


def describe(spans: pl.DataFrame) -> pl.DataFrame:
    """Add what each span is: IsOpenAI, IsModel, IsTool, IsChain, AgentName (null: none of its own), ToolName, ToolFailed, ToolCallId."""
    kind = attribute(semconv.OPENINFERENCE_KIND)
    openai = is_openai()
    return spans.with_columns(
        IsOpenAI=openai,
        IsModel=((kind == "LLM") & ~openai).fill_null(False),
        IsTool=(kind == "TOOL").fill_null(False),
        IsChain=(kind == "CHAIN").fill_null(False),
        AgentName=pl.coalesce(
            attribute(semconv.OPENINFERENCE_AGENT_NAME),
            attribute(semconv.GEN_AI_AGENT_NAME),
            attribute(semconv.OPENINFERENCE_GRAPH_NODE),
            pl.when(kind == "AGENT").then("SpanName"),
        ),
        ToolName=pl.coalesce(attribute(semconv.OPENINFERENCE_TOOL_NAME), attribute(semconv.GEN_AI_TOOL_NAME), "SpanName"),
        ToolFailed=pl.col("StatusCode") == "Error",
        ToolCallId=pl.coalesce(attribute(name) for name in TOOL_CALL_ID_NAMES),
    )


def calls(spans: pl.DataFrame, answers: pl.DataFrame) -> pl.DataFrame:
    """Canonical calls of LLM spans that nobody else answers for.

    Args:
        spans: described spans, each of them one call.
        answers: ANSWERS; a span without one is a call without ids.
    """
    rows = (
        spans.drop("Choice")
        .join(answers, on=["TraceId", "SpanId"], how="left", maintain_order="left")
        .with_columns(
            pl.col("Choice").fill_null(0),
            pl.col("Policy", "ResponseId", "TokenizerHash", "FinishReason").fill_null(""),
            pl.col("PromptIds", "ResponseIds", "Logprobs").fill_null([]),
            Model=pl.coalesce(pl.col("Model").replace("", None), _asked("model"), pl.lit("")),
            Constrained=_constrained(),
            **{name: _asked(field).cast(SAMPLING[name], strict=False) for name, field in _SAMPLING_FIELDS.items()},
            ErrorType=pl.when(pl.col("StatusCode") == "Error")
            .then(pl.col("StatusMessage").str.split(":").list.first())
            .otherwise(pl.lit("")),
            HttpStatus=pl.lit(0, pl.UInt16),
            # A stream that its reader closed early: the ids so far, and no finish reason.
            Aborted=(pl.col("FinishReason") == "") & (pl.col("ResponseIds").list.len() > 0),
            Redacted=pl.lit(False),
            IdsSource=pl.lit("engine"),
            ByGateway=pl.lit(False),
        )
        .with_columns(
            ErrorType=pl.when((pl.col("StatusCode") == "Error") & (pl.col("ErrorType") == "")).then(pl.lit("error")).otherwise("ErrorType")
        )
    )
    names = [call_id(trace, span, choice) for trace, span, choice in rows.select("TraceId", "SpanId", "Choice").iter_rows()]
    return rows.with_columns(CallId=pl.Series(names, dtype=pl.String))


def _asked(field: str) -> pl.Expr:
    """A parameter of the request, as text; null where it was left out."""
    return attribute(INVOCATION_PARAMETERS).str.json_path_match(f"$.{field}")


def _constrained() -> pl.Expr:
    """Whether the request kept tokens from being sampled, by a schema or by a tool that must be called."""
    form, choice = _asked("response_format.type"), _asked("tool_choice")
    return (form.is_not_null() & (form != "text")) | (choice.is_not_null() & ~choice.is_in(["auto", "none"]))


def asked_tools(spans: pl.DataFrame) -> pl.DataFrame:
    """Which tool calls the answer of an openai-level span asked for: TraceId, SpanId, ToolCallId."""
    entry = pl.col("Attributes").map.entries()
    return (
        spans.filter("IsOpenAI")
        .select("TraceId", "SpanId", entry.alias("entry"))
        .explode("entry")
        .unnest("entry")
        .filter(pl.col("key").str.contains(_ASKED_TOOL))
        .select("TraceId", "SpanId", pl.col("value").alias("ToolCallId"))
    )
