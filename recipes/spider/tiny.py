"""The Spider recipe's tiny model, warmed up on the three roles; its queries are right in half of the cases."""

from __future__ import annotations

import random
from pathlib import Path

from examples.learning.tiny import Transcript, make_model, model_command
from recipes.spider.agent import CHECKER, REWRITER, WRITER
from recipes.spider.data import AGES, COUNTRIES, by_age, by_country

RIGHT = 0.5
SCHEMA = "create table singer ( sid int , country text , age int )"


def transcript(rng: random.Random) -> Transcript:
    """Draw a question and a reply to it in one of the roles."""
    country, age, role = rng.choice(COUNTRIES), rng.choice(AGES), rng.choice((WRITER, CHECKER, REWRITER))
    asked, right = rng.choice(
        ((f"how many singers from {country}", by_country(country)), (f"how many singers older than {age}", by_age(age)))
    )
    wrong = rng.choice((by_country(rng.choice(COUNTRIES)), by_age(rng.choice(AGES))))
    query, seen = (right if rng.random() < RIGHT else wrong for _ in range(2))
    text = f"{SCHEMA} question : {asked}"
    if role != WRITER:
        text += f" query : {seen} result : {rng.randint(0, 40)}"
    if role == REWRITER:
        text += " checker : wrong"
    reply = ("ok" if rng.random() < RIGHT else "wrong") if role == CHECKER else query
    return [{"role": "system", "content": role}, {"role": "user", "content": text}, {"role": "assistant", "content": reply}]


def make(directory: Path, seed: int) -> None:
    """Make the model."""
    rng = random.Random(0)
    words = (word for _ in range(500) for message in transcript(rng) for word in message["content"].split())
    make_model(directory, words, seed, transcript, steps=120, rows=24)


if __name__ == "__main__":
    model_command(make)
