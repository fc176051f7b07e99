"""Raw answers of the engine in spans: the token ids of direct mode, and the SQL that reads them, typed, in the database.

The values are too long for the lean span table. Invariant: text is never read for token ids; only the engine's own extra fields are.

What is read, the first that is there:
- an answer as JSON in `output.value` (OpenInference), `mlflow.spanOutputs`, or `agentlightning.operation.output`: of chats and completions
  `prompt_token_ids`, `choices[].token_ids`, `choices[].logprobs`; of any other shape (Responses, Anthropic's messages) the generations
  in the field `spangrad` of our middleware, a choice each;
- ids as attributes of their own: Agent Lightning's `prompt_token_ids` and `response_token_ids`, with `logprobs.content`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import msgspec
import polars as pl

from spangrad import semconv
from spangrad.encoding import content_parts
from spangrad.errors import JSON_ERRORS
from transition_builder.dialects import scopes
from transition_builder.dialects.conventions import agent_lightning, mlflow
from transition_builder.dialects.describe import conventions
from transition_builder.dialects.model_spans import literal
from transition_builder.dialects.reading import attribute, unquoted
from transition_builder.schemas import SPAN

ANSWER_ATTRIBUTES = (semconv.OPENINFERENCE_OUTPUT, mlflow.OUTPUTS, agent_lightning.OUTPUT)
"""Attributes that may hold an engine's raw answer."""
_WITHOUT = (
    "spangrad.",
    "opentelemetry.instrumentation.httpx",
    "opentelemetry.instrumentation.requests",
    "opentelemetry.instrumentation.urllib3",
)
_CHOICE = (
    "Tuple(index UInt16, finish_reason String, token_ids Array(UInt32), prompt_token_ids Array(UInt32),"
    " logprobs Tuple(content Array(Tuple(logprob Float32)), token_logprobs Array(Float32)),"
    " provider_specific_fields Tuple(token_ids Array(UInt32)))"
)
_GENERATION = "Tuple(prompt_token_ids Array(UInt32), token_ids Array(UInt32), logprobs Array(Float32), finish_reason String)"
_SAMPLING = (
    "temperature Nullable(Float64), top_p Nullable(Float64), top_k Nullable(Int64), min_p Nullable(Float64),"
    " presence_penalty Nullable(Float64), frequency_penalty Nullable(Float64), repetition_penalty Nullable(Float64),"
    " constrained Nullable(Bool)"
)
_ANSWER = f"""Tuple(
    id String, model String, prompt_token_ids Array(UInt32), choices Array({_CHOICE}),
    {semconv.ANSWER_FIELD} Tuple(
        policy String, versions Array(Array(Tuple(UInt32, UInt64))), tokenizer_hash String, sampling Tuple({_SAMPLING}),
        generations Array({_GENERATION})
    )
)"""
_WEAVE = agent_lightning.OUTPUT
_WEAVE_IDS = (
    f"{_WEAVE}.response_token_ids.0",
    f"{_WEAVE}.choices.0.token_ids",
    f"{_WEAVE}.choices.0.provider_specific_fields.token_ids",
)

_CONVERSATION = ("messages", "input", "prompt", "system")
"""Fields of a request that hold its prompt."""
_LOOKED_AT = (*_CONVERSATION, "prompt_embeds", *content_parts.FIELDS)
_NAMES = "|".join(content_parts.NAMES)
_TYPE = rf'"(?:type|modality)"\s*:\s*"({_NAMES})"'
"""Pattern of the type of a part in JSON that cannot be decoded; a text's own quotes are escaped there."""
_MARK = rf'"(?:{_NAMES}|prompt_embeds)"\s*(?:[,}}\]]|$|:\s*[^\sn])|\\u00[67]'
"""Pattern of JSON that may hold something else than text: a type, a field that is not null, or a letter that is escaped."""
_TOKEN = r'"(?:[^"\\]|\\.)*"|[^"]+'
"""Pattern that splits JSON into its strings and what is between them."""
_LONGEST_NAME = 2 + len("\\u0000") * max(map(len, _LOOKED_AT))
"""Length of a string of JSON above which it is no name that is looked at, escaped or not."""
_CONTENT_BYTES = 65536
"""Length of a request's or an answer's structure above which only the types in it leave the database."""


def _attribute_sql(name: str) -> str:
    return f"SpanAttributes['{name}']"


def _first(*names: str) -> str:
    """Return SQL for the first attribute that is not empty."""
    return f"coalesce({', '.join(f'nullIf({_attribute_sql(name)}, {chr(39) * 2})' for name in names)}, '')"


def _ids(*names: str) -> str:
    return f"JSONExtract({_first(*names)}, 'Array(UInt32)')"


def _object(fields: str, value: str = "field.2") -> str:
    """Return SQL for JSON of an object's fields (name, raw value) that are looked at."""
    named = f"arrayFilter(field -> field.1 IN {_LOOKED_AT}, {fields})"
    return f"concat(char(123), arrayStringConcat(arrayMap(field -> concat(toJSONString(field.1), ':', {value}), {named}), ','), char(125))"


