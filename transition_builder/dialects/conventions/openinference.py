"""OpenInference: Arize's conventions and its instrumentations of clients, LangChain and LangGraph, the Agents SDK, AutoGen and others.

The kind alone makes a span a call; kinds that are not named here (RETRIEVER, EMBEDDING, RERANKER, GUARDRAIL, EVALUATOR, PROMPT) are neither
call nor tool nor chain. The client-level span (scope `openinference.instrumentation.openai` and its like) is the only one that keeps the
engine's extras, in `output.value`: see `answers`.
"""

from __future__ import annotations

from dataclasses import replace

import polars as pl

from spangrad import semconv
from transition_builder.dialects.conventions import gen_ai
from transition_builder.dialects.reading import AttributeColumns, Reading, of_json

INVOCATION_PARAMETERS = "llm.invocation_parameters"
TOOL_CALL_ID_NAMES = ("tool_call.id", "tool.id", semconv.GEN_AI_TOOL_CALL_ID)
"""Attributes in which a tool's span may name the tool call that it answers."""
_MODELS = (
    *("llm.response.model_name", "llm.model_name", "llm.request.model_name"),
    *(semconv.GEN_AI_RESPONSE_MODEL, semconv.GEN_AI_REQUEST_MODEL),
)
_ID = r'^\s*\{\s*"id"\s*:\s*"([^"]+)"'
_TOOL_MESSAGE_ID = r'"tool_call_id"\s*:\s*"([^"]+)"'
_TOOL_MESSAGE_FAILED = r'"tool_call_id".*"status"\s*:\s*"error"'
"""LangChain's ToolMessage, which a tool's span holds whole."""


def read(attributes: AttributeColumns) -> Reading:
    """Read spans by their kinds."""
    base = gen_ai.outcome(attributes)
    kind = attributes.once("=kind", attributes(semconv.OPENINFERENCE_KIND).str.to_uppercase())
    output = attributes(semconv.OPENINFERENCE_OUTPUT)
    # Long texts: each pattern is sought in those alone that may have it.
    message = pl.when((kind == "TOOL") & output.str.contains('"tool_call_id"', literal=True)).then(output)
    node = pl.when(~pl.col("ScopeName").str.contains("langchain", literal=True)).then(attributes.first(semconv.OPENINFERENCE_GRAPH_NODE))
    asked, model = attributes(INVOCATION_PARAMETERS), attributes.first(*_MODELS)
    return replace(
        base,
        call=kind == "LLM",
        tool=kind == "TOOL",
        chain=kind == "CHAIN",
        agent=pl.coalesce(
            attributes.first(semconv.OPENINFERENCE_AGENT_NAME, semconv.GEN_AI_AGENT_NAME, "agent_name"),
            node,
            pl.when(kind == "AGENT").then("SpanName"),
        ),
        tool_name=attributes.first(semconv.OPENINFERENCE_TOOL_NAME, semconv.GEN_AI_TOOL_NAME),
        tool_call_id=pl.coalesce(attributes.first(*TOOL_CALL_ID_NAMES), message.str.extract(_TOOL_MESSAGE_ID)),
        arguments=attributes.any_of(semconv.OPENINFERENCE_INPUT, "tool_call.function.arguments", "tool.parameters", *gen_ai.ARGUMENTS),
        result=attributes.any_of(semconv.OPENINFERENCE_OUTPUT, *gen_ai.RESULTS),
        failed=message.str.contains(_TOOL_MESSAGE_FAILED).fill_null(False),
        model=pl.coalesce(model, of_json(pl.when(model.is_null()).then(asked), "model")),
        response_id=pl.coalesce(attributes.first(semconv.GEN_AI_RESPONSE_ID), pl.when(kind == "LLM").then(output).str.extract(_ID)),
        input_tokens=pl.coalesce(attributes.first("llm.token_count.prompt"), base.input_tokens),
        output_tokens=pl.coalesce(attributes.first("llm.token_count.completion"), base.output_tokens),
        finish=pl.coalesce(attributes.first("llm.finish_reason"), base.finish),
    )
