"""Decorator `@spangrad.rollout`, which marks the function that is the agent.

In: a function, plain or async. Out: the same function, with a mark that `spangrad run`, `spangrad worker` and `spangrad.Client` find.
Invariant: a call of the decorated function calls the function itself.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar, overload

F = TypeVar("F", bound=Callable[..., Any])
_MARK = "__spangrad_rollout__"


@dataclass(frozen=True, slots=True)
class Mark:
    """Arguments of the decorator."""

    name: str
    """Name of the agent after a colon: `my_agent.py:NAME`."""
    evaluator: Callable[..., Any] | str | None
    """Function of (input, output), or `module:function`. None: the agent's own value is the reward, unless the command line names one."""


@overload
def rollout(function: F, /) -> F: ...
@overload
def rollout(*, name: str | None = None, evaluator: Callable[..., Any] | str | None = None) -> Callable[[F], F]: ...
def rollout(
    function: F | None = None, /, *, name: str | None = None, evaluator: Callable[..., Any] | str | None = None
) -> F | Callable[[F], F]:
    """Mark a function as the agent of its module; `spangrad run my_agent.py` then needs no other name.

    Args:
        function: called with a task's input, and with `endpoint=` where it has a parameter of that name.
        name: name in `my_agent.py:NAME`. None: the function's own.
        evaluator: a function of (input, output) whose value is the reward, or `module:function`. None: the agent's own value is.

    Raises:
        TypeError: the decorated object cannot be called.
    """

    def mark(marked: F) -> F:
        if not callable(marked):
            raise TypeError(f"@spangrad.rollout decorates a function, not {type(marked).__name__}")
        setattr(marked, _MARK, Mark(name or marked.__name__, evaluator))
        return marked

    return mark if function is None else mark(function)


def mark_of(value: object) -> Mark | None:
    """Return the mark of an object. None: it is not decorated."""
    mark = inspect.getattr_static(value, _MARK, None)  # static: a value's own attribute access may do anything
    return mark if isinstance(mark, Mark) else None
