"""An upstream's key stays with its upstream, however that answers: by a redirect, in an error, in a stream."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from gateway.pool.upstream import Scrubber
from spangrad import semconv
from spangrad.processes import free_ports
from tests.support.gateways import staged

KEY = "sk-secret"
STREAM = {"content-type": "text/event-stream"}


@asynccontextmanager
async def server(app: web.Application) -> AsyncGenerator[str]:
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    (port,) = free_ports(1)
    await web.TCPSite(runner, "127.0.0.1", port).start()
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        await runner.cleanup()


def answering(handler: Callable[[web.Request], Awaitable[web.StreamResponse]]) -> web.Application:
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handler)
    return app


@pytest.mark.parametrize(
    ("kind", "path"), [("anthropic", "/v1/messages"), ("openai", "/v1/chat/completions"), ("openai", "/v1/embeddings")]
)
async def test_upstream_redirect_is_not_followed(kind: str, path: str) -> None:
    followed: list[str] = []

    async def elsewhere(request: web.Request) -> web.Response:
        followed.append(request.path)
        return web.json_response({})

    async with server(answering(elsewhere)) as away:

        async def redirect(request: web.Request) -> web.Response:
            raise web.HTTPTemporaryRedirect(f"{away}/elsewhere")

        async with (
            server(answering(redirect)) as url,
            staged(backends=[{"url": url, "policy": "judge", "kind": kind, "key": KEY}]) as stage,
            stage.client.post(path, json={"model": "judge", "messages": [], "max_tokens": 1}) as answer,
        ):
            assert (answer.status, answer.headers.get("location")) == (307, None)
    assert followed == []


async def test_engine_that_redirects_is_down() -> None:
    async def elsewhere(request: web.Request) -> web.Response:
        return web.json_response({"policy": "policy", "version": 0, "tokenizer_hash": "cafe", "warm": False})

    async with server(answering(elsewhere)) as away:

        async def redirect(request: web.Request) -> web.Response:
            raise web.HTTPTemporaryRedirect(f"{away}/spangrad/info")

        async with server(answering(redirect)) as url, staged(engine_url=url) as stage:
            await stage.readiness("answers /spangrad/info with 307")


@pytest.mark.parametrize("status", [200, 401])
async def test_scrubber_removes_key_from_unrecorded_answer(status: int) -> None:
    async def quote(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(status=status)
        await response.prepare(request)
        for part in ("no such key: sk-s", "ecret, nor sk-", "x, sk-"):
            await response.write(part.encode())
        return response

    async with (
        server(answering(quote)) as url,
        staged(backends=[{"url": url, "policy": "judge", "kind": "openai", "key": KEY}]) as stage,
        stage.client.post("/v1/embeddings", json={"model": "judge"}) as answer,
    ):
        assert (answer.status, await answer.read()) == (status, b"no such key: ***, nor sk-x, sk-")


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses"])
async def test_scrubber_removes_key_from_stream_events_before_recording(path: str) -> None:
    async def quote(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers=STREAM)
        await response.prepare(request)
        await response.write(b'data: {"type": "response.failed", "response": {"id": "r", "error": {"message": "bad key sk-se')
        await response.write(b'cret"}}}\n\n')
        return response

    async with server(answering(quote)) as url, staged(backends=[{"url": url, "policy": "judge", "kind": "openai", "key": KEY}]) as stage:
        async with stage.client.post(path, json={"model": "judge", "messages": [], "stream": True}) as answer:
            body = await answer.text()
        (span,) = await stage.spans()
    assert (answer.status, "bad key ***" in body, KEY in body) == (200, True, False)
    assert KEY not in str(span.attributes)
    assert path != "/v1/responses" or "bad key ***" in str(span.attributes[semconv.RESPONSE_JSON])


@given(st.lists(st.text("ab*", max_size=4)), st.text("ab", min_size=1, max_size=4))
def test_scrubber_finds_key_at_any_split(parts: list[str], key: str) -> None:
    scrubber = Scrubber(key.encode())
    shown = b"".join(scrubber.feed(part.encode()) for part in parts) + scrubber.rest()
    assert shown == "".join(parts).encode().replace(key.encode(), b"***")
