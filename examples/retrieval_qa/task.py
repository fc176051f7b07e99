"""The questions about the world and their reward.

In: a seed. Out: questions of one hop ("who rules siniland ?") and of two ("who runs the capital of siniland ?"), half each, with their
answers; the reward of an answer. Invariant: one in five (relations, entity) is held out, and is asked neither in training nor in the
model's warm start.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping
from typing import Any

from examples.learning.example import Question, Questions
from examples.retrieval_qa.facts import CITIES, CITIES_HAVE, COUNTRIES, COUNTRIES_HAVE, KINDS, facts

ASKED = {
    "capital": ("what is the capital of", "which city governs"),
    "leader": ("who is the leader of", "who rules"),
    "river": ("what is the river of", "what flows through"),
    "mayor": ("who is the mayor of", "who runs"),
    "dish": ("what is the dish of", "what do people eat in"),
    "founder": ("who is the founder of", "who built"),
}
CAPITAL = ("capital", "governing city")
HELD_OUT = 256
HELD_OUT_SEED = 99
HELD_OUT_SHARE = 0.2
RIGHT, FORM = 0.9, 0.1


def is_held_out(hops: list[tuple[str, str]]) -> bool:
    """Return whether a chain of relations from this entity is kept out of training."""
    return random.Random(repr(([relation for relation, _ in hops], hops[0][1]))).random() < HELD_OUT_SHARE


def question(rng: random.Random, *, held_out: bool) -> Question:
    """Draw a question: its text, its hops as (relation, entity) and its answer."""
    while True:
        if rng.choice((1, 2)) == 1:
            relation = rng.choice((*COUNTRIES_HAVE, *CITIES_HAVE))
            entity = rng.choice(COUNTRIES if relation in COUNTRIES_HAVE else CITIES)
            hops, asked = [(relation, entity)], entity
        else:
            relation, country = rng.choice(CITIES_HAVE), rng.choice(COUNTRIES)
            hops, asked = [("capital", country), (relation, facts()["capital", country])], f"the {rng.choice(CAPITAL)} of {country}"
        if is_held_out(hops) == held_out:
            return {"text": f"{rng.choice(ASKED[relation])} {asked} ?", "hops": hops, "answer": facts()[hops[-1]]}


def questions(seed: int, count: int) -> Questions:
    """The questions of a run; `count` of them to train on."""
    rng, same = random.Random(seed + 5), random.Random(HELD_OUT_SEED)
    train = [question(rng, held_out=False) for _ in range(count)]
    return Questions(train, [question(same, held_out=True) for _ in range(HELD_OUT)])


def f1(answered: list[str], right: list[str]) -> float:
    """Harmonic mean of precision and recall of the words."""
    shared = sum((Counter(answered) & Counter(right)).values())
    return 2 * shared / (len(answered) + len(right)) if shared else 0.0


def evaluate(given: Mapping[str, Any], output: str) -> float:
    """0.9 F1 + 0.1 for an answer of one or two words; 0 for what is no answer."""
    match output.split():
        case ["answer", first, *more] if len(more) < 2:
            return RIGHT * f1([first, *more], given["answer"].split()) + FORM
        case _:
            return 0.0


WORDS = (
    *["search", "answer", "the", "of", "is", ".", "?", "found", "nothing", "city"],
    *COUNTRIES_HAVE,
    *CITIES_HAVE,
    *(word for ways in ASKED.values() for way in ways for word in way.split()),
    *(word for way in CAPITAL for word in way.split()),
    *(name for names in KINDS for name in names),
)
"""Every word that a conversation can hold."""
