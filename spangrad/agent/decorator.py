"""`@spangrad.rollout`: says in the code which function is the agent.

In: a function, plain or async. Out: the same function, with a mark that `spangrad run`, `spangrad worker` and `spangrad.Client` find.
Invariant: whoever calls the function calls the function.
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
    """What the decorator was told."""

    name: str
    """By which it is named after a colon: `my_agent.py:NAME`."""
    evaluator: Callable[..., Any] | str | None
    """A function of (input, output), or `module:function`. None: the agent's own value is the reward, unless the command line names one."""


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
        name: by which `my_agent.py:NAME` means it. None: its own.
        evaluator: a function of (input, output) whose value is the reward, or `module:function`. None: the agent's own value is.

    Raises:
        TypeError: what is decorated cannot be called.
    """

    def mark(marked: F) -> F:
        if not callable(marked):
            raise TypeError(f"@spangrad.rollout decorates a function, not {type(marked).__name__}")
        setattr(marked, _MARK, Mark(name or marked.__name__, evaluator))
        return marked

    return mark if function is None else mark(function)


def mark_of(value: object) -> Mark | None:
    """What was said of it. None: it is not decorated."""
    mark = inspect.getattr_static(value, _MARK, None)  # whatever else a value does when it is asked for an attribute
    return mark if isinstance(mark, Mark) else None
