"""What a search does next, worked out from what is known: which edits were made, and how candidates were measured.

In: the version that the search began with, its shape, edits and scores. Out: the next step, or the end. Invariant: the same facts give the
same step, so a search that was killed goes on where its facts stand; nothing that has a score is measured again; the best never gets worse.

The search is that of Pryzant et al. 2023 (Automatic Prompt Optimization with "Gradient Descent" and Beam Search): in each round each
prompt of the beam is criticised and edited `branch` times, and the `width` best of all that were measured make the next beam. Instead of
a bandit, which spends few evaluations on poor candidates, all candidates have the same held-out tasks: they can be compared in pairs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Shape:
    """How far and how wide a search goes."""

    rounds: int
    width: int
    """Prompts that are kept after a round."""
    branch: int
    """Edits of each of them in a round."""


@dataclass(frozen=True, slots=True, order=True)
class Place:
    """One edit: the number-th (from 0) of a parent in a round (from 1)."""

    round: int
    parent: int
    number: int


@dataclass(frozen=True, slots=True)
class Round:
    """How the search stands after a round."""

    number: int
    """0: only the start is known."""
    beam: tuple[int, ...]
    """The best versions so far, the best first."""


@dataclass(frozen=True, slots=True)
class Expand:
    """Edit: these edits are not made yet."""

    places: tuple[Place, ...]


@dataclass(frozen=True, slots=True)
class Measure:
    """Measure: these versions have no score yet."""

    round: int
    versions: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Done:
    """Nothing is left to do."""

    rounds: tuple[Round, ...]
    entered: tuple[int, ...]
    """Every version that was a candidate, in the order in which they came in."""


Step = Expand | Measure | Done


def next_step(start: int, shape: Shape, edits: Mapping[Place, int | None], scores: Mapping[int, float | None]) -> Step:
    """What to do next.

    Args:
        start: the version that the search began with.
        shape: of the search.
        edits: what came of each edit that was made. None: no prompt; a version that was there before is no new candidate.
        scores: of what was measured. None: it cannot be compared, and is never in a beam.
    """
    entered = [start]
    rounds: list[Round] = []
    for number in range(shape.rounds + 1):
        if number:
            places = [Place(number, parent, edit) for parent in rounds[-1].beam for edit in range(shape.branch)]
            if missing := tuple(place for place in places if place not in edits):
                return Expand(missing)
            made = (edits[place] for place in places)
            entered = list(dict.fromkeys([*entered, *(version for version in made if version is not None)]))
        if unmeasured := tuple(version for version in entered if version not in scores):
            return Measure(number, unmeasured)
        rounds.append(Round(number, _best(entered, scores)[: shape.width]))
    return Done(tuple(rounds), tuple(entered))


def _best(entered: Sequence[int], scores: Mapping[int, float | None]) -> tuple[int, ...]:
    """By score, the highest first; of equals, what came in first."""
    known = [(version, score) for version in entered if (score := scores[version]) is not None]
    return tuple(version for version, _ in sorted(known, key=lambda one: -one[1]))
