"""Traceloop's OpenLLMetry: `traceloop.*` on what a program's own functions do, `gen_ai.*` and `llm.request.type` on calls.

`traceloop.span.kind` decides where it is present, else `llm.request.type`, else `gen_ai.*`. Every span of a traced process repeats
`traceloop.workflow.name` and `traceloop.entity.path`, HTTP spans as well: they mark nothing.
"""

from __future__ import annotations

from dataclasses import replace

import polars as pl

from transition_builder.dialects.conventions import gen_ai
from transition_builder.dialects.reading import AttributeColumns, Reading

SPAN_KIND = "traceloop.span.kind"
REQUEST_TYPE = "llm.request.type"
SCOPES = r"(?i)^(opentelemetry\.instrumentation\.openai\.v[01]$|traceloop\b|@traceloop/)"
"""Scopes of its own. Its other instrumentations share their names with OpenTelemetry's; their attributes identify them."""


def read(attributes: AttributeColumns) -> Reading:
    """Read spans by their kinds."""
    base = gen_ai.read(attributes)
    kind = attributes(SPAN_KIND).str.to_lowercase().replace(["", "unknown"], [None, None])
    request_type = attributes(REQUEST_TYPE).str.to_lowercase().replace(["", "unknown"], [None, None])
    name = pl.coalesce(attributes.first("traceloop.entity.name"), pl.col("SpanName").str.replace(r"\.(workflow|task|agent|tool)$", ""))
    return replace(
        base,
        call=kind.is_null() & pl.when(request_type.is_null()).then(base.call).otherwise(request_type.is_in(["chat", "completion"])),
        tool=(kind == "tool").fill_null(False) | (kind.is_null() & base.tool),
        chain=kind == "workflow",
        suspect=kind.is_null() & request_type.is_null() & base.suspect,
        agent=pl.coalesce(pl.when(kind.is_in(["agent", "workflow"])).then(name), base.agent),
        tool_name=pl.when(kind == "tool").then(name).otherwise(base.tool_name),
        arguments=attributes.any_of("traceloop.entity.input", *gen_ai.ARGUMENTS),
        result=attributes.any_of("traceloop.entity.output", *gen_ai.RESULTS),
    )