def _parts(types: str) -> str:
    """Return SQL for JSON of parts that have nothing but a type."""
    return f"toJSONString(arrayMap(type -> map('type', type), arrayDistinct({types})))"


_HAS_MARK = f"match(text, {literal(_MARK)})"
_TYPED = _parts(f"extractAll(text, {literal(_TYPE)})")
_CHOICES = f"arrayMap(choice -> {_object('JSONExtractKeysAndValuesRaw(choice)')}, JSONExtractArrayRaw(field.2))"
_FIELD = f"if(field.1 = 'choices', concat('[', arrayStringConcat({_CHOICES}, ','), ']'), field.2)"
_CONTENT = f"""multiIf(
            NOT isValidJSON(text), if(substring(trimLeft(text), 1, 1) IN (char(123), '['), {_TYPED}, ''),
            JSONType(text) = 'Object', {_object("JSONExtractKeysAndValuesRaw(text)", _FIELD)},
            JSONType(text) = 'Array', JSONExtractRaw(text),
            ''
        )"""
_SHORTENED = f"if(startsWith(token, '\"') AND length(token) > {_LONGEST_NAME}, '\"n\"', token)"


ANSWER_SQL = f"""
WITH
    {_first(*ANSWER_ATTRIBUTES)} AS value,
    -- Request and answer, where they may hold something else than text: the fields that are looked at, long strings as "n".
    arrayMap(
        text -> arrayStringConcat(arrayMap(token -> {_SHORTENED}, extractAll(text, {literal(_TOKEN)}))),
        arrayFilter(text -> {_HAS_MARK}, arrayMap(
            text -> {_CONTENT},
            arrayFilter(text -> {_HAS_MARK}, [{_first(semconv.OPENINFERENCE_INPUT, mlflow.INPUTS, "gen_ai.input.messages")}, value])
        ))
    ) AS contents,
    mapValues(mapFilter((name, value) -> endsWith(name, '.message_content.type'), SpanAttributes)) AS types,
    JSONExtract(value, '{_ANSWER}') AS answer,
    {_ids("prompt_token_ids", f"{_WEAVE}.prompt_token_ids")} AS prompt_ids,
    {_ids("response_token_ids", *_WEAVE_IDS)} AS response_ids,
    arrayMap(token -> token.1, JSONExtract({_attribute_sql("logprobs.content")}, 'Array(Tuple(logprob Float32))')) AS logprobs,
    JSONExtract({_attribute_sql(semconv.GEN_AI_FINISH_REASONS)}, 'Array(String)')[1] AS finish_reason,
    length(answer.{semconv.ANSWER_FIELD}.generations) AS generations,
    answer.{semconv.ANSWER_FIELD}.versions AS versions,
    answer.{semconv.ANSWER_FIELD}.sampling AS sampling,
    multiIf(
        -- More than an engine gives, or more than may be held: no answer.
        length(answer.choices) + generations > 1024 OR (length(answer.choices) + generations) * length(value) > 268435456, [],
        notEmpty(answer.choices), arrayMap(choice -> (
            choice.index,
            if(empty(choice.prompt_token_ids), answer.prompt_token_ids, choice.prompt_token_ids),
            if(empty(choice.token_ids), choice.provider_specific_fields.token_ids, choice.token_ids),
            if(empty(choice.logprobs.content), choice.logprobs.token_logprobs, choice.logprobs.content.logprob),
            choice.finish_reason
        ), answer.choices),
        generations > 0, arrayMap((generation, place) -> (
            toUInt16(place - 1), generation.prompt_token_ids, generation.token_ids, generation.logprobs, generation.finish_reason
        ), answer.{semconv.ANSWER_FIELD}.generations, arrayEnumerate(answer.{semconv.ANSWER_FIELD}.generations)),
        notEmpty(response_ids), [(toUInt16(0), prompt_ids, response_ids, logprobs, finish_reason)],
        []
    ) AS choices
SELECT
    TraceId, SpanId,
    choice.1 AS ChoiceIndex,
    answer.{semconv.ANSWER_FIELD}.policy AS Policy,
    tupleElement(versions[choice.1 + 1], 1) AS `Versions.Start`,
    tupleElement(versions[choice.1 + 1], 2) AS `Versions.Version`,
    if(answer.model = '', {_first(semconv.GEN_AI_RESPONSE_MODEL, f"{_WEAVE}.model")}, answer.model) AS Model,
    if(answer.id = '', {_first(semconv.GEN_AI_RESPONSE_ID, f"{_WEAVE}.id")}, answer.id) AS ResponseId,
    answer.{semconv.ANSWER_FIELD}.tokenizer_hash AS TokenizerHash,
    choice.2 AS PromptIds,
    choice.3 AS ResponseIds,
    choice.4 AS Logprobs,
    choice.5 AS FinishReason,
    sampling.temperature AS Temperature, sampling.top_p AS TopP, sampling.top_k AS TopK, sampling.min_p AS MinP,
    sampling.presence_penalty AS PresencePenalty, sampling.frequency_penalty AS FrequencyPenalty,
    sampling.repetition_penalty AS RepetitionPenalty, sampling.constrained AS Constrained,
    if(place > 1, [], arrayConcat(
        [{_parts(f"arrayIntersect(types, {list(content_parts.NAMES)})")}],
        arrayMap(text -> if(length(text) > {_CONTENT_BYTES}, {_TYPED}, text), contents)
    )) AS Contents
FROM otel.otel_traces
LEFT ARRAY JOIN choices AS choice, arrayEnumerate(choices) AS place
WHERE ServiceName IN %(services)s AND SpanName IN %(names)s
    AND Timestamp BETWEEN fromUnixTimestamp64Nano(%(first)s) AND fromUnixTimestamp64Nano(%(last)s)
    AND TraceId IN %(traces)s AND SpanId IN %(spans)s
LIMIT 1 BY TraceId, SpanId, ChoiceIndex
"""
"""Query of the engine's extra fields, typed in the database: a row a choice, one empty row where the span holds no answer with ids.
Contents, of a span's first choice: prompt and response as JSON without long strings, where they may hold something else than text.

Parameters: services, names, traces, spans (tuples of text), first, last (nanoseconds since the epoch)."""


