"""The model of word problems: it knows the form of expressions, to copy numbers, and not which operator a verb means.

In: a directory and a seed. Out: there, the model after supervised steps on made-up replies, in which a number is the right one with
probability 0.9, and the operator with 0.4; else they are drawn blindly. Held-out texts are never shown.
"""

from __future__ import annotations

import random
from pathlib import Path

from examples.calculator.arithmetic import OPERATORS
from examples.calculator.task import WORDS, trained_question
from examples.learning.tiny import Transcript, make_model, model_command

RIGHT_NUMBER = 0.9
RIGHT_OPERATOR = 0.4
STEPS = 400
ROWS = 48


def transcript(rng: random.Random) -> Transcript:
    """Draw a problem and a reply, right or wrong."""
    problem = trained_question(rng)
    numbers = [word for word in problem["text"].split() if word.isdigit()]

    def number(right: int) -> str:
        return str(right) if rng.random() < RIGHT_NUMBER else rng.choice(numbers)

    words = [number(problem["start"])]
    for operator, operand in problem["steps"]:
        words += [operator if rng.random() < RIGHT_OPERATOR else rng.choice(OPERATORS), number(operand)]
    return [{"role": "user", "content": problem["text"]}, {"role": "assistant", "content": " ".join(words)}]


def make(directory: Path, seed: int) -> None:
    """Make the model."""
    make_model(directory, WORDS, seed, transcript, steps=STEPS, rows=ROWS)


if __name__ == "__main__":
    model_command(make)
