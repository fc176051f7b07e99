"""Trace context in the opening requests of connections that an agent opens with the library `websockets`.

OpenTelemetry has no instrumentation of that library, which clients of environments use (OpenEnv's). In: a connection that is opened. Out:
the same with `traceparent` and `baggage` of the current context among its headers, so that what the server records belongs to the
rollout. Invariant: a header that the agent sends itself stays as it is; without a current span nothing is sent.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from opentelemetry import trace
from wrapt import register_post_import_hook, wrap_function_wrapper

from spangrad.agent.propagation import carrier_of

_OPENINGS = {"websockets.asyncio.client": "connect.__init__", "websockets.sync.client": "connect"}
"""Functions that open connections, by their modules."""
_HEADERS = "additional_headers"
_linked = False


def link_websockets() -> None:
    """Wrap the functions that open connections, once; in an agent that does not use the library, nothing is imported."""
    global _linked
    if _linked:
        return
    for name in _OPENINGS:
        register_post_import_hook(_wrap, name)
    _linked = True


def _wrap(module: Any) -> None:
    wrap_function_wrapper(module, _OPENINGS[module.__name__], _open)


def _open(wrapped: Callable[..., Any], instance: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    del instance
    if not trace.get_current_span().get_span_context().is_valid:
        return wrapped(*args, **kwargs)
    given = kwargs.get(_HEADERS) or ()
    # The library's own mapping may have a header several times.
    pairs = getattr(given, "raw_items", getattr(given, "items", lambda: given))
    headers: list[tuple[str, str]] = [*pairs()]
    named = {name.lower() for name, _ in headers}
    added = [(name, value) for name, value in carrier_of().items() if name not in named]
    return wrapped(*args, **{**kwargs, _HEADERS: [*headers, *added]})
