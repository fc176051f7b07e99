"""Ratings by role: the Bradley-Terry model, and the games that it is fitted to."""

from __future__ import annotations

import math
import random
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spangrad.settings import Settings
from trainer.monitor.held_out import HeldOutRollout, HeldOutRollouts
from trainer.monitor.ratings import SCRIPTS, Competitor, Score, ratings, scores_of

FIRST, SECOND = Competitor("first", "p", 1), Competitor("second", "p", 1)


def test_scores_compare_returns_and_script_has_the_opposite() -> None:
    assert scores_of([FIRST, SECOND], {"first": 0.8, "second": -0.8}) == [Score(FIRST, SECOND, 1.0)]
    assert scores_of([SECOND, FIRST], {"first": -0.2, "second": 0.2}) == [Score(FIRST, SECOND, 0.0)]
    assert scores_of([FIRST], {"first": -0.2}) == [Score(SCRIPTS, FIRST, 1.0)]
    assert scores_of([SECOND], {}) == [Score(SCRIPTS, SECOND, 0.5)]
    three = [Competitor(role, "p", 0) for role in "abc"]
    assert [score.points for score in scores_of(three, {"a": 2.0, "b": 1.0, "c": 1.0})] == [1.0, 1.0, 0.5]


def test_ratings_of_two_competitors_are_the_odds() -> None:
    """Against scripts 10 of 11 won: w = 10.5 / 1.5 with the drawn game beside, since the likelihood's maximum has the share won."""
    games = [Score(FIRST, SCRIPTS, 1.0)] * 10 + [Score(FIRST, SCRIPTS, 0.0)]
    assert ratings(Counter(games)) == {FIRST: pytest.approx(400 * math.log10(10.5 / 1.5), abs=0.01)}
    assert ratings(Counter()) == {}


def test_ratings_recover_the_strengths_that_games_were_drawn_by() -> None:
    rng = random.Random(1)
    roles = ("first", "second")
    true = {Competitor(role, "p", version): 120.0 * version + 40 * (role == "second") for role in roles for version in range(4)}
    players = [*true, SCRIPTS]
    games = list[Score]()
    for _ in range(6000):
        first, second = rng.sample(players, 2)
        odds = 10 ** ((true.get(first, 0.0) - true.get(second, 0.0)) / 400)
        games.append(Score(first, second, float(rng.random() < odds / (1 + odds))))
    assert ratings(Counter(games)) == {competitor: pytest.approx(points, abs=45) for competitor, points in true.items()}


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4), st.sampled_from([0.0, 0.5, 1.0])), max_size=40))
def test_ratings_are_finite_and_balance_points_won(games: list[tuple[int, int, float]]) -> None:
    """Each competitor has won as many points as the model expects at the maximum of the likelihood."""
    players = [Competitor("first", "p", version) for version in range(4)] + [SCRIPTS]
    scores = [Score(players[first], players[second], points) for first, second, points in games if first != second]
    rated = {SCRIPTS: 0.0, **ratings(Counter(scores))}
    assert all(map(math.isfinite, rated.values()))
    won = {competitor: 0.5 - 1 / (1 + 10 ** (-rated[competitor] / 400)) for competitor in rated}
    for score in scores:
        expected = 1 / (1 + 10 ** ((rated[score.opponent] - rated[score.competitor]) / 400))
        won[score.competitor] += score.points - expected
        won[score.opponent] += expected - score.points
    assert {competitor: value for competitor, value in won.items() if competitor != SCRIPTS and abs(value) > 0.01} == {}


SCORES = st.lists(
    st.builds(
        Score, st.builds(Competitor, st.sampled_from("ab")), st.builds(Competitor, st.sampled_from("cd")), st.sampled_from([0.0, 0.5, 1.0])
    ),
    max_size=20,
)


@given(SCORES, SCORES)
def test_games_of_rollout_that_was_built_again_count_no_longer(before: list[Score], after: list[Score]) -> None:
    client: Any = None
    rollouts = HeldOutRollouts(client, Settings(), "spec")
    rollouts._replace({"r": HeldOutRollout(1, {}, before), "other": HeldOutRollout(1, {"reward": 1.0}, after)})
    rollouts._replace({"r": HeldOutRollout(2, {}, after), "other": None})
    assert dict(rollouts.games) == dict(Counter(after))
    assert rollouts.game_changes == 2 * len(before) + 3 * len(after)
