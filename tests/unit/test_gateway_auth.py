"""Access to the gateway: requests that a token allows, limits of their size and time, TLS, and secrets that reach no engine and no log."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import ssl
from datetime import UTC, datetime, timedelta
from functools import partial
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from gateway.proxy.auth import AccessControl, tls_context
from gateway.server import serve
from spangrad.errors import GatewayError, SettingsError, SpangradError
from spangrad.http.client_timeouts import SilentConnections
from spangrad.http.tokens import agent_token
from spangrad.settings import GatewaySettings
from spangrad.settings.sources import load_settings
from tests.support.fake_engine import FakeEngine
from tests.support.gateways import ASKED, Stage, staged

CLIENTS = [
    {"name": "evals", "token": "evals-key", "rollouts": "eval-*"},
    {"name": "judge", "token": "judge-key", "policies": ["judge"]},
    {"name": "anyone", "token": "any-key"},
    {"name": "trainer", "token": "trainer-key", "may_admin": True},
]
ANNOUNCED = {"rollout_id": "eval-1", "attempt": 0, "run_id": "run", "mode": "train"}


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


async def ask(stage: Stage, method: str, path: str, headers: dict[str, str], **more: Any) -> tuple[int, str]:
    """Status, and the error's type and message."""
    async with stage.client.request(method, path, headers=headers, **more) as answer:
        body = await answer.json()
        error = body.get("error", {})
        assert (error.get("code"), answer.ok) in {(None, True), (answer.status, False)}
        return answer.status, f"{error.get('type')}: {error.get('message')}" if error else ""


CHAT = "/v1/chat/completions"


@pytest.mark.parametrize(
    ("headers", "path", "baggage", "expected"),
    [
        ({}, CHAT, "", (401, "authentication_error: this gateway asks for a token.")),
        (bearer("nobody"), CHAT, "", (401, "authentication_error: this gateway asks for a token.")),
        ({"Authorization": "Basic root"}, CHAT, "", (401, "authentication_error: this gateway asks for a token.")),
        (bearer("root"), CHAT, "", (200, "")),
        ({"Authorization": "bearer  root"}, CHAT, "", (200, "")),
        ({"x-api-key": "root"}, CHAT, "", (200, "")),
        (bearer("nobody") | {"x-api-key": "any-key"}, CHAT, "", (200, "")),
        (bearer("any-key"), CHAT, "", (200, "")),
        (bearer(agent_token("root")), CHAT, "", (200, "")),
        (bearer(agent_token("trainer-key")), CHAT, "", (200, "")),
        (bearer(agent_token("any-key")), CHAT, "", (401, "authentication_error: this gateway asks for a token.")),
        (bearer("any-key"), f"/rollout/r/attempt/0{CHAT}", "", (200, "")),
        (bearer("evals-key"), f"/rollout/eval-1/attempt/0{CHAT}", "", (200, "")),
        (bearer("evals-key"), CHAT, "spangrad.rollout.id=eval-2", (200, "")),
        (
            bearer("evals-key"),
            f"/rollout/train-1/attempt/0{CHAT}",
            "spangrad.rollout.id=eval-2",
            (403, "permission_error: client 'evals' may not call under rollout 'train-1': gateway.clients allows it 'eval-*'."),
        ),
        (
            bearer("evals-key"),
            CHAT,
            "",
            (403, "permission_error: client 'evals' must name a rollout like 'eval-*', in the URL or as baggage."),
        ),
        (
            bearer("judge-key"),
            CHAT,
            "",
            (403, "permission_error: client 'judge' may not call policy 'policy': gateway.clients allows it ['judge']."),
        ),
    ],
)
async def test_gateway_call_needs_token_of_its_scope(headers: dict[str, str], path: str, baggage: str, expected: tuple[int, str]) -> None:
    async with staged(token="root", clients=CLIENTS) as stage:
        status, message = await ask(stage, "POST", path, {"Authorization": "", **headers, "baggage": baggage}, json=ASKED)
        assert (status, message.startswith(expected[1])) == (expected[0], True), message
        assert len(stage.engine.requests) == (status == 200)


