"""Blocking WebSocket client, with the standard library alone.

In: a ws or http URL, texts. Out: texts. Invariant: a wait has a limit that pings do not extend, or ends when a server is silent;
pings are answered while a text is awaited.

Source: RFC 6455.
"""

from __future__ import annotations

import base64
import hashlib
import os
import socket
import ssl
import struct
import time
from collections.abc import Mapping
from urllib.parse import urlsplit

_GUID = "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
_TEXT, _BINARY, _CLOSE, _PING, _PONG = 1, 2, 8, 9, 10
_HEAD_BYTES = 2**16
_MESSAGE_BYTES = 256 * 2**20
_SILENT_SECONDS = 600.0
"""Longest silence of a server, without so much as a ping, in seconds."""


class WebSocketError(OSError):
    """The connection was refused, or broke off."""


class WebSocket:
    """A connection."""

    def __init__(self, url: str, headers: Mapping[str, str], seconds: float) -> None:
        """Connect.

        Args:
            url: address; http and https count as ws and wss.
            headers: further headers of the first request.
            seconds: time limit of the connection, of the first request, and of each text that is sent or received.

        Raises:
            OSError: there is no connection, or the server refuses.
        """
        self.wait_at_most(seconds)
        parts = urlsplit(url)
        secure = parts.scheme in ("https", "wss")
        port = parts.port or (443 if secure else 80)
        connection = socket.create_connection((parts.hostname or "", port), seconds)
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if secure:
                connection = ssl.create_default_context().wrap_socket(connection, server_hostname=parts.hostname)
            self._connection = connection
            self._buffer = bytearray()
            self._begin_wait()
            path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
            self.headers = self._shake_hands(f"{parts.hostname}:{port}", path, headers)
            """Headers of the server's answer, by their names in lower case."""
        except BaseException:
            connection.close()
            raise

    def wait_at_most(self, seconds: float) -> None:
        """Set the time limit of each later text, in seconds. Infinite: it takes what it takes, as long as the server sends pings."""
        self._seconds = seconds

    def send(self, text: str) -> None:
        """Send a text.

        Raises:
            OSError: the connection is lost.
        """
        self._begin_wait()
        self._send(_TEXT, text.encode())

    def receive(self) -> str | None:
        """Return the next text. None: the server has closed the connection.

        Raises:
            OSError: the connection is lost, or the text did not come in time.
        """
        self._begin_wait()
        message = bytearray()
        while True:
            final, kind, payload = self._frame(len(message))
            if kind == _PING:
                self._send(_PONG, payload)
            elif kind == _CLOSE:
                self._send(_CLOSE, payload[:2])
                return None
            elif kind != _PONG:
                message += payload
                if final:
                    return message.decode()

    def close(self) -> None:
        """Close the connection."""
        self._begin_wait()
        try:
            self._send(_CLOSE, struct.pack("!H", 1000))
        except OSError:
            pass  # the server has left
        self._connection.close()

    def _shake_hands(self, host: str, path: str, headers: Mapping[str, str]) -> dict[str, str]:
        key = base64.b64encode(os.urandom(16)).decode()
        lines = [
            f"GET {path} HTTP/1.1",
            f"Host: {host}",
            "Upgrade: websocket",
            "Connection: Upgrade",
            f"Sec-WebSocket-Key: {key}",
            "Sec-WebSocket-Version: 13",
            *(f"{name}: {value}" for name, value in headers.items()),
        ]
        self._limit_wait()
        self._connection.sendall("\r\n".join([*lines, "", ""]).encode())
        while b"\r\n\r\n" not in self._buffer:
            if len(self._buffer) > _HEAD_BYTES:
                raise WebSocketError("the server sends no end of its headers")
            self._read()
        head, _, rest = bytes(self._buffer).partition(b"\r\n\r\n")
        self._buffer = bytearray(rest)
        status, *fields = head.decode("latin-1").split("\r\n")
        answer = {name.strip().lower(): value.strip() for name, _, value in (field.partition(":") for field in fields)}
        accepted = base64.b64encode(hashlib.sha1((key + _GUID).encode()).digest()).decode()
        if " 101 " not in f"{status} ":
            raise WebSocketError(f"the server refuses a WebSocket ({status.partition(' ')[2]})")
        if answer.get("sec-websocket-accept") != accepted:
            raise WebSocketError("the server's answer is no WebSocket's")
        return answer

    def _send(self, kind: int, payload: bytes) -> None:
        size, mask = len(payload), os.urandom(4)
        if size < 126:
            head = struct.pack("!BB", 0x80 | kind, 0x80 | size)
        elif size < 2**16:
            head = struct.pack("!BBH", 0x80 | kind, 0x80 | 126, size)
        else:
            head = struct.pack("!BBQ", 0x80 | kind, 0x80 | 127, size)
        repeated = (mask * (size // 4 + 1))[:size]
        masked = (int.from_bytes(payload, "big") ^ int.from_bytes(repeated, "big")).to_bytes(size, "big")
        self._limit_wait()
        self._connection.sendall(head + mask + masked)

    def _frame(self, message_size: int) -> tuple[bool, int, bytes]:
        """Return whether a frame is the last one of a message, of which so many bytes are here, its kind, and its payload."""
        first, second = self._take(2)
        size = second & 0x7F
        if size == 126:
            (size,) = struct.unpack("!H", self._take(2))
        elif size == 127:
            (size,) = struct.unpack("!Q", self._take(8))
        if message_size + size > _MESSAGE_BYTES:
            raise WebSocketError(f"the server sends a message of {message_size + size} bytes or more, over the limit of {_MESSAGE_BYTES}")
        return bool(first & 0x80), first & 0x0F, self._take(size)

    def _take(self, size: int) -> bytes:
        while len(self._buffer) < size:
            self._read()
        taken = bytes(self._buffer[:size])
        del self._buffer[:size]
        return taken

    def _begin_wait(self) -> None:
        self._end = time.monotonic() + self._seconds

    def _limit_wait(self) -> None:
        """Give the socket the time that is left, since its own limit begins anew with each frame."""
        left = self._end - time.monotonic()
        if left <= 0:
            raise TimeoutError(f"the server took more than {self._seconds:g} s")
        self._connection.settimeout(min(left, _SILENT_SECONDS))

    def _read(self) -> None:
        self._limit_wait()
        data = self._connection.recv(2**16)
        if not data:
            raise WebSocketError("the server has cut the connection")
        self._buffer += data
