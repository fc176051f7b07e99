"""Word problems as an environment of one turn: the reply is an expression, which is worked out from left to right.

In: a question of the calculator's. Out: its text; 1 for an expression with the right value, 0 for another value, less for none.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from examples.calculator.arithmetic import calculate
from spangrad.episode.environment import StepResult

MALFORMED = -0.2
"""Reward of a reply that has no value."""


class WordProblem:
    """One problem, one reply."""

    def reset(self, task: Mapping[str, Any]) -> str:
        """Ask the problem."""
        self._answer = task["answer"]
        return task["text"]

    def step(self, action: str) -> StepResult:
        """Judge the reply."""
        try:
            value = worked_out(action)
        except ValueError:
            return StepResult(None, MALFORMED, done=True)
        return StepResult(None, float(value == self._answer), done=True)


def worked_out(expression: str) -> int:
    """Return the value of an expression such as `12 + 7 / 2`: whole numbers from 0 to 99, worked out from left to right.

    Raises:
        ValueError: it has no value.
    """
    first, *rest = expression.split() or [""]
    if len(rest) % 2:
        raise ValueError(f"{expression!r} ends in the midst")
    value = int(first)
    for operator, operand in zip(rest[::2], rest[1::2], strict=True):
        value = calculate(value, operator, int(operand))
    return value
