"""HTTP server of a trainer's process for publications: JSON or words on requests that bear a token, and nothing else.

In: POST requests. Out: what a function returns for their path and body. Invariant: no body is read before the token was compared and the
length is known to be allowed.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from spangrad.errors import SpangradError
from spangrad.http.service import in_url
from spangrad.http.tokens import credential

logger = logging.getLogger(__name__)

_REQUEST_BYTES = 8 * 2**20
"""Largest body of a request, in bytes."""
_SILENT_SECONDS = 60.0
"""Time after which a connection on which nothing moves is closed, in seconds."""


@dataclass(frozen=True, slots=True)
class Binary:
    """Answer of bytes."""

    size: int
    chunks: Iterable[Any]
    """Buffers, `size` bytes together."""
    headers: Mapping[str, str] = field(default_factory=dict[str, str])


Answer = Callable[[str, Mapping[str, Any]], "dict[str, Any] | Binary"]
"""Function of a path and a body. SpangradError: the request cannot be met; ValueError, KeyError or TypeError: it is no request."""


class TokenServer:
    """HTTP server of POST requests, with a thread for each connection."""

    def __init__(self, host: str, port: int, allows: Callable[[str, str | None], bool], answer: Answer) -> None:
        """Listen at a port, or with 0 at any free one; `allows` returns whether a path is open to a request with a token.

        Raises:
            OSError: this process cannot listen there.
        """
        self._server = ThreadingHTTPServer((host, port), _handler(allows, answer))
        self._server.daemon_threads = True
        address, port = self._server.server_address[:2]
        self.url = f"http://{in_url(str(address))}:{port}"
        threading.Thread(target=self._server.serve_forever, args=(0.05,), name="sender of weights", daemon=True).start()

    def close(self) -> None:
        """Stop the server."""
        self._server.shutdown()
        self._server.server_close()


def _handler(allows: Callable[[str, str | None], bool], answer: Answer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        timeout = _SILENT_SECONDS
        # A head and its words are two writes, the second of which would wait for the client's delayed acknowledgement.
        disable_nagle_algorithm = True

        def do_POST(self) -> None:
            if not allows(self.path, credential(self.headers.get("authorization", ""))):
                self._refuse(401, b"another token is needed.")
                return
            length = self.headers.get("content-length", "")
            if not length.isascii() or not length.isdigit():
                self._refuse(411, b"a request states its length.")
                return
            if int(length) > _REQUEST_BYTES:
                self._refuse(413, f"a request may have {_REQUEST_BYTES} bytes.".encode())
                return
            try:
                response = answer(self.path, json.loads(self.rfile.read(int(length))))
            except SpangradError as error:
                self._respond(409, str(error).encode())
            except (ValueError, KeyError, TypeError) as error:
                self._respond(400, f"that is no request of a publication: {error!r}".encode())
            else:
                self._respond(200, response if isinstance(response, Binary) else json.dumps(response).encode(), "application/json")

        def _refuse(self, status: int, body: bytes) -> None:
            """Respond without reading the request's body, and close the connection, on which it would be taken for the next request."""
            self.close_connection = True
            self._respond(status, body)

        def _respond(self, status: int, body: bytes | Binary, kind: str = "text/plain") -> None:
            response = body if isinstance(body, Binary) else Binary(len(body), [body], {"content-type": kind})
            self.send_response(status)
            for name, value in {"content-type": "application/octet-stream", **response.headers}.items():
                self.send_header(name, value)
            self.send_header("content-length", str(response.size))
            if self.close_connection:
                self.send_header("connection", "close")
            self.end_headers()
            for chunk in response.chunks:
                self.wfile.write(chunk)

        def log_message(self, format: str, *args: object) -> None:
            logger.debug("sender: " + format, *args)

    return Handler
