"""Served games: players on connections of their own, for random games, delays and departures; in virtual time."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runner.sessions.game import Game
from runner.sessions.messages import ErrorCode, SessionError, SessionOpening, decoded
from runner.sessions.players import PlayersInstance
from runner.sessions.shard import call_here, description_of
from runner.sessions.step_spans import PlayedSpans
from spangrad.episode.environment import StepResult
from spangrad.settings import EnvironmentServiceSettings
from tests.support.virtual_time import run_in_virtual_time

ROLES = ("a", "b", "c")
LIMITS = EnvironmentServiceSettings(idle_seconds=100.0, turn_seconds=10.0, lease_seconds=3.0)


class Habit(Enum):
    """Behaviour of a player at one of its turns."""

    ACTS = "acts"
    HESITATES = "hesitates"
    DAWDLES = "dawdles"
    """It acts after its time is over."""
    RECONNECTS = "reconnects"
    """Its connection breaks while it waits, and it asks again by the step's number."""
    REPEATS = "repeats"
    """It sends an action that cannot be read first, and asks out of turn from a second connection."""
    LEAVES = "leaves"
    VANISHES = "vanishes"
    """Its connection breaks, and it does not come back."""


class Table:
    """A zero-sum game whose turns are drawn beforehand, and which checks what it is asked for."""

    roles = ROLES

    def __init__(self, turns: Sequence[frozenset[str]], *, forfeit_ends: bool) -> None:
        self.turns, self.forfeit_ends, self.at = turns, forfeit_ends, 0
        self.numbers = dict.fromkeys(ROLES, 0)
        self.dealt = dict.fromkeys(ROLES, 0.0)

    def system_prompt(self, role: str) -> str:
        return f"You are {role}."

    def reset(self, task: Any) -> dict[str, str]:
        self.task = task
        return {role: f"begin {role}" for role in ROLES}

    def acting(self) -> list[str]:
        return sorted(self.turns[self.at])

    def parse(self, text: str) -> tuple[str, int]:
        role, number = text.split()
        return role, int(number)

    def step(self, actions: Mapping[str, tuple[str, int]]) -> dict[str, StepResult]:
        assert set(actions) == self.turns[self.at], "acted out of turn"
        for role, (sender, number) in actions.items():
            assert sender == role
            assert number > self.numbers[role], "played twice"
            self.numbers[role] = number
        return self._results(done=False)

    def forfeit(self, role: str) -> dict[str, StepResult]:
        assert role in self.turns[self.at]
        return self._results(done=self.forfeit_ends)

    def _results(self, *, done: bool) -> dict[str, StepResult]:
        self.at += 1
        is_over = done or self.at == len(self.turns)
        rewards = {"a": 1.0, "b": -1.0} if self.at % 2 else {"b": 0.5, "c": -0.5}
        for role, reward in rewards.items():
            self.dealt[role] += reward
        return {role: StepResult(f"turn {self.at}", rewards.get(role), is_over) for role in ROLES}


def game_of(table: Table) -> Game:
    session = PlayersInstance(table, SessionOpening(), PlayedSpans({}), call_here, 1)

    async def ask(payload: bytes) -> bytes:
        await asyncio.sleep(0.1)
        return (await session.answer(payload)).payload

    return Game(ask, ROLES, LIMITS)


async def send(game: Game, role: str, kind: str, data: object = None, **fields: object) -> dict[str, Any]:
    """A request of a player and its response."""
    return json.loads(await game.answer(role, decoded(json.dumps({"type": kind, "data": data, **fields}).encode())))


async def play(game: Game, role: str, habits: Sequence[Habit]) -> tuple[float, str]:
    """Play one episode; return the rewards that the player saw, and how it ended for it."""
    game.attach(role)
    response, total, number = await send(game, role, "reset", {"task": role}), 0.0, 0
    while response["type"] == "observation":
        total += response["data"]["reward"] or 0.0
        if response["data"]["done"]:
            return total, "done"
        habit = habits[number] if number < len(habits) else Habit.ACTS
        number += 1
        text = {"text": f"{role} {number}"}
        match habit:
            case Habit.LEAVES | Habit.VANISHES:
                game.detach(role, returns=habit is Habit.VANISHES)
                return total, "left"
            case Habit.HESITATES:
                await asyncio.sleep(LIMITS.turn_seconds / 2)
            case Habit.DAWDLES:
                await asyncio.sleep(LIMITS.turn_seconds * 2)
            case Habit.RECONNECTS:
                lost = asyncio.create_task(send(game, role, "step", text, step=number))
                await asyncio.sleep(0.05)
                lost.cancel()
                game.detach(role)
                game.attach(role)
            case Habit.REPEATS:
                unread = await send(game, role, "step", {"text": "nothing"}, step=number)
                if unread["type"] == "error" and unread["data"]["code"] == "VALIDATION_ERROR":
                    await send(game, role, "step", text, step=number + 5)
                else:  # its turn had passed, or the episode has ended meanwhile
                    response = unread
                    continue
            case Habit.ACTS:
                pass
        response = await send(game, role, "step", text, step=number)
    return total, response["data"]["code"]


