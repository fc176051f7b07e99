"""GSM8K: questions, their answers, the reward; and small data in the same schema (`question`, and `answer`, which ends with `#### 72`)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from examples.calculator.task import questions
from recipes.recipe import Recipe, Row, SmallData

_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
MALFORMED = -0.2
"""Reward of what ends with no answer."""


def tasks(rows: Iterable[Row]) -> list[dict[str, Any]]:
    """Return the agent's inputs: each question with its number."""
    return [{"question": row["question"], "answer": row["answer"].rpartition("####")[2].strip().replace(",", "")} for row in rows]


def evaluate(given: Mapping[str, Any], output: str) -> float:
    """Return 1 for the right number after the word `answer`, 0 for a wrong one, less than 0 for no answer at all."""
    numbers = _NUMBER.findall(output.lower().rpartition("answer")[2]) if "answer" in output.lower() else []
    if not numbers:
        return MALFORMED
    return float(abs(float(numbers[-1].replace(",", "")) - float(given["answer"])) < 1e-6)


def small(directory: Path) -> SmallData:
    """Return problems of the calculator's example."""
    drawn = questions(0, 64)
    train, held_out = (
        [{"question": row["text"], "answer": f"{row['start']} {row['steps']}\n#### {row['answer']}"} for row in part]
        for part in (drawn.train, drawn.held_out[:16])
    )
    return train, held_out, {}


RECIPE = Recipe(
    name="math",
    train="hf:openai/gsm8k:main:train",
    held_out="hf:openai/gsm8k:main:test",
    inputs=lambda rows, arguments, directory: tasks(rows),
    small=small,
    parser="words",
)
