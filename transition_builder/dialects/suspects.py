"""Spans that seem to have called a model, and that no dialect reads.

Invariant: a suspect is never a call by itself. It becomes one, of the convention `unknown`, where no span around it records the same call;
so that unreadable calls are dropped with a reason, not lost.

Two signs show a call: a request to a path that generates, and attributes that describe a model, its prompts or its tokens.
"""

from __future__ import annotations

import polars as pl

from transition_builder.dialects.reading import AttributeColumns

PATHS = (
    r"(/chat/completions|/completions|/v\d[^/]*/(responses|messages)|/(openai|anthropic|llm)/(responses|messages)|//[^/]+/(responses|messages)"
    r"|/generate(_stream)?|:\d+/api/(chat|generate)|:(stream)?[gG]enerateContent|:(stream)?[rR]awPredict"
    r"|/model/[^/]+/(invoke|converse)[a-z-]*|/v\d+/ai/language-model)/?([?#].*)?$"
)
"""Paths at which servers of OpenAI, Anthropic, vLLM, Ollama, Google, Bedrock and Vercel generate; in the syntax of RE2 and Rust."""
NAMES = r"^Bedrock Runtime\.(Invoke|Converse)"
"""Names of spans of AWS's clients."""
KEYS = (
    r"(?i)^(gen_?ai|llm|llms|ai|chat_?completions?|openai|anthropic|litellm|langchain|langsmith|traceloop|langfuse|mlflow|lmnr|helicone|weave|"
    r"braintrust|opik|dspy|ollama|vertexai|bedrock|mistral|cohere|groq|model|inference)[._/:-]"
    r"(.*[._/:-])?((request|response)[._]?model|model([._]?(name|id))?|prompts?|completions?|messages|(prompt|completion|input|output|total)[._]?tokens)"
    r"([._].*)?$"
)
"""Names of attributes that describe a model's response."""
SPEAKS = "SpeaksOfModels"
"""Column that is true where a span has such an attribute."""
_URLS = ("url.full", "http.url")
_OF_SERVERS = ("http.route", "http.server_name", "net.host.port", "http.target")
"""Attributes of spans of HTTP servers, which clients' spans lack: a received request is no call by the span's process."""
_METHODS = ("http.request.method", "http.method")


def suspects() -> pl.Expr:
    """Return whether a span that no dialect reads seems to have called a model, by other signs than a request."""
    return pl.col("SpanName").str.contains(NAMES).fill_null(False) | pl.col(SPEAKS)


def requests(attributes: AttributeColumns) -> pl.Expr:
    """Return whether a span is an HTTP client's, of a request to a path that generates."""
    generating = attributes.first(*_URLS).str.contains(PATHS) & (attributes.first(*_METHODS).fill_null("POST").str.to_uppercase() == "POST")
    return attributes.once("=request", (generating & ~attributes.has(*_OF_SERVERS)).fill_null(False))
