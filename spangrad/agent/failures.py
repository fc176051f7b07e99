"""Recognition of failures that the policy caused, by the exception that ended an agent or by the engine's error response.

In: exceptions of agents and of the frameworks that they use, bodies of error responses. Out: an `AttemptFailure`. Invariant: classes of
frameworks are recognised by name, so that nothing is imported that the agent does not import itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

from spangrad.errors import EnvironmentsError, PromptError, SandboxError, SandboxRequestError, SettingsError
from spangrad.types import AttemptFailure

TURN_LIMITS = frozenset(
    {
        "MaxTurnsError",  # ours
        "MaxTurnsExceeded",  # OpenAI Agents SDK
        "GraphRecursionError",  # LangGraph
        "ModelCallLimitExceededError",  # LangChain's agent middleware
        "UsageLimitExceeded",  # Pydantic AI
        "AgentMaxStepsError",  # smolagents
        "LlmCallsLimitExceededError",  # Google ADK
    }
)
"""Classes of exceptions that frameworks raise when an agent used up its turns. AutoGen raises none: its run ends, and is evaluated."""
CONTEXT_LIMITS = frozenset({"ContextWindowExceededError", "ContextOverflowError"})
"""Classes of exceptions of LiteLLM and LangChain for a prompt that exceeds the model's context."""
_CONTEXT_CODE = "context_length_exceeded"
_CONTEXT_WORDS = ("maximum context length", "longer than the maximum model length", _CONTEXT_CODE)
"""Parts of such messages of vLLM and of OpenAI's API."""


class MaxTurnsError(Exception):
    """Raised by an agent that used up its own turn limit: the attempt fails as `max_turns` (docs/guides/runner.md)."""


def names_context_overflow(text: str) -> bool:
    """Return whether an error's text reports that a prompt is longer than the model's context."""
    lowered = text.lower()
    return any(words in lowered for words in _CONTEXT_WORDS)


def failure_of(error: BaseException) -> AttemptFailure:
    """Return the kind of failure of the exception that ended an agent.

    The exception itself, what caused it, and the members of exception groups are looked at; the outermost one that is recognised decides.

    Returns:
        max_turns, context_overflow, environment, sandbox, or exception where nothing is recognised.
    """
    for link in _chain(error):
        if isinstance(link, EnvironmentsError | PromptError | SettingsError):
            return AttemptFailure.ENVIRONMENT
        if isinstance(link, SandboxError) and not isinstance(link, SandboxRequestError):
            return AttemptFailure.SANDBOX
        names = {kind.__name__ for kind in type(link).__mro__}
        if names & TURN_LIMITS:
            return AttemptFailure.MAX_TURNS
        if names & CONTEXT_LIMITS or getattr(link, "code", None) == _CONTEXT_CODE or names_context_overflow(message_of(link)):
            return AttemptFailure.CONTEXT_OVERFLOW
    return AttemptFailure.EXCEPTION


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an exception, those in its group, and those that led to it, each once, nearest first."""
    waiting, seen = [error], set[int]()
    while waiting:
        link = waiting.pop(0)
        if id(link) in seen:
            continue
        seen.add(id(link))
        yield link
        if isinstance(link, BaseExceptionGroup):
            waiting += cast("BaseExceptionGroup[BaseException]", link).exceptions
        before = link.__cause__ or (None if link.__suppress_context__ else link.__context__)
        if before is not None:
            waiting.append(before)


def message_of(error: BaseException) -> str:
    """Return an exception's message; empty where its class fails to give one."""
    try:
        return str(error)
    except Exception:
        return ""
