"""Link from the openai client's spans to LangChain's, which OpenInference leaves in separate traces.

OpenInference's LangChain tracer cannot attach its spans to the context (its callbacks have no place to detach them), so the
openai client's span does not see them. In: a request of the openai client. Out: the same request, in the context of the
LangChain run that makes it.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Awaitable, Callable, Generator
from contextlib import contextmanager
from typing import Any

from opentelemetry import context, trace
from opentelemetry.context import Context
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import Span
from wrapt import wrap_function_wrapper

_LANGCHAIN = "openinference.instrumentation.langchain"
_OPENAI = "openinference.instrumentation.openai"
_RUNS = "langchain_core.runnables.config"
"""Module in which LangChain keeps the current run. The instrumentor may be installed without it, and loads without it."""

_logger = logging.getLogger(__name__)
_linked = False


def link_langchain() -> None:
    """Wrap the openai client's `request`, once; does nothing unless both of OpenInference's instrumentors are loaded."""
    global _linked
    if _linked or _LANGCHAIN not in sys.modules or _OPENAI not in sys.modules:
        return
    wrap_function_wrapper("openai", "OpenAI.request", _request)
    wrap_function_wrapper("openai", "AsyncOpenAI.request", _async_request)
    _trace_inline()
    _linked = True


def _trace_inline() -> None:
    """Avoid the thread that LangChain would otherwise use for each event of the tracer: a quarter of an async agent's CPU time."""
    from openinference.instrumentation.langchain import LangChainInstrumentor

    tracer = getattr(LangChainInstrumentor(), "_tracer", None)
    if tracer is not None:
        tracer.run_inline = True


def _request(wrapped: Callable[..., Any], instance: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    del instance
    with _inside_langchain():
        return wrapped(*args, **kwargs)


async def _async_request(wrapped: Callable[..., Awaitable[Any]], instance: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    del instance
    with _inside_langchain():
        return await wrapped(*args, **kwargs)


@contextmanager
def _inside_langchain() -> Generator[None]:
    inside = _langchain_context()
    token = None if inside is None else context.attach(inside)
    try:
        yield
    finally:
        if token is not None:
            context.detach(token)


def _langchain_context() -> Context | None:
    """Return the context of the current LangChain run; None when there is none, or when a span was begun inside of it."""
    if _RUNS not in sys.modules:
        return None
    from openinference.instrumentation.langchain import get_ancestor_spans, get_current_span

    try:
        span = get_current_span()
        if span is None:
            return None
        outermost = (get_ancestor_spans() or [span])[-1]
    except Exception:  # foreign code in an agent's request: lose the link, not the request
        _logger.exception("no link to LangChain's span")
        return None
    return None if _begun_inside(outermost) else trace.set_span_in_context(span)


def _begun_inside(outermost: Span) -> bool:
    """Return whether the current span is another one than that in which LangChain's outermost run began."""
    current = trace.get_current_span().get_span_context()
    if not current.is_valid:
        return False
    parent = outermost.parent if isinstance(outermost, ReadableSpan) else None
    return parent is None or parent.span_id != current.span_id
