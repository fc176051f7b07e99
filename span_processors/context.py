"""The rollout that a process was started for, from its environment to its first span.

In: TRACEPARENT, TRACESTATE and BAGGAGE, as whoever started the process set them. Out: the context that every span of the
process begins in. The SDK itself ignores these variables.
"""

from __future__ import annotations

from collections.abc import Mapping

from opentelemetry import baggage
from opentelemetry.context import Context

from spangrad.agent.propagation import context_from
from spangrad.semconv import CONTEXT_KEYS, PROMPT_NAME, PROMPT_VERSION, ROLLOUT_ATTEMPT, ROLLOUT_ID

_NAMES = ("traceparent", "tracestate", "baggage")
_OF_ATTEMPT = frozenset({ROLLOUT_ATTEMPT, PROMPT_NAME, PROMPT_VERSION})
_NUMBERS = frozenset({ROLLOUT_ATTEMPT, PROMPT_VERSION})


def environment_context(environ: Mapping[str, str]) -> Context:
    """The context that the process was started in."""
    return context_from({name: environ[name.upper()] for name in _NAMES if name.upper() in environ})


def rollout_attributes(context: Context | None, process: Mapping[str, str]) -> dict[str, str | int]:
    """The span attributes that say which run and rollout a span belongs to.

    Args:
        context: where the span starts. None: the current context.
        process: the same attributes as the process was started with, used for what the context does not say. A rollout,
            its attempt and its prompt come from one place: another rollout's are never mixed in.
    """
    carried = baggage.get_all(context)
    found: dict[str, str | int] = {}
    for key in CONTEXT_KEYS:
        value = carried.get(key)
        if value is None and not (key in _OF_ATTEMPT and ROLLOUT_ID in carried):
            value = process.get(key)
        if value is not None:
            text = str(value)
            found[key] = int(text) if key in _NUMBERS and text.isdecimal() else text
    return found


def process_attributes(context: Context) -> dict[str, str]:
    """What of a context `rollout_attributes` falls back on."""
    carried = baggage.get_all(context)
    return {key: str(carried[key]) for key in CONTEXT_KEYS if key in carried}
