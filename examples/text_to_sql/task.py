"""The questions about the database and their reward.

In: a seed. Out: questions with the parts of their queries; 1 for a query that finds what the right one finds, else 0. Invariant: no
pattern of a held-out question is trained on.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

from examples.learning.example import Question, Questions
from examples.text_to_sql.database import rows
from examples.text_to_sql.grammar import HELD_OUT, TRAINED, Pattern, query

ASKED = 256
"""Held-out questions."""
HELD_OUT_SEED = 99


def question(rng: random.Random, patterns: Sequence[Pattern]) -> Question:
    """Draw a question of one of the patterns."""
    pattern = rng.choice(patterns)
    value = pattern.condition.value(rng)
    return {"text": pattern.text(value), "parts": pattern.parts(value)}


def questions(seed: int, count: int, *, oracle: bool) -> Questions:
    """The questions of a run; `count` of them to train on, for agents whose checker is the oracle or a model."""
    rng, same = random.Random(seed + 5), random.Random(HELD_OUT_SEED)
    train = [{**question(rng, TRAINED), "oracle": oracle} for _ in range(count)]
    return Questions(train, [{**question(same, HELD_OUT), "oracle": oracle} for _ in range(ASKED)])


def evaluate(given: Mapping[str, Any], output: Mapping[str, Any]) -> float:
    """1 where the last query finds what the right one finds."""
    selected = rows(output["query"])
    return float(selected is not None and selected == rows(query(given["parts"])))
