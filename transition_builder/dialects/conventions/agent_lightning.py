"""Agent Lightning 0.x: spans of AgentOps, of LiteLLM's proxy and of its own tracers, with token ids as attributes.

A reward is a span of its own, so that its scores belong to the rollout and to no call. Ids are integer arrays: `prompt_token_ids` and
`response_token_ids` (AgentOps, LiteLLM), or those of the answer under `agentlightning.operation.output` (its Weave tracer). They are long,
so that `answers` reads them in the database.
"""

from __future__ import annotations

from dataclasses import replace

import polars as pl

from transition_builder.dialects.conventions import gen_ai
from transition_builder.dialects.reading import NO, OF_CLIENT, AttributeColumns, Reading, of_json

SCOPES = r"^(agentlightning|agentops)\b"
SPAN_KIND = "agentops.span.kind"
OPERATION = "agentlightning.operation."
OUTPUT = f"{OPERATION}output"
MARKS = (
    SPAN_KIND,
    "agentlightning.operation.name",
    "agentlightning.operation.output.id",
    "agentlightning.operation.output.object",
    "agentlightning.reward.0.value",
    "prompt_token_ids",
    "response_token_ids",
)
_CALL_NAME = r"(?i)(openai|anthropic|litellm)\.(chat|completions?|responses?|messages?)\b"
_ANSWERS = r"^(chat\.completion|text_completion|response|message)$"
_OUTPUTS = ("agentops.task.output", "agentops.entity.output")
"""Attributes in which AgentOps keeps the return value of a decorated function."""


def read(attributes: AttributeColumns) -> Reading:
    """Read spans by their kinds and names."""
    base = gen_ai.read(attributes)
    kind = attributes(SPAN_KIND).str.to_lowercase()
    answer = attributes(f"{OPERATION}output.object").str.contains(_ANSWERS).fill_null(False)
    ids = attributes.has("prompt_token_ids", "response_token_ids", f"{OPERATION}output.prompt_token_ids")
    named = pl.col("SpanName").str.contains(_CALL_NAME)
    other = kind.is_in(["agent", "tool", "task", "workflow", "session", "operation", "chain", "guardrail"]).fill_null(False)
    call = ~other & (base.call | (kind == "llm").fill_null(False) | answer | ids | (named & attributes.has(f"{OPERATION}name")))
    return replace(
        base,
        call=call,
        client=OF_CLIENT | answer | named,
        tool=(kind == "tool").fill_null(False) | (kind.is_null() & base.tool),
        chain=kind.is_in(["chain", "workflow"]),
        suspect=NO,
        agent=pl.coalesce(
            attributes.first("agent.name"),
            base.agent,
            pl.when(kind == "agent").then(attributes.first("operation.name", "agentops.entity.name")),
            pl.when(attributes("type") == "agent").then(attributes.first(f"{OPERATION}input.name")),
        ),
        tool_name=attributes.first("tool.name", "operation.name", *gen_ai.TOOL_NAMES),
        arguments=attributes.any_of("tool.parameters", "agentops.tool.input", "agentops.entity.input", *gen_ai.ARGUMENTS),
        result=attributes.any_of("tool.result", "agentops.tool.output", "agentops.entity.output", *gen_ai.RESULTS),
        failed=attributes("tool.status").str.contains("(?i)fail|error").fill_null(False),
        model=pl.coalesce(attributes.first(f"{OPERATION}output.model", f"{OPERATION}input.model"), base.model),
        response_id=pl.coalesce(base.response_id, attributes.first(f"{OPERATION}output.id")),
        finish=pl.coalesce(base.finish, attributes.first(f"{OPERATION}output.choices.0.finish_reason")),
    )


def old_reward(attributes: AttributeColumns) -> pl.Expr:
    """Return the reward in a span of an early version: of the decorator `reward`, or of 0.2's annotation; null where there is none."""
    rewards = [pl.when(of_json(attributes(name), "type") == "reward").then(of_json(attributes(name), "value")) for name in _OUTPUTS]
    annotation = pl.when(pl.col("SpanName").is_in(["agentlightning.annotation", "agentlightning.reward"])).then(attributes("reward"))
    return pl.coalesce(*rewards, annotation)
