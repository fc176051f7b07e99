"""The MuSiQue recipe's tiny model, warmed up on the form of queries and answers; what it answers is drawn from what was found."""

from __future__ import annotations

import random
from pathlib import Path

from examples.learning.tiny import Transcript, make_model, model_command
from examples.retrieval_qa.facts import CITIES, CITIES_HAVE, COUNTRIES, COUNTRIES_HAVE, facts
from recipes.musique.agent import SYSTEM
from recipes.musique.data import SMALL_WORDS

QUERIED = 0.7
"""Share of the conversations that query before they answer."""


def transcript(rng: random.Random) -> Transcript:
    """Draw a conversation."""
    known = facts()
    relation = rng.choice((*COUNTRIES_HAVE, *CITIES_HAVE))
    entity = rng.choice(COUNTRIES if relation in COUNTRIES_HAVE else CITIES)
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": f"what is the {relation} of {entity}"}]
    if rng.random() < QUERIED:
        others = [f"{place} : the {fact} of {place} is {answer}" for (fact, place), answer in rng.sample(sorted(known.items()), 2)]
        documents = [f"{entity} : the {relation} of {entity} is {known[relation, entity]}", *others]
        messages += [
            {"role": "assistant", "content": f"<think> search </think> <query> {relation} of {entity} </query>"},
            {"role": "user", "content": f"<information> {' '.join(documents)} </information>"},
        ]
    return [*messages, {"role": "assistant", "content": f"<think> found </think> <answer> {known[relation, entity]} </answer>"}]


def make(directory: Path, seed: int) -> None:
    """Make the model."""
    form = "<think> </think> <query> </query> <answer> </answer> <information> </information> search found what is the of : capital"
    make_model(directory, (*form.split(), *SMALL_WORDS), seed, transcript, steps=120, rows=24)


if __name__ == "__main__":
    model_command(make)
