"""`spangrad tools --swe-rex`: a sandbox by SWE-ReX's routes, for SWE-agent and whatever else uses its `RemoteRuntime`.

In: requests of SWE-ReX 1.4 over HTTP. Out: its responses. Invariant: beyond loopback each request needs the key; a request that comes
again with the id of the last ones is answered as before, also with an error, and does nothing again; while the first one is under way, it
waits for that.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import msgspec
from aiohttp import web
from opentelemetry.context import Context

from runner.sandboxes.policy import SandboxPolicy
from runner.swe_rex.runtime import RexRuntime
from runner.swe_rex.wire import (
    ERROR_STATUS,
    KEY_HEADER,
    REQUEST_HEADER,
    RexAction,
    RexClosedSession,
    RexCommand,
    RexError,
    RexInterrupt,
    RexRead,
    RexSession,
    RexWrite,
)
from runner.tools.action_spans import ActionSpans
from runner.tools.span_export import action_provider
from runner.tools.toolbox import prepare_tools
from span_processors.context import environment_context
from spangrad.agent.propagation import context_from
from spangrad.errors import SandboxError
from spangrad.http import server as http_server
from spangrad.http.client_timeouts import BODY_SECONDS, TooSlowError
from spangrad.http.server import BODY_BYTES, Address, Handler, HttpServer, body, json_response, site_guards
from spangrad.http.tokens import is_token
from spangrad.settings import Settings
from spangrad.types import SandboxRung

_KEPT_RESPONSES = 64
"""Number of responses that are kept for requests that come again."""
_KEPT_BYTES = 2**26
"""Number of bytes of those responses; the last one may have more."""
log = logging.getLogger(__name__)


def address_of(settings: Settings) -> Address:
    """Return the address at which the server listens."""
    return Address("tools", "docs/guides/sandboxes.md", settings.tools.host, settings.tools.port, settings.tools.token)


def serve(settings: Settings, policy: SandboxPolicy, environment: Mapping[str, str]) -> None:
    """Serve a sandbox until SIGTERM or SIGINT; environment variables may name the trace of the actions.

    Raises:
        SpangradError: the address may not be bound, or is in use.
        SandboxError: no sandbox can be started.
    """
    address_of(settings).require_usable()
    if policy.engine is SandboxRung.REMOTE:
        raise SandboxError("a server of a sandbox starts it on this machine. Set runner.sandbox.engine to auto, bubblewrap or landlock.")
    http_server.serve(
        lambda: running(settings, policy, environment_context(environment)),
        lambda url: log.info("tools ready: %s, by SWE-ReX's routes", url),
    )


@asynccontextmanager
async def running(settings: Settings, policy: SandboxPolicy, parent: Context) -> AsyncGenerator[str]:
    """Serve for as long as the block; yield the URL. Arguments and errors as of `serve`; `parent` is the trace of the actions."""
    prepared = await asyncio.to_thread(prepare_tools, policy)
    log.info("tools act in sandboxes of %s: %s", prepared.rung, prepared.reason)
    provider = action_provider(settings.store)
    runtime = RexRuntime(prepared, ActionSpans(prepared.image, provider))
    key = settings.tools.token.get_secret_value() if settings.tools.token is not None else None
    try:
        async with rex_server(runtime, settings.tools.host, settings.tools.port, key, parent) as server:
            yield server.url
    finally:
        await runtime.close()
        await asyncio.to_thread(provider.shutdown)


def rex_server(runtime: RexRuntime, host: str, port: int, key: str | None, parent: Context) -> HttpServer:
    """Return a server of a runtime; port 0: a free one.

    Each request needs the key, if there is one. `parent` is the context of actions whose requests name none.
    """
    middlewares = [*site_guards(key, "tools", _refusal), _guard(key), _Answers().answer]
    application = web.Application(middlewares=middlewares, client_max_size=BODY_BYTES)
    application.add_routes(_routes(runtime, parent))
    return HttpServer(application, host, port)


def _routes(runtime: RexRuntime, parent: Context) -> list[web.RouteDef]:
    def context_of(request: web.Request) -> Context:
        return context_from(request.headers, parent)

    def post(path: str, kind: Any, method: Callable[[Any, Context], Awaitable[dict[str, Any]]]) -> web.RouteDef:
        async def answer(request: web.Request) -> web.Response:
            return json_response(await method(msgspec.json.decode(await body(request), type=kind), context_of(request)))

        return web.post(path, answer)

    async def alive(request: web.Request) -> web.Response:
        del request
        return json_response({"is_alive": True, "message": ""})

    async def upload(request: web.Request) -> web.Response:
        form = await request.post()
        file, path = form.get("file"), form.get("target_path")
        if not isinstance(file, web.FileField) or not isinstance(path, str):
            raise ValueError("an upload is a form with the fields `file` and `target_path`")
        content = await asyncio.to_thread(file.file.read)
        return json_response(await runtime.upload(path, content, form.get("unzip") in ("true", "True", "1"), context_of(request)))

    async def close(request: web.Request) -> web.Response:
        del request
        return json_response(await runtime.close())

    return [
        web.get("/is_alive", alive),
        post("/create_session", RexSession, runtime.create_session),
        post("/run_in_session", RexAction | RexInterrupt, runtime.run_in_session),
        post("/close_session", RexClosedSession, runtime.close_session),
        post("/execute", RexCommand, runtime.execute),
        post("/read_file", RexRead, runtime.read_file),
        post("/write_file", RexWrite, runtime.write_file),
        web.post("/upload", upload),
        web.post("/close", close),
    ]


def _guard(key: str | None) -> Any:

    @web.middleware
    async def guarded(request: web.Request, handler: Handler) -> web.StreamResponse:
        if key is not None and not is_token(request.headers.get(KEY_HEADER), key):
            return _refusal(401, f"this server asks for its key: send `{KEY_HEADER}` with tools.token.")
        return await _in_protocol(request, handler)

    return guarded


async def _in_protocol(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answer a request; errors are turned into the protocol's."""
    try:
        return await handler(request)
    except (RexError, SandboxError) as failure:
        error = failure if isinstance(failure, RexError) else RexError("SwerexException", str(failure))
        transfer = {"message": str(error), "class_path": error.class_path, "traceback": "", "extra_info": error.extra}
        return json_response({"swerexception": transfer}, ERROR_STATUS)
    except (TooSlowError, TimeoutError):
        return _refusal(408, "the request did not arrive in time. Send it faster.")
    except web.HTTPRequestEntityTooLarge:
        return _refusal(413, f"a body may have {BODY_BYTES} bytes. Send less.")
    except web.HTTPException as error:
        return _refusal(error.status, f"{request.method} {request.path} is not answered here: these are SWE-ReX's routes.")
    except (ValueError, RecursionError) as error:
        return _refusal(422, f"{request.method} {request.path}: {error}")


