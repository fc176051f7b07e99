"""Routes of one served environment: its sessions over WebSocket and HTTP.

In: requests of OpenEnv's clients. Out: responses. Invariant: as the sessions.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Mapping
from typing import Any

import msgspec
from aiohttp import WSCloseCode, WSMsgType, web

from runner.sessions.frames import FrameEvents
from runner.sessions.games import Games, end_span
from runner.sessions.messages import ErrorCode, SessionError, SessionOpening, decoded
from runner.sessions.sessions import SessionTable
from runner.sessions.shards import Shards
from spangrad import semconv
from spangrad.episode.openenv_fields import EPISODE_ID, REWARDS_HEADER, ROLES
from spangrad.http.server import BODY_BYTES, body, json_response
from spangrad.settings import EnvironmentServiceSettings

_PINGS_IN_LEASE = 1.5
"""Pings in the duration of a connection's lease: a connection is closed when half a pause after a ping no answer has come."""
_STATUSES = {
    ErrorCode.CAPACITY_REACHED: 503,
    ErrorCode.SESSION_ERROR: 409,
    ErrorCode.VALIDATION_ERROR: 422,
    ErrorCode.INVALID_JSON: 400,
    ErrorCode.UNKNOWN_TYPE: 400,
}
"""HTTP status of an error; 500 for the others."""


class _Response(msgspec.Struct):
    """Response of a session, its data as they are."""

    type: str
    data: msgspec.Raw


