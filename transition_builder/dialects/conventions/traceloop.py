"""Traceloop's OpenLLMetry: `traceloop.*` on what a program's own functions do, `gen_ai.*` and `llm.request.type` on calls.

`traceloop.span.kind` decides where it is present, else `llm.request.type`, else `gen_ai.*`. Every span of a traced process repeats
`traceloop.workflow.name` and `traceloop.entity.path`, HTTP spans as well: they mark nothing.
"""

from __future__ import annotations

from dataclasses import replace

import polars as pl

from transition_builder.dialects.conventions import gen_ai
from transition_builder.dialects.reading import AttributeColumns, Reading, of_json

SPAN_KIND = "traceloop.span.kind"
REQUEST_TYPE = "llm.request.type"
SCOPES = r"(?i)^(opentelemetry\.instrumentation\.openai\.v[01]$|traceloop\b|@traceloop/)"
"""Scopes of its own. Its other instrumentations share their names with OpenTelemetry's; their attributes identify them."""


def read(attributes: AttributeColumns) -> Reading:
    """Read spans by their kinds."""
    base = gen_ai.read(attributes)
    kind = attributes(SPAN_KIND).str.to_lowercase().replace(["", "unknown"], [None, None])
    request_type = attributes(REQUEST_TYPE).str.to_lowercase().replace(["", "unknown"], [None, None])
    name = pl.coalesce(
        attributes.first("traceloop.entity.name"),
        pl.when(kind == "workflow").then(attributes.first("traceloop.workflow.name")),
        pl.col("SpanName").str.replace(r"\.(workflow|task|agent|tool)$", ""),
    )
    # For JavaScript, LangChain's tools are tasks by the names of their classes, and their results are LangChain's messages.
    task = ((kind == "task") & base.tool).fill_null(False)
    message = pl.when(task).then(attributes("traceloop.entity.output"))
    return replace(
        base,
        call=kind.is_null() & pl.when(request_type.is_null()).then(base.call).otherwise(request_type.is_in(["chat", "completion"])),
        tool=(kind == "tool").fill_null(False) | (kind.is_null() & base.tool) | task,
        chain=kind == "workflow",
        suspect=kind.is_null() & request_type.is_null() & base.suspect,
        agent=pl.coalesce(pl.when(kind.is_in(["agent", "workflow"])).then(name), base.agent),
        tool_name=pl.when(kind == "tool").then(name).otherwise(pl.coalesce(of_json(message, "kwargs.name"), base.tool_name)),
        tool_call_id=pl.coalesce(base.tool_call_id, of_json(message, "kwargs.tool_call_id")),
        arguments=attributes.any_of("traceloop.entity.input", *gen_ai.ARGUMENTS),
        result=attributes.any_of("traceloop.entity.output", *gen_ai.RESULTS),
    )