def with_modality(rows: pl.DataFrame) -> pl.DataFrame:
    """Return rows of `ANSWER_SQL`, with the column Modality in place of Contents."""
    contents = rows["Contents"].cast(pl.List(pl.Binary))  # a store may hold text that is not UTF-8
    modality = pl.Series([_modality(texts) for texts in contents.to_list()], dtype=pl.String)
    return rows.drop("Contents").with_columns(Modality=modality).with_columns(pl.col("Modality").max().over(SPAN))


def _modality(texts: Iterable[bytes]) -> str:
    contents, prompt_embeds = list[Any](), list[Any]()
    for text in texts:
        try:
            value = msgspec.json.decode(text)
        except JSON_ERRORS:
            # Nested too deep.
            contents += [{"type": name.decode()} for name in re.findall(_TYPE.encode(), text)]
            continue
        fields = value if isinstance(value, dict) else {}
        prompts = [fields[name] for name in (*_CONVERSATION, "prompt_embeds") if name in fields]
        contents += prompts or [value]
        prompt_embeds += [fields.get("prompt_embeds")]
    return content_parts.modality(contents, any(prompt_embeds))


def holds_answer(spans: pl.DataFrame) -> pl.Series:
    """Return a boolean a row of SPANS: the span may hold an engine's raw answer with token ids.

    Such are spans of calls, by OpenInference's instrumentations of clients and by others that write its kinds, by MLflow and by Agent
    Lightning. The other conventions, and OpenInference's instrumentations of frameworks, keep messages only.
    """
    names = spans["ScopeName"].unique()
    may = [name for name in names if not (name or "").startswith(_WITHOUT) and _keeps(name or "")]
    at = spans.select(pl.col("ScopeName").is_in(may, nulls_equal=True).fill_null(False)).to_series()
    if not at.any():
        return at
    scoped = spans[["Attributes", "ScopeName", "SpanName", "StatusCode", "StatusMessage"]].filter(at)
    # Spans of agents and tools carry none of these; this check costs a fifth of reading them.
    if not scoped.select(_marked([name for name in may if name == "litellm" or scopes.dialect(name or "") == "agent_lightning"])).item():
        return at & False
    attributes, beside = conventions(scoped)
    convention = pl.col("Convention")
    kind, span_type = attributes(semconv.OPENINFERENCE_KIND).str.to_uppercase(), unquoted(attributes(mlflow.SPAN_TYPE)).str.to_uppercase()
    holds = (
        ((convention == "openinference") & (kind == "LLM"))
        | ((convention == "mlflow") & span_type.is_in(mlflow.CALLS))
        | ((convention == "agent_lightning") & ~attributes.has("agentlightning.reward.0.value"))
        | ((convention == "gen_ai") & (pl.col("ScopeName") == "litellm"))
    )
    holding = attributes.frame(beside).select(holds.fill_null(False)).to_series()
    return at.scatter(at.arg_true(), holding)


def _marked(scope_names: list[str | None]) -> pl.Expr:
    """Return whether any span has a mark of those that hold answers: a known scope, or an attribute."""
    named = (attribute(name).is_not_null() for name in (mlflow.SPAN_TYPE, *agent_lightning.MARKS))
    return pl.any_horizontal(
        pl.col("ScopeName").is_in(scope_names), attribute(semconv.OPENINFERENCE_KIND).str.to_uppercase() == "LLM", *named
    ).any()


def _keeps(scope: str) -> bool:
    """Return whether an OpenInference instrumentation keeps the engine's extra fields: those of clients do, except LiteLLM's."""
    return "openinference" not in scope or (scopes.is_client(scope) and "litellm" not in scope)
