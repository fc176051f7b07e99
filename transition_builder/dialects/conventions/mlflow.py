"""MLflow tracing: `mlflow.spanType`, `mlflow.spanInputs` and `mlflow.spanOutputs`, each as JSON, a name in quotes.

The type decides; a chat model's span is the client's where the message format is a client's. Its outputs are the raw answer, ids and all,
where a client of OpenAI's was traced: see `answers`.
"""

from __future__ import annotations

from dataclasses import replace

import polars as pl

from transition_builder.dialects.conventions import gen_ai
from transition_builder.dialects.reading import NO, AttributeColumns, Reading, of_json, unquoted

SPAN_TYPE = "mlflow.spanType"
OUTPUTS = "mlflow.spanOutputs"
CALLS = ("CHAT_MODEL", "LLM")
INPUTS = "mlflow.spanInputs"
_CLIENTS = ("openai", "anthropic", "gemini", "groq", "mistral", "bedrock", "litellm", "cohere", "ollama", "together")
"""Message formats that a client's instrumentation writes."""
_ID = r'^\s*\{\s*"id"\s*:\s*"([^"]+)"'


def read(attributes: AttributeColumns) -> Reading:
    """Read spans by their types."""
    base = gen_ai.read(attributes)
    kind = unquoted(attributes(SPAN_TYPE)).str.to_uppercase()
    inputs, outputs = attributes(INPUTS), attributes(OUTPUTS)
    usage = attributes("mlflow.chat.tokenUsage")
    return replace(
        base,
        call=kind.is_in(CALLS),
        client=unquoted(attributes("mlflow.message.format")).is_in(_CLIENTS),
        tool=kind == "TOOL",
        chain=kind.is_in(["CHAIN", "WORKFLOW"]),
        suspect=NO,
        agent=pl.coalesce(pl.when(kind == "AGENT").then("SpanName"), base.agent),
        arguments=attributes.any_of(INPUTS, *gen_ai.ARGUMENTS),
        result=attributes.any_of(OUTPUTS, *gen_ai.RESULTS),
        model=pl.coalesce(of_json(outputs, "model"), unquoted(attributes.first("mlflow.llm.model")), of_json(inputs, "model"), base.model),
        response_id=pl.coalesce(pl.when(kind.is_in(CALLS)).then(outputs.str.extract(_ID)), base.response_id),
        input_tokens=pl.coalesce(of_json(usage, "input_tokens"), base.input_tokens),
        output_tokens=pl.coalesce(of_json(usage, "output_tokens"), base.output_tokens),
        finish=pl.coalesce(of_json(outputs, "choices[0].finish_reason"), base.finish),
    )
