"""The engine of the gateway's benchmark: answers that are ready, as fast as bytes can be written, in a process of its own.

In: chat requests, and what a gateway asks before it admits an engine. Out: `Bodies`, with a new id each, without what was not asked for;
streams a chunk at a time, all of them at each step, as an engine does that samples a token for every sequence at a step. Invariant: one
answer a request, in the order of the requests of a connection; a stream's chunks are as many writes, never joined by us.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
from collections.abc import Iterator
from itertools import count
from typing import cast

import uvloop

from benchmarks.gateway_bodies import NO_ID, POLICY, TOKENIZER_HASH, VERSION, Bodies, answer_id

CHAT_PATH = b"/v1/chat/completions"
_NO_ID = NO_ID.encode()
_SUMS = {"dtype": "float32", "words": 1, "plain": 0, "weighted": 0}
_ASKS_LOGPROBS = re.compile(rb'"logprobs": ?(true|1)')
_ASKS_IDS = re.compile(rb'"return_token_ids": ?true')
_ASKS_STREAM = re.compile(rb'"stream": ?true')
_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_CONTROL = {
    b"/spangrad/info": {"policy": POLICY, "version": VERSION, "tokenizer_hash": TOKENIZER_HASH, "warm": True},
    b"/is_paused": {"is_paused": False},
    b"/v1/models": {"object": "list", "data": [{"id": POLICY, "object": "model", "created": 0, "owned_by": "benchmark"}]},
    b"/spangrad/checksum": {"replicas": [[{"shards": [["w", [0, [[1, 1]]], _SUMS]]}]]},
}


class Answers:
    """All that can be asked for, ready to be written."""

    def __init__(self, bodies: Bodies) -> None:
        kinds = [(ids, logprobs) for ids in (False, True) for logprobs in (False, True)]
        self.whole = {(ids, logprobs): _whole(bodies.whole(ids=ids, logprobs=logprobs)) for ids, logprobs in kinds}
        self.streams = {
            (ids, logprobs): [b"%x\r\n%b\r\n" % (len(event), event) for event in bodies.events(ids=ids, logprobs=logprobs)]
            for ids, logprobs in kinds
        }
        self.control = {path: _whole(json.dumps(answer).encode()) for path, answer in _CONTROL.items()}


class Steps:
    """The engine's clock: at each step every stream gets its next chunk."""

    def __init__(self, step_seconds: float) -> None:
        self._seconds = step_seconds
        self._streams: dict[_Connection, Iterator[bytes]] = {}

    def begin(self, connection: _Connection, chunks: Iterator[bytes]) -> None:
        """Let a stream have its first chunk now, and the others step by step."""
        connection.write(next(chunks))
        if not self._streams:
            asyncio.get_running_loop().call_later(self._seconds, self._step)
        self._streams[connection] = chunks

    def leave(self, connection: _Connection) -> None:
        """The client is gone."""
        self._streams.pop(connection, None)

    def _step(self) -> None:
        for connection, chunks in list(self._streams.items()):
            chunk = next(chunks, None)
            if chunk is None:
                del self._streams[connection]
                connection.go_on()
            else:
                connection.write(chunk)
        if self._streams:
            asyncio.get_running_loop().call_later(self._seconds, self._step)


class _Connection(asyncio.Protocol):
    """One client's."""

    numbers = count(1)

    def __init__(self, answers: Answers, steps: Steps) -> None:
        self._answers = answers
        self._steps = steps
        self._read = b""
        self._streaming = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin."""
        self.write = cast(asyncio.Transport, transport).write  # uvloop's are no subclass

    def connection_lost(self, exc: Exception | None) -> None:
        """End."""
        self._steps.leave(self)

    def data_received(self, data: bytes) -> None:
        """Answer what is whole."""
        self._read += data
        self._answer()

    def go_on(self) -> None:
        """A stream has ended."""
        self._streaming = False
        self._answer()

    def _answer(self) -> None:
        while not self._streaming and (end := self._read.find(b"\r\n\r\n")) >= 0:
            length = _LENGTH.search(self._read, 0, end)
            whole = end + 4 + (int(length[1]) if length else 0)
            if len(self._read) < whole:
                return
            path, body = self._read.split(b" ", 2)[1], self._read[end + 4 : whole]
            self._read = self._read[whole:]
            if path != CHAT_PATH:
                self.write(self._answers.control.get(path) or _whole(b"{}"))
                continue
            kind = (bool(_ASKS_IDS.search(body)), bool(_ASKS_LOGPROBS.search(body)))
            own_id = answer_id(next(self.numbers)).encode()
            if _ASKS_STREAM.search(body):
                self._streaming = True
                self.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n")
                chunks = (chunk.replace(_NO_ID, own_id, 1) for chunk in (*self._answers.streams[kind], b"0\r\n\r\n"))
                self._steps.begin(self, chunks)
            else:
                self.write(self._answers.whole[kind].replace(_NO_ID, own_id, 1))


def _whole(body: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)


async def serve(port: int, bodies: Bodies, step_seconds: float) -> None:
    """Answer until the process is ended."""
    answers, steps = Answers(bodies), Steps(step_seconds)
    server = await asyncio.get_running_loop().create_server(lambda: _Connection(answers, steps), "127.0.0.1", port, backlog=1024)
    await server.serve_forever()


def main() -> None:
    """Serve on a port."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--step-seconds", type=float, required=True)
    arguments = parser.parse_args()
    uvloop.run(serve(arguments.port, Bodies(arguments.seed), arguments.step_seconds))


if __name__ == "__main__":
    main()
