"""vLLM's own spans, of the scope `vllm.llm_engine`: the engine records each request when it is done.

The request's id is that of the answer, so that the span is joined to the caller's where no parent link leads there.
"""

from __future__ import annotations

from dataclasses import replace

import polars as pl

from transition_builder.dialects.conventions import gen_ai
from transition_builder.dialects.reading import NO, NONE, AttributeColumns, Reading

SCOPES = r"^vllm\."


def read(attributes: AttributeColumns) -> Reading:
    """Read spans by their name: vLLM traces how it loads models in other spans of its scopes."""
    base = gen_ai.read(attributes)
    return replace(
        base,
        call=NO,
        engine=(pl.col("SpanName") == "llm_request") | attributes.has("gen_ai.request.id"),
        tool=NO,
        suspect=NO,
        agent=NONE,
        response_id=pl.coalesce(attributes.first("gen_ai.request.id"), base.response_id),
    )
