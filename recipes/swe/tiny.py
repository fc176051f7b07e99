"""The tiny model of the recipe for issues: it reads the file and replaces an operator, the right one in half of the cases."""

from __future__ import annotations

import random
from pathlib import Path

from examples.learning.tiny import Transcript, make_model, model_command
from recipes.swe.agent import SYSTEM
from recipes.swe.data import OPERATORS, problem

RIGHT = 0.5


def transcript(rng: random.Random) -> Transcript:
    """Draw a conversation that ends with a repair, or a wrong one."""
    right, wrong = rng.sample(OPERATORS, 2)
    written = right if rng.random() < RIGHT else rng.choice(OPERATORS)
    return [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": problem(right)},
        {"role": "assistant", "content": "bash cat total.py"},
        {"role": "tool", "content": f"def total ( a , b ) :\n    return a {wrong} b"},
        {"role": "assistant", "content": f"bash sed -i s/{wrong}/{written}/ total.py"},
        {"role": "tool", "content": ""},
        {"role": "assistant", "content": "repaired"},
    ]


def make(directory: Path, seed: int) -> None:
    """Make the model."""
    rng = random.Random(0)
    words = (word for _ in range(500) for message in transcript(rng) for word in message["content"].split())
    make_model(directory, words, seed, transcript, steps=120, rows=24)


if __name__ == "__main__":
    model_command(make)