class SessionRoutes:
    """HTTP and WebSocket handlers of the server."""

    def __init__(self, table: SessionTable, games: Games, shards: Shards, settings: EnvironmentServiceSettings) -> None:
        self._table = table
        self._games = games
        self._shards = shards
        self._heartbeat = settings.lease_seconds / _PINGS_IN_LEASE
        self._connections: set[web.WebSocketResponse] = set()
        self._endings: set[asyncio.Task[None]] = set()

    def below(self, prefix: str) -> list[web.RouteDef]:
        """Return the routes below a path; empty: at the root."""
        return [
            web.get(f"{prefix}/ws", self.connect),
            web.post(f"{prefix}/reset", self.reset),
            web.post(f"{prefix}/step", self.step),
            web.get(f"{prefix}/state", self.state),
            web.get(f"{prefix}/schema", self.schema),
            web.get(f"{prefix}/metadata", self.metadata),
            web.get(f"{prefix}/v1/load", self.load),
        ]

    async def close(self) -> None:
        """Close all connections."""
        goodbye = WSCloseCode.GOING_AWAY
        await asyncio.gather(*(connection.close(code=goodbye) for connection in list(self._connections)), return_exceptions=True)

    async def connect(self, request: web.Request) -> web.WebSocketResponse:
        """Serve a session for as long as its connection."""
        connection = web.WebSocketResponse(
            heartbeat=self._heartbeat, compress=False, max_msg_size=BODY_BYTES, timeout=1.0, decode_text=False
        )
        await connection.prepare(request)
        self._connections.add(connection)
        try:
            name, role = request.query.get("session_id"), request.query.get("role")
            if role is None:
                await self._converse(connection, name, _opening(request.headers))
            else:
                await self._converse_player(connection, name, role, _opening(request.headers))
        except SessionError as error:
            await refuse(connection, error)
        except ConnectionError:
            pass  # the client has left
        finally:
            self._connections.discard(connection)
        return connection

    async def _converse(self, connection: web.WebSocketResponse, name: str | None, opening: SessionOpening) -> None:
        """Apply a connection's requests, one after the other, until it ends."""
        session = await self._table.open(name, opening)

        def over(error: SessionError) -> None:
            self._endings.add(task := asyncio.create_task(refuse(connection, error)))
            task.add_done_callback(self._endings.discard)

        session.attach(over)
        try:
            while (message := await connection.receive()).type in (WSMsgType.TEXT, WSMsgType.BINARY):
                frame = await session.ask(message.data)
                if frame.events & FrameEvents.CLOSED:
                    await connection.close()
                    return
                await connection.send_frame(frame.payload, WSMsgType.TEXT)
        finally:
            session.detach(over)

    async def _converse_player(self, connection: web.WebSocketResponse, name: str | None, role: str, opening: SessionOpening) -> None:
        """Answer a player's requests, one after the other, until its connection ends."""
        if not name:
            raise SessionError(ErrorCode.VALIDATION_ERROR, f"name the game that {role} plays: ?session_id=GAME&role={role}")
        game = await self._games.join(name, self._shards.description.metadata.get(ROLES, ()), role)
        returns = True
        try:
            while (message := await connection.receive()).type in (WSMsgType.TEXT, WSMsgType.BINARY):
                try:
                    request = decoded(message.data)
                except SessionError as error:
                    await connection.send_frame(error.encode(), WSMsgType.TEXT)
                    continue
                if request.type == "close":
                    returns = False
                    await connection.close()
                    return
                is_played = request.type in ("reset", "step")
                span = self._games.spans.begin(request, opening, {semconv.REWARD_ROLE: role}) if is_played else None
                payload = await game.answer(role, request)
                if span is not None:
                    end_span(span, payload, game, role, request.type)
                await connection.send_frame(payload, WSMsgType.TEXT)
        finally:
            game.detach(role, returns=returns)

    async def reset(self, request: web.Request) -> web.Response:
        """Begin an episode, in the session that has its name."""
        data = _object(await body(request))
        is_named = EPISODE_ID in data
        episode = data.setdefault(EPISODE_ID, uuid.uuid4().hex)
        numbers = {name: data.pop(name) for name in ("reset", "request_id") if name in data}
        return await self._apply(request, episode, {"type": "reset", "data": data, **numbers}, opens=True, keeps=is_named)

    async def step(self, request: web.Request) -> web.Response:
        """Apply an action in the episode that is named."""
        data = _object(await body(request))
        if not isinstance(action := data.get("action"), dict):
            sentence = f"the action {action!r:.200} is no object. Send {{'text': ...}}"
            return _http_response(SessionError(ErrorCode.VALIDATION_ERROR, sentence).encode())
        message = {"type": "step", "data": action, **{name: data[name] for name in ("step", "request_id") if name in data}}
        return await self._apply(request, data.get(EPISODE_ID), message)

    async def state(self, request: web.Request) -> web.Response:
        """Return the state of the episode that is named."""
        return await self._apply(request, request.query.get(EPISODE_ID), {"type": "state"})

    async def schema(self, request: web.Request) -> web.Response:
        """Return the JSON schemas of actions, observations and state."""
        return json_response(self._shards.description.schema)

    async def metadata(self, request: web.Request) -> web.Response:
        """Return the description of the environment."""
        return json_response(self._shards.description.metadata)

    async def load(self, request: web.Request) -> web.Response:
        """Return the number of sessions, and its limit."""
        return json_response({"sessions": len(self._table), "capacity": self._table.capacity})

    async def _apply(
        self, request: web.Request, name: object, message: Mapping[str, Any], *, opens: bool = False, keeps: bool = True
    ) -> web.Response:
        """Apply a request over HTTP; `opens` a session where there is none, and `keeps` it after an error."""
        try:
            if not isinstance(name, str) or not name:
                sentence = f"name the episode: {EPISODE_ID}, as reset answers it in its metadata"
                raise SessionError(ErrorCode.VALIDATION_ERROR, sentence)
            session = await self._table.open(name, _opening(request.headers)) if opens else self._table.find(name)
            frame = await session.ask(msgspec.json.encode(message))
            if frame.events & FrameEvents.ERROR and not keeps:  # its user has not heard its name
                self._table.end(session, "closed")
        except SessionError as error:
            return _http_response(error.encode())
        return _http_response(frame.payload)


async def refuse(connection: web.WebSocketResponse, error: SessionError) -> None:
    """Send an error, and close."""
    try:
        await connection.send_frame(error.encode(), WSMsgType.TEXT)
        await connection.close()
    except ConnectionError:
        pass  # the client has left


def _http_response(payload: bytes) -> web.Response:
    response = msgspec.json.decode(payload, type=_Response)
    if response.type != "error":
        return web.Response(body=bytes(response.data), content_type="application/json")
    data = msgspec.json.decode(response.data)
    status = _STATUSES.get(data["code"], 500)
    return json_response({"error": data["message"], **data}, status, {"Retry-After": "1"} if status == 503 else None)


def _opening(headers: Mapping[str, str]) -> SessionOpening:
    carrier = {name: headers[name] for name in ("traceparent", "tracestate", "baggage") if name in headers}
    return SessionOpening(carrier=carrier, client_rewards=headers.get(REWARDS_HEADER) == "client")


def _object(text: bytes) -> dict[str, Any]:
    return msgspec.json.decode(text or b"{}", type=dict[str, Any])
