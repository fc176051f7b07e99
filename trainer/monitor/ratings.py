"""Ratings of policy versions by role, from games between them.

In: scores of games. Out: a rating for each version in each role, in points of Elo's scale, where scripts have 0. Invariant: pure functions;
a version that wins nothing, or everything, has a finite rating.

Source: R. A. Bradley and M. E. Terry, Rank analysis of incomplete block designs I, Biometrika 39 (1952): i beats j with probability
w_i / (w_i + w_j). Maximum likelihood by the iteration of D. R. Hunter, MM algorithms for generalized Bradley-Terry models, The Annals of
Statistics 32 (2004), eq. 3: w_i = W_i / sum_j n_ij / (w_i + w_j). A rating is 400 log10(w_i), so that 400 points are odds of 10 to 1 (Elo).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

_POINTS = 400.0
_PRIOR_GAMES = 1.0
"""Games against a script that count beside each competitor's own, all drawn: without them, who has won everything has no rating."""
_ITERATIONS = 5000
_TOLERANCE = 1e-6
"""Largest relative change of a strength at which the iteration ends."""


@dataclass(frozen=True, slots=True, order=True)
class Competitor:
    """Version of a policy in a role; empty: the scripts, all together."""

    role: str = ""
    policy: str = ""
    version: int = 0


SCRIPTS = Competitor()


@dataclass(frozen=True, slots=True)
class Score:
    """Result of a game between two competitors."""

    competitor: Competitor
    opponent: Competitor
    points: float
    """1 for a win, 0.5 for a draw, 0 for a loss."""


def scores_of(competitors: Sequence[Competitor], returns: Mapping[str, float]) -> list[Score]:
    """Return the scores of one game, by the sums of rewards by role: of two competitors the one with the larger return has won.

    One alone played against scripts, whose return is the opposite of its own.
    """
    own = {competitor: returns.get(competitor.role, 0.0) for competitor in competitors}
    if len(own) == 1:
        own[SCRIPTS] = -sum(own.values())
    return [Score(first, second, (1.0 + np.sign(own[first] - own[second])) / 2) for first, second in combinations(sorted(own), 2)]


def ratings(games: Mapping[Score, int]) -> dict[Competitor, float]:
    """Return the rating of each competitor, that of scripts excepted, which is 0, by the number of games of each score.

    An iteration costs what there are pairs that have played, not pairs of competitors.
    """
    competitors = sorted({competitor for score in games for competitor in (score.competitor, score.opponent)} - {SCRIPTS})
    if not competitors:
        return {}
    places = {competitor: place for place, competitor in enumerate([SCRIPTS, *competitors])}
    prior = [(Score(SCRIPTS, competitor, 0.5), _PRIOR_GAMES) for competitor in competitors]
    rows = [(places[score.competitor], places[score.opponent], count, count * score.points) for score, count in (*prior, *games.items())]
    firsts, seconds, played, won_by_first = zip(*rows, strict=True)
    first, second = np.array(firsts), np.array(seconds)
    played, won_by_first = np.array(played, np.float64), np.array(won_by_first, np.float64)
    size = len(places)
    won = np.bincount(first, won_by_first, size) + np.bincount(second, played - won_by_first, size)
    strengths = np.ones(size)
    for _ in range(_ITERATIONS):
        expected = played / (strengths[first] + strengths[second])
        after = won / (np.bincount(first, expected, size) + np.bincount(second, expected, size))
        after[0] = 1.0
        change = float(np.abs(after / strengths - 1).max())
        strengths = after
        if change < _TOLERANCE:
            break
    return {competitor: float(_POINTS * np.log10(strengths[places[competitor]])) for competitor in competitors}
