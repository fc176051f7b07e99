"""A server before an engine that makes happen what agents meet in real life: a call that must be tried again, a stream that takes its time.

In: requests with the text `again` or `slow` of its constructor in their bodies. Out: 503 to the first of the former; the answers to the
latter line by line; everybody else is sent on to the engine. Invariant: it changes no byte of an answer.
"""

from __future__ import annotations

import threading
import time
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Self

LINE_SECONDS = 0.02


class EngineFront:
    """A context manager; serves on a free port of loopback in threads of its own."""

    def __init__(self, engine: str, *, again: str, slow: str) -> None:
        """Stand before the engine at a URL."""
        front = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("content-length", 0)))
                if again.encode() in body and not front.refused:
                    front.refused = True
                    self._say(503, {"content-type": "application/json"}, b'{"error": {"message": "come again"}}')
                elif slow.encode() in body:
                    self._dawdle(body)
                else:
                    self._say(307, {"location": engine + self.path}, b"")

            def _say(self, status: int, headers: dict[str, str], body: bytes) -> None:
                self.send_response(status)
                for name, value in {**headers, "content-length": str(len(body))}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(body)

            def _dawdle(self, body: bytes) -> None:
                self.close_connection = True
                request = urllib.request.Request(engine + self.path, body, {"content-type": "application/json"})
                with urllib.request.urlopen(request, timeout=60) as answer:
                    self.send_response(answer.status)
                    self.send_header("content-type", answer.headers["content-type"])
                    self.send_header("connection", "close")
                    self.end_headers()
                    try:
                        for line in answer:
                            self.wfile.write(line)
                            self.wfile.flush()
                            time.sleep(LINE_SECONDS)
                    except OSError:
                        pass  # the reader has left, which is what this is for

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self.refused = False
        """Whether somebody was told to come again; set to False to do so once more."""

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._server.shutdown()
        self._server.server_close()
