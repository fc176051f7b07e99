"""Requests to services, with and without an event loop: what is tried again, and how failures read."""

from __future__ import annotations

import asyncio
import json
import re
import socket
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from spangrad.errors import QueueError
from spangrad.http.async_http import AsyncClient
from spangrad.http.json_http import ask, status_of
from spangrad.http.server import HttpServer
from spangrad.http.service import RemoteService, RequestError, Retries, in_url, queue_service, without_userinfo
from tests.support.servers import raw_server

WHOLE = b'HTTP/1.1 200 OK\r\nContent-Length: 7\r\n\r\n{"a":1}'
HALF = b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n{"
BUSY = b"HTTP/1.1 503 Full House\r\nContent-Length: 99\r\n\r\n{"
DEEP = b'{"a":' + b"[" * 100_000
REFUSED = b'HTTP/1.1 404 Not Found\r\nContent-Length: 15\r\n\r\n{"error": "no"}'
Ask = Callable[[RemoteService], Any]


def blocking(service: RemoteService) -> Any:
    return ask(service, "POST", "/x", {"b": 2}, seconds=30)


def awaited(service: RemoteService) -> Any:
    async def send() -> Any:
        async with AsyncClient(service, seconds=30) as client:
            return await client.ask("POST", "/x", dict)

    return asyncio.run(send())


@pytest.fixture
def answers() -> list[bytes]:
    """Return the server's next answers, of which the last one is repeated."""
    return [WHOLE]


@pytest.fixture
def url(answers: list[bytes]) -> Iterator[str]:
    with raw_server(answers) as address:
        yield address


@pytest.mark.parametrize("client", [blocking, awaited])
@pytest.mark.parametrize("answer", [HALF, b"SSH-2.0-OpenSSH_9.6\r\n\r\n", b""])
def test_ask_incomplete_response_raises_no_answer(client: Ask, answer: bytes, answers: list[bytes], url: str) -> None:
    answers[:] = [answer]
    with pytest.raises(QueueError, match=rf"the queue at {url} does not answer \(.+\)\. Start it with `spangrad queue`") as caught:
        client(queue_service(url, None))
    assert caught.value.http_status is None


@pytest.mark.parametrize("client", [blocking, awaited])
def test_ask_response_nested_too_deep_raises_no_answer(client: Ask, answers: list[bytes], url: str) -> None:
    answers[:] = [b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(DEEP), DEEP)]
    with pytest.raises(QueueError, match=rf"the queue at {url} does not answer"):
        client(queue_service(url, None))


@pytest.mark.parametrize("client", [blocking, awaited])
@pytest.mark.parametrize("failure", [HALF, b"", BUSY, b"HTTP/1.1 502 Bad Gateway\r\nContent-Length: 0\r\n\r\n"])
def test_ask_transient_failure_is_retried(client: Ask, failure: bytes, answers: list[bytes], url: str) -> None:
    answers[:] = [failure, failure, WHOLE]
    assert client(queue_service(url, None, 20)) == {"a": 1}


@pytest.mark.parametrize("client", [blocking, awaited])
def test_ask_refusal_is_final_and_names_value_place_and_status(client: Ask, answers: list[bytes], url: str) -> None:
    answers[:] = [REFUSED, WHOLE]
    with pytest.raises(QueueError, match=rf"the queue at {url} refuses POST /x \(404\): no") as caught:
        client(queue_service(url, None, 20))
    assert caught.value.http_status == 404
    assert answers == [WHOLE]


def test_ask_refusal_with_broken_body_gives_http_reason(answers: list[bytes], url: str) -> None:
    answers[:] = [BUSY]
    with pytest.raises(QueueError, match=r"\(503\): Full House"):
        blocking(queue_service(url, None))


@pytest.mark.parametrize(
    ("body", "reason"),
    [({"error": "no"}, "no"), ({"error": {"message": "no"}}, "no"), ([], "[]"), ("", '""')],
)
def test_request_error_of_response_reads_message_of_each_form(body: object, reason: str) -> None:
    assert RequestError.of_response(400, json.dumps(body).encode(), None, "Bad Request").reason == reason
    assert RequestError.of_response(400, b" ", None, "Bad Request").reason == "Bad Request"


async def _hangs(url: str) -> Awaitable[bytes]:
    async with AsyncClient(queue_service(url, None)) as client:
        return await client.send("GET", "/", within_seconds=0.2)  # type: ignore[return-value]


def test_send_to_silent_server_ends_within_time_limit() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(RequestError, match="no response in time"):
        asyncio.run(_hangs(f"http://127.0.0.1:{silent.getsockname()[1]}"))


