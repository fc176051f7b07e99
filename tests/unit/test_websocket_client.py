"""The blocking WebSocket client, against a server that sends raw frames."""

from __future__ import annotations

import base64
import hashlib
import math
import re
import socket
import struct
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager

import pytest

from spangrad.http import websocket
from spangrad.http.websocket import WebSocket, WebSocketError

GUID = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
CONTINUED, TEXT, PING = 0, 1, 9


def frame(kind: int, payload: bytes, *, final: bool = True) -> bytes:
    return struct.pack("!BB", (0x80 if final else 0) | kind, len(payload)) + payload


@contextmanager
def frame_server(send: Callable[[socket.socket, threading.Event], None]) -> Generator[str]:
    """Yield the URL of a server that opens one WebSocket and calls `send` with its connection and the end of the test."""
    done = threading.Event()

    def serve() -> None:
        connection, _ = server.accept()
        with connection:
            key = re.search(rb"Sec-WebSocket-Key: (\S+)", connection.recv(65536))
            assert key is not None
            accepted = base64.b64encode(hashlib.sha1(key[1] + GUID).digest())
            connection.sendall(b"HTTP/1.1 101 Switching Protocols\r\nSec-WebSocket-Accept: " + accepted + b"\r\n\r\n")
            try:
                send(connection, done)
            except OSError:
                pass  # the client has left

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"ws://127.0.0.1:{server.getsockname()[1]}"
        done.set()
        thread.join()


def test_receive_from_server_that_only_pings_times_out() -> None:
    def ping(connection: socket.socket, done: threading.Event) -> None:
        end = time.monotonic() + 30
        while not done.wait(0.05) and time.monotonic() < end:
            connection.sendall(frame(PING, b"x"))

    with frame_server(ping) as url:
        client = WebSocket(url, {}, 10)
        client.wait_at_most(0.5)
        began = time.monotonic()
        with pytest.raises(TimeoutError):
            client.receive()
        assert 0.4 < time.monotonic() - began < 8, "not the 10 s of the first request"
        client.close()


@pytest.mark.parametrize(("pings", "silent_seconds"), [(True, 2.0), (False, 0.5)])
def test_receive_without_limit_waits_as_long_as_the_server_pings(
    pings: bool, silent_seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(websocket, "_SILENT_SECONDS", silent_seconds)

    def send(connection: socket.socket, done: threading.Event) -> None:
        end = time.monotonic() + 2.4
        while time.monotonic() < end and not done.wait(0.05):
            if pings:
                connection.sendall(frame(PING, b"x"))
        connection.sendall(frame(TEXT, b"late"))
        done.wait()

    with frame_server(send) as url:
        client = WebSocket(url, {}, 10)
        client.wait_at_most(math.inf)
        if pings:
            assert client.receive() == "late"
        else:
            with pytest.raises(TimeoutError):
                client.receive()
        client.close()


def test_receive_message_in_fragments_returns_their_text() -> None:
    def send(connection: socket.socket, done: threading.Event) -> None:
        parts = frame(TEXT, b"a", final=False), frame(PING, b""), frame(CONTINUED, b"b", final=False), frame(CONTINUED, b"c")
        connection.sendall(b"".join(parts))
        done.wait()

    with frame_server(send) as url:
        client = WebSocket(url, {}, 10)
        assert client.receive() == "abc"
        client.close()


def test_receive_fragments_over_size_limit_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(websocket, "_MESSAGE_BYTES", 250)

    def send(connection: socket.socket, done: threading.Event) -> None:
        connection.sendall(frame(TEXT, b"a" * 100, final=False) + frame(CONTINUED, b"b" * 100, final=False) * 2)
        done.wait()

    with frame_server(send) as url:
        client = WebSocket(url, {}, 10)
        with pytest.raises(WebSocketError, match="a message of 300 bytes or more, over the limit of 250"):
            client.receive()
        client.close()
