"""Items of concurrent callers share requests; each has its own value, failure or cancellation."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from spangrad.errors import SpangradError
from spangrad.http.batches import Batches


class Service:
    """A service that answers when it may."""

    def __init__(self) -> None:
        self.requests: list[list[int]] = []
        self.may_answer = asyncio.Event()
        self.may_answer.set()

    async def send(self, items: Sequence[int]) -> list[int]:
        self.requests.append(list(items))
        await self.may_answer.wait()
        if -1 in items:
            raise ConnectionError("away")
        return [item * 10 for item in items]


async def test_batches_items_that_come_during_a_request_share_the_next() -> None:
    service = Service()
    batches = Batches(service.send)
    service.may_answer.clear()
    first = asyncio.create_task(batches.ask(1))
    await asyncio.sleep(0.01)
    others = [asyncio.create_task(batches.ask(item)) for item in (2, 3)]
    await asyncio.sleep(0.01)
    service.may_answer.set()
    assert (await first, [await other for other in others], service.requests) == (10, [20, 30], [[1], [2, 3]])
    assert await batches.ask(4) == 40


async def test_batches_items_of_one_moment_share_the_first() -> None:
    service = Service()
    batches = Batches(service.send)
    assert await asyncio.gather(*(batches.ask(item) for item in range(3))) == [0, 10, 20]
    assert service.requests == [[0, 1, 2]]


async def test_batches_failure_is_that_of_its_own_items() -> None:
    service = Service()
    batches = Batches(service.send)
    failed = await asyncio.gather(batches.ask(-1), batches.ask(1), return_exceptions=True)
    assert [type(one) for one in failed] == [ConnectionError, ConnectionError]
    with pytest.raises(ConnectionError, match="away"):
        await batches.ask(-1)
    assert await batches.ask(2) == 20


async def test_batches_cancelled_caller_takes_nothing_from_others() -> None:
    service = Service()
    batches = Batches(service.send)
    service.may_answer.clear()
    first, second = asyncio.create_task(batches.ask(1)), asyncio.create_task(batches.ask(2))
    await asyncio.sleep(0.01)
    third, fourth = asyncio.create_task(batches.ask(3)), asyncio.create_task(batches.ask(4))
    await asyncio.sleep(0.01)
    first.cancel()
    third.cancel()
    service.may_answer.set()
    assert (await second, await fourth, service.requests) == (20, 40, [[1, 2], [4]])
    assert first.cancelled()
    assert third.cancelled()


async def test_batches_request_with_fewer_values_fails_its_items_and_no_later() -> None:
    async def send(items: Sequence[int]) -> list[int]:
        return [] if 1 in items else [item * 10 for item in items]

    batches = Batches(send)
    with pytest.raises(SpangradError, match="1 items got 0 values"):
        await asyncio.wait_for(batches.ask(1), 30)
    assert await batches.ask(2) == 20
