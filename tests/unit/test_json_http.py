"""Questions to our servers whose answers are none, or break off: an error that callers expect."""

from __future__ import annotations

import socket
import threading
import urllib.error

import pytest

from spangrad.http.json_http import ask, refusal


def answered_once(answer: bytes) -> str:
    """The URL of a server that sends these bytes to whoever asks first, and ends."""
    listening = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        with listening, listening.accept()[0] as connection:
            connection.recv(65536)
            connection.sendall(answer)

    threading.Thread(target=serve, daemon=True).start()
    return f"http://127.0.0.1:{listening.getsockname()[1]}"


@pytest.mark.parametrize("answer", [b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n{", b"SSH-2.0-OpenSSH_9.6\r\n", b""])
def test_an_answer_that_is_none_is_nobody_answering(answer: bytes) -> None:
    with pytest.raises(OSError, match=r"IncompleteRead|BadStatusLine|closed connection"):
        ask(answered_once(answer), None, "GET", "/", None, 10)


def test_a_refusal_that_breaks_off_is_told_by_its_status() -> None:
    with pytest.raises(urllib.error.HTTPError) as caught:
        ask(answered_once(b"HTTP/1.1 503 Full House\r\nContent-Length: 99\r\n\r\n{"), None, "GET", "/", None, 10)
    assert refusal(caught.value) == "Full House"


def test_an_answer_is_read_as_json() -> None:
    assert ask(answered_once(b'HTTP/1.1 200 OK\r\nContent-Length: 7\r\n\r\n{"a":1}'), None, "POST", "/", {"b": 2}, 10) == {"a": 1}
