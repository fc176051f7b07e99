"""`spangrad page`: the web page over the span store.

In: requests of browsers. Out: pages, their files, and JSON. Invariant: no GET changes anything; what agents and models wrote leaves the
server as JSON or plain text alone, never as markup.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import struct
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, TypeVar
from urllib.parse import parse_qsl

from aiohttp import web

from page.access import HEADERS, NO_ACTIONS, PageAccess, local_target
from page.actions.perform import ActionCommands, ActionRunner
from page.actions.requests import read_request
from page.encoding import begin_events, encode, error_answer, json_answer
from page.files import PAGES, STATIC, PageTemplates
from page.overview import FRESH_SECONDS, overview_without
from page.play.routes import PlayRoutes
from page.play.sessions import PlaySessions, playable
from page.views import PageReaders, PageViews
from spangrad.errors import SpangradError, StoreError
from spangrad.http import server as http_server
from spangrad.http.client_timeouts import TooSlowError
from spangrad.http.server import Address, Handler, HttpServer, body
from spangrad.settings import PageSettings, Settings

T = TypeVar("T")
Answer = Callable[[Any], Any]
THREADS = 6
"""Largest number of requests that read the store at the same time."""
_BODY_BYTES = 2**20
"""Largest body of a request, in bytes: the ids of as many rollouts as the queue's view shows, whichever characters they have."""
_ABSENT = "the store holds nothing that this address names: it has expired, or has not arrived yet. /rollouts lists what is there."
log = logging.getLogger(__name__)


def serve(settings: Settings, readers: PageReaders, commands: ActionCommands) -> None:
    """Serve the page until SIGTERM or SIGINT.

    Raises:
        SpangradError: the address may not be bound, or is in use.
    """
    address_of(settings.page).require_usable()

    def ready(server: HttpServer) -> None:
        log.info("page ready: %s", server.url)

    http_server.serve(lambda: running(settings, readers, commands), ready)


def address_of(settings: PageSettings) -> Address:
    """Return the address at which the page listens."""
    return Address("page", "docs/guides/page.md", settings.host, settings.port, settings.token, "page")


@asynccontextmanager
async def running(settings: Settings, readers: PageReaders, commands: ActionCommands) -> AsyncGenerator[HttpServer]:
    """Serve the page for as long as the block."""
    views = PageViews(settings, readers)
    with ThreadPoolExecutor(THREADS, "page") as threads:
        page = _Page(settings, views, commands, threads)
        application = web.Application(middlewares=[page.guarded], client_max_size=_BODY_BYTES)
        application.add_routes(page.routes())
        async with HttpServer(application, settings.page.host, settings.page.port) as server:
            threads.submit(views.prepare)
            try:
                yield server
            finally:
                await page.stop()
        views.close()


