"""Conventions with one attribute of their own for a span's kind, a row of a table each; `gen_ai.*` gives what the row lacks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import polars as pl

from transition_builder.dialects.conventions import gen_ai
from transition_builder.dialects.reading import AttributeColumns, Reading, unquoted


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Vocabulary of a convention."""

    mark: str
    """Attribute that marks its spans."""
    kind: tuple[str, ...] = ()
    """Attributes of a span's kind: the first that it has; default: the mark."""
    spans: str = ""
    """Pattern of the span names to which the mark is restricted; empty: any."""
    named: str = ""
    """Pattern of the names of its spans without the mark; the group is the kind."""
    call: str = r"^llm$"
    """Patterns of kinds, in lower case."""
    tool: str = r"^tool$"
    agent: str = r"^agent$"
    chain: str = r"^(chain|workflow)$"
    arguments: tuple[str, ...] = ()
    result: tuple[str, ...] = ()
    model: tuple[str, ...] = ()
    name: tuple[str, ...] = ()
    """Attributes that name the agent or the tool; default: the name of the span."""
    tool_call_id: tuple[str, ...] = ()
    input_tokens: tuple[str, ...] = ()
    output_tokens: tuple[str, ...] = ()


VOCABULARIES = {
    "langsmith": Vocabulary("langsmith.span.kind"),
    "laminar": Vocabulary(
        "lmnr.span.type",
        call=r"^(llm|cached)$",
        agent=r"^executor$",
        chain=r"^pipeline$",
        arguments=("lmnr.span.input",),
        result=("lmnr.span.output",),
    ),
    "voltagent": Vocabulary(
        "voltagent.operation_id",
        ("span.type", "entity.type"),
        arguments=("input",),
        result=("output",),
        model=("llm.model", "ai.model.name"),
        name=("tool.name", "entity.name"),
        tool_call_id=("tool.call.id",),
        input_tokens=("llm.usage.prompt_tokens", "usage.prompt_tokens"),
        output_tokens=("llm.usage.completion_tokens", "usage.completion_tokens"),
    ),
    "claude_code": Vocabulary(
        "span.type",
        spans=r"^claude_code\.",
        call=r"^(claude_code\.)?llm_request$",
        tool=r"^(claude_code\.)?tool$",
        agent=r"^(claude_code\.)?interaction$",
        arguments=("tool_input",),
        result=("new_context",),
        model=("model",),
        name=("tool_name",),
        input_tokens=("input_tokens",),
        output_tokens=("output_tokens",),
    ),
    "haystack": Vocabulary(
        "haystack.component.type",
        # An agent's steps have no attributes unless content is traced.
        named=r"^haystack\.agent\.(?:step\.)?(run|llm|tool)$",
        call=r"(generator|^llm)$",
        tool=r"^tool(invoker)?$",
        agent=r"^(agent|run)$",
        chain=r"^(pipeline|supercomponent)$",
        arguments=("haystack.component.input",),
        result=("haystack.component.output",),
        name=("haystack.component.name",),
    ),
    "trulens": Vocabulary(
        "ai.observability.span_type",
        call=r"^generation$",
        chain=r"^(record_root|workflow|workflow_step)$",
        model=("ai.observability.cost.model",),
        input_tokens=("ai.observability.cost.num_prompt_tokens",),
        output_tokens=("ai.observability.cost.num_completion_tokens",),
    ),
    "genkit": Vocabulary(
        "genkit:metadata:subtype",
        call=r"^model$",
        agent=r"^(flow|agent)$",
        chain=r"^$",
        arguments=("genkit:input",),
        result=("genkit:output",),
        name=("genkit:name",),
    ),
    "datadog": Vocabulary("_ml_obs.meta.span.kind", model=("_ml_obs.meta.model_name",)),
}


def reader(words: Vocabulary) -> Callable[[AttributeColumns], Reading]:
    """Return the dialect of a vocabulary."""

    def read(attributes: AttributeColumns) -> Reading:
        base = gen_ai.read(attributes)
        of_name = [pl.col("SpanName").str.extract(words.named)] if words.named else []
        kind = pl.coalesce(unquoted(attributes.first(*(words.kind or (words.mark,)))), *of_name).str.to_lowercase().fill_null("")
        call, tool = kind.str.contains(words.call), kind.str.contains(words.tool)
        named = kind.str.contains(words.agent)
        known = call | tool | named | kind.str.contains(words.chain)
        return replace(
            base,
            call=call | (~known & base.call),
            tool=tool | (~known & base.tool),
            chain=kind.str.contains(words.chain),
            suspect=~known & base.suspect,
            agent=pl.coalesce(base.agent, pl.when(named).then(pl.coalesce(attributes.first(*words.name), "SpanName"))),
            tool_name=pl.coalesce(attributes.first(*words.name), base.tool_name),
            tool_call_id=pl.coalesce(base.tool_call_id, attributes.first(*words.tool_call_id)),
            arguments=attributes.any_of(*words.arguments, *gen_ai.ARGUMENTS),
            result=attributes.any_of(*words.result, *gen_ai.RESULTS),
            model=pl.coalesce(base.model, attributes.first(*words.model)),
            input_tokens=pl.coalesce(base.input_tokens, attributes.first(*words.input_tokens)),
            output_tokens=pl.coalesce(base.output_tokens, attributes.first(*words.output_tokens)),
        )

    return read
