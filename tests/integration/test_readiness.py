"""Commands that wait for services: they name the one that is missing, and go on when it answers."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from spangrad.errors import SpangradError
from spangrad.http.readiness import NeededService, await_services, need_of_store, needs_of_rollouts
from spangrad.processes import free_ports
from spangrad.settings.sources import load_settings


@contextmanager
def answering(*statuses: int) -> Iterator[str]:
    """Serve on a port of this machine; the last status is repeated."""
    left = list(statuses)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(left.pop(0) if len(left) > 1 else left[0])
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def test_await_services_names_missing_service_and_waits(caplog: pytest.LogCaptureFixture) -> None:
    with answering(503, 200) as url, caplog.at_level(logging.WARNING):
        await_services([NeededService("the gateway's engine", url, "gateway", "gateway.url")], 30)
    (warning,) = [record.getMessage() for record in caplog.records]
    assert f"waiting for the gateway's engine, which does not answer at {url}. Start it with `spangrad gateway`" in warning


@pytest.mark.parametrize("status", [401, 404, 500])
def test_await_services_error_answer_ends_the_wait(status: int, caplog: pytest.LogCaptureFixture) -> None:
    with answering(status) as url:
        await_services([NeededService("the queue", url, "queue", "queue.url")], 30)
    assert caplog.records == []


def test_await_services_timeout_raises_with_remedy() -> None:
    (port,) = free_ports(1)
    settings = load_settings({"store.url": f"http://127.0.0.1:{port}"}, env={})
    with pytest.raises(
        SpangradError, match=rf"the span store at http://127.0.0.1:{port}/ping does not answer after 0.1 s.*`spangrad up`.*store.url"
    ):
        await_services(need_of_store(settings), 0.1)


def test_needs_of_rollouts_follow_settings() -> None:
    def needs(**values: object) -> list[str]:
        settings = load_settings({key.replace("__", "."): value for key, value in values.items()}, env={})
        return [service.name for service in needs_of_rollouts(settings)]

    assert needs() == ["the span store", "the gateway's engine"]
    assert needs(runner__gateway=False, queue__url="http://127.0.0.1:8190") == ["the span store", "the queue"]
