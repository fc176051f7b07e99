"""Beam search: computes the next step from the edits made so far and the scores of the candidates.

In: the version that the search began with, its settings, edits and scores. Out: the next step, or the end. Invariant: the same facts give
the same step, so a search that was killed continues from its recorded facts; a version with a score is not measured again; the best score
never decreases.

The search is that of Pryzant et al. 2023 (Automatic Prompt Optimization with "Gradient Descent" and Beam Search): in each round each
prompt of the beam is criticised and edited `branch` times, and the `beam_width` best of all measured ones form the next beam. Instead of
a bandit, which spends few evaluations on poor candidates, all candidates have the same held-out tasks: they can be compared in pairs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from spangrad.settings import PromptSettings


@dataclass(frozen=True, slots=True, order=True)
class EditPosition:
    """One edit: the number-th (from 0) of a parent in a round (from 1)."""

    round: int
    parent: int
    number: int


@dataclass(frozen=True, slots=True)
class Round:
    """State of the search after a round."""

    number: int
    """Number of the round; 0: only the start is measured."""
    beam: tuple[int, ...]
    """Best versions so far, the best first."""


@dataclass(frozen=True, slots=True)
class Expand:
    """Step: make these edits, which do not exist yet."""

    places: tuple[EditPosition, ...]


@dataclass(frozen=True, slots=True)
class MeasureVersions:
    """Step: measure these versions, which have no score yet."""

    round: int
    versions: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Done:
    """End of the search."""

    rounds: tuple[Round, ...]
    entered: tuple[int, ...]
    """Every version that was a candidate, in the order of entry."""


Step = Expand | MeasureVersions | Done


def next_step(start: int, settings: PromptSettings, edits: Mapping[EditPosition, int | None], scores: Mapping[int, float | None]) -> Step:
    """Return the next step.

    Args:
        start: the version that the search began with.
        settings: size of the search: its rounds, the width of the beam, the edits of each prompt.
        edits: version that each edit led to. None: the model gave no prompt; a version that existed before is no new candidate.
        scores: by measured version. None: the version cannot be compared, and is never in a beam.
    """
    entered = [start]
    rounds: list[Round] = []
    for number in range(settings.rounds + 1):
        if number:
            places = [EditPosition(number, parent, edit) for parent in rounds[-1].beam for edit in range(settings.branch)]
            if missing := tuple(position for position in places if position not in edits):
                return Expand(missing)
            edited = (edits[position] for position in places)
            entered = list(dict.fromkeys([*entered, *(version for version in edited if version is not None)]))
        if unmeasured := tuple(version for version in entered if version not in scores):
            return MeasureVersions(number, unmeasured)
        rounds.append(Round(number, _best(entered, scores)[: settings.beam_width]))
    return Done(tuple(rounds), tuple(entered))


def _best(entered: Sequence[int], scores: Mapping[int, float | None]) -> tuple[int, ...]:
    """Sort the versions by score, the highest first; equal ones by order of entry."""
    known = [(version, score) for version in entered if (score := scores[version]) is not None]
    return tuple(version for version, _ in sorted(known, key=lambda entry: -entry[1]))