async def test_gateway_openai_and_anthropic_clients_authenticate_and_see_refusals() -> None:
    import anthropic  # 3,000 modules, which each worker of pytest-xdist would import

    asked = {"model": "policy", "messages": ASKED["messages"]}
    async with staged(token="root", clients=CLIENTS) as stage:
        url = str(stage.client._base_url).rstrip("/")
        async with openai.AsyncOpenAI(api_key="any-key", base_url=f"{url}/v1") as allowed:
            assert (await allowed.chat.completions.create(**asked)).choices[0].finish_reason == "stop"
        async with openai.AsyncOpenAI(api_key="evals-key", base_url=f"{url}/rollout/train-1/attempt/0/v1") as client:
            with pytest.raises(openai.PermissionDeniedError, match="client 'evals' may not call under rollout 'train-1'"):
                await client.chat.completions.create(**asked)
        async with anthropic.AsyncAnthropic(api_key="evals-key", base_url=url) as other:
            with pytest.raises(anthropic.PermissionDeniedError, match="client 'evals' must name a rollout like 'eval-"):
                await other.messages.create(max_tokens=8, **asked)
        async with anthropic.AsyncAnthropic(api_key="nobody", base_url=url) as stranger:
            with pytest.raises(anthropic.AuthenticationError, match="asks for a token"):
                await stranger.messages.create(max_tokens=8, **asked)
        assert len(stage.engine.requests) == 1


async def test_gateway_request_without_model_needs_access_to_the_default_policy() -> None:
    async with staged(token="root", clients=CLIENTS) as stage:
        status, message = await ask(stage, "GET", "/v1/responses/r1", bearer("judge-key"))
        assert (status, message.startswith("permission_error: client 'judge' may not call policy 'policy'")) == (403, True)
        assert stage.engine.bodies == []
        assert (await ask(stage, "GET", "/v1/models", bearer("judge-key")))[0] == 200


@pytest.mark.parametrize("body", [b"no JSON", b'{"model": 3}', b"[]", pytest.param(b'{"x": ' + b"[" * 100_000, id="deep")])
async def test_gateway_client_limited_to_policies_must_name_one(body: bytes) -> None:
    async with staged(token="root", clients=CLIENTS) as stage:
        assert await ask(stage, "POST", CHAT, bearer("judge-key"), data=body) == (
            403,
            "permission_error: client 'judge' must name its policy as `model` in a JSON object.",
        )


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("POST", "/attempts", {"attempts": [ANNOUNCED]}),
        ("POST", "/attempts/calls", {"attempts": []}),
        ("GET", "/admin/policies/policy", None),
        ("POST", "/admin/policies/policy/versions", {"version": 1}),
        ("GET", "/metrics", None),
    ],
)
async def test_gateway_admin_orders_need_administrator_token(method: str, path: str, body: object) -> None:
    async with staged(token="root", clients=CLIENTS) as stage:
        for token in ("evals-key", "any-key", agent_token("root"), agent_token("trainer-key")):
            status, message = await ask(stage, method, path, bearer(token), json=body)
            assert (status, message.split(":")[0]) == (403, "permission_error")
        for token in ("root", "trainer-key"):
            async with stage.client.request(method, path, headers=bearer(token), json=body) as answer:
                assert answer.status not in {401, 403}


async def test_gateway_unknown_path_answers_404_only_with_token() -> None:
    async with staged(token="root", clients=CLIENTS) as stage:
        assert (await ask(stage, "GET", "/nowhere", bearer("any-key")))[0] == 404
        assert (await ask(stage, "GET", "/nowhere", {"Authorization": ""}))[0] == 401
        assert (await ask(stage, "GET", "/healthz", {"Authorization": ""}))[0] == 200


def access(**settings: object) -> AccessControl:
    return AccessControl(GatewaySettings.model_validate(settings), str)


def test_access_control_duplicate_client_tokens_or_names_raise() -> None:
    with pytest.raises(SettingsError, match=r"'b' has the same token as 'a'"):
        access(clients=[{"name": "a", "token": "same"}, {"name": "b", "token": "same"}])
    with pytest.raises(SettingsError, match=r"'a' has the same token as 'gateway.token'"):
        access(token="same", clients=[{"name": "a", "token": "same"}])
    with pytest.raises(SettingsError, match=r"'b' has the same token as 'a'"):
        access(clients=[{"name": "a", "token": agent_token("1")}, {"name": "b", "token": "1", "may_admin": True}])
    with pytest.raises(SettingsError, match=r"names 'a' twice"):
        access(clients=[{"name": "a", "token": "1"}, {"name": "a", "token": "2"}])


def test_gateway_clients_setting_error_hides_token(tmp_path: Path) -> None:
    file = tmp_path / "s.toml"
    file.write_text('[[gateway.clients]]\ntoken = "sesame"\n')
    with pytest.raises(SettingsError) as caught:
        load_settings(file=file, env={})
    assert str(caught.value) == f"setting gateway.clients.0.name = {{...}} (file {file}): Field required"
    env = {"SPANGRAD_GATEWAY__CLIENTS": json.dumps(CLIENTS)}
    settings = load_settings(env=env)
    assert [client.name for client in settings.gateway.clients] == ["evals", "judge", "anyone", "trainer"]
    assert "evals-key" not in repr(settings)


