"""Pydantic AI, as it instruments itself: `agent run` or `invoke_agent NAME`, `chat MODEL`, `running tool` or `execute_tool NAME`.

Its spans of calls are a framework's. Formats 1 and 2 name tools and agents in words of their own, later ones in `gen_ai.*`.
"""

from __future__ import annotations

from dataclasses import replace

import polars as pl

from spangrad import semconv
from transition_builder.dialects.conventions import gen_ai
from transition_builder.dialects.reading import NO, AttributeColumns, Reading

SCOPES = r"^pydantic[-_]ai\b"


def read(attributes: AttributeColumns) -> Reading:
    """Read spans by `gen_ai.*` and by Pydantic AI's own names."""
    base = gen_ai.read(attributes)
    named = pl.col("SpanName").str.contains("^(agent run|invoke_agent)")
    run = attributes.has("final_result", "all_messages_events", "pydantic_ai.all_messages") | named
    return replace(
        base,
        call=base.call & ~run,
        client=NO,
        suspect=NO,
        agent=pl.coalesce(attributes.first("agent_name", semconv.GEN_AI_AGENT_NAME), base.agent),
        arguments=attributes.any_of("tool_arguments", *gen_ai.ARGUMENTS),
        result=attributes.any_of("tool_response", *gen_ai.RESULTS),
    )
