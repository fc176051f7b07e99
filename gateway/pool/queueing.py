"""A queue that is fair between rollouts: each rollout has a line of its own, and the lines are served round-robin.

In: waiters, each with the key of its line. Out: the waiter to serve next. Invariant: a waiter that can be served is served within as many
turns as there are lines and places before it in its own line.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterator
from typing import Generic, TypeVar

_K = TypeVar("_K", bound=Hashable)
_W = TypeVar("_W")
_R = TypeVar("_R")


class FairQueue(Generic[_K, _W]):
    """Round-robin queue of waiters: a line for each key, in the order of their turns."""

    def __init__(self) -> None:
        self._lines: OrderedDict[_K, deque[_W]] = OrderedDict()
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[_W]:
        return (waiter for line in self._lines.values() for waiter in line)

    def put(self, key: _K, waiter: _W) -> None:
        """Append a waiter to the line of a key."""
        self._lines.setdefault(key, deque()).append(waiter)
        self._size += 1

    def discard(self, key: _K, waiter: _W) -> None:
        """Remove a waiter that was not served; do nothing if it is not in the line."""
        line = self._lines.get(key)
        if line is not None and waiter in line:
            line.remove(waiter)
            self._size -= 1
            if not line:
                del self._lines[key]

    def take(self, serve: Callable[[_W], _R | None]) -> _R | None:
        """Serve the head of the first line whose head can be served, and move the line behind the others. None: none can be served.

        Args:
            serve: returns the result of serving a waiter, or None if it cannot be served now. All of a line are served alike.
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
