"""Stages of the attempts of an agent host, and the host's answer for each attempt.

In, out: frozen values. Invariant: an answer is JSON, whatever the agent returned.
"""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

from spangrad.agent.command import ProgramFailure
from spangrad.agent.failures import failure_of, message_of
from spangrad.agent.reward_values import Rewards
from spangrad.types import AttemptFailure

_MOST_LEVELS = 800
"""Largest number of levels of an output: the runner and the service read it with Python's usual limit, which agents may raise for
themselves."""
END_STAGE = "end"
"""Name that stands for a stage where none is left."""


@dataclass(frozen=True, slots=True)
class AttemptReply:
    """Result of an attempt."""

    id: str
    reward: Rewards | float | None = None
    """Rewards of the attempt. None when it failed, or when a service evaluates it; empty when the agent has rewarded itself."""
    failure: AttemptFailure | None = None
    """Failure of the attempt, or None when it succeeded."""
    detail: str = ""
    """Explanation for users; with a reward or an output, the exception after which it is partial."""
    stuck: bool = False
    """True if one of its threads still runs."""
    flushed: bool = False
    """True if its spans were sent."""
    output: object = None
    """Output of the agent, where a service evaluates it."""

    def message(self) -> dict[str, object]:
        """Return it as a message to the runner; `asdict` would copy the output, which a deep one does not stand."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


@dataclass(frozen=True, slots=True)
class Stages:
    """Functions of the stages of an attempt."""

    agent: Callable[..., Any]
    initialiser: Callable[..., Any] | None = None
    """Function that makes the environment. None: there is no stage `init` here."""
    evaluator: Callable[..., Any] | None = None
    """Function that rewards the output. None: there is no stage `evaluate` here."""
    leased: bool = False
    """True if a job brings its environment."""
    outputs: bool = False
    """True if the agent's output is returned as it is, for a service to evaluate."""
    on_failure: Callable[..., Any] | None = None
    """Function of (input, error) whose value takes the place of the result of a stage that raised. None: there is no hook."""
    empty_reward: float | None = None
    """Reward of an empty output, which is not evaluated. None: it is evaluated as any other."""
    close_after_run: bool = False
    """True if the environment is closed before the output is evaluated."""

    @property
    def environments(self) -> bool:
        """Return whether an attempt has an environment."""
        return self.leased or self.initialiser is not None


def raised(name: str, failure: AttemptFailure, error: BaseException) -> AttemptReply:
    """Return the answer for an exception of the user's code, and print its traceback to the attempt's log."""
    traceback.print_exception(error)
    return AttemptReply(name, failure=failure, detail=f"{type(error).__name__}: {message_of(error)}"[:1000])


def failed_run(name: str, error: BaseException) -> AttemptReply:
    """Return the answer for an agent that raised."""
    if isinstance(error, ProgramFailure):
        return AttemptReply(name, failure=error.failure, detail=str(error))
    return raised(name, failure_of(error), error)


def is_empty(output: object) -> bool:
    """Return whether an output is nothing: null, or an empty text, list or object."""
    return output is None or (isinstance(output, str | list | tuple | dict) and not output)


def handed_on(name: str, output: object) -> AttemptReply:
    """Return an answer whose output a service evaluates: what its JSON means, so that nothing of the agent's is left in it."""
    try:
        plain = json.loads(json.dumps(output, allow_nan=False))
        if _is_deeper(plain, _MOST_LEVELS):
            raise RecursionError(f"it has more than {_MOST_LEVELS} levels")
    except RecursionError as error:  # no part of it is shown, since that would be as deep
        return AttemptReply(name, failure=AttemptFailure.INVALID_OUTPUT, detail=f"the output is nested too deeply for JSON: {error}")
    except (TypeError, ValueError) as error:
        return AttemptReply(name, failure=AttemptFailure.INVALID_OUTPUT, detail=f"the output {output!r:.200} is not JSON: {error}")
    return AttemptReply(name, output=plain)


def _is_deeper(value: Any, levels: int) -> bool:
    """Return whether a value of JSON has objects and arrays in more than so many levels."""
    level = [value] if isinstance(value, list | dict) else []
    while level and levels:
        inner = (child for container in level for child in (container.values() if isinstance(container, dict) else container))
        level, levels = [child for child in inner if isinstance(child, list | dict)], levels - 1
    return bool(level)
