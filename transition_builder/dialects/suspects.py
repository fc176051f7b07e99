"""Spans that seem to have called a model, and that no dialect reads.

In: spans that are no call, tool or chain in any dialect. Out: which of them are suspects. Invariant: a suspect is never a call by itself.
It becomes one, of the convention `unknown`, where no span around it tells of the same call; so that what nobody could read is dropped by
name, not lost.

Two things betray a call: a request to a path that generates, and attributes that speak of a model, its prompts or its tokens.
"""

from __future__ import annotations

import polars as pl

from transition_builder.dialects.reading import Said

PATHS = (
    r"(/chat/completions|/completions|/v\d[^/]*/(responses|messages)|/(openai|anthropic|llm)/(responses|messages)|//[^/]+/(responses|messages)"
    r"|/generate(_stream)?|:\d+/api/(chat|generate)|:(stream)?[gG]enerateContent|:(stream)?[rR]awPredict"
    r"|/model/[^/]+/(invoke|converse)[a-z-]*|/v\d+/ai/language-model)/?([?#].*)?$"
)
"""Where OpenAI's, Anthropic's, vLLM's, Ollama's, Google's, Bedrock's and Vercel's servers generate. In RE2's and in Rust's syntax."""
NAMES = r"^Bedrock Runtime\.(Invoke|Converse)"
"""Names of spans of AWS's clients."""
KEYS = (
    r"(?i)^(gen_?ai|llm|llms|ai|chat_?completions?|openai|anthropic|litellm|langchain|langsmith|traceloop|langfuse|mlflow|lmnr|helicone|weave|"
    r"braintrust|opik|dspy|ollama|vertexai|bedrock|mistral|cohere|groq|model|inference)[._/:-]"
    r"(.*[._/:-])?((request|response)[._]?model|model([._]?(name|id))?|prompts?|completions?|messages|(prompt|completion|input|output|total)[._]?tokens)"
    r"([._].*)?$"
)
"""Names of attributes that speak of a model's answer."""
SPEAKS = "SpeaksOfModels"
"""The column that says whether a span has such an attribute."""
_URLS = ("url.full", "http.url")
_OF_SERVERS = ("http.route", "http.server_name", "net.host.port", "http.target")
"""What spans of HTTP servers have, and those of clients have not: a request that somebody received is no call that he made."""
_METHODS = ("http.request.method", "http.method")


def suspects(said: Said) -> pl.Expr:
    """Whether a span that no dialect reads seems to have called a model, by anything but a request."""
    return pl.col("SpanName").str.contains(NAMES).fill_null(False) | pl.col(SPEAKS)


def requests(said: Said) -> pl.Expr:
    """Whether a span is an HTTP client's, of a request to a path that generates."""
    asked = said.first(*_URLS).str.contains(PATHS) & (said.first(*_METHODS).fill_null("POST").str.to_uppercase() == "POST")
    return said.once("=request", (asked & ~said.has(*_OF_SERVERS)).fill_null(False))
