"""Served games of two players: random interleavings of joining, acting, retries, leaving and resets, over several episodes."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Mapping
from enum import Enum
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from runner.sessions.game import Game
from runner.sessions.messages import SessionOpening, SessionRequest, decoded
from runner.sessions.players import PlayersInstance
from runner.sessions.shard import call_here
from runner.sessions.step_spans import PlayedSpans
from spangrad.episode.environment import StepResult
from spangrad.settings import EnvironmentServiceSettings
from tests.support.virtual_time import run_in_virtual_time

ROLES = ("black", "white")
LIMITS = EnvironmentServiceSettings(idle_seconds=100.0, turn_seconds=10.0, lease_seconds=3.0)
TURNS = ("black", "white", "both", "white", "black")
PAUSES = (0.0, 0.05, 1.0, 4.0, 12.0)
"""Seconds after a move: none, within a play, within a turn, enough to have left, and more than a turn."""
BOUND = LIMITS.idle_seconds + len(TURNS) * (LIMITS.turn_seconds + 1)
"""Time in which every request is answered, whatever the players do."""


class Move(Enum):
    """Action of a player at a place of the interleaving, which does not wait for its response."""

    RESET = "reset"
    ACT = "act"
    """Sends its next step, under a number or a name, whether or not it is its turn."""
    PUSH = "push"
    """Sends a step without number or name."""
    MUMBLE = "mumble"
    """Sends an action that cannot be read."""
    BREAK = "break"
    """Sends an action at which the environment fails."""
    RETRY = "retry"
    """Sends its last request again, from another connection."""
    DROP = "drop"
    """Loses its connection, and comes back with its next move."""
    LEAVE = "leave"


class Board:
    """A zero-sum game of two that can be played again, and which checks what it is asked for."""

    roles = ROLES

    def __init__(self) -> None:
        self.at = 0
        self.played = set[str]()
        """Actions of all episodes; each has a name of its own."""
        self.dealt: list[dict[str, float]] = []
        """Rewards by role of each episode."""
        self.faults: list[str] = []

    def reset(self, task: Any) -> dict[str, str]:
        self.at = 0
        self.dealt.append(dict.fromkeys(ROLES, 0.0))
        return dict.fromkeys(ROLES, self.text)

    @property
    def text(self) -> str:
        return f"{len(self.dealt) - 1} {self.at}"

    def acting(self) -> list[str]:
        return [role for role in ROLES if TURNS[self.at] in {role, "both"}]

    def parse(self, text: str) -> tuple[str, str]:
        role, name = text.split()
        return role, name

    def step(self, action: Mapping[str, tuple[str, str]]) -> dict[str, StepResult]:
        self._check(set(action) == set(self.acting()), f"{sorted(action)} acted out of turn")
        for role, (sender, name) in action.items():
            self._check(sender == role, f"{role} acted for {sender}")
            self._check(name not in self.played, f"{name} was played twice")
            self.played.add(name)
        if any(name.endswith("!") for _, name in action.values()):
            raise RuntimeError("the environment breaks")
        return self._results(0.5 if self.at % 2 else -1.0, done=self.at + 1 == len(TURNS))

    def forfeit(self, role: str) -> dict[str, StepResult]:
        self._check(role in self.acting(), f"{role} forfeited out of turn")
        return self._results(-1.0 if role == "black" else 1.0, done=True)

    def _check(self, holds: bool, fault: str) -> None:
        if not holds:
            self.faults.append(fault)  # raised, it would be a failure of the environment, which players may cause as well

    def _results(self, reward: float, *, done: bool) -> dict[str, StepResult]:
        """Give black a reward, and white its negative."""
        self.at += 1
        rewards = {"black": reward, "white": -reward}
        for role in ROLES:
            self.dealt[-1][role] += rewards[role]
        return {role: StepResult(self.text, rewards[role], done) for role in ROLES}


class Client:
    """A player that sends requests without waiting for the responses, and notes these as they come."""

    def __init__(self, game: Game, role: str, *, by_name: bool) -> None:
        self.game, self.role, self.by_name = game, role, by_name
        self.connected, self.steps, self.number = False, 0, 0
        self.last: dict[str, Any] | None = None
        """Last request, if it may be sent again."""
        self.sent: list[asyncio.Task[dict[str, Any]]] = []
        self.told: dict[str, dict[str, Any]] = {}
        """Data of responses by their text: a response that was given again counts once."""
        self.resets, self.waits_since = 0, 0.0
        """Resets without a response, and the time of the first."""

    def make(self, move: Move) -> None:
        if move in {Move.DROP, Move.LEAVE}:
            if self.connected:
                self.connected = False
                self.game.detach(self.role, returns=move is Move.DROP)
            return
        if not self.connected:
            self.connected = True
            self.game.attach(self.role)
        self.number += 1
        name = f"{self.role}-{self.number}"
        if move is Move.RESET:
            message: dict[str, Any] = {"type": "reset", "data": {}, "request_id": name}
        elif move is Move.RETRY:
            if self.last is None:
                return
            message = self.last
        else:
            text = "nothing" if move is Move.MUMBLE else f"{self.role} {name}{'!' * (move is Move.BREAK)}"
            key = {} if move is Move.PUSH else {"request_id": name} if self.by_name else {"step": self.steps + 1}
            message = {"type": "step", "data": {"text": text}, **key}
        self.last = None if move is Move.PUSH else message
        self.sent.append(asyncio.create_task(self._receive(message)))

    async def _receive(self, message: dict[str, Any]) -> dict[str, Any]:
        now, is_reset = asyncio.get_running_loop().time, message["type"] == "reset"
        if is_reset:
            self.waits_since = self.waits_since if self.resets else now()
            self.resets += 1
        response = json.loads(await self.game.answer(self.role, decoded(json.dumps(message).encode())))
        self.resets -= is_reset
        if response["type"] == "error":
            if "did not reset within" in response["data"]["message"] and message is self.last:
                assert now() - self.waits_since > LIMITS.idle_seconds - 0.5, "the others had less time than the limit"
        else:
            self.steps = json.loads(await self.game.answer(self.role, SessionRequest(type="state")))["data"]["step_count"]
            self.told[json.dumps(response["data"])] = response["data"]
        return response

    async def play(self) -> None:
        """Play a whole episode, as a player does that waits for each response."""
        self.make(Move.RESET)
        while not (response := await self.sent[-1])["data"].get("done"):
            assert response["type"] == "observation", response
            self.make(Move.ACT)

    def returns(self) -> dict[int, float]:
        """Return the sum of the rewards that it was told, by episode, of those whose end it was told."""
        sums: dict[int, float] = {}
        ended = set[int]()
        for data in self.told.values():
            episode = int(data["observation"]["text"].split()[0])
            sums[episode] = sums.get(episode, 0.0) + (data["reward"] or 0.0)
            if data["done"]:
                ended.add(episode)
        return {episode: sums[episode] for episode in ended}


MOVES = [*Move, *[Move.ACT] * 8, *[Move.RETRY] * 3, Move.RESET]
PLACES = list(itertools.product(ROLES, MOVES, PAUSES))
interleavings = st.lists(st.sampled_from(PLACES), max_size=16)


@given(interleavings, st.booleans(), st.booleans())
@settings(max_examples=1000, deadline=None)
def test_served_game_of_two_with_random_interleavings_answers_all_and_adds_to_zero(
    interleaving: list[tuple[str, Move, float]], black_by_name: bool, white_by_name: bool
) -> None:
    board = Board()

    async def scenario() -> None:
        session = PlayersInstance(board, SessionOpening(), PlayedSpans({}), call_here, 1)

        async def ask(payload: bytes) -> bytes:
            await asyncio.sleep(0.1)
            return (await session.answer(payload)).payload

        game = Game(ask, ROLES, LIMITS)
        clients = {role: Client(game, role, by_name=by_name) for role, by_name in zip(ROLES, (black_by_name, white_by_name), strict=True)}
        for role in ROLES:  # most interleavings begin with an episode
            clients[role].make(Move.RESET)
        for role, move, pause in interleaving:
            clients[role].make(move)
            await asyncio.sleep(pause)
        await asyncio.sleep(BOUND)
        for client in clients.values():
            assert all(request.done() for request in client.sent), "a request has no response"
            assert all(request.result()["type"] in {"observation", "error"} for request in client.sent)
        assert not game.is_waiting
        await asyncio.gather(*(client.play() for client in clients.values()))
        assert board.faults == []
        returns = {role: client.returns() for role, client in clients.items()}
        for role in ROLES:
            assert {episode: board.dealt[episode][role] for episode in returns[role]} == returns[role]
        both = returns["black"].keys() & returns["white"].keys()
        assert len(board.dealt) - 1 in both
        assert all(returns["black"][episode] + returns["white"][episode] == 0 for episode in both)

    run_in_virtual_time(scenario())
