"""What an agent host is told of the stages of its attempts, and what it answers of each attempt.

In, out: frozen values. Invariant: an answer is JSON, whatever the agent gave.
"""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from spangrad.agent.reward_values import Rewards
from spangrad.types import AttemptFailure

END_STAGE = "end"
"""Stands for a stage where none is left."""


@dataclass(frozen=True, slots=True)
class Answer:
    """How an attempt ended."""

    id: str
    reward: Rewards | float | None = None
    """None when it failed, or when somebody else evaluates; empty when the agent has rewarded itself."""
    failure: AttemptFailure | None = None
    """None when it succeeded."""
    detail: str = ""
    """What happened, for people."""
    stuck: bool = False
    """Whether a thread of it still runs."""
    flushed: bool = False
    """Whether its spans were sent."""
    output: object = None
    """What the agent gave, where somebody else evaluates it."""


@dataclass(frozen=True, slots=True)
class Stages:
    """What an attempt goes through."""

    agent: Callable[..., Any]
    initialiser: Callable[..., Any] | None = None
    """None: there is no stage `init` here."""
    evaluator: Callable[..., Any] | None = None
    """None: there is no stage `evaluate` here."""
    leased: bool = False
    """Whether a job brings its environment."""
    outputs: bool = False
    """Whether the agent's value is answered as it is, for somebody else to evaluate."""

    @property
    def environments(self) -> bool:
        """Whether an attempt has one."""
        return self.leased or self.initialiser is not None


def raised(name: str, failure: AttemptFailure, error: BaseException) -> Answer:
    """Somebody's code raised: the attempt's log has where."""
    traceback.print_exception(error)
    return Answer(name, failure=failure, detail=f"{type(error).__name__}: {error}"[:1000])


def handed_on(name: str, output: object) -> Answer:
    """An answer whose output somebody else evaluates."""
    try:
        json.dumps(output, allow_nan=False)
    except (TypeError, ValueError) as error:
        return Answer(name, failure=AttemptFailure.INVALID_OUTPUT, detail=f"the output {output!r:.200} is not JSON: {error}")
    return Answer(name, output=output)