SUBSETS = [frozenset(role for place, role in enumerate(ROLES) if number >> place & 1) for number in range(1, 2 ** len(ROLES))]
plans = st.fixed_dictionaries({role: st.lists(st.sampled_from(Habit), max_size=4) for role in ROLES})


@given(st.lists(st.sampled_from(SUBSETS), min_size=1, max_size=6), plans, st.booleans())
@settings(max_examples=300, deadline=None)
def test_served_game_with_random_habits_ends_for_every_player(
    turns: list[frozenset[str]], habits: dict[str, list[Habit]], forfeit_ends: bool
) -> None:
    table = Table(turns, forfeit_ends=forfeit_ends)

    async def scenario() -> None:
        game = game_of(table)
        ends = dict(zip(ROLES, await asyncio.gather(*(play(game, role, habits[role]) for role in ROLES)), strict=True))
        assert {end for _, end in ends.values()} <= {"done", "left"}
        assert all(total == table.dealt[role] for role, (total, end) in ends.items() if end == "done")
        assert sum(table.dealt.values()) == 0
        assert not game.is_waiting

    run_in_virtual_time(scenario())


def test_served_game_responds_at_a_players_turn_with_all_that_happened() -> None:
    table = Table([frozenset("a"), frozenset("b"), frozenset("a")], forfeit_ends=True)

    async def scenario() -> None:
        game = game_of(table)
        for role in ROLES:
            game.attach(role)
        tasks = dict(zip(ROLES, (7, 8, 9), strict=True))
        resets = {role: asyncio.create_task(send(game, role, "reset", {"task": task})) for role, task in tasks.items()}
        await asyncio.sleep(1)
        assert table.task == 7, "the task is that of the first reset"
        assert [role for role, reset in resets.items() if reset.done()] == ["a"]
        assert (await resets["a"])["data"]["observation"] == {"text": "begin a"}
        assert (await send(game, "b", "state"))["data"]["player"] == "pending"
        refused = await send(game, "b", "step", {"text": "b 1"})
        assert (refused["data"]["code"], refused["data"]["message"]) == ("VALIDATION_ERROR", "it is not the turn of b")
        first = asyncio.create_task(send(game, "a", "step", {"text": "a 1"}))
        reply = (await resets["b"])["data"]
        assert (reply["observation"], reply["reward"], reply["done"]) == ({"text": "begin b\nturn 1"}, -1.0, False)
        assert not first.done()
        second = asyncio.create_task(send(game, "b", "step", {"text": "b 1"}))
        assert (await first)["data"]["observation"] == {"text": "turn 1\nturn 2"}
        await asyncio.sleep(LIMITS.turn_seconds + 1)  # a forfeits
        ended = (await second)["data"]
        assert (ended["observation"], ended["reward"], ended["done"]) == ({"text": "turn 2\nturn 3"}, -0.5, True)
        late = (await send(game, "a", "step", {"text": "a 2"}))["data"]
        assert (late["observation"], late["reward"], late["done"]) == ({"text": "turn 3"}, 1.0, True)
        assert (await resets["c"])["data"]["observation"] == {"text": "begin c\nturn 1\nturn 2\nturn 3"}
        assert (await send(game, "a", "step", {"text": "a 3"}))["data"]["code"] == "SESSION_ERROR"

    run_in_virtual_time(scenario())


def test_served_game_observation_rendered_as_none_is_shown_as_it_is() -> None:
    table: Any = Table([frozenset("a")], forfeit_ends=True)
    table.render = lambda observation: None if observation.startswith("begin") else observation.upper()

    async def scenario() -> None:
        game = game_of(table)
        for role in ROLES:
            game.attach(role)
        resets = {role: asyncio.create_task(send(game, role, "reset", {})) for role in ROLES}
        assert "content" not in (await resets["a"])["data"]["metadata"]
        assert (await send(game, "a", "step", {"text": "a 1"}))["data"]["metadata"]["content"] == "TURN 1"
        assert (await resets["b"])["data"]["metadata"]["content"] == "begin b\nTURN 1"

    run_in_virtual_time(scenario())


