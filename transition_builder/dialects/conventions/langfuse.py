"""Langfuse: `langfuse.observation.*`, from its SDKs, its wrapper of the openai client and its callback handlers.

The observation's type decides; a generation is a call. Scores go to Langfuse's own API and never into spans.
"""

from __future__ import annotations

from dataclasses import replace

import polars as pl

from transition_builder.dialects.conventions import gen_ai
from transition_builder.dialects.reading import NO, OF_CLIENT, AttributeColumns, Reading, of_json, unquoted

OBSERVATION_TYPE = "langfuse.observation.type"
INPUT = "langfuse.observation.input"
OUTPUT = "langfuse.observation.output"
_OF_WRAPPER = r"^OpenAI-(generation|embedding)"
"""Span names of its wrapper of the openai client, unless configured otherwise."""


def read(attributes: AttributeColumns) -> Reading:
    """Read spans by the types of their observations."""
    base = gen_ai.read(attributes)
    kind = unquoted(attributes(OBSERVATION_TYPE)).str.to_lowercase()
    usage = attributes("langfuse.observation.usage_details")
    return replace(
        base,
        call=(kind == "generation") | ((kind == "span") & base.call),
        client=OF_CLIENT | pl.col("SpanName").str.contains(_OF_WRAPPER),
        tool=(kind == "tool") | ((kind == "span") & base.tool),
        chain=kind == "chain",
        suspect=NO,
        agent=pl.coalesce(base.agent, pl.when(kind == "agent").then("SpanName")),
        arguments=attributes.any_of(INPUT, *gen_ai.ARGUMENTS),
        result=attributes.any_of(OUTPUT, *gen_ai.RESULTS),
        failed=(attributes("langfuse.observation.level") == "ERROR").fill_null(False),
        model=pl.coalesce(attributes.first("langfuse.observation.model.name"), base.model),
        input_tokens=pl.coalesce(of_json(usage, "input", "prompt_tokens", "input_tokens"), base.input_tokens),
        output_tokens=pl.coalesce(of_json(usage, "output", "completion_tokens", "output_tokens"), base.output_tokens),
    )
