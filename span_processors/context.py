"""Rollout that a process was started for, from its environment to its first span.

In: TRACEPARENT, TRACESTATE and BAGGAGE, as the parent process set them. Out: the context that every span of the
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
    """Return the context that the process was started in."""
    return context_from({name: environ[name.upper()] for name in _NAMES if name.upper() in environ})


def rollout_attributes(context: Context | None, process: Mapping[str, object]) -> dict[str, str | int]:
    """Return the span attributes that name the run and the rollout of a span.

    Args:
        context: context in which the span starts. None: the current context.
        process: baggage that the process was started with, used for what the context lacks. A rollout, its attempt and its prompt
            come from one source: another rollout's are never mixed in.
    """
    carried = baggage.get_all(context)
    attributes: dict[str, str | int] = {}
    for key in CONTEXT_KEYS:
        value = carried.get(key)
        if value is None and not (key in _OF_ATTEMPT and ROLLOUT_ID in carried):
            value = process.get(key)
        if value is not None:
            text = str(value)
            attributes[key] = int(text) if key in _NUMBERS and text.isdecimal() else text
    return attributes