def test_serve_beyond_loopback_without_token_raises() -> None:
    with socket.create_server(("0.0.0.0", 0)) as taken:
        bound = {"gateway.host": "0.0.0.0", "gateway.port": taken.getsockname()[1]}
        for allowed, message in (
            ({}, r"Set gateway.token, or bind 127.0.0.1"),
            ({"gateway.clients": [{"name": "a", "token": "1"}]}, r"gateway.port"),
            ({"gateway.token": "1"}, r"gateway.port"),
        ):
            with pytest.raises(SpangradError, match=message):
                serve(load_settings({**bound, **allowed}))


@pytest.mark.parametrize("chunked", [False, True])
async def test_gateway_body_over_max_request_bytes_answers_413(chunked: bool) -> None:
    async with staged(max_request_bytes=1000) as stage:

        async def pieces() -> Any:
            for _ in range(20):
                yield b" " * 100

        refused = (413, "request_too_large: the request's body has more than gateway.max_request_bytes = 1000 bytes. Send a smaller one.")
        assert await ask(stage, "POST", CHAT, {}, data=pieces() if chunked else b" " * 1001) == refused
        assert await ask(stage, "POST", "/attempts", {}, data=b" " * 1001) == refused
        assert (await stage.chat())[0] == 200


async def test_gateway_body_that_is_not_as_declared_answers_400() -> None:
    async with staged() as stage:
        reason = "the body cannot be read (Can not decode content-encoding: gzip). Send it as its head declares it."
        assert await ask(stage, "POST", CHAT, {"Content-Encoding": "gzip"}, data=b"{}") == (400, f"invalid_request_error: {reason}")
        assert (await stage.chat())[0] == 200


async def said_to(stage: Stage, *pieces: bytes, until: bytes | None = None) -> bytes:
    """Send pieces of a request; return the gateway's answer up to `until`, or until it ends the connection."""
    assert stage.client._base_url
    reader, writer = await asyncio.open_connection("127.0.0.1", stage.client._base_url.port)
    try:
        for piece in pieces:
            writer.write(piece)
            await asyncio.sleep(0.05)
        return await asyncio.wait_for(reader.readuntil(until) if until else reader.read(), 30)
    finally:
        writer.close()


