"""Games of a server: one session each, shared by a connection for each player.

In: connections that name a game and a role. Out: games, and spans of what each player did, in the trace of its own. Invariant: a game's
session lasts while a player is connected, or may come back, and no longer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from runner.sessions.game import Game
from runner.sessions.messages import ErrorCode, SessionError, SessionOpening
from runner.sessions.sessions import EnvironmentSession, SessionTable
from runner.sessions.step_spans import PlayedSpan, PlayedSpans
from spangrad import semconv
from spangrad.episode.environment import StepResult, rendered
from spangrad.episode.openenv_fields import CONTENT, EPISODE_ID, observation_of
from spangrad.settings import EnvironmentServiceSettings


class Games:
    """Games of a table's sessions."""

    def __init__(self, table: SessionTable, settings: EnvironmentServiceSettings, spans: PlayedSpans) -> None:
        self._table = table
        self._settings = settings
        self.spans = spans

    async def join(self, name: str, roles: Sequence[str], role: str) -> Game:
        """Return the game of a name, or a new one, with a connection of a player more.

        Raises:
            SessionError: there is no such role, or no further session fits.
        """
        if role not in roles:
            remedy = f"Name one of {', '.join(roles)}" if roles else "The environment has none: leave it out"
            raise SessionError(ErrorCode.VALIDATION_ERROR, f"there is no role {role!r}. {remedy}")
        session = await self._table.open(name, SessionOpening())
        game = session.game = session.game or self._create(session, roles)
        game.attach(role)
        return game

    def _create(self, session: EnvironmentSession, roles: Sequence[str]) -> Game:
        async def ask(payload: bytes) -> bytes:
            return (await session.ask(payload)).payload

        game = Game(ask, roles, self._settings)

        def end() -> None:
            if session.game is game:  # else another connection has taken the session over
                self._table.end(session, "closed")

        def over(error: SessionError) -> None:
            session.game = None  # a player that comes later gets another one
            game.close(error)

        game.on_empty = end
        session.attach(over)
        return game


def end_span(span: PlayedSpan, payload: bytes, game: Game, role: str, kind: str) -> None:
    """End the span of a player's reset or step, of this kind, by its response; that of a response that has one is dropped."""
    response: Mapping[str, Any] = msgspec.json.decode(payload)
    data = response["data"]
    if response["type"] == "error":
        span.end(None, "", data["message"])
        return
    if not game.is_first(role, kind, payload):
        return
    metadata = data["metadata"]
    span.span.set_attribute(semconv.EPISODE_ID, metadata[EPISODE_ID])
    observation = observation_of(data["observation"])
    span.end(StepResult(observation, data["reward"], data["done"]), metadata.get(CONTENT) or rendered(observation))
