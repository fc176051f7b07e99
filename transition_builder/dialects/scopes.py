"""Instrumentation scopes: the libraries and dialects that they belong to.

In: the name of a scope. Out: whether it belongs to a client of a model's server, and the dialect that it determines. Invariant: a name is
matched once a batch, however many spans have it; an unknown scope is no client's.
"""

from __future__ import annotations

import re
from functools import lru_cache

from spangrad import semconv
from transition_builder.dialects.conventions import agent_lightning, pydantic_ai, traceloop, vllm

_CLIENTS = frozenset(
    {
        *(
            "openai",
            "anthropic",
            "litellm",
            "bedrock",
            "bedrockruntime",
            "genai",
            "generativeai",
            "vertexai",
            "mistral",
            "mistralai",
            "groq",
        ),
        *("cohere", "ollama", "together", "togetherai", "fireworks", "replicate", "alephalpha", "watsonx", "sagemaker", "transformers"),
        *("writer", "xai", "deepseek", "inference", "huggingface", "cerebras", "sambanova", "perplexity", "dashscope", "zhipuai"),
    }
)
"""Words of scopes that belong to clients: openinference.instrumentation.openai, opentelemetry.instrumentation.openai_v2,
com.anthropic.sdk.python, @traceloop/instrumentation-openai."""
_FRAMEWORKS = frozenset(
    {
        *(
            "agents",
            "agent",
            "agentic",
            "agentchat",
            "langchain",
            "langgraph",
            "llamaindex",
            "llama",
            "haystack",
            "crewai",
            "autogen",
            "ag2",
        ),
        *("dspy", "smolagents", "agno", "instructor", "pydantic", "semantic", "strands", "adk", "mcp", "beeai", "guardrails", "mastra"),
        *("portkey", "promptflow", "langsmith"),
    }
)
"""Words of scopes of frameworks above clients, whichever client they name: openinference.instrumentation.openai_agents."""
_NAMESPACES = re.compile(r"^(opentelemetry\.(instrumentation\.)?genai\.|agentops\.instrumentation\.(providers|agentic)\.)")
_DIALECTS = (
    (re.compile(f"^{re.escape(semconv.GATEWAY_SCOPE)}$"), "gateway"),
    (re.compile(vllm.SCOPES), "vllm"),
    (re.compile(pydantic_ai.SCOPES), "pydantic_ai"),
    (re.compile(agent_lightning.SCOPES), "agent_lightning"),
    (re.compile(traceloop.SCOPES), "traceloop"),
)


@lru_cache(maxsize=4096)
def is_client(scope: str) -> bool:
    """Return whether a scope belongs to a library that speaks to the model's server."""
    words = set(re.split(r"[^a-z0-9]+", _NAMESPACES.sub("", scope.lower())))
    return bool(words & _CLIENTS) and not words & _FRAMEWORKS


@lru_cache(maxsize=4096)
def dialect(scope: str) -> str:
    """Return the dialect that a scope alone determines; empty where its spans' attributes must."""
    return next((name for pattern, name in _DIALECTS if pattern.search(scope)), "")