class _Page:
    """Handlers of the page's requests."""

    def __init__(self, settings: Settings, views: PageViews, commands: ActionCommands, threads: ThreadPoolExecutor) -> None:
        self._access = PageAccess(settings.page.token)
        self._plays = PlaySessions(settings, commands.start_play) if settings.page.actions else None
        self._actions = ActionRunner(settings, views.store, commands, self._plays) if self._plays else None
        self._play_routes = PlayRoutes(self._access, self._plays, playable(settings), settings.gateway, self._in_thread)
        self._action_token = self._access.action_token if self._plays else ""
        self._templates = PageTemplates(settings.page)
        self._views = views
        self._threads = threads
        self._stopping = asyncio.Event()
        self._overview_turn = asyncio.Lock()

    def routes(self) -> list[web.AbstractRouteDef]:
        """Return all routes: pages, their files, JSON and downloads."""
        views = self._views
        return [
            *(web.get(path, partial(self._page, name)) for path, (name, _) in PAGES.items()),
            web.static("/static", STATIC, follow_symlinks=True),  # an installer may link its files
            web.get("/login", self._login_page),
            web.post("/api/actions", self._act),
            *self._play_routes.routes(),
            web.post("/login", self._login),
            web.get("/healthz", self._healthy),
            web.get("/events/overview", self._events),
            web.get("/api/overview", self._overview_json),
            *(web.get(path, partial(self._json, answer)) for path, answer in views.answers().items()),
            *(web.get(path, partial(self._download, answer)) for path, answer in views.downloads().items()),
        ]

    @web.middleware
    async def guarded(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Answer a request that may be answered, with the headers of every answer; an error becomes a sentence."""
        try:
            response = await self._answered(request, handler)
        except web.HTTPSeeOther as redirect:
            redirect.headers.update(HEADERS)
            raise
        response.headers.update(HEADERS)
        return response

    async def _answered(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        begin = time.perf_counter()
        try:
            response = self._access.refusal(request) or await handler(request)
        except web.HTTPSeeOther:
            raise
        except web.HTTPRequestEntityTooLarge as error:
            return error_answer(f"the body has more than {_BODY_BYTES:,} bytes: ask for less at once.", error.status)
        except web.HTTPException as error:
            return error_answer(f"{request.method} {request.path} is not answered here. The page begins at /.", error.status)
        except TooSlowError as error:
            return error_answer(f"{error}. Send it faster.", 408)
        except ValueError as error:
            return error_answer(str(error), 400)
        except StoreError as error:
            return error_answer(str(error), error.http_status or 503)
        except SpangradError as error:
            return error_answer(str(error), 500)
        if request.path.startswith("/static/"):
            response.headers["Cache-Control"] = "no-cache"
        response.headers["Server-Timing"] = f"server;dur={(time.perf_counter() - begin) * 1000:.1f}"
        return response

    async def _page(self, name: str, request: web.Request) -> web.Response:
        page = self._templates.page(name, action_token=self._action_token)
        return web.Response(text=page, content_type="text/html", headers={"Cache-Control": "no-cache, private"})

    async def _login_page(self, request: web.Request) -> web.Response:
        return web.Response(text=self._templates.page("login"), content_type="text/html", headers={"Cache-Control": "no-cache"})

    async def _login(self, request: web.Request) -> web.StreamResponse:
        form = dict(parse_qsl((await body(request)).decode(errors="replace")))
        if not self._access.accepts(form.get("token", "")):
            page = self._templates.page("login", refused=True)
            return web.Response(status=403, text=page, content_type="text/html")
        response = web.HTTPSeeOther(local_target(request.query.get("next", "/")))
        self._access.remember(response, secure=request.secure)
        raise response

    async def _act(self, request: web.Request) -> web.Response:
        """Carry out an action; a request that another site could have sent, or that does not show the page's token, changes nothing."""
        runner, problem = self._actions, self._access.action_problem(request)
        if runner is None or problem:
            return error_answer(NO_ACTIONS if runner is None else problem, 403)
        action = read_request(await body(request))
        return json_answer(encode({"done": await self._in_thread(lambda: runner.run(action, request.remote or ""))}))

    async def _healthy(self, request: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def _json(self, answer: Answer, request: web.Request) -> web.Response:
        def encoded() -> bytes | None:
            return None if (value := answer(request.query)) is None else encode(value)

        content = await self._in_thread(encoded)
        return error_answer(_ABSENT, 404) if content is None else json_answer(content)

    async def _overview_json(self, request: web.Request) -> web.Response:
        overview = await self._overview()
        return json_answer(encode(overview), 503 if "error" in overview else 200)

    async def _overview(self) -> dict[str, Any]:
        # One thread reads; who waits for it holds none.
        async with self._overview_turn:
            return await self._in_thread(self._views.overview.read)

    async def _download(self, answer: Answer, request: web.Request) -> web.StreamResponse:
        name, parts = await self._in_thread(lambda: answer(request.query))
        if parts is None:
            return error_answer(_ABSENT, 404)
        response = web.StreamResponse(
            headers={**HEADERS, "Content-Disposition": f'attachment; filename="{name}"', "Cache-Control": "no-store"}
        )
        response.content_type = "text/csv" if name.endswith(".csv") else "text/plain"
        response.charset = "utf-8"
        waiting = iter(parts)
        part = await self._in_thread(lambda: next(waiting, None))
        await response.prepare(request)
        try:
            while part is not None:
                await response.write(part)
                part = await self._in_thread(lambda: next(waiting, None))
        except ConnectionResetError:
            pass  # the browser has left
        except SpangradError as error:
            log.warning("download of %s ended early: %s", request.path, error)
            _reset(request)
        return response

    async def _events(self, request: web.Request) -> web.StreamResponse:
        """Send the overview by server-sent events until the browser leaves or the server stops: after the first, steps that are new."""
        response = await begin_events(request)
        sent: dict[int, dict[str, Any]] = {}
        try:
            while not self._stopping.is_set():
                overview = await self._overview()
                await response.write(b"data: " + encode(overview_without(overview, sent)) + b"\n\n")
                sent = {step["Version"]: step for step in overview.get("steps", [])}
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._stopping.wait(), FRESH_SECONDS)
        except ConnectionResetError:
            pass  # the browser has left
        return response

    async def stop(self) -> None:
        """End the streams of events, and the episodes that people play."""
        self._stopping.set()
        if self._plays is not None:
            await self._plays.close()

    def _in_thread(self, work: Callable[[], T]) -> Awaitable[T]:
        return asyncio.get_running_loop().run_in_executor(self._threads, work)


def _reset(request: web.Request) -> None:
    """Reset a connection amid a response: a second response would be part of the first, and a clean end would make that look whole."""
    if request.transport is not None:
        request.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        request.transport.abort()
