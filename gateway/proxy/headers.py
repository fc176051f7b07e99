"""Filters of the headers and query parameters that pass between agents and engines.

In: the headers of a request or an answer, a query. Out: those that the other side gets. Invariant: a header that is not
named here ends at the gateway, keys, cookies and trace context among them, and nothing of one connection reaches the other.
"""

from __future__ import annotations

from collections.abc import Mapping
from urllib.parse import unquote_plus

from multidict import CIMultiDict

_HOP_BY_HOP = {
    "connection",
    "keep-alive",
    "proxy-authenticate",
    "proxy-authorization",
    "te",
    "trailer",
    "transfer-encoding",
    "upgrade",
}
# Headers that engines read. Any other may hold a key; and the engine gets the call's own span as its parent.
_FORWARDED = frozenset(
    {"accept", "anthropic-beta", "anthropic-version", "content-type", "openai-beta", "user-agent", "x-data-parallel-rank", "x-request-id"}
)
_KEYS = frozenset({"access_token", "api-key", "api_key", "apikey", "auth", "authorization", "auth_token", "key", "password", "token"})
"""Query parameters in which clients send their keys."""
# A client that followed a redirect would take its token and its conversation elsewhere.
_NOT_RETURNED = _HOP_BY_HOP | {"content-length", "date", "location", "server"}


def forwarded(headers: Mapping[str, str]) -> CIMultiDict[str]:
    """Return the client's headers that the engine gets."""
    return CIMultiDict((name, value) for name, value in headers.items() if name.lower() in _FORWARDED)


def forwarded_query(query: str) -> str:
    """Return the part of a client's query that the engine gets, both percent-encoded."""
    return "&".join(pair for pair in query.split("&") if unquote_plus(pair.partition("=")[0]).lower() not in _KEYS)


def returned(headers: Mapping[str, str]) -> CIMultiDict[str]:
    """Return the engine's headers that the client gets."""
    return CIMultiDict((name, value) for name, value in headers.items() if name.lower() not in _NOT_RETURNED)
