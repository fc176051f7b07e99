"""A queue that is fair between rollouts: those who wait stand in a line of their own rollout, and the lines take turns.

In: those who wait, each with the key of its line. Out: who is served next. Invariant: whoever can be served is, within as many
turns as there are lines and places before it in its own.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterator
from typing import Generic, TypeVar

_K = TypeVar("_K", bound=Hashable)
_W = TypeVar("_W")
_R = TypeVar("_R")


class FairQueue(Generic[_K, _W]):
    """Lines by key, in the order of their turns."""

    def __init__(self) -> None:
        self._lines: OrderedDict[_K, deque[_W]] = OrderedDict()
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[_W]:
        return (one for line in self._lines.values() for one in line)

    def put(self, key: _K, waiter: _W) -> None:
        """Stand at the end of a line."""
        self._lines.setdefault(key, deque()).append(waiter)
        self._size += 1

    def discard(self, key: _K, waiter: _W) -> None:
        """Leave without having been served; nothing when it stands there no more."""
        line = self._lines.get(key)
        if line is not None and waiter in line:
            line.remove(waiter)
            self._size -= 1
            if not line:
                del self._lines[key]

    def take(self, serve: Callable[[_W], _R | None]) -> _R | None:
        """Serve one: the first of the first line that can be served; its line goes behind the others.

        Args:
            serve: what serves the one given, or None when it cannot be served now. All of a line are served alike.
        """
        for key, line in self._lines.items():
            served = serve(line[0])
            if served is not None:
                line.popleft()
                self._size -= 1
                if line:
                    self._lines.move_to_end(key)
                else:
                    del self._lines[key]
                return served
        return None
