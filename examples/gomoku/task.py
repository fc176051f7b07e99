"""Openings of gomoku: those that are trained, and those that are held out.

In: a seed. Out: tasks. Invariant: no held-out opening is trained, or part of the warm start.
"""

from __future__ import annotations

import json
import random
from functools import cache

from examples.gomoku.game import Opening, opening
from examples.learning.example import Question, Questions

HELD_OUT = 256
HELD_OUT_SEED = 99


@cache
def _held_out() -> dict[str, Opening]:
    """Return the held-out openings, the same for every seed, by their text."""
    rng, drawn = random.Random(HELD_OUT_SEED), dict[str, Opening]()
    while len(drawn) < HELD_OUT:
        candidate = opening(rng)
        drawn[json.dumps(candidate)] = candidate
    return drawn


def trained_opening(rng: random.Random) -> Opening:
    """Draw an opening that is not held out."""
    while json.dumps(drawn := opening(rng)) in _held_out():
        pass
    return drawn


def openings(seed: int, count: int) -> Questions:
    """Return the openings of a run; `count` of them to train on."""
    rng = random.Random(seed + 5)
    train: list[Question] = [trained_opening(rng) for _ in range(count)]
    return Questions(train, list(_held_out().values()))
