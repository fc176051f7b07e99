"""The world that is searched: 300 facts, a sentence each, and their index.

In: nothing; the world is the same for every seed. Out: facts by (relation, entity), and the sentences that a query finds. Invariant: equal
queries find equal sentences, the better ones first, in the order of the world where they are equally good.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from functools import cache

import bm25s
import numpy as np

COUNTRIES_HAVE = ("capital", "leader", "river")
CITIES_HAVE = ("mayor", "dish", "founder")
SIZE = 50
"""Countries, cities and rivers, each."""
FOUND = 2
"""Sentences that a search gives."""
NOTHING = "found nothing"
"""Answer of a search that finds none."""
SEARCHES = 3
"""Most searches of an agent for one question."""


def _names(count: int, ending: str, seed: int) -> tuple[str, ...]:
    """Different names of two syllables and an ending."""
    rng = random.Random(seed)

    def drawn() -> Iterator[str]:
        while True:
            yield "".join(rng.choice("bdfgklmnprstvz") + rng.choice("aeiou") for _ in range(2)) + ending

    names: dict[str, None] = {}
    for name in drawn():
        names[name] = None
        if len(names) == count:
            break
    return tuple(names)


COUNTRIES = _names(SIZE, "land", 1)
CITIES = _names(SIZE, "ton", 2)
RIVERS = _names(SIZE, "flow", 3)
DISHES = _names(SIZE // 2, "soup", 4)
FIRST_NAMES = _names(16, "", 5)
LAST_NAMES = _names(16, "son", 6)
KINDS = (COUNTRIES, CITIES, RIVERS, DISHES, FIRST_NAMES, LAST_NAMES)


@cache
def facts() -> dict[tuple[str, str], str]:
    """(relation, entity) -> what it is."""
    rng = random.Random(0)

    def person() -> str:
        return f"{rng.choice(FIRST_NAMES)} {rng.choice(LAST_NAMES)}"

    values: dict[tuple[str, str], str] = {}
    capitals = rng.sample(CITIES, SIZE)
    for country, capital in zip(COUNTRIES, capitals, strict=True):
        values |= {("capital", country): capital, ("leader", country): person(), ("river", country): rng.choice(RIVERS)}
    for city in CITIES:
        values |= {("mayor", city): person(), ("dish", city): rng.choice(DISHES), ("founder", city): person()}
    return values


@cache
def _index() -> tuple[bm25s.BM25, list[str]]:
    sentences = [f"the {relation} of {entity} is {value} ." for (relation, entity), value in facts().items()]
    index = bm25s.BM25(method="lucene", k1=1.2, b=0.75)
    index.index([sentence.split() for sentence in sentences], show_progress=False)
    return index, sentences


@cache
def _found(words: tuple[str, ...]) -> tuple[str, ...]:
    index, sentences = _index()
    known = [word for word in words if word in index.vocab_dict]
    if not known:
        return ()
    scores = index.get_scores(known)
    best = np.argsort(-scores, kind="stable")[:FOUND]
    return tuple(sentences[place] for place in best if scores[place] > 0)


def search(words: Sequence[str]) -> tuple[str, ...]:
    """The sentences that fit the words best, at most `FOUND`."""
    return _found(tuple(sorted(set(words))))
