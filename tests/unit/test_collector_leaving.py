"""Clients of ClickHouse's interface that wait, and leave before it is their turn: what they sent goes with them."""

from __future__ import annotations

import asyncio
import gc
import os
import sys
import threading
import weakref
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any, cast

import aiohttp
import pytest
from aiohttp import web

from collector.arrivals import ArrivalBoard
from collector.auth import TokenRole
from collector.database import EmbeddedDatabase, EngineRefusedError, Kind, QueryAnswer
from collector.sql import body as bodies
from collector.sql.body import Unpacker, read_body
from collector.sql.readers import ReaderLimits
from collector.sql.statements import WORKERS, QueryRequest, RunningStatement, StatementRunner
from collector.write.ingest import Budget, Charge
from collector.write.write_buffer import WriteBuffer
from tests.support.processes import open_files


class BusyEngine:
    """An engine whose every question waits for a gate."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.name = "handle"

    def handle(self) -> BusyEngine:
        return self

    def query(self, sql: str, *_: object) -> QueryAnswer:
        if sql.startswith("SELECT 1"):
            self.gate.wait(60)
        return QueryAnswer(b"")

    def write(self, *_: object) -> QueryAnswer:
        return self.query("SELECT 1")

    def kind(self, _: str) -> Kind:
        return Kind(1, True)

    def settle(self) -> None:
        """Do nothing: no spans wait."""

    def close(self) -> None:
        """Nothing to close."""

    def kill_queries(self) -> None:
        """Nothing to kill."""


@pytest.fixture
def engine() -> Iterator[BusyEngine]:
    engine = BusyEngine()
    yield engine
    engine.gate.set()


async def until(holds: Callable[[], bool]) -> None:
    """Wait for something to hold."""
    async with asyncio.timeout(20):
        while not holds():  # noqa: ASYNC110 - there is no event
            await asyncio.sleep(0.01)


def run(body: bytes, number: int) -> RunningStatement:
    request = QueryRequest(parameters={}, headers={}, body=body, files={}, role=TokenRole.READER, safe=False, query_id=str(number))
    return RunningStatement(request, quick_seconds=0)


async def test_statement_of_disconnected_client_frees_body_and_files(engine: BusyEngine) -> None:
    runner = StatementRunner(cast(EmbeddedDatabase, engine), cast(WriteBuffer, engine), ArrivalBoard(), ReaderLimits(100, 60))
    statements = [run(b"SELECT 1", number) for number in range(WORKERS[TokenRole.READER])]
    for statement in statements:
        runner.start(statement)
    await until(lambda: all(statement.done.running() for statement in statements))
    body = b"SELECT 1 /* " + bytes(1000) + b" */"
    gc.collect()  # what earlier tests have left is not closed in between
    before = sys.getrefcount(body), open_files(os.getpid())

    left = [run(body, 100 + number) for number in range(10)]
    for statement in left:
        runner.start(statement)
        runner.abandon(statement)

    assert all(statement.done.cancelled() for statement in left)
    assert (sys.getrefcount(body), open_files(os.getpid())) == before
    engine.gate.set()
    await until(lambda: all(statement.done.done() for statement in statements))
    for statement in statements:
        runner.abandon(statement)
    # Those whose turn came after they were gone did nothing, and closed nothing a second time.
    last = run(b"SELECT 1", 1000)
    runner.start(last)
    assert await last.result() == QueryAnswer(b"")
    runner.abandon(last)
    assert open_files(os.getpid()) == before[1] - 2 * len(statements)
    runner.close()


async def test_statement_of_disconnected_client_is_killed_again_after_refusal(engine: BusyEngine) -> None:
    refusals = ["Code: 241. DB::Exception: memory is short. (MEMORY_LIMIT_EXCEEDED)"]

    def kill(_: str) -> None:
        if refusals:
            raise EngineRefusedError(refusals.pop(), 241)
        engine.gate.set()

    engine.kill = kill  # type: ignore[attr-defined]
    runner = StatementRunner(cast(EmbeddedDatabase, engine), cast(WriteBuffer, engine), ArrivalBoard(), ReaderLimits(100, 60))
    statement = run(b"SELECT 1", 1)
    runner.start(statement)
    await until(lambda: statement.handle is not None)
    runner.abandon(statement)
    await until(statement.done.done)
    assert not refusals
    runner.close()


async def test_handle_that_is_closed_after_insert_is_freed(engine: BusyEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[weakref.ref[BusyEngine]] = []

    def handle() -> BusyEngine:
        new = BusyEngine()
        opened.append(weakref.ref(new))
        return new

    monkeypatch.setattr(engine, "handle", handle)
    runner = StatementRunner(cast(EmbeddedDatabase, engine), cast(WriteBuffer, engine), ArrivalBoard(), ReaderLimits(100, 60))
    # By its name the session might be left with a table of its own: its handle is closed after the statement.
    insert = b"INSERT INTO spangrad_internal.temporary_rows (a) FORMAT CSV\n1\n"
    for number in range(3):
        statement = RunningStatement(QueryRequest({}, {}, insert, {}, TokenRole.WRITER, safe=False, query_id=str(number)), quick_seconds=0)
        runner.start(statement)
        await statement.result()
        runner.abandon(statement)
    runner.close()
    gc.collect()

    assert [freed() for freed in opened] == [None] * 4


@asynccontextmanager
async def reading(unpacker: Unpacker, budget: Budget) -> AsyncGenerator[str]:
    """A server that reads bodies and says how long they are; gives its URL."""

    async def length(request: web.Request) -> web.Response:
        with Charge(budget) as charge:
            return web.Response(text=str(len(await read_body(request, {}, charge, unpacker))))

    application = web.Application()
    application.router.add_post("/", length)
    server = web.AppRunner(application, auto_decompress=False, handler_cancellation=True, shutdown_timeout=0.1)
    await server.setup()
    await web.TCPSite(server, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{server.addresses[0][1]}/"
    finally:
        await server.cleanup()


async def test_unpacker_slow_bodies_block_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    gate, begun = threading.Event(), threading.Semaphore(0)

    def slow(packed: bytes, *_: Any) -> bytes:
        begun.release()
        gate.wait(60)
        return packed

    monkeypatch.setattr(bodies, "decompress", slow)
    unpacker, budget = Unpacker("test"), Budget(2**30)
    async with reading(unpacker, budget) as url, aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as client:

        async def send() -> str:
            async with client.post(url, data=bytes(1000), headers={"Content-Encoding": "gzip"}) as answer:
                return await answer.text()

        requests = [asyncio.create_task(send()) for _ in range(100)]
        await until(lambda: budget.held == 100 * 1000)
        # Answers are packed on the event loop's own threads.
        assert await asyncio.wait_for(asyncio.to_thread(lambda: "an answer"), 20) == "an answer"

        for request in requests[:98]:
            request.cancel()
        await until(lambda: budget.held == 2 * 1000)
        gate.set()
        answers = await asyncio.gather(*requests, return_exceptions=True)
    assert [answer for answer in answers if isinstance(answer, str)] == ["1000"] * 2
    unpacker.close()
