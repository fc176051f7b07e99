"""The agents of the gateway's benchmark, in a process of their own: requests out, answers read whole and timed.

In: the seed; on standard input a JSON line for each part of the load, an `Order`. Out: JSON lines on standard output: {"ready"}, then for
each order its `Part`s by address. Invariant: a connection has one request at a time; the addresses of an order take turns on it, so that
what is compared is measured under the same conditions.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import re
import sys
import time
from collections.abc import Iterator
from itertools import count
from typing import cast
from urllib.parse import urlsplit

import msgspec
import uvloop

from benchmarks.gateway_bodies import Bodies

TIMEOUT_SECONDS = 120
_ID = re.compile(rb'"id": ?"(chatcmpl-[^"]+)"')
_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)


class Order(msgspec.Struct):
    """Requests to send."""

    urls: list[str]
    stream: bool
    connections: int
    count: int
    """Number of requests to all addresses together."""


class Part(msgspec.Struct):
    """Answers of one address."""

    seconds: float = 0.0
    """Duration of the whole order, in seconds."""
    milliseconds: list[float] = []
    """Milliseconds from the first byte sent to the last byte read, one value a request."""
    first_milliseconds: list[float] = []
    """Milliseconds from the first byte sent to the first byte of the body, one value a request."""
    ids: list[str] = []
    """Response ids of the answers."""
    answers: list[str] = []
    """Different answers, without their ids and headers: only one if the route adds nothing of its own."""
    refused: list[str] = []
    """Descriptions of failed requests."""


class _Exchange(asyncio.Protocol):
    """A connection; `ask` gives one answer."""

    def __init__(self) -> None:
        self._read = bytearray()
        self._body = 0
        self._length: int | None = None
        self._waiting: asyncio.Future[None] | None = None
        self.first_byte = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self.transport = cast(asyncio.Transport, transport)  # uvloop's are no subclass

    def data_received(self, data: bytes) -> None:
        """Append the data, and check whether the answer is complete."""
        self._read += data
        if not self._body:
            end = self._read.find(b"\r\n\r\n")
            if end < 0:
                return
            self._body = end + 4
            length = _LENGTH.search(self._read, 0, end)
            self._length = int(length[1]) if length else None
        if not self.first_byte and len(self._read) > self._body:
            self.first_byte = time.perf_counter()
        done = self._read.endswith(b"\r\n0\r\n\r\n") if self._length is None else len(self._read) >= self._body + self._length
        if done and self._waiting and not self._waiting.done():
            self._waiting.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        """An answer that is not whole is an error."""
        if self._waiting and not self._waiting.done():
            self._waiting.set_exception(exc or ConnectionResetError("closed before the answer was whole"))

    async def ask(self, request: bytes) -> tuple[bytes, bytes]:
        """Head and body of the answer."""
        self._read.clear()
        self._body, self._length, self.first_byte = 0, None, 0.0
        self._waiting = asyncio.get_running_loop().create_future()
        self.transport.write(request)
        await asyncio.wait_for(self._waiting, TIMEOUT_SECONDS)
        head, body = bytes(self._read[: self._body]), bytes(self._read[self._body :])
        return head, body if self._length is not None else b"".join(_chunks(body))


class Load:
    """The connections of one order."""

    def __init__(self, order: Order, bodies: Bodies) -> None:
        self._order = order
        self._numbers = count()
        self._requests = [_request(url, bodies.request(stream=order.stream)) for url in order.urls]
        self._addresses = [(parts.hostname or "127.0.0.1", parts.port or 80) for parts in map(urlsplit, order.urls)]
        self._parts = [Part() for _ in order.urls]
        self._seen: list[set[str]] = [set() for _ in order.urls]

    async def run(self) -> dict[str, Part]:
        """Ask everything."""
        began = time.perf_counter()
        await asyncio.gather(*(self._work() for _ in range(min(self._order.connections, self._order.count))))
        for part in self._parts:
            part.seconds = time.perf_counter() - began
        return dict(zip(self._order.urls, self._parts, strict=True))

    async def _work(self) -> None:
        open_: dict[int, _Exchange] = {}
        try:
            while (number := next(self._numbers)) < self._order.count:
                which = number % len(self._order.urls)
                try:
                    if which not in open_ or open_[which].transport.is_closing():
                        _, open_[which] = await asyncio.get_running_loop().create_connection(_Exchange, *self._addresses[which])
                    await self._ask(which, open_[which])
                except (OSError, TimeoutError) as error:
                    self._parts[which].refused.append(f"{type(error).__name__}: {error}")
                    if which in open_:
                        open_.pop(which).transport.abort()
        finally:
            for exchange in open_.values():
                exchange.transport.abort()

    async def _ask(self, which: int, exchange: _Exchange) -> None:
        part = self._parts[which]
        began = time.perf_counter()
        head, body = await exchange.ask(self._requests[which])
        ended = time.perf_counter()
        status = head.split(b" ", 2)[1]
        own_id = _ID.search(body)
        if status != b"200" or own_id is None:
            part.refused.append(f"HTTP {status.decode()}: {body[:200]!r}")
            return
        part.milliseconds.append(round((ended - began) * 1e3, 3))
        part.first_milliseconds.append(round((exchange.first_byte - began) * 1e3, 3))
        part.ids.append(own_id[1].decode())
        answer = body.replace(own_id[1], b"ID")
        digest = hashlib.sha256(answer).hexdigest()
        if digest not in self._seen[which]:
            self._seen[which].add(digest)
            if len(part.answers) < 2:  # enough to show a difference
                part.answers.append(answer.decode())


def _request(url: str, body: bytes) -> bytes:
    parts = urlsplit(url)
    head = f"POST {parts.path} HTTP/1.1\r\nHost: {parts.netloc}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
    return head.encode() + b"Authorization: Bearer none\r\nAccept: */*\r\n\r\n" + body


def _chunks(body: bytes) -> Iterator[bytes]:
    """The parts of a body that came in chunks."""
    at = 0
    while True:
        end = body.index(b"\r\n", at)
        size = int(body[at:end], 16)
        if not size:
            return
        yield body[end + 2 : end + 2 + size]
        at = end + 4 + size


def main() -> None:
    """Ask what standard input orders."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    bodies = Bodies(parser.parse_args().seed)
    # With PYTHONUNBUFFERED, Python's own standard output may write a part of a long line only.
    with open(sys.stdout.fileno(), "wb", closefd=False) as out:
        out.write(b'{"ready": true}\n')
        out.flush()
        for line in sys.stdin:
            parts = uvloop.run(Load(msgspec.json.decode(line, type=Order), bodies).run())
            out.write(msgspec.json.encode(parts) + b"\n")
            out.flush()


if __name__ == "__main__":
    main()
