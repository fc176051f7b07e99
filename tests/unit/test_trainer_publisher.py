"""The gateway's client, against a small HTTP server."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from pydantic import SecretStr

from spangrad.errors import GatewayError
from spangrad.processes import free_ports
from spangrad.settings import GatewaySettings
from spangrad.types import PolicyVersion
from trainer.publish.publisher import Publisher

VERSION = PolicyVersion("org/policy", 3, 2, "batch", "float32:0a", "/policies/v3")


class Gateway(HTTPServer):
    """Answers everything with `status` and `answer`, and remembers what was asked."""

    status = 200
    answer: object = None
    asked: list[tuple[str, str, object, str | None]]


class _Handler(BaseHTTPRequestHandler):
    server: Gateway

    def do_GET(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        body = json.loads(self.rfile.read(length)) if length else None
        self.server.asked.append((self.command, self.path, body, self.headers.get("Authorization")))
        data = self.server.answer if isinstance(self.server.answer, bytes) else json.dumps(self.server.answer).encode()
        self.send_response(self.server.status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    do_POST = do_GET  # noqa: N815

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def gateway() -> Iterator[Gateway]:
    with Gateway(("127.0.0.1", 0), _Handler) as server:
        server.asked = []
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        yield server
        server.shutdown()


def publisher(gateway: Gateway, token: str | None = None) -> Publisher:
    return Publisher(GatewaySettings(url=f"http://127.0.0.1:{gateway.server_port}/", token=SecretStr(token) if token else None))


def test_publisher_publish_sends_version_path_and_checksum(gateway: Gateway):
    gateway.answer = {"policy": "org/policy", "version": 3, "checksum": "float32:0a", "seconds": 0.125}
    assert publisher(gateway, token="secret").publish(VERSION) == 0.125
    body = {"version": 3, "path": "/policies/v3", "checksum": "float32:0a"}
    assert gateway.asked == [("POST", "/admin/policies/org%2Fpolicy/versions", body, "Bearer secret")]


def test_publisher_stages_are_those_of_slowest_engine(gateway: Gateway):
    stages = {"policy-0": {"pause": 0.25, "reload": 0.5}, "policy-1": {"pause": 0.125, "reload": 0.75}}
    gateway.answer = {"policy": "org/policy", "version": 3, "checksum": "float32:0a", "seconds": 1.0, "stages": stages}
    publishing = publisher(gateway)
    assert publishing.publish(VERSION) == 1
    assert publishing.stages == {"files": 0.125, "pause": 0.125, "reload": 0.75}
    gateway.answer = {"policy": "org/policy", "version": 3, "checksum": "float32:0a", "seconds": 0.0, "stages": {}}
    publishing.publish(VERSION)
    assert publishing.stages == {}, "it was served already"


def test_publisher_served_gives_version_of_gateway(gateway: Gateway):
    gateway.answer = {"policy": "org/policy", "version": 2, "tokenizer_hash": "t", "status": "serving"}
    assert publisher(gateway).served("org/policy") == 2
    assert gateway.asked == [("GET", "/admin/policies/org%2Fpolicy", None, None)]


@pytest.mark.parametrize(
    ("answer", "says"), [({"error": {"message": "checksum differs."}}, "checksum differs."), (b"Bad Gateway", "Bad Gateway"), ([], "[]")]
)
def test_publisher_refusal_raises_with_message_and_remedy(gateway: Gateway, answer: object, says: str):
    gateway.status, gateway.answer = 409, answer
    with pytest.raises(GatewayError) as caught:
        publisher(gateway).publish(VERSION)
    assert f"(409): {says}" in str(caught.value)
    assert "is published when `spangrad train` starts again" in str(caught.value)


def test_publisher_without_gateway_raises_with_remedy():
    url = f"http://127.0.0.1:{free_ports(1)[0]}"
    with pytest.raises(GatewayError, match=r"does not answer \(.*refused.*\)\. Start it with `spangrad gateway`"):
        Publisher(GatewaySettings(url=url)).served("policy")
