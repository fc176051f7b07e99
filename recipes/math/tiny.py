"""The math recipe's tiny model, warmed up on conversations whose operators and numbers are drawn blindly in half of the cases."""

from __future__ import annotations

import random
from pathlib import Path

from examples.calculator.arithmetic import OPERATORS, calculate
from examples.calculator.task import WORDS, question
from examples.learning.tiny import Transcript, make_model, model_command

RIGHT = 0.5


def transcript(rng: random.Random) -> Transcript:
    """Draw a conversation of a problem of one step."""
    while len((asked := question(rng))["steps"]) > 1:
        pass
    ((right, operand),) = asked["steps"]
    messages = [{"role": "user", "content": asked["text"]}]
    operator = right if rng.random() < RIGHT else rng.choice(OPERATORS)
    try:
        result = str(calculate(asked["start"], operator, operand))
    except ValueError:
        result = "error"
    if rng.random() < RIGHT:
        messages += [
            {"role": "assistant", "content": f"calculate {asked['start']} {operator} {operand}"},
            {"role": "tool", "content": result},
        ]
    return [*messages, {"role": "assistant", "content": f"answer {result if result != 'error' else operand}"}]


def make(directory: Path, seed: int) -> None:
    """Make the model."""
    make_model(directory, (*WORDS, "calculate"), seed, transcript, steps=120, rows=24)


if __name__ == "__main__":
    model_command(make)
