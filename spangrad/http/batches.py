"""Batches: requests for single items that share one request to a service.

In: items, by callers that run concurrently. Out: to each its own value. Invariant: one request is on its way at a time, and holds all items
that came before it; a caller that is cancelled takes nothing from the others; a failure of a request is that of each of its items.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar

from spangrad.errors import SpangradError

_T = TypeVar("_T")
_V = TypeVar("_V")


class Batches(Generic[_T, _V]):
    """Items of concurrent callers, sent together."""

    def __init__(self, send: Callable[[Sequence[_T]], Awaitable[Sequence[_V]]]) -> None:
        """Keep `send`, which returns a value for each item, in order."""
        self._send = send
        self._waiting: list[tuple[_T, asyncio.Future[_V]]] = []
        self._task: asyncio.Task[None] | None = None

    async def ask(self, item: _T) -> _V:
        """Return the value of an item.

        Raises:
            Exception: the failure of the request that held it.
        """
        value: asyncio.Future[_V] = asyncio.get_running_loop().create_future()
        self._waiting.append((item, value))
        if self._task is None:
            self._task = asyncio.create_task(self._run())
        return await value

    async def _run(self) -> None:
        try:
            while self._waiting:
                batch = [(item, value) for item, value in self._waiting if not value.done()]
                self._waiting = []
                if batch:
                    await self._answer(batch)
        finally:
            self._task = None

    async def _answer(self, batch: Sequence[tuple[_T, asyncio.Future[_V]]]) -> None:
        try:
            values = list(await self._send([item for item, _ in batch]))
            if len(values) != len(batch):
                raise SpangradError(f"{len(batch)} items got {len(values)} values. Is the service of the same release?")
        except Exception as error:
            for _, value in batch:
                if not value.done():
                    value.set_exception(error)
            return
        for (_, future), value in zip(batch, values, strict=True):
            if not future.done():
                future.set_result(value)
