"""Instrumentation scopes: the libraries and dialects that they belong to; an unknown scope is no client's."""

from __future__ import annotations

import re
from functools import lru_cache

from spangrad import semconv
from transition_builder.dialects.conventions import agent_lightning, pydantic_ai, traceloop, vllm

_CLIENTS = re.compile(
    r"\b(openai|anthropic|litellm|bedrock|bedrockruntime|genai|generativeai|vertexai|mistral|mistralai|groq|cohere|ollama|together|togetherai"
    r"|fireworks|replicate|alephalpha|watsonx|sagemaker|transformers|writer|xai|deepseek|inference|huggingface|cerebras|sambanova|perplexity"
    r"|dashscope|zhipuai)\b"
)
"""Words of scopes that belong to clients: openinference.instrumentation.openai, opentelemetry.instrumentation.openai_v2,
com.anthropic.sdk.python, @traceloop/instrumentation-openai."""
_FRAMEWORKS = re.compile(
    r"\b(agents?|agentic|agentchat|langchain|langgraph|llamaindex|llama|haystack|crewai|autogen|ag2|dspy|smolagents|agno|instructor|pydantic"
    r"|semantic|strands|adk|mcp|beeai|guardrails|mastra|portkey|promptflow|langsmith)\b"
)
"""Words of scopes of frameworks above clients, whichever client they name: openinference.instrumentation.openai_agents."""
_NAMESPACES = re.compile(r"^(opentelemetry\.(instrumentation\.)?genai\.|agentops\.instrumentation\.(providers|agentic)\.)")
_DIALECTS = {
    "gateway": f"^{re.escape(semconv.GATEWAY_SCOPE)}$",
    "vllm": vllm.SCOPES,
    "pydantic_ai": pydantic_ai.SCOPES,
    "agent_lightning": agent_lightning.SCOPES,
    "traceloop": traceloop.SCOPES,
    # Of VoltAgent's own spans only the outermost have its mark.
    "voltagent": "^@voltagent/",
}


@lru_cache(maxsize=4096)
def is_client(scope: str) -> bool:
    """Return whether a scope belongs to a client library of the model's server."""
    words = _NAMESPACES.sub("", scope.lower()).replace("_", " ")
    return bool(_CLIENTS.search(words)) and not _FRAMEWORKS.search(words)


@lru_cache(maxsize=4096)
def dialect(scope: str) -> str:
    """Return the dialect that a scope alone determines; empty where its spans' attributes must."""
    return next((name for name, pattern in _DIALECTS.items() if re.search(pattern, scope)), "")
