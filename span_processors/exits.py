"""Flushing of spans at the exits where Python runs no exit handlers: SIGTERM, and the end of a multiprocessing child.

In: the provider whose spans must be sent. Invariant: the process ends as it would have without us, a bounded time later.
The first process of a container is not ended by SIGTERM, with us or without.
"""

from __future__ import annotations

import multiprocessing.util
import os
import signal
import threading
from types import FrameType

from opentelemetry.sdk.trace import TracerProvider


def flush_at_exits(provider: TracerProvider) -> None:
    """Call `provider.shutdown` at both exits; at an ordinary exit the SDK does it by itself."""
    # A child clears the finalizers that it inherits, then runs these.
    multiprocessing.util.register_after_fork(provider, _finalize_child)
    _flush_on_sigterm(provider)


def _finalize_child(provider: TracerProvider) -> None:
    # Below 0: after the child has joined its own children.
    multiprocessing.util.Finalize(None, provider.shutdown, exitpriority=-1)


def _flush_on_sigterm(provider: TracerProvider) -> None:
    """Flush, then die of the signal, if it would have killed. An agent's own handler, set before or after, is left alone."""
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        return

    def flush_and_die(number: int, frame: FrameType | None) -> None:
        del frame
        if os.getpid() == 1:
            # Linux drops the signal of the kill below for the first process of a container, but not for those that it forks. The agent
            # works on, as without us, and so does the export: no flush, which could make the agent wait for what it interrupted.
            return
        try:
            provider.shutdown()
        finally:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    signal.signal(signal.SIGTERM, flush_and_die)