class _Answers:
    """Answers to the last requests with an id, for those that come again."""

    def __init__(self) -> None:
        self._tasks: OrderedDict[str, asyncio.Task[tuple[int, bytes]]] = OrderedDict()
        """Tasks that answer with a status and a body, by id; those that have ended in the order of their ends."""

    @web.middleware
    async def answer(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Answer a request; one with an id is applied once and to its end, since a client that leaves may ask again."""
        # A request that breaks off before its end has come is not applied.
        if request.content_type == "multipart/form-data":
            async with asyncio.timeout(BODY_SECONDS):
                await request.post()
        else:
            await body(request)
        if (number := request.headers.get(REQUEST_HEADER)) is None:
            return await handler(request)
        if (task := self._tasks.get(number)) is None:
            task = self._tasks[number] = asyncio.create_task(_applied(request, handler))
            task.add_done_callback(lambda ended: self._keep(number, ended))
        status, content = await asyncio.shield(task)
        return web.Response(status=status, body=content, content_type="application/json")

    def _keep(self, number: str, task: asyncio.Task[tuple[int, bytes]]) -> None:
        """Keep the answer of a task that has ended, unless it is a refusal; forget the oldest ones beyond the limits."""
        self._tasks.move_to_end(number)
        if _size(task) and task.result()[0] not in {200, ERROR_STATUS}:
            del self._tasks[number]
        ended = [name for name, kept in self._tasks.items() if kept.done()]
        size = sum(_size(self._tasks[name]) for name in ended)
        for oldest in ended[:-1]:
            if len(self._tasks) <= _KEPT_RESPONSES and size <= _KEPT_BYTES:
                break
            size -= _size(self._tasks.pop(oldest))


async def _applied(request: web.Request, handler: Handler) -> tuple[int, bytes]:
    response = await _in_protocol(request, handler)
    assert isinstance(response, web.Response)
    assert isinstance(response.body, bytes)
    return response.status, response.body


def _size(task: asyncio.Task[tuple[int, bytes]]) -> int:
    """Return the number of bytes of a task's answer. 0: it raised."""
    return 0 if task.cancelled() or task.exception() is not None else len(task.result()[1])


def _refusal(status: int, sentence: str) -> web.Response:
    return json_response({"detail": sentence}, status)
