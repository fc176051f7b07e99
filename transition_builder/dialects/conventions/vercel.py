"""Vercel's AI SDK: `ai.*`, a span for each call of its functions and, within, one for each call of the model.

`.doGenerate` and `.doStream` are the client's spans. The function's own span around them and the tools is no call: it is the agent's, where
`functionId` names one.
"""

from __future__ import annotations

from dataclasses import replace

import polars as pl

from transition_builder.dialects.conventions import gen_ai
from transition_builder.dialects.reading import NO, AttributeColumns, Reading

OPERATION = "ai.operationId"
_CLIENT = r"\.do(Generate|Stream)$"


def read(attributes: AttributeColumns) -> Reading:
    """Read spans by their operations."""
    base = gen_ai.read(attributes)
    operation = attributes(OPERATION)
    client = operation.str.contains(_CLIENT)
    return replace(
        base,
        call=client,
        client=client,
        tool=operation == "ai.toolCall",
        chain=NO,
        suspect=NO,
        agent=pl.coalesce(base.agent, attributes.first("ai.telemetry.functionId", "ai.telemetry.metadata.agentName")),
        tool_name=pl.coalesce(attributes.first("ai.toolCall.name"), base.tool_name),
        tool_call_id=pl.coalesce(attributes.first("ai.toolCall.id"), base.tool_call_id),
        arguments=attributes.any_of("ai.toolCall.args", "ai.toolCall.input", *gen_ai.ARGUMENTS),
        result=attributes.any_of("ai.toolCall.result", "ai.toolCall.output", *gen_ai.RESULTS),
        model=pl.coalesce(attributes.first("ai.response.model"), base.model, attributes.first("ai.model.id")),
        response_id=pl.coalesce(attributes.first("ai.response.id"), base.response_id),
        input_tokens=pl.coalesce(base.input_tokens, attributes.first("ai.usage.promptTokens", "ai.usage.inputTokens")),
        output_tokens=pl.coalesce(base.output_tokens, attributes.first("ai.usage.completionTokens", "ai.usage.outputTokens")),
        finish=pl.coalesce(attributes.first("ai.response.finishReason"), base.finish),
    )
