"""GSM8K: questions, their answers, the reward; and small data in the same schema (`question`, and `answer`, which ends with `#### 72`)."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from examples.calculator.task import questions
from recipes.recipe import Prepared, Recipe, Row, rows_of, write_rows

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


def prepare(arguments: argparse.Namespace, directory: Path) -> Prepared:
    """Read the data set."""
    return Prepared(tasks(rows_of(arguments.train, arguments.rows)), tasks(rows_of(arguments.held_out, arguments.rows)))


def write_small(directory: Path) -> dict[str, Any]:
    """Write problems of the calculator's example."""
    drawn = questions(0, 64)
    for name, part in (("train", drawn.train), ("test", drawn.held_out[:16])):
        rows = ({"question": row["text"], "answer": f"{row['start']} {row['steps']}\n#### {row['answer']}"} for row in part)
        write_rows(directory / f"{name}.jsonl", rows)
    return {"train": str(directory / "train.jsonl"), "held_out": str(directory / "test.jsonl")}


RECIPE = Recipe(
    name="math",
    train="hf:openai/gsm8k:main:train",
    held_out="hf:openai/gsm8k:main:test",
    prepare=prepare,
    write_small=write_small,
    parser="words",
)