def test_service_token_is_sent_and_never_shown() -> None:
    service = queue_service("http://127.0.0.1:1", "secret")
    assert service.headers["Authorization"] == "Bearer secret"
    assert "secret" not in repr(service)


@pytest.mark.parametrize("send", [blocking, awaited])
def test_requests_with_a_line_break_in_their_token_are_refused_at_once(send: Ask, url: str) -> None:
    with pytest.raises(QueueError, match=r"^the token for the queue at http://.* has a line break") as caught:
        send(queue_service(url, "s3cret\n", 60.0))
    assert "s3cret" not in str(caught.value)


@pytest.mark.parametrize("send", [blocking, awaited])
@pytest.mark.parametrize("place", ["http://user:s3cret@127.0.0.1:9", "http://user:s3cret@127.0.0.1", "http://user:s3cret@[::1"])
def test_requests_to_a_url_with_a_password_do_not_show_it(send: Ask, place: str) -> None:
    with pytest.raises(QueueError, match=r"the queue at http://(127\.0\.0\.1|\[::1)[: ]") as caught:
        send(queue_service(place, "token"))
    assert "s3cret" not in str(caught.value)


@pytest.mark.parametrize("send", [blocking, awaited])
@pytest.mark.parametrize("place", ["http://127.0.0.1:port", "http://[::1"])
def test_requests_to_an_invalid_url_are_not_retried(send: Ask, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Retries, "pause", None)
    with pytest.raises(QueueError, match=r"^the queue at .* does not answer"):
        send(queue_service(place, None, 3600.0))


def test_send_that_the_library_refuses_is_not_retried() -> None:
    with pytest.raises(QueueError, match="AUTHORIZATION header"):
        awaited(queue_service("http://user:s3cret@127.0.0.1:9", "token", 3600.0))


def test_without_userinfo_leaves_everything_else() -> None:
    urls = {
        "http://u:p@host:1/a?b#c": "http://host:1/a?b#c",
        "u:p@host:1": "host:1",
        "http://host/a@b?c@d": "http://host/a@b?c@d",
        "http://@[::1": "http://[::1",
        "queue:9": "queue:9",
    }
    assert [without_userinfo(url) for url in urls] == list(urls.values())


def test_status_of_returns_the_status_or_none(answers: list[bytes], url: str) -> None:
    answers[:] = [REFUSED, WHOLE]
    assert [status_of(url), status_of(url)] == [404, 200]
    assert status_of(url.replace("//", "//user:password@")) == 200
    assert status_of("http://127.0.0.1:9") is None


def test_status_of_refusal_without_body_does_not_wait() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor() as threads:
        status = threads.submit(status_of, f"http://127.0.0.1:{server.getsockname()[1]}", seconds=30)
        connection, _ = server.accept()
        with connection:
            connection.recv(4096)
            connection.sendall(BUSY)
            assert status.result(10) == 503


@pytest.mark.parametrize("send", [blocking, awaited])
def test_requests_to_a_url_without_scheme_raise_the_services_error(send: Ask) -> None:
    with pytest.raises(QueueError, match="queue:9"):
        send(queue_service("queue:9", None))


def test_retries_pause_after_retry_after_0() -> None:
    retries = Retries(queue_service("http://127.0.0.1:9", None, 60.0), "GET", "/x")
    assert 0 < retries.pause(RequestError("busy", 503, 0.0)) <= 1
    assert retries.pause(RequestError("busy", 503, 7.0)) == 7


async def test_http_server_on_a_taken_port_leaves_no_task() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        server = HttpServer(web.Application(), "127.0.0.1", taken.getsockname()[1])
        with pytest.raises(OSError, match="address already in use"):
            await server.start()
    await asyncio.sleep(0)
    assert [task.get_name() for task in asyncio.all_tasks() if task is not asyncio.current_task()] == []


def test_in_url_puts_brackets_around_ipv6_addresses_alone() -> None:
    assert [in_url(host) for host in ("::1", "127.0.0.1", "gateway")] == ["[::1]", "127.0.0.1", "gateway"]
    # It has one home: no other file of the product writes brackets around a host.
    packages = ("spangrad", "collector", "commands", "gateway", "runner", "span_processors", "trainer", "transition_builder", "prompts")
    files = [file for package in packages for file in (Path(__file__).parents[2] / package).rglob("*.py")]
    assert [file.name for file in files if re.search(r"\[\{[^}]*host[^}]*\}\]", file.read_text())] == ["service.py"]
