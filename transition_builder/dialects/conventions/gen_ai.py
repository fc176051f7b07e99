"""OpenTelemetry's generative AI conventions, from the first `gen_ai.system` to `gen_ai.provider.name` and content in span attributes.

The operation's name decides; a span that names a model and no operation is a call; one that only counts tokens is a suspect. Until version
1.36 messages were events of the span (`gen_ai.user.message`, `gen_ai.choice`): `texts` reads them. No version has a place for token ids.
"""

from __future__ import annotations

from dataclasses import replace

import polars as pl

from spangrad import semconv
from transition_builder.dialects.reading import AttributeColumns, Reading, coalesced, first_of_list

CALLS = (
    *("chat", "text_completion", "generate_content", "completion", "chat_completion", "chat.completions", "text.completions", "response"),
    "model_step",
)
"""Operations that call a model, those of earlier versions, of Semantic Kernel and of Mastra among them."""
OTHERS = r"embed|tool|agent|workflow|retriev|rerank|guard|memory|plan|evaluat|moderat|image|speech|audio|transcri|token|handoff|task"
"""Pattern of the names of all other operations. An operation that is in neither list is a call if it names a model."""
TOOL_NAMES = (semconv.GEN_AI_TOOL_NAME,)
ARGUMENTS = (
    semconv.GEN_AI_TOOL_ARGUMENTS,
    "gcp.vertex.agent.tool_call_args",
    "gen_ai.tool.args",
    "gen_ai.tool.arguments",
    "tool_arguments",
)
RESULTS = (semconv.GEN_AI_TOOL_RESULT, "gcp.vertex.agent.tool_response", "gen_ai.tool.message", "tool_response")
FINISH_REASONS = (
    semconv.GEN_AI_FINISH_REASONS,
    "gen_ai.response.finish_reason",
    "gen_ai.completion.0.finish_reason",
    "llm.response.finish_reason",
    "llm.response.stop_reason",
)


def outcome(attributes: AttributeColumns) -> Reading:
    """Read the error, the tokens and the finish reason of a call alone."""
    return Reading(
        error=attributes.first(semconv.ERROR_TYPE, "exception.type"),
        input_tokens=attributes.first(semconv.GEN_AI_INPUT_TOKENS, "gen_ai.usage.prompt_tokens"),
        output_tokens=attributes.first(semconv.GEN_AI_OUTPUT_TOKENS, "gen_ai.usage.completion_tokens"),
        finish=coalesced(first_of_list(pl.col(name)) for name in attributes.present(*FINISH_REASONS)),
    )


def read(attributes: AttributeColumns) -> Reading:
    """Read spans by `gen_ai.*` attributes alone; other dialects put their own attributes first."""
    base = outcome(attributes)
    operation = attributes(semconv.GEN_AI_OPERATION).str.to_lowercase().replace("", None)
    model = attributes.first(semconv.GEN_AI_RESPONSE_MODEL, semconv.GEN_AI_REQUEST_MODEL)
    named_tool = attributes(semconv.GEN_AI_TOOL_NAME).is_not_null()
    other = operation.str.contains(OTHERS).fill_null(False)
    call = operation.is_in(CALLS).fill_null(False) | (model.is_not_null() & ~other & ~(named_tool & operation.is_null()))
    invoked = pl.when(operation == "invoke_agent").then(pl.col("SpanName").str.extract(r"^invoke_agent\s+(.+)$"))
    # Vercel's AI SDK puts the model's name into the span's where the agent has none.
    invoked = pl.when(invoked.ne_missing(model)).then(invoked)
    return replace(
        base,
        call=call,
        tool=(operation == "execute_tool") | (operation.is_null() & named_tool),
        chain=operation == "invoke_workflow",
        suspect=~call
        & operation.is_null()
        & ~named_tool
        & (base.output_tokens.is_not_null() | attributes.has("gen_ai.output.messages", "gen_ai.completion")),
        agent=pl.coalesce(attributes.first(semconv.GEN_AI_AGENT_NAME), invoked),
        tool_name=pl.coalesce(attributes.first(*TOOL_NAMES), pl.col("SpanName").str.extract(r"^(?:execute_tool|tools/call)\s+(.+)$")),
        tool_call_id=attributes.first(semconv.GEN_AI_TOOL_CALL_ID),
        arguments=attributes.first(*ARGUMENTS),
        result=attributes.any_of(*RESULTS),
        # Strands ends the span of a failed tool as Ok.
        failed=(attributes("gen_ai.tool.status").str.to_lowercase() == "error").fill_null(False),
        model=model,
        response_id=attributes.first(semconv.GEN_AI_RESPONSE_ID),
    )
