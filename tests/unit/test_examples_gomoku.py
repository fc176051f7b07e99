"""Gomoku: its rules, its contexts, the script, and the openings; what the warm start teaches has the contexts of an episode."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from examples.gomoku.board import LARGE, SMALL, Rules
from examples.gomoku.game import FIRST, PASS, PASS_REWARD, SECOND, Gomoku, LargeGomoku
from examples.gomoku.model import MOVES, WORDS, transcript
from examples.gomoku.script import OTHER, OWN, Script, stones_of
from examples.gomoku.task import HELD_OUT, openings, trained_opening
from spangrad.episode.environment import EnvironmentCalls
from spangrad.episode.match import Match, MatchOutcome
from spangrad.episode.player import EpisodeLimits
from spangrad.episode.script import ScriptModel

EMPTY = {FIRST: [], SECOND: []}


def match(game: Gomoku, task: dict[str, list[str]], **players) -> MatchOutcome:
    """Play a game of two functions that write replies."""
    calls = EnvironmentCalls(game)
    return asyncio.run(Match(calls, {role: ScriptModel(reply) for role, reply in players.items()}, EpisodeLimits()).run(task))


def replies(cells: Sequence[str]) -> Callable[[object], str]:
    """A function that replies with these cells, then with nothing."""
    left = iter(cells)
    return lambda _: next(left, "")


@pytest.mark.parametrize(("rules", "lines"), [(SMALL, 28), (LARGE, 140)])
def test_rules_have_every_line_of_the_board(rules: Rules, lines: int) -> None:
    assert len({line for of_cell in rules.lines.values() for line in of_cell}) == lines
    assert len(rules.cells) == rules.size**2
    assert all(cell in line for cell, of_cell in rules.lines.items() for line in of_cell)


def test_completing_names_free_cells_that_end_a_line() -> None:
    stones = {**dict.fromkeys(("a1", "b1", "c1"), OWN), **dict.fromkeys(("b2", "c3", "d4"), OTHER)}
    assert SMALL.completing(stones, OWN) == ["d1"]
    assert SMALL.completing(stones, OTHER) == ["e5"], "the other end of the diagonal is taken"


def test_gomoku_players_read_the_same_board_each_from_its_side() -> None:
    game = Gomoku()
    assert game.reset({FIRST: ["a1"], SECOND: ["c3"]}) == {FIRST: "a1 C3", SECOND: "c3 A1"}
    assert game.reset(EMPTY) == {FIRST: "empty", SECOND: "empty"}
    assert {role: (result.observation, result.reward) for role, result in game.step({FIRST: "b2"}).items()} == {
        FIRST: (None, 0.2),
        SECOND: ("B2", -0.2),
    }
    assert game.acting() == SECOND
    passed = {role: (result.observation, result.reward) for role, result in game.step({SECOND: "b2"}).items()}
    assert passed == {FIRST: (PASS, -PASS_REWARD), SECOND: (None, PASS_REWARD)}, "the cell is taken"
    assert game.step({FIRST: "nonsense"})[SECOND].observation == PASS
    assert game.stones == {"b2": FIRST}


def test_gomoku_win_forfeit_and_draw_give_rewards_by_role() -> None:
    game = Gomoku()
    game.reset({FIRST: ["a1", "b1", "c1"], SECOND: ["a5", "b5", "e3"]})
    results = game.step({FIRST: "d1"})
    assert {role: (result.reward, result.done) for role, result in results.items()} == {FIRST: (1.0, True), SECOND: (-1.0, True)}
    assert {role: result.reward for role, result in game.forfeit(FIRST).items()} == {FIRST: -1.0, SECOND: 1.0}
    silent = match(Gomoku(), EMPTY, first=lambda _: "", second=lambda _: "")
    assert len(silent.steps) == 25
    assert silent.returns == pytest.approx({FIRST: PASS_REWARD, SECOND: -PASS_REWARD}), "the first player passed once more"


@given(seed=st.integers(0, 10**6))
def test_gomoku_returns_of_any_match_add_to_zero(seed: int) -> None:
    rng = random.Random(seed)

    def blind(_: object) -> str:
        return rng.choice((*SMALL.cells, "nonsense"))

    outcome = match(Gomoku(), trained_opening(rng), first=blind, second=Script(SMALL, rng=rng))
    assert sum(outcome.returns.values()) == pytest.approx(0)
    assert outcome.end == "done"


def test_script_sees_its_chance_before_the_threat() -> None:
    message = {"role": "user", "content": "a1 b1 c1 A5 B5 C5"}
    sharp, blind = (Script(SMALL, sees=sees, rng=random.Random(0)) for sees in (1.0, 0.0))
    assert {sharp([message]) for _ in range(20)} == {"d1"}
    assert sharp([{"role": "user", "content": "a1 b1 e1 A5 B5 C5"}]) == "d5"
    assert len({blind([message]) for _ in range(200)}) == 19
    assert stones_of(SMALL, [message, {"role": "assistant", "content": "d3"}, {"role": "user", "content": "pass"}])["d3"] == OWN


def test_script_of_nine_cells_plays_the_large_board() -> None:
    outcome = match(LargeGomoku(), EMPTY, first=Script(LARGE, 1.0), second=Script(LARGE, 0.0))
    assert outcome.end == "done"
    assert "9 x 9 cells, from a1 in one corner to i9" in outcome.messages[SECOND][0]["content"]
    assert {role: len({reply.text for reply in replies}) for role, replies in outcome.replies.items()} == {
        role: len(replies) for role, replies in outcome.replies.items()
    }


def test_transcript_has_the_contexts_of_an_episode() -> None:
    seen: set[str] = set()
    for seed in range(40):
        messages = [{name: text for name, text in message.items() if name != "odds"} for message in transcript(random.Random(seed))]
        role, opening_seed = messages[0]["content"], random.Random(seed)
        opening_seed.choice(Gomoku.roles)
        task = trained_opening(opening_seed)
        # The opponent's moves are read from the transcript; the reader's are its replies.
        own = [message["content"] for message in messages if message["role"] == "assistant"]
        words = [word for message in messages if message["role"] == "user" for word in message["content"].split()]
        others = [word.lower() for word in words if word.isupper()][len(task[FIRST]) :]
        players = {player: replies(own if player == role else others) for player in Gomoku.roles}
        outcome = match(Gomoku(), task, **players)
        assert [*outcome.messages[role]][: len(messages)] == messages
        assert len(own) <= MOVES
        seen |= {word for message in messages for word in message["content"].split()}
    assert seen <= set(WORDS)


def test_openings_held_out_are_not_trained() -> None:
    drawn, other = openings(1, 500), openings(2, 500)
    assert drawn.held_out == other.held_out
    assert (len(drawn.train), len(drawn.held_out)) == (500, HELD_OUT)
    assert drawn.train != other.train
    assert not [opening for opening in drawn.train if opening in drawn.held_out]
    assert {len(opening[FIRST]) for opening in drawn.held_out} == {1, 2}
