"""Ratings by role: the Bradley-Terry model, and the games that it is fitted to."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.monitor.ratings import SCRIPTS, Competitor, PlayedGames, Score, ratings, scores_of

FIRST, SECOND = Competitor("first", "p", 1), Competitor("second", "p", 1)


def test_scores_compare_returns_and_script_has_the_opposite() -> None:
    assert scores_of([FIRST, SECOND], {"first": 0.8, "second": -0.8}) == [Score(FIRST, SECOND, 1.0)]
    assert scores_of([FIRST, SECOND], {"first": -0.2, "second": 0.2}) == [Score(FIRST, SECOND, 0.0)]
    assert scores_of([FIRST], {"first": -0.2}) == [Score(FIRST, SCRIPTS, 0.0)]
    assert scores_of([SECOND], {}) == [Score(SECOND, SCRIPTS, 0.5)]
    three = [Competitor(role, "p", 0) for role in "abc"]
    assert [score.points for score in scores_of(three, {"a": 2.0, "b": 1.0, "c": 1.0})] == [1.0, 1.0, 0.5]


def test_ratings_of_two_competitors_are_the_odds() -> None:
    """Against scripts 10 of 11 won: w = 10.5 / 1.5 with the drawn game beside, since the likelihood's maximum has the share won."""
    games = [Score(FIRST, SCRIPTS, 1.0)] * 10 + [Score(FIRST, SCRIPTS, 0.0)]
    assert ratings(PlayedGames(games)) == {FIRST: pytest.approx(400 * math.log10(10.5 / 1.5), abs=0.01)}
    assert ratings(PlayedGames()) == {}


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
    assert ratings(PlayedGames(games)) == {competitor: pytest.approx(points, abs=45) for competitor, points in true.items()}


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4), st.sampled_from([0.0, 0.5, 1.0])), max_size=40))
def test_ratings_are_finite_and_balance_points_won(games: list[tuple[int, int, float]]) -> None:
    """Each competitor has won as many points as the model expects at the maximum of the likelihood."""
    players = [Competitor("first", "p", version) for version in range(4)] + [SCRIPTS]
    scores = [Score(players[first], players[second], points) for first, second, points in games if first != second]
    rated = {SCRIPTS: 0.0, **ratings(PlayedGames(scores))}
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
def test_games_removed_scores_count_no_longer(kept: list[Score], removed: list[Score]) -> None:
    games = PlayedGames([*removed, *(Score(score.opponent, score.competitor, 1 - score.points) for score in kept)])
    games.remove(removed)
    assert sorted(games.sums()) == sorted(PlayedGames(kept).sums())
    assert games.changes == 2 * len(removed) + len(kept)
