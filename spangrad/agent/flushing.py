"""Flushing of a process's spans, off its event loop, and at its exit.

In: attempts that ended. Out: whether their spans were sent. Invariant: a flush that began before a span ended does not count for that span.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import NoReturn

from opentelemetry import trace
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider

from spangrad.agent.failures import message_of
from spangrad.episode.user_calls import USER_ERRORS, plain_exceptions

_FLUSH_MILLISECONDS = 10_000
_GATHER_SECONDS = 0.01
"""Time for which a flush waits for further attempts to end, in seconds."""


class Flusher:
    """Flushes the tracer provider off the event loop; attempts that end during a flush share the next one."""

    def __init__(self) -> None:
        # A thread of its own: in the loop's threads a flush would wait for tools of agents.
        self._thread = ThreadPoolExecutor(1, "flush")
        self._turn = asyncio.Lock()
        self._next: asyncio.Task[bool] | None = None

    async def flush(self) -> bool:
        """Send all spans that have ended; False when that exceeds the time limit, or all processors raise."""
        if self._next is None:
            self._next = asyncio.create_task(self._flush())
        return await asyncio.shield(self._next)

    async def _flush(self) -> bool:
        async with self._turn:
            await asyncio.sleep(_GATHER_SECONDS)
            self._next = None  # spans that end from here on need another flush
            provider = trace.get_tracer_provider()
            if not isinstance(provider, TracerProvider):
                return True
            if await asyncio.get_running_loop().run_in_executor(self._thread, _force_flush, provider):
                return True
            print(f"spangrad: not all spans were sent in {_FLUSH_MILLISECONDS / 1000:g} s; going on, they stay queued", file=sys.stderr)
            return False


def exit_process() -> NoReturn:
    """End this process with exit code 0 without waiting for its threads, once its spans are sent and its outputs written."""
    provider = trace.get_tracer_provider()
    if isinstance(provider, TracerProvider):
        for processor in _processors(provider):
            try:
                with plain_exceptions():
                    processor.shutdown()
            except USER_ERRORS as error:
                _report_failure("shutdown", error)
    for output in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # its reader has gone, or it is closed
            output.flush()
    os._exit(0)


def _force_flush(provider: TracerProvider) -> bool:
    """Flush all span processors of a provider; where one of an agent's raises, each of the others, among which ours may stand behind it."""
    try:
        with plain_exceptions():
            return provider.force_flush(_FLUSH_MILLISECONDS)
    except USER_ERRORS as error:
        _report_failure("force_flush", error)
    flushed: list[bool] = []
    for processor in _processors(provider):
        with suppress(*USER_ERRORS), plain_exceptions():
            flushed.append(processor.force_flush(_FLUSH_MILLISECONDS))
    return bool(flushed) and all(flushed)


def _processors(provider: TracerProvider) -> Sequence[SpanProcessor]:
    return provider._active_span_processor._span_processors  # pyright: ignore[reportPrivateUsage]  # nothing else lists them


def _report_failure(method: str, error: BaseException) -> None:
    """Print that a span processor, which is an agent's, raised; also where standard error has no reader any more."""
    with suppress(OSError, ValueError):
        print(f"spangrad: a span processor fails in {method}: {type(error).__name__}: {message_of(error)}", file=sys.stderr)
