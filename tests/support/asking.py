"""Raw requests to the store's SQL interface, for what the drivers hide: headers, cut answers, clients that leave.

In: settings of a running store and SQL. Out: replies. Invariant: every request has a connection of its own.
"""

from __future__ import annotations

import http.client
import socket
import time
import urllib.parse
from collections.abc import Callable
from dataclasses import dataclass
from email.message import Message

from spangrad.settings import StoreSettings


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer, and whether it came whole."""

    status: int
    headers: Message
    body: bytes
    whole: bool = True

    @property
    def code(self) -> int:
        """ClickHouse's code of the error; 0 for none."""
        return int(self.headers["X-ClickHouse-Exception-Code"] or 0)


def ask(
    store: StoreSettings,
    sql: str | bytes = "",
    *,
    method: str = "POST",
    path: str = "/",
    headers: dict[str, str] | None = None,
    **parameters: object,
) -> Reply:
    """Ask, and read all that comes."""
    connection = http.client.HTTPConnection("127.0.0.1", store.clickhouse_port, timeout=60)
    try:
        connection.request(method, f"{path}?{urllib.parse.urlencode(parameters)}", sql, headers or {})
        answer = connection.getresponse()
        try:
            return Reply(answer.status, answer.headers, answer.read())
        except http.client.IncompleteRead as cut:
            return Reply(answer.status, answer.headers, cut.partial, whole=False)
    finally:
        connection.close()


def begin(store: StoreSettings, sql: str, **parameters: object) -> socket.socket:
    """Send a question and read nothing."""
    connection = socket.create_connection(("127.0.0.1", store.clickhouse_port))
    path = f"/?{urllib.parse.urlencode(parameters)}"
    connection.sendall(f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(sql)}\r\n\r\n{sql}".encode())
    return connection


def until(holds: Callable[[], bool], seconds: float = 20) -> None:
    """Wait for something to hold."""
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def form(**parts: tuple[str | None, bytes]) -> tuple[bytes, dict[str, str]]:
    """Body and headers of a form: by name, a file's name (None for a field) and the content."""
    lines: list[bytes] = []
    for name, (file, content) in parts.items():
        named = f'; filename="{file}"' if file is not None else ""
        lines.append(f'--edge\r\nContent-Disposition: form-data; name="{name}"{named}\r\n\r\n'.encode() + content + b"\r\n")
    return b"".join(lines) + b"--edge--\r\n", {"Content-Type": "multipart/form-data; boundary=edge"}
