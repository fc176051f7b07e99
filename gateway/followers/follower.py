"""Connection of a gateway that follows another one, the controller.

In: the controller's messages. Out: this gateway's pool as the controller describes it, and reports of its calls; requests for the
administration, which the controller answers. Invariant: calls are passed on by the last known state while the controller is away.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence

import aiohttp
import msgspec
from aiohttp import web
from yarl import URL

from gateway.followers.followed_pool import FollowedPool
from gateway.followers.messages import BEAT_SECONDS, CLOSED_KEPT, COUNT_SECONDS, SILENT_SECONDS, ControllerUpdate, FollowerReport
from gateway.proxy.auth import STATE_PATH
from gateway.proxy.http import error_response
from spangrad.errors import GatewayError
from spangrad.http.announcements import ClosedAttempt
from spangrad.http.service import bearer
from spangrad.settings import GatewaySettings

log = logging.getLogger(__name__)

RETRY_SECONDS = 0.5
_REMEDIES = {
    401: "Set gateway.token to the controller's.",
    403: "Set gateway.token to the controller's.",
    404: "Set gateway.controller to the URL of a gateway of this version.",
    409: "It follows another gateway itself: set gateway.controller to that one's URL.",
}


class Follower:
    """This gateway's part in another one's state."""

    def __init__(self, settings: GatewaySettings, pool: FollowedPool, session: aiohttp.ClientSession) -> None:
        assert settings.controller
        self._url = settings.controller.rstrip("/")
        self._own_url = settings.url
        self._headers = bearer(settings.token)
        self._pool = pool
        self._session = session
        self._revision = 0
        """Number of the newest state of this connection. 0: none has come, and what is known has another one's numbers."""
        self._due = asyncio.Event()
        """Set when a report is due at once: a state is not confirmed yet, or attempts have ended."""
        self._closed: deque[ClosedAttempt] = deque(maxlen=CLOSED_KEPT)
        """Ends of attempts that the controller is sent when the connection is made: it may have missed or forgotten them."""
        self._unsent: deque[ClosedAttempt] = deque(maxlen=CLOSED_KEPT)
        """Ends of attempts that the controller was not sent yet on this connection."""
        self.connected = False
        self.on_closed: Callable[[ClosedAttempt], None] = lambda closed: None
        """Callback for each attempt that has ended, by the controller's word."""

    def reason(self) -> str:
        """Return the reason why this gateway is degraded; empty: it is not."""
        return "" if self.connected else "no controller"

    def routes(self) -> list[web.RouteDef]:
        """Return the routes that aiohttp registers."""
        servers = [web.post(path, self.forward) for path in ("/add_llm_server", "/clear_llm_server")]
        return [web.get(STATE_PATH, self.refuse), web.route("*", "/admin/{path:.*}", self.forward), *servers]

    async def refuse(self, request: web.Request) -> web.Response:
        """Refuse to be followed: a state at third hand would not be confirmed."""
        return error_response(409, f"this gateway follows {self._url}. Set gateway.controller to that URL.")

    async def forward(self, request: web.Request) -> web.Response:
        """Have the controller answer a request for the administration."""
        if not self.connected:
            return self._away("see this gateway's log for the reason.")
        headers = {**self._headers, "Content-Type": request.headers.get("Content-Type", "application/json")}
        try:
            async with self._session.request(
                request.method,
                URL(self._url + request.raw_path, encoded=True),
                data=await request.read(),
                headers=headers,
                allow_redirects=False,
            ) as answer:
                return web.Response(body=await answer.read(), status=answer.status, content_type=answer.content_type)
        except (aiohttp.ClientError, OSError) as error:
            return self._away(str(error) or type(error).__name__)

    def _away(self, reason: str) -> web.Response:
        return error_response(503, f"the gateway at {self._url} (gateway.controller), which answers this, is away: {reason}")

    def close_attempts(self, closed: Sequence[ClosedAttempt]) -> None:
        """Report the ends of attempts to the controller, which informs all its followers; one that is away, once it is back."""
        self._closed += closed
        self._unsent += closed
        self._due.set()

    async def run(self) -> None:
        """Follow the controller; never returns."""
        logged = ""
        while True:
            try:
                await self._follow()
                reason = f"the gateway at {self._url} (gateway.controller) has closed the connection."
            except GatewayError as error:
                reason = str(error)
            if self.connected:
                logged = ""
            self.connected = False
            self._pool.take_elsewhere({})
            if reason != logged:  # one that is away for long is logged once
                log.warning("%s Calls go on with the backends that are known.", reason)
            logged = reason
            await asyncio.sleep(RETRY_SECONDS)

    async def _follow(self) -> None:
        """Follow the controller until the connection ends.

        Raises:
            GatewayError: it ended by an error.
        """
        try:
            async with asyncio.timeout(SILENT_SECONDS):
                socket = await self._session.ws_connect(
                    self._url + STATE_PATH,
                    params={"url": self._own_url},
                    headers=self._headers,
                    timeout=aiohttp.ClientWSTimeout(ws_receive=SILENT_SECONDS),  # pyright: ignore[reportCallIssue] - attrs
                    max_msg_size=0,
                )
            self._revision = 0
            async with socket:
                reporting = asyncio.create_task(self._report(socket))
                try:
                    while (message := await socket.receive()).type is aiohttp.WSMsgType.BINARY:
                        self._take(msgspec.msgpack.decode(message.data, type=ControllerUpdate))
                finally:
                    reporting.cancel()
        except aiohttp.WSServerHandshakeError as error:
            remedy = _REMEDIES.get(error.status, "Look into its log.")
            raise GatewayError(f"the gateway at {self._url} (gateway.controller) answers {error.status}. {remedy}") from error
        except (aiohttp.ClientError, OSError, msgspec.DecodeError) as error:
            reason = str(error) or type(error).__name__
            raise GatewayError(f"the gateway at {self._url} (gateway.controller) does not answer: {reason}.") from error

    def _take(self, update: ControllerUpdate) -> None:
        if update.state is not None:
            self._pool.follow(update.state)
            self._revision = update.revision
            self._due.set()
        self._pool.take_elsewhere(update.elsewhere)
        for closed in update.closed:
            self.on_closed(closed)
        if not self.connected:
            self.connected = True
            log.info("follows the gateway at %s: %d backends", self._url, len(self._pool.backends))

    async def _report(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        """Confirm each state and report ends of attempts at once, and the calls in flight when they have changed."""
        sent, sent_at = FollowerReport(0, {}, {}), 0.0
        self._unsent = self._closed.copy()
        with contextlib.suppress(ConnectionError, aiohttp.ClientError):  # the receiving side ends
            while True:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._due.wait(), COUNT_SECONDS)
                self._due.clear()
                closed = tuple(self._unsent)
                self._unsent.clear()
                report = self._pool.report(self._revision, closed) if self._revision else FollowerReport(0, {}, {}, closed)
                if report != sent or time.monotonic() - sent_at >= BEAT_SECONDS:
                    await socket.send_bytes(msgspec.msgpack.encode(report))
                    sent, sent_at = report, time.monotonic()
