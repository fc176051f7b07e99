"""Pydantic AI, as it instruments itself: `agent run` or `invoke_agent NAME`, `chat MODEL`, `running tool` or `execute_tool NAME`.

In: spans of its scope. Out: what each is. Invariant: its spans of calls are a framework's; those of the client that it uses are others'.
Formats 1 and 2 name tools and agents in words of their own, later ones in `gen_ai.*`.
"""

from __future__ import annotations

from dataclasses import replace

import polars as pl

from spangrad import semconv
from transition_builder.dialects.conventions import gen_ai
from transition_builder.dialects.reading import AttributeColumns, Reading

SCOPES = r"^pydantic[-_]ai\b"


def read(attributes: AttributeColumns) -> Reading:
    """Read spans by `gen_ai.*` and by Pydantic AI's own names."""
    base = gen_ai.read(attributes)
    run = attributes.has("final_result", "all_messages_events", "pydantic_ai.all_messages") | pl.col("SpanName").str.contains(
        "^(agent run|invoke_agent)"
    )
    return replace(
        base,
        call=base.call & ~run,
        client=pl.lit(False),
        suspect=pl.lit(False),
        agent=pl.coalesce(attributes.first("agent_name", semconv.GEN_AI_AGENT_NAME), base.agent),
        arguments=attributes.any_of("tool_arguments", *gen_ai.ARGUMENTS),
        result=attributes.any_of("tool_response", *gen_ai.RESULTS),
    )
