"""Games of a server: one session each, shared by a connection for each player.

In: connections that name a game and a role. Out: games, and spans of what each player did, in the trace of its own. Invariant: a game's
session lasts while a player is connected, or may come back, and no longer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from runner.sessions.game import Game
from runner.sessions.instance import SessionOpening
from runner.sessions.messages import ErrorCode, SessionError, SessionRequest
from runner.sessions.sessions import EnvironmentSession, SessionTable
from runner.sessions.step_spans import PlayedSpan, PlayedSpans
from spangrad import semconv
from spangrad.episode.environment import StepResult, rendered
from spangrad.episode.openenv_fields import CONTENT, EPISODE_ID, observation_of
from spangrad.settings import EnvironmentServiceSettings


class Games:
    """Games by name."""

    def __init__(self, table: SessionTable, settings: EnvironmentServiceSettings, spans: PlayedSpans) -> None:
        """Begin without a game.

        Args:
            table: sessions of the server.
            settings: times.
            spans: source of the players' spans.
        """
        self._table = table
        self._settings = settings
        self._games: dict[str, tuple[Game, EnvironmentSession]] = {}
        self.spans = spans

    async def join(self, name: str, roles: Sequence[str], role: str) -> Game:
        """Return the game of a name, or a new one, with a connection of a player more; `leave` ends it.

        Raises:
            SessionError: there is no such role, or no further session fits.
        """
        if role not in roles:
            remedy = f"Name one of {', '.join(roles)}" if roles else "The environment has none: leave it out"
            raise SessionError(ErrorCode.VALIDATION_ERROR, f"there is no role {role!r}. {remedy}")
        session = await self._table.open(name, SessionOpening())
        if name not in self._games or self._games[name][1] is not session:
            self._games[name] = self._create(name, session, roles), session
        game = self._games[name][0]
        game.attach(role)
        return game

    def leave(self, name: str, game: Game, role: str, *, returns: bool) -> None:
        """Note the end of a player's connection; `returns` is False if it has said that it does not come back."""

        def left() -> None:
            if game.is_empty and name in self._games and self._games[name][0] is game:
                _, session = self._games.pop(name)
                self._table.end(session, "closed")

        game.detach(role, left, returns=returns)

    def _create(self, name: str, session: EnvironmentSession, roles: Sequence[str]) -> Game:
        async def ask(payload: bytes) -> bytes:
            return (await session.ask(payload)).payload

        game = Game(ask, roles, self._settings)

        def over(error: SessionError) -> None:
            self._games.pop(name, None)
            game.close(error)

        session.attach(over)
        session.is_held = lambda: game.is_waiting
        return game


class PlayerSpans:
    """Spans of one player's resets and steps, each once, however often it is asked for."""

    def __init__(self, spans: PlayedSpans, opening: SessionOpening, game: Game, role: str) -> None:
        """Store the arguments.

        Args:
            spans: source of spans.
            opening: what the player has sent with its first request.
            game: its game.
            role: its role.
        """
        self._spans, self._opening, self._game, self._role = spans, opening, game, role
        self._kind = ""
        """Type of the request of the span that was begun last."""

    def begin(self, request: SessionRequest) -> PlayedSpan | None:
        """Begin the span of a request. None: it has none, or belongs to no trace."""
        if request.type not in ("reset", "step"):
            return None
        self._kind = request.type
        carrier = self._opening.carrier | ({"traceparent": request.traceparent} if request.traceparent else {})
        return self._spans.begin(request.type, carrier, {semconv.REWARD_ROLE: self._role}, rewards=not self._opening.client_rewards)

    def end(self, span: PlayedSpan, payload: bytes) -> None:
        """End a span by the response; that of a response that has one is dropped."""
        response: Mapping[str, Any] = msgspec.json.decode(payload)
        data = response["data"]
        if response["type"] == "error":
            span.end(None, "", data["message"])
            return
        if not self._game.is_first(self._role, self._kind, payload):
            return
        metadata = data["metadata"]
        span.span.set_attribute(semconv.EPISODE_ID, metadata[EPISODE_ID])
        observation = observation_of(data["observation"])
        span.end(StepResult(observation, data["reward"], data["done"]), metadata.get(CONTENT) or rendered(observation))
