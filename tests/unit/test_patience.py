"""Clients that do not get on with a request: let go, in words where they can be told."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from collector.encodings import TooLargeError, decompress
from spangrad.http import client_timeouts
from spangrad.http.client_timeouts import SilentConnections, TooSlowError, arriving

HEAD = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\n"


@pytest.fixture(autouse=True)
def _haste(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_timeouts, "_LOOK_SECONDS", 0.02)


@asynccontextmanager
async def served(body_seconds: float = 0.2) -> AsyncGenerator[int]:
    """A server that reads each body in `arriving()` and answers with it, or with why not; gives its port."""

    async def echo(request: web.Request) -> web.Response:
        body = b""
        try:
            async with arriving(body_seconds) as arrived:
                async for piece in request.content.iter_any():
                    body += piece
                    arrived(len(body))
        except TooSlowError as error:
            return web.Response(status=408, text=str(error))
        return web.Response(body=body)

    application = web.Application()
    application.router.add_post("/", echo)
    silent = SilentConnections(application, 0.2)
    runner = web.AppRunner(application, lingering_time=0, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    assert runner.server
    watcher = asyncio.create_task(silent.watch(runner.server))
    try:
        yield runner.addresses[0][1]
    finally:
        watcher.cancel()
        await runner.cleanup()


async def answer(port: int, *pieces: bytes, pause: float = 0.05) -> bytes:
    """All that the server says to pieces that come one after the other, until it ends the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        for piece in pieces:
            writer.write(piece)
            await asyncio.sleep(pause)
        return await asyncio.wait_for(reader.read(), 30)
    finally:
        writer.close()


@pytest.mark.parametrize("begun", [b"", b"POST /", HEAD[:-9]], ids=["nothing", "half a line", "half a head"])
async def test_silent_connections_without_whole_head_are_closed(begun: bytes) -> None:
    async with served() as port:
        assert await answer(port, begun) == b""


async def test_arriving_body_that_stalls_answers_408() -> None:
    async with served() as port:
        response = await answer(port, HEAD + b"\r\nab")
    assert response.startswith(b"HTTP/1.1 408 ")
    assert response.endswith(b"only 2 bytes of the body came in time; it may take 0.2 s, and a second more for each 65536 bytes")


async def test_arriving_body_in_pieces_is_awaited() -> None:
    async with served(30) as port:
        assert (await answer(port, HEAD + b"Connection: close\r\n\r\n", b"ab", b"cd")).endswith(b"\r\n\r\nabcd")


async def test_arriving_large_body_has_more_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_timeouts, "BODY_BYTES_A_SECOND", 0.1)
    async with served() as port:
        assert (await answer(port, HEAD + b"Connection: close\r\n\r\na", b"b", b"c", b"d", pause=0.15)).endswith(b"\r\n\r\nabcd")


async def test_silent_connections_keep_idle_connection_between_requests() -> None:
    async with served() as port:
        response = await answer(port, HEAD + b"\r\nabcd", HEAD + b"Connection: close\r\n\r\nefgh", pause=0.4)
    assert (response.count(b"200 OK"), response[-4:]) == (2, b"efgh")


async def test_silent_connections_client_leaving_within_its_body_logs_nothing(caplog: pytest.LogCaptureFixture) -> None:
    async with served(30) as port:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(HEAD + b"\r\nab")
        await asyncio.sleep(0.05)
        writer.transport.abort()
        await asyncio.sleep(0.05)
    assert not caplog.records


async def test_arriving_other_timeout_error_stays_unchanged() -> None:
    with pytest.raises(TimeoutError) as caught:
        async with arriving(0.2):
            raise TimeoutError("somebody else's")
    assert type(caught.value) is TimeoutError


@pytest.mark.parametrize("pack", ["gzip", "deflate", "zstd", "lz4"])
def test_decompress_stops_when_hold_raises(pack: str) -> None:
    from tests.support.otlp import packed

    body = packed(pack, bytes(64 * 2**20))
    seen: list[int] = []

    def hold(size: int) -> None:
        seen.append(size)
        if size > 4 * 2**20:
            raise TooLargeError("no room")

    with pytest.raises(TooLargeError, match="no room"):
        decompress(body, pack, 2**30, hold)
    assert seen == sorted(seen)
    assert seen[-1] <= 6 * 2**20


@pytest.mark.parametrize("pack", ["gzip", "deflate", "zstd", "lz4"])
def test_decompress_empty_streams_stops_when_hold_raises(pack: str) -> None:
    from tests.support.otlp import packed

    def hold(size: int) -> None:
        raise TooLargeError(f"no room for {size}")

    with pytest.raises(TooLargeError, match="no room for 0"):
        decompress(packed(pack, b"") * 1000, pack, 2**30, hold)
