"""The calculator's questions and their reward.

In: a seed. Out: word problems of one or two steps with their answers; the reward of an answer. Invariant: each operand is drawn among those
for which the result is a whole number from 0 to 99, and no held-out text is trained on.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from functools import cache
from typing import Any

from examples.calculator.arithmetic import HIGHEST, OPERATORS, calculate
from examples.learning.example import Question, Questions

PEOPLE = ("tom", "ann", "bob", "eve", "sam", "mia")
THINGS = ("apples", "pens", "books", "coins", "cards", "shells")
VERBS = {"+": ("buys", "finds"), "-": ("loses", "sells"), "*": ("multiplies", "scales"), "/": ("splits", "shares")}
HELD_OUT = 300
HELD_OUT_SEED = 99
MALFORMED = -0.2


def question(rng: random.Random) -> Question:
    """Draw a problem: its text, its steps as (operator, operand) and its answer."""
    while True:
        start = value = rng.randint(2, 60)
        steps: list[tuple[str, int]] = []
        for _ in range(rng.choice((1, 2))):
            operator = rng.choice(OPERATORS)
            fitting = [b for b in (range(2, 10) if operator in "*/" else range(2, 41)) if _exists(value, operator, b)]
            if not fitting:
                break
            operand = rng.choice(fitting)
            steps.append((operator, operand))
            value = calculate(value, operator, operand)
        else:
            person, what = rng.choice(PEOPLE), rng.choice(THINGS)
            sentences = [f"{person} has {start} {what} .", *(f"{person} {rng.choice(VERBS[operator])} {b} ." for operator, b in steps)]
            return {"text": f"{' '.join(sentences)} how many {what} ?", "start": start, "steps": steps, "answer": value}


def _exists(a: int, operator: str, b: int) -> bool:
    try:
        calculate(a, operator, b)
    except ValueError:
        return False
    return True


def held_out_questions() -> list[Question]:
    """The held-out questions, the same for every seed."""
    rng = random.Random(HELD_OUT_SEED)
    drawn: dict[str, Question] = {}
    while len(drawn) < HELD_OUT:
        candidate = question(rng)
        drawn[candidate["text"]] = candidate
    return list(drawn.values())


@cache
def _held_out_texts() -> frozenset[str]:
    return frozenset(problem["text"] for problem in held_out_questions())


def trained_question(rng: random.Random) -> Question:
    """Draw a problem that is not held out."""
    while (drawn := question(rng))["text"] in _held_out_texts():
        pass
    return drawn


def questions(seed: int, count: int) -> Questions:
    """The questions of a run; `count` of them to train on."""
    rng = random.Random(seed + 5)
    return Questions([trained_question(rng) for _ in range(count)], held_out_questions())


def evaluate(given: Mapping[str, Any], output: str) -> float:
    """1 for the right answer, 0 for a wrong one, less than 0 for what is no answer at all."""
    match output.split():
        case ["answer", word]:
            return float(word == str(given["answer"]))
        case _:
            return MALFORMED


WORDS = (
    *["has", ".", "?", "how", "many", "calc", "answer", "error"],
    *PEOPLE,
    *THINGS,
    *(verb for verbs in VERBS.values() for verb in verbs),
    *OPERATORS,
    *map(str, range(HIGHEST + 1)),
)
"""Every word that a conversation can hold."""