async def test_gateway_body_that_stalls_answers_408() -> None:
    async with staged(body_seconds=0.2) as stage:
        head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 400\r\n\r\n"
        answer = await said_to(stage, head + b"ab", until=b"}}")
    head, body = answer.split(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 408 ")
    assert b"Connection: close" in head
    assert json.loads(body) == {
        "error": {
            "message": "only 2 bytes of the body came in time; it may take 0.2 s, and a second more for each 65536 bytes "
            "(gateway.body_seconds). Send it faster.",
            "type": "request_timeout",
            "code": 408,
        }
    }


async def test_gateway_large_body_that_progresses_is_awaited() -> None:
    async with staged(body_seconds=1) as stage:

        async def pieces() -> Any:
            yield json.dumps(ASKED)[:-1].encode() + b', "x": "' + b"a" * 2**18
            await asyncio.sleep(1.5)
            yield b'"}'

        async with stage.client.post(CHAT, data=pieces()) as answer:
            assert answer.status == 200


async def test_gateway_connection_without_whole_head_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spangrad.http.client_timeouts._LOOK_SECONDS", 0.02)
    monkeypatch.setattr("spangrad.http.server.SilentConnections", partial(SilentConnections, first_head_seconds=0.1))
    async with staged() as stage:
        assert await said_to(stage, b"POST /v1/chat") == b""


async def test_gateway_slow_body_of_a_whole_head_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spangrad.http.client_timeouts._LOOK_SECONDS", 0.02)
    monkeypatch.setattr("spangrad.http.server.SilentConnections", partial(SilentConnections, first_head_seconds=0.5))
    body = json.dumps(ASKED).encode()
    assert len(body) / 6 * 0.05 > 0.6, "it takes longer than a head may"
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: gateway\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % len(body)
    async with staged() as stage:
        answer = await said_to(stage, head, *(body[at : at + 6] for at in range(0, len(body), 6)))
    assert answer.startswith(b"HTTP/1.1 200 ")


SECRET = "sk-s3cret"
SECRETIVE = {
    "Authorization": f"Bearer {SECRET}",
    "x-api-key": SECRET,
    "api-key": SECRET,
    "x-goog-api-key": SECRET,
    "Proxy-Authorization": f"Basic {SECRET}",
    "Cookie": f"session={SECRET}",
    "X-Forwarded-Access-Token": SECRET,
    "X-Mine": SECRET,
    "baggage": f"token={SECRET}",
    "tracestate": f"vendor={SECRET}",
    "OpenAI-Organization": SECRET,
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("status", [200, 500])
async def test_gateway_secrets_of_client_reach_neither_engine_nor_log(stream: bool, status: int, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    async with staged(FakeEngine(status=status), token=SECRET) as stage:
        for path in (f"/v1/chat/completions?api_key={SECRET}", f"/v1/models?key={SECRET}", f"/nowhere?key={SECRET}"):
            method = "POST" if "chat" in path else "GET"
            async with stage.client.request(method, path, json={**ASKED, "stream": stream}, headers=SECRETIVE) as answer:
                body = await answer.text()
            assert SECRET not in body
            assert SECRET not in str(answer.headers)
        (span,) = await stage.spans()
    assert SECRET not in str(span)
    assert SECRET not in str(stage.engine.headers)
    # The fake engine's own access log is in it.
    assert "GET /v1/models" in caplog.text
    assert SECRET not in caplog.text
    assert stage.engine.headers[0]["content-type"] == "application/json"


async def test_gateway_secrets_of_malformed_request_are_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    async with staged() as stage:
        for field in (f"Authorization : Bearer {SECRET}", f"Authorization: {SECRET}\0", f"Cookie: {SECRET * 2000}"):
            answer = await said_to(stage, f"GET /v1/models HTTP/1.1\r\nHost: x\r\n{field}\r\n\r\n".encode())
            assert b" 400 Bad Request" in answer
    assert caplog.text.count("Error handling request from 127.0.0.1") == 3
    assert SECRET not in caplog.text


def certificate(directory: Path, name: str = "gateway", password: bytes | None = None) -> tuple[Path, Path]:
    """A self-signed certificate for 127.0.0.1, and its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.now(UTC)
    signed = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(hours=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1"))]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    locked = serialization.BestAvailableEncryption(password) if password else serialization.NoEncryption()
    files = directory / f"{name}.pem", directory / f"{name}.key"
    files[0].write_bytes(signed.public_bytes(serialization.Encoding.PEM))
    files[1].write_bytes(key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, locked))
    return files


async def test_gateway_with_tls_cert_serves_tls_only(tmp_path: Path) -> None:
    cert, key = certificate(tmp_path)
    trusting = ssl.create_default_context(cafile=cert)
    async with staged(tls_cert=str(cert), tls_key=str(key)) as stage:
        port = stage.client._base_url.port
        over_tls = aiohttp.ClientSession(f"https://127.0.0.1:{port}", connector=aiohttp.TCPConnector(ssl=trusting))
        async with over_tls as client, client.post(CHAT, json={**ASKED, "stream": True}) as answer:
            assert (answer.status, (await answer.read()).endswith(b"data: [DONE]\n\n")) == (200, True)
        with pytest.raises(aiohttp.ClientError):
            await stage.client.get("/healthz")


def test_tls_context_of_unusable_certificate_raises(tmp_path: Path) -> None:
    cert, key = certificate(tmp_path)
    _, other = certificate(tmp_path, "other")
    _, locked = certificate(tmp_path, "locked", b"password")
    (tmp_path / "text.pem").write_text("hello")
    assert tls_context(GatewaySettings()) is None
    assert tls_context(GatewaySettings(tls_cert=cert, tls_key=key)) is not None
    for settings, message in (
        (GatewaySettings(tls_cert=cert), "gateway.tls_key is not set, and TLS needs both"),
        (GatewaySettings(tls_key=key), "gateway.tls_cert is not set, and TLS needs both"),
        (GatewaySettings(tls_cert=tmp_path / "none.pem", tls_key=key), "none.pem' cannot be read (No such file or directory)"),
        (GatewaySettings(tls_cert=cert, tls_key=tmp_path), "cannot be read (Is a directory)"),
        (GatewaySettings(tls_cert=cert, tls_key=other), "do not make a pair"),
        (GatewaySettings(tls_cert=cert, tls_key=locked), "do not make a pair"),
        (GatewaySettings(tls_cert=tmp_path / "text.pem", tls_key=key), "do not make a pair"),
    ):
        with pytest.raises((GatewayError, SettingsError)) as caught:
            tls_context(settings)
        assert message in str(caught.value)
