"""The calculator's model: it knows the form of calls and answers, to copy numbers, and not which operator a verb means.

In: a directory and a seed. Out: there, the model after 700 supervised steps on made-up transcripts. In those a number is the right one with
probability 0.9, the moment to stop with 0.95, the operator with 0.4; else they are drawn blindly. Held-out texts are never shown.
"""

from __future__ import annotations

import random
from pathlib import Path

from examples.calculator.arithmetic import CALLS, OPERATORS, calculate
from examples.calculator.task import WORDS, trained_question
from examples.learning.tiny import Transcript, make_model, model_command

RIGHT_NUMBER = 0.9
RIGHT_STOP = 0.95
RIGHT_OPERATOR = 0.4
STEPS = 700
ROWS = 48


def transcript(rng: random.Random) -> Transcript:
    """Draw a conversation that ends with an answer, right or wrong."""
    problem = trained_question(rng)
    messages = [{"role": "user", "content": problem["text"]}]
    numbers = [word for word in problem["text"].split() if word.isdigit()]
    current, steps = str(problem["start"]), problem["steps"]
    for turn in range(CALLS + 1):
        stop = turn >= len(steps) if rng.random() < RIGHT_STOP else turn > 0 and rng.random() < 0.5
        if stop or turn == CALLS:
            number = current if rng.random() < RIGHT_NUMBER else rng.choice(numbers)
            return [*messages, {"role": "assistant", "content": f"answer {number}"}]
        right_operator, right_b = steps[min(turn, len(steps) - 1)]
        a = current if rng.random() < RIGHT_NUMBER else rng.choice(numbers)
        b = str(right_b) if rng.random() < RIGHT_NUMBER else rng.choice(numbers)
        operator = right_operator if rng.random() < RIGHT_OPERATOR else rng.choice(OPERATORS)
        try:
            result = str(calculate(int(a), operator, int(b)))
        except ValueError:
            result = "error"
        else:
            numbers.append(result)
            current = result
        messages += [{"role": "assistant", "content": f"calc {a} {operator} {b}"}, {"role": "tool", "content": result}]
    raise AssertionError("unreachable: the last turn answers")


def make(directory: Path, seed: int) -> None:
    """Make the model."""
    make_model(directory, WORDS, seed, transcript, steps=STEPS, rows=ROWS)


if __name__ == "__main__":
    model_command(make)
