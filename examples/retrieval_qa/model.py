"""The retrieval model: it knows the form of searches and answers, and to copy names, and takes the right step only often.

In: a directory and a seed. Out: there, the model after 350 supervised steps on made-up transcripts. In those each choice (relation, entity,
to search on or to answer, which found sentence to answer from) is the right one with probability 0.7, else drawn blindly. Every name of a
transcript is renamed at random, else the model would learn the facts by heart and never search. Held-out questions are never shown.
"""

from __future__ import annotations

import random
from pathlib import Path

from examples.learning.tiny import Transcript, make_model, model_command
from examples.retrieval_qa.facts import CITIES, CITIES_HAVE, COUNTRIES, COUNTRIES_HAVE, KINDS, NOTHING, SEARCHES, search
from examples.retrieval_qa.task import WORDS, question

RIGHT = 0.7
STEPS = 350
ROWS = 32
_ENTITIES = frozenset((*COUNTRIES, *CITIES))


def transcript(rng: random.Random) -> Transcript:
    """Draw a conversation that ends with an answer, right or wrong, all names changed."""
    asked = question(rng, held_out=False)
    hops, answer = asked["hops"], asked["answer"]
    messages = [{"role": "user", "content": asked["text"]}]
    seen: list[str] = []
    for turn in range(SEARCHES + 1):
        stop = turn >= len(hops) if rng.random() < RIGHT else turn > 0 and rng.random() < 0.5
        if (stop or turn == SEARCHES) and seen:
            right = [sentence for sentence in seen if answer in sentence]
            source = rng.choice(right) if right and rng.random() < RIGHT else rng.choice(seen)
            reply = source.split(" is ")[1].removesuffix(" .")
            return _renamed([*messages, {"role": "assistant", "content": f"answer {reply}"}], rng)
        relation, entity = hops[min(turn, len(hops) - 1)]
        words = " ".join([asked["text"], *seen]).split()
        known = [word for word in words if word in _ENTITIES]
        if rng.random() >= RIGHT:
            relation = rng.choice((*COUNTRIES_HAVE, *CITIES_HAVE))
        if entity not in words or rng.random() >= RIGHT:
            entity = rng.choice(known)
        sentences = search([relation, entity])
        seen += sentences
        messages += [
            {"role": "assistant", "content": f"search {relation} {entity}"},
            {"role": "tool", "content": " ".join(sentences) or NOTHING},
        ]
    raise AssertionError("unreachable: the last turn answers")


def _renamed(messages: Transcript, rng: random.Random) -> Transcript:
    others = {name: other for names in KINDS for name, other in zip(names, rng.sample(names, len(names)), strict=True)}
    return [
        {"role": message["role"], "content": " ".join(others.get(word, word) for word in str(message["content"]).split())}
        for message in messages
    ]


def make(directory: Path, seed: int) -> None:
    """Make the model."""
    make_model(directory, WORDS, seed, transcript, steps=STEPS, rows=ROWS)


if __name__ == "__main__":
    model_command(make)
