"""A served game: a connection for each player, each of which meets an environment of its own with reset and step.

In: requests of players. Out: a response to each. Invariant: a player is pending, its response withheld, until its turn has come or the
episode has ended for it; the environment gets the actions of exactly the roles that it named, each once; a player that does not act in
time, or has left, forfeits; whatever players do, none waits for ever.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from runner.sessions.messages import ErrorCode, LastReset, SessionError, SessionRequest, encode
from spangrad.episode.environment import Content, rendered
from spangrad.episode.match import PlayerState
from spangrad.episode.openenv_fields import ACTING, ACTIONS, CONTENT, EPISODE_ID, FORFEIT, PLAYERS, observation_fields, observation_of
from spangrad.episode.player import joined
from spangrad.settings import EnvironmentServiceSettings

Ask = Callable[[bytes], Awaitable[bytes]]
"""Applies a request to the environment of all players; returns the response."""
_Fields = Mapping[str, Any]


@dataclass(slots=True)
class Seat:
    """Player of a role."""

    state: PlayerState = PlayerState.DONE
    steps: int = 0
    step_name: str | None = None
    response: asyncio.Future[bytes] | None = None
    """Response to its last request, done once it is sent. None: it has sent none in this episode."""
    last_reset: LastReset[asyncio.Future[bytes]] = field(default_factory=LastReset["asyncio.Future[bytes]"])
    recorded: dict[str, bytes] = field(default_factory=dict[str, bytes])
    """Last responses that a span has, by the type of the request."""
    observed: list[_Fields] = field(default_factory=list["_Fields"])
    """Results with an observation since its last response, as `runner.sessions.players` has them."""
    reward: float | None = None
    """Sum of its rewards since its last response. None: it had none."""
    connections: int = 0
    is_late: bool = False
    """True if it did not act in time: its next step gets what has happened since, and is not played."""
    has_left: bool = False
    """True if it did not come back: it forfeits at its next turn."""
    leaving: asyncio.TimerHandle | None = None


class Game:
    """Players of one environment."""

    def __init__(self, ask: Ask, roles: Sequence[str], settings: EnvironmentServiceSettings) -> None:
        """Wait for the players; `ask` applies requests of `runner.sessions.players`."""
        self.seats = {role: Seat() for role in roles}
        self.on_empty: Callable[[], None] = lambda: None
        """Called once no player is connected, or may come back."""
        self._ask = ask
        self._settings = settings
        self._episode = ""
        """Id of the episode; empty: none has begun."""
        self._joined: dict[str, dict[str, Any]] = {}
        """Data of the resets of those who wait for the others."""
        self._joining: asyncio.TimerHandle | None = None
        self._acting: frozenset[str] = frozenset()
        """Roles whose turn it is; empty while the environment plays."""
        self._actions: dict[str, _Fields] = {}
        self._forfeiting: str | None = None
        self._turn: asyncio.TimerHandle | None = None
        self._turn_end = 0.0
        """End of the turn, in seconds of the event loop's clock; refused actions do not change it."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._ended: SessionError | None = None
        """Reason of the end of the environment's session, after which no request is applied. None: it lives."""

    @property
    def is_waiting(self) -> bool:
        """Return whether a player waits for its response."""
        return any(seat.response is not None and not seat.response.done() for seat in self.seats.values())

    @property
    def is_empty(self) -> bool:
        """Return whether no player is connected, or may come back."""
        return all(not seat.connections and seat.leaving is None for seat in self.seats.values())

    def attach(self, role: str) -> None:
        """Note a connection of a player, of one of the roles."""
        seat = self.seats[role]
        seat.connections += 1
        seat.has_left = False
        if seat.leaving is not None:
            seat.leaving.cancel()
            seat.leaving = None

    def detach(self, role: str, *, returns: bool = True) -> None:
        """Note the end of a player's connection; without `returns` it has said that it does not come back, and counts as left at once."""
        seat = self.seats[role]
        seat.connections -= 1
        if not seat.connections:

            def leave() -> None:
                seat.leaving = None
                self._leave(role)
                if self.is_empty:
                    self.on_empty()

            seat.leaving = asyncio.get_running_loop().call_later(self._settings.lease_seconds if returns else 0.0, leave)

    def close(self, error: SessionError) -> None:
        """End all that waits, and refuse all that comes later, with an error."""
        self._ended = error
        self._finish(error)
        for timer in (self._turn, self._joining, *(seat.leaving for seat in self.seats.values())):
            if timer is not None:
                timer.cancel()

    async def answer(self, role: str, request: SessionRequest) -> bytes:
        """Return the response to a player's request, once it may be sent."""
        if self._ended is not None:
            return self._ended.encode()
        try:
            match request.type:
                case "reset":
                    return await asyncio.shield(self._join(role, request))
                case "step":
                    return await asyncio.shield(self._act(role, request))
                case "state":
                    seat = self.seats[role]
                    return encode("state", {EPISODE_ID: self._episode or None, "step_count": seat.steps, "player": seat.state})
                case _:
                    raise SessionError(ErrorCode.UNKNOWN_TYPE, f"Unknown message type: {request.type}")
        except SessionError as error:
            return error.encode()

    def is_first(self, role: str, kind: str, payload: bytes) -> bool:
        """Return whether no span has a response yet, and note that one has: a request that was made again gets the response of before."""
        recorded = self.seats[role].recorded
        if recorded.get(kind) is payload:
            return False
        recorded[kind] = payload
        return True

    def _join(self, role: str, request: SessionRequest) -> asyncio.Future[bytes]:
        """Have a player wait for the others; the last one begins the episode."""
        seat = self.seats[role]
        if (before := seat.last_reset.response_to(request)) is not None:
            return before
        if role in self._joined and seat.response is not None:
            return seat.response  # it asks again, on another connection
        if seat.state is not PlayerState.DONE:
            raise SessionError(ErrorCode.VALIDATION_ERROR, f"the episode of {role} is under way. Send step")
        self._joined[role] = request.data or {}
        loop = asyncio.get_running_loop()
        seat.steps, seat.step_name, seat.is_late = 0, None, False
        seat.observed, seat.reward, seat.response = [], None, loop.create_future()
        seat.last_reset.note(request, seat.response)
        if set(self._joined) == set(self.seats):
            self._begin()
        elif self._joining is None:
            self._joining = loop.call_later(self._settings.idle_seconds, self._give_up_joining)
        return seat.response

    def _begin(self) -> None:
        (first, *_), self._episode = self._joined.values(), uuid.uuid4().hex
        for seat in self.seats.values():
            seat.state = PlayerState.PENDING
        self._clear_joined()
        self._play({"type": "reset", "data": {EPISODE_ID: self._episode, **first}})

    def _clear_joined(self) -> None:
        """Empty the list of those who wait for the others: the next one has its whole time."""
        self._joined = {}
        if self._joining is not None:
            self._joining.cancel()
            self._joining = None

    def _give_up_joining(self) -> None:
        lacking = ", ".join(role for role in self.seats if role not in self._joined)
        error = SessionError(ErrorCode.SESSION_ERROR, f"{lacking} did not reset within {self._settings.idle_seconds:g} s. Reset again")
        for role in self._joined:
            self._respond(self.seats[role], error.encode())
        self._clear_joined()

    def _act(self, role: str, request: SessionRequest) -> asyncio.Future[bytes]:
        """Take a player's action; the last of a turn plays it."""
        seat = self.seats[role]
        if request.data is None:
            raise SessionError(ErrorCode.VALIDATION_ERROR, "Invalid message: a step needs data, the action")
        is_named_again = request.request_id is not None and request.request_id == seat.step_name
        if seat.steps and seat.response is not None and (request.step == seat.steps or is_named_again):
            return seat.response
        if seat.state is PlayerState.DONE and not seat.is_late:
            raise SessionError(ErrorCode.SESSION_ERROR, f"the episode has ended for {role}, or has not begun. Send reset")
        if request.step is not None and request.step != seat.steps + 1:
            raise SessionError(ErrorCode.VALIDATION_ERROR, f"step {request.step} does not follow step {seat.steps} of {role}")
        if seat.is_late:
            seat.steps, seat.step_name, seat.is_late = seat.steps + 1, request.request_id, False
            seat.response = asyncio.get_running_loop().create_future()
            if role in self._acting or seat.state is PlayerState.DONE:
                self._deliver(role)
            return seat.response
        if role not in self._acting or role in self._actions:
            raise SessionError(ErrorCode.VALIDATION_ERROR, f"it is not the turn of {role}")
        seat.steps, seat.step_name = seat.steps + 1, request.request_id
        seat.response = asyncio.get_running_loop().create_future()
        self._actions[role] = request.data
        self._play_if_whole()
        return seat.response

    def _leave(self, role: str) -> None:
        seat = self.seats[role]
        seat.has_left = True
        if self._joined.pop(role, None) is not None:
            seat.last_reset = LastReset()  # it has reset nothing, and may ask again
            self._respond(seat, SessionError(ErrorCode.SESSION_ERROR, f"{role} has left").encode())
            if not self._joined:
                self._clear_joined()
        elif role in self._acting and role not in self._actions:
            self._forfeit(role)

    def _exceed(self) -> None:
        """End the turn: those that have not acted forfeit, of whom the environment hears of the first."""
        self._turn = None
        if late := [role for role in self.seats if role in self._acting and role not in self._actions]:
            self._forfeit(late[0])

    def _forfeit(self, role: str) -> None:
        self._forfeiting = role
        self._play_if_whole()

    def _play_if_whole(self) -> None:
        """Play the turn once every acting role has acted, or one forfeits."""
        if self._forfeiting is not None:
            data: dict[str, Any] = {FORFEIT: self._forfeiting}
        elif self._acting and self._actions.keys() == self._acting:
            data = {ACTIONS: dict(self._actions)}
        else:
            return
        if self._turn is not None:
            self._turn.cancel()
            self._turn = None
        for role in self._acting:
            seat = self.seats[role]
            seat.state, seat.is_late = PlayerState.PENDING, role not in self._actions
        self._play({"type": "step", "data": data})

    def _play(self, message: _Fields) -> None:
        """Have the environment play, and give each player its share of what happens."""
        turn, self._acting = self._acting, frozenset[str]()

        async def play() -> None:
            try:
                response = msgspec.json.decode(await self._ask(msgspec.json.encode(message)))
                if response["type"] == "error":
                    self._refuse(turn, response["data"])
                else:
                    self._deal(response["data"]["observation"])
            except SessionError as error:
                self._ended = error
                self._finish(error)
            except Exception as error:  # such as a response that is nested too deep: without an end the players would wait for ever
                sentence = f"what the environment gave cannot be dealt to the players: {type(error).__name__}: {error}"
                self._finish(SessionError(ErrorCode.EXECUTION_ERROR, sentence))

        self._tasks.add(task := asyncio.create_task(play()))
        task.add_done_callback(self._tasks.discard)

    def _refuse(self, turn: frozenset[str], data: dict[str, Any]) -> None:
        """Return an action that the environment cannot read to its player, who acts again; any other error ends the episode."""
        error = SessionError(ErrorCode(data.pop("code")), data.pop("message"), **data)
        role = data.get("role")
        if error.code is not ErrorCode.VALIDATION_ERROR or role not in turn:
            self._finish(error)
            return
        seat = self.seats[role]
        seat.steps, seat.step_name = seat.steps - 1, None
        del self._actions[role]
        self._respond(seat, error.encode())
        self._await_turn(turn)

    def _deal(self, observation: _Fields) -> None:
        """Give each role what happened to it; those whose turn it is, and those that are done, get their responses."""
        self._actions, self._forfeiting = {}, None
        for role, player in observation[PLAYERS].items():
            seat = self.seats[role]
            if player["observation"] is not None:
                seat.observed.append(player)
            if player["reward"] is not None:
                seat.reward = (seat.reward or 0.0) + player["reward"]
            if player["done"] and seat.state is not PlayerState.DONE:
                seat.state = PlayerState.DONE
                self._deliver(role)
        for role in observation[ACTING]:
            self._deliver(role)
        self._turn_end = asyncio.get_running_loop().time() + self._settings.turn_seconds
        self._await_turn(frozenset(observation[ACTING]))

    def _await_turn(self, acting: frozenset[str]) -> None:
        """Let players act, until the turn is played."""
        self._acting = acting
        for role in acting - self._actions.keys():
            self.seats[role].state = PlayerState.RUNNING
        if left := [role for role in self.seats if role in acting and self.seats[role].has_left and role not in self._actions]:
            self._forfeit(left[0])
        elif acting:
            self._turn = asyncio.get_running_loop().call_at(self._turn_end, self._exceed)

    def _deliver(self, role: str) -> None:
        """Respond to a player with all that happened since its last response; one that has sent nothing meanwhile is late."""
        seat = self.seats[role]
        if seat.response is None or seat.response.done():
            seat.is_late = True
            return
        observation, content = _together(seat.observed)
        metadata = {EPISODE_ID: self._episode, "role": role, **({} if content is None else {CONTENT: content})}
        done = seat.state is PlayerState.DONE
        data = {"observation": observation_fields(observation), "reward": seat.reward, "done": done, "metadata": metadata}
        seat.observed, seat.reward = [], None
        seat.response.set_result(encode("observation", data))

    def _finish(self, error: SessionError) -> None:
        self._acting, self._actions, self._forfeiting = frozenset(), {}, None
        if self._turn is not None:
            self._turn.cancel()
            self._turn = None
        self._clear_joined()
        for seat in self.seats.values():
            seat.state = PlayerState.DONE
            self._respond(seat, error.encode())

    @staticmethod
    def _respond(seat: Seat, payload: bytes) -> None:
        if seat.response is not None and not seat.response.done():
            seat.response.set_result(payload)


def _together(observed: Sequence[_Fields]) -> tuple[Any, Content | None]:
    """Return several observations as one, texts as lines; and as content, where the environment renders its own."""
    values = [observation_of(player["observation"]) for player in observed]
    contents = [player.get(CONTENT) for player in observed]  # None also where the environment's `render` returned it
    shown = [rendered(value) if content is None else content for content, value in zip(contents, values, strict=True)]
    content = joined(shown) if any(content is not None for content in contents) else None
    if len(values) == 1:
        return values[0], content
    return "\n".join(values) if all(isinstance(value, str) for value in values) else values, content
