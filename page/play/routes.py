"""HTTP routes of play: environments and policies to choose from, events of a session, replies.

In: requests of browsers. Out: JSON, and server-sent events. Invariant: what changes a session needs the page's token for actions.
"""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable, Iterator
from typing import Annotated, Any

import msgspec
from aiohttp import web

from page.access import NO_ACTIONS, PageAccess
from page.encoding import begin_events, encode, error_answer, json_answer
from page.play.sessions import PlaySessions
from spangrad.errors import JSON_ERRORS, GatewayError
from spangrad.http.json_http import ask
from spangrad.http.server import body
from spangrad.http.service import gateway_service
from spangrad.settings import GatewaySettings
from spangrad.types import canary_bucket

_ANSWER_SECONDS = 5.0
_IDS_MOST = 20_000
"""Largest number of ids that are drawn for one of a canary's: enough for a share of a thousandth."""


class PlayAnswer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Reply of a person, or their leaving."""

    rollout: str
    turn: int = 0
    text: Annotated[str, msgspec.Meta(max_length=6000)] | None = None
    """None: the person leaves."""


class PlayRoutes:
    """Handlers of requests of play."""

    def __init__(
        self,
        access: PageAccess,
        sessions: PlaySessions | None,
        environments: list[str],
        gateway: GatewaySettings,
        in_thread: Callable[[Callable[[], Any]], Awaitable[Any]],
    ) -> None:
        """Store the arguments. Without sessions the page offers no actions; `in_thread` returns the result of a function that waits."""
        self._access = access
        self._sessions = sessions
        self._environments = environments
        self._gateway = gateway
        self._in_thread = in_thread

    def routes(self) -> list[web.RouteDef]:
        """Return the routes that aiohttp registers."""
        return [
            web.get("/api/play/environments", self.environments),
            web.get("/events/play", self.events),
            web.post("/api/play", self.answer),
        ]

    async def environments(self, request: web.Request) -> web.Response:
        """Return the names of the environments, and the served versions of policies; none where no gateway answers.

        Each has the id of a rollout that it answers: where a canary is out, the gateway goes by the id.
        """
        return json_answer(encode({"environments": self._environments, "policies": await self._in_thread(self._policies)}))

    def _policies(self) -> list[dict[str, object]]:
        try:
            answer = ask(gateway_service(self._gateway.url, self._gateway.token), "GET", "/admin/policies", seconds=_ANSWER_SECONDS)
        except GatewayError:  # an episode with scripts alone needs no gateway
            return []
        return list(_served(answer["policies"]))

    async def answer(self, request: web.Request) -> web.Response:
        """Take a person's reply, or let the person leave."""
        problem = self._access.action_problem(request)
        if self._sessions is None or problem:
            return error_answer(problem or NO_ACTIONS, 403)
        try:
            answer = msgspec.json.decode(await body(request), type=PlayAnswer)
        except JSON_ERRORS as error:
            raise ValueError(f"the body is no reply of a player: {error}") from None
        session = self._sessions.get(answer.rollout)
        if answer.text is None:
            await session.leave("It was left.")
        else:
            await session.reply(answer.turn, answer.text)
        return json_answer(encode({"done": ""}))

    async def events(self, request: web.Request) -> web.StreamResponse:
        """Send the events of a session, from the one after `Last-Event-ID` on, until it ends or the browser leaves."""
        if self._sessions is None:
            return error_answer(NO_ACTIONS, 403)
        session = self._sessions.get(request.query.get("id", ""))
        last = request.headers.get("Last-Event-ID", "")
        response = await begin_events(request)
        with session.listened():
            try:
                async for number, event in session.events(int(last) + 1 if last.isdecimal() else 0):
                    await response.write(b"id: %d\ndata: %s\n\n" % (number, encode(event)))
            except ConnectionResetError:
                pass  # the browser has left
        return response


def _served(policies: list[dict[str, Any]]) -> Iterator[dict[str, object]]:
    """Yield the versions of policies that answer calls, the canary's included."""
    for policy in policies:
        canary = policy.get("canary")
        share = canary["share"] if canary else 0.0
        yield {"name": policy["policy"], "version": policy["version"], "rollout": _rollout(lambda bucket, share=share: bucket >= share)}
        if canary:
            rollout = _rollout(lambda bucket, share=share: bucket < share)
            yield {"name": policy["policy"], "version": canary["version"], "rollout": rollout}


def _rollout(is_place: Callable[[float], bool]) -> str:
    """Return a new rollout's id whose place among a canary's rollouts meets a condition."""
    for _ in range(_IDS_MOST):
        rollout = f"play-{secrets.token_hex(16)}"
        if is_place(canary_bucket(rollout)):
            return rollout
    return ""
