"""Pass-through of requests that are no policy calls: models, embeddings, token counts.

In: a request to a path below /v1 that no dialect answers. Out: the engine's answer, as it comes. Invariant: nothing but the name of the
model is read, nothing recorded or counted; and nothing passes that would change what the engine serves, or that would be a call.
"""

from __future__ import annotations

import asyncio
from urllib.parse import quote

import aiohttp
import msgspec
from aiohttp import web
from yarl import URL

from gateway.dialects import DIALECTS
from gateway.dialects.base import Fields
from gateway.pool.policy import RETRY_AFTER_SECONDS, PoolFullError
from gateway.pool.pool import BackendPool
from gateway.pool.upstream import BackendDownError, Upstream, unreachable
from gateway.proxy.headers import forwarded, forwarded_query, returned
from gateway.proxy.http import error_response, model_of
from spangrad.errors import JSON_ERRORS
from spangrad.http.announcements import AttemptKey
from spangrad.http.server import json_response

REFUSED = {
    "load_lora_adapter": "only a publication changes what the engine serves",
    "unload_lora_adapter": "only a publication changes what the engine serves",
    "chat/completions/batch": "its choices would not be recorded; send a call for each conversation",
}
"""Path below /v1 that does not pass -> the reason."""


async def pass_through(
    request: web.Request, session: aiohttp.ClientSession, pool: BackendPool, attempt: AttemptKey | None
) -> web.StreamResponse:
    """Forward a request to a backend of the policy that its model names."""
    path = request.match_info["rest"]
    refusal = _refusal(request.method, path)
    if refusal:
        return error_response(403, f"/v1/{path} does not pass: {refusal}.", "permission_error")
    body = await request.read()
    try:
        model = model_of(body)
    except JSON_ERRORS:
        model = None
    if request.method == "GET" and path == "models" and len(pool.names) > 1:
        return json_response({"object": "list", "data": [_model(name) for name in pool.names]})
    try:
        async with pool.lease(model, attempt) as lease:
            if lease.model not in (None, model):
                body = msgspec.json.encode({**msgspec.json.decode(body, type=Fields), "model": lease.model})
            return await _let_answer(request, body, session, lease.backend)
    except BackendDownError as error:
        return error_response(503, str(error), "engine_down")
    except PoolFullError as error:
        response = error_response(503, str(error), "pool_full")
        response.headers["Retry-After"] = str(RETRY_AFTER_SECONDS)
        return response


def _model(name: str) -> dict[str, object]:
    """Return the entry of a model of which the gateway knows the name alone."""
    return {"id": name, "object": "model", "created": 0, "owned_by": "spangrad"}


async def _let_answer(request: web.Request, body: bytes, session: aiohttp.ClientSession, backend: Upstream) -> web.StreamResponse:
    headers = forwarded(request.headers)
    backend.add_headers(headers)
    path = request.match_info["rest"]
    response = None
    try:
        async with session.request(
            request.method,
            URL(f"{backend.url}/v1/{quote(path)}?{forwarded_query(request.rel_url.raw_query_string)}", encoded=True),
            data=body,
            headers=headers,
            allow_redirects=False,
        ) as upstream:
            response = web.StreamResponse(status=upstream.status, headers=returned(upstream.headers))
            await response.prepare(request)
            scrubber = backend.scrubber()
            async for data in upstream.content.iter_any():
                if shown := scrubber.feed(data):
                    await response.write(shown)
            await response.write_eof(scrubber.rest())
            return response
    except (aiohttp.ClientError, OSError, asyncio.CancelledError) as error:
        if response is not None and request.transport is not None:
            request.transport.abort()  # only a broken connection says that this was not all
        if isinstance(error, asyncio.CancelledError):
            raise
        return response if response is not None else error_response(502, unreachable(backend, error), "engine_unreachable")


def _refusal(method: str, path: str) -> str:
    """Return the reason why a path below /v1, percent-decoded, does not pass; empty: it does."""
    parts = path.strip("/")
    if any(part in (".", "..") for part in path.split("/")):
        return "it leads elsewhere"
    # However it is spelt (%2F, an extra slash), it would reach the engine as a call that is not recorded.
    if method == "POST" and f"/v1/{parts}" in DIALECTS:
        return f"calls go to /v1/{parts}, spelt like that"
    return REFUSED.get(parts, "")