def test_served_game_reset_asked_for_again_resets_nothing_and_is_answered_as_before() -> None:
    table = Table([frozenset("a"), frozenset("b")], forfeit_ends=True)

    async def scenario() -> None:
        game = game_of(table)
        for role in ROLES:
            game.attach(role)
        resets = {role: asyncio.create_task(send(game, role, "reset", {}, request_id=role)) for role in ROLES}
        first = await resets["a"]
        assert await send(game, "a", "reset", {}, request_id="a") == first
        waiting = asyncio.create_task(send(game, "b", "reset", {}, request_id="b"))
        ended = asyncio.create_task(send(game, "a", "step", {"text": "a 1"}, step=1))
        assert await waiting == await resets["b"]
        assert await send(game, "a", "reset", {}, request_id="a") == first
        assert (await send(game, "a", "reset", {}, request_id="later"))["data"]["code"] == "VALIDATION_ERROR"
        assert (await send(game, "b", "step", {"text": "b 1"}, step=1))["data"]["done"] is True
        assert (await ended)["data"]["done"] is True
        assert table.at == 2, "the game went on"

    run_in_virtual_time(scenario())


def test_served_game_begins_with_all_players_or_not_at_all() -> None:
    async def scenario() -> None:
        game = game_of(Table([frozenset("a")], forfeit_ends=True))
        for role in "ab":
            game.attach(role)
        alone = await asyncio.gather(send(game, "a", "reset"), send(game, "b", "reset"))
        assert [answer["data"]["code"] for answer in alone] == ["SESSION_ERROR", "SESSION_ERROR"]
        assert "c did not reset within 100 s" in alone[0]["data"]["message"]
        game.attach("c")
        begun = await asyncio.wait_for(asyncio.gather(*(play(game, role, ()) for role in ROLES)), 60)
        assert begun == [(1.0, "done"), (-1.0, "done"), (0.0, "done")]

    run_in_virtual_time(scenario())


def test_served_game_turn_is_not_prolonged_by_actions_that_are_refused() -> None:
    async def scenario() -> None:
        game, time = game_of(Table([frozenset("a"), frozenset("b")], forfeit_ends=True)), asyncio.get_running_loop().time
        for role in ROLES:
            game.attach(role)
        resets = {role: asyncio.create_task(send(game, role, "reset", {})) for role in ROLES}
        await resets["a"]
        began = time()
        while not resets["b"].done() and time() - began < LIMITS.turn_seconds * 5:
            await asyncio.sleep(LIMITS.turn_seconds / 3)
            await send(game, "a", "step", {"text": "nothing"})
        assert time() - began < LIMITS.turn_seconds * 2
        assert (await resets["b"])["data"]["done"] is True

    run_in_virtual_time(scenario())


@pytest.mark.parametrize("in_play", [False, True])
def test_served_game_whose_session_has_ended_refuses_a_player_at_once(in_play: bool) -> None:
    """Another player may have come back already, to a new game under the same name."""
    ended = SessionError(ErrorCode.SESSION_ERROR, "the process of this environment has ended")

    async def ask(payload: bytes) -> bytes:
        raise ended

    async def scenario() -> None:
        game, time = Game(ask, ROLES, LIMITS), asyncio.get_running_loop().time
        if in_play:
            await asyncio.gather(*(send(game, role, "reset", {}) for role in ROLES))
        else:
            game.close(ended)
        began = time()
        refused = await send(game, "a", "reset", {})
        assert (refused["data"]["message"], time() - began) == (str(ended), 0.0)

    run_in_virtual_time(scenario())


def test_served_game_of_a_lost_episode_has_ended_for_a_player_that_acts() -> None:
    async def scenario() -> None:
        game = game_of(Table([frozenset("a")], forfeit_ends=True))
        game.attach("a")
        assert (await send(game, "a", "step", {"text": "a 3"}, step=3))["data"] == {
            "message": "the episode has ended for a, or has not begun. Send reset",
            "code": "SESSION_ERROR",
        }

    run_in_virtual_time(scenario())


async def test_description_of_an_environment_with_roles_has_each_roles_prompt() -> None:
    metadata: Any = (await description_of(Table([frozenset("a")], forfeit_ends=True))).metadata
    assert (metadata["roles"], metadata["system_prompts"]["b"], metadata["forfeits"]) == (["a", "b", "c"], "You are b.", True)


async def test_game_whose_response_cannot_be_read_ends_for_all_players() -> None:
    async def ask(payload: bytes) -> bytes:
        return b"[" * 5000 + b"]" * 5000

    game = Game(ask, ("a", "b"), LIMITS)
    async with asyncio.timeout(30):
        responses = await asyncio.gather(*(game.answer(role, decoded(b'{"type": "reset", "data": {}}')) for role in ("a", "b")))
    for response in responses:
        assert json.loads(response)["data"]["message"].startswith(
            "what the environment gave cannot be dealt to the players: RecursionError"
        )
    assert not game.is_waiting
