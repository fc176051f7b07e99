"""A server that answers as the gateway's administration does, and keeps what it is asked."""

from __future__ import annotations

import json
from collections.abc import Generator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread


class AdminGateway:
    """Publications that were asked for (`tests/unit/test_gateway_admin_api.py` has the real server)."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, dict[str, object]]] = []
        asked = self.asked

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                asked.append((self.path, json.loads(self.rfile.read(int(self.headers["Content-Length"])))))
                self.send_response(200)
                self.end_headers()
                self.wfile.write(b'{"seconds": 0.25}')

            def log_message(self, format: str, *args: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"

    @classmethod
    @contextmanager
    def running(cls) -> Generator[AdminGateway]:
        """Serve for as long as the block."""
        gateway = cls()
        Thread(target=gateway.server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        try:
            yield gateway
        finally:
            gateway.server.shutdown()
