"""Repositories to repair, and the reward of what an agent made of them: 1 where all hidden tests pass, else 0.

In: a seed; the files that an agent left. Out: questions; a reward. Invariant: one in five comments is held out, and is in no repository of
training or of the warm start; hidden tests run in a fresh sandbox that reads them and cannot write them, and no agent's sandbox has them.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import astuple
from functools import cache
from pathlib import Path
from typing import Any

from examples.code_repair.repository import (
    HEADERS,
    MODULES,
    NAMES,
    OPERATIONS,
    SIZE,
    Expression,
    Repository,
    cases_of,
    comment_of,
    repository_of,
)
from examples.learning.example import Question, Questions
from runner.sandboxes.engines import SandboxEngine, prepare
from runner.sandboxes.policy import SandboxLimits, SandboxPolicy
from runner.sandboxes.sandbox import open_sandbox

ASKED = 128
"""Held-out repositories."""
HELD_OUT_SEED = 99
HELD_OUT_SHARE = 0.2
HIDDEN = Path(__file__).resolve().parent / "hidden"
HIDDEN_CASES = 24
"""Random hidden tests of a function."""
SAME = (1, 7)
"""Arguments that are all the same in a further hidden test each: there comparisons differ."""
LIMITS = SandboxLimits(processes=32, memory_bytes=2**29, disk_bytes=2**20)
_SECONDS = 10.0


def is_held_out(comment: str) -> bool:
    """Return whether functions with this comment are kept out of training."""
    return random.Random(comment).random() < HELD_OUT_SHARE


def repository(rng: random.Random, *, held_out: bool) -> Repository:
    """Draw a repository."""
    comments: list[tuple[str, Expression]] = []
    while len(comments) < SIZE:
        drawn = comment_of(rng)
        if is_held_out(drawn[0]) == held_out:
            comments.append(drawn)
    return repository_of(rng, comments)


def prompt(drawn: Repository) -> str:
    """Return what an agent is told."""
    return f"repair {' '.join(f'{function.name}.py' for function in drawn.functions)}"


def question(rng: random.Random, *, held_out: bool) -> Question:
    """Draw a question: what the agent is told, the files, and what the hidden tests are made of."""
    drawn = repository(rng, held_out=held_out)
    right = {function.name: [function.parameters, *astuple(function.right)] for function in drawn.functions}
    return {"text": prompt(drawn), "files": drawn.files, "right": right, "seed": rng.randrange(2**32)}


def questions(seed: int, count: int) -> Questions:
    """Return the questions of a run; `count` of them to train on."""
    rng, same = random.Random(seed + 5), random.Random(HELD_OUT_SEED)
    train = [question(rng, held_out=False) for _ in range(count)]
    return Questions(train, [question(same, held_out=True) for _ in range(ASKED)])


@cache
def engine() -> SandboxEngine:
    """Return what starts the evaluator's sandboxes."""
    return prepare(SandboxPolicy(HIDDEN, (), {}, False, LIMITS))


def hidden_tests(rng: random.Random, parameters: Sequence[str], operation: str, operands: Sequence[str]) -> list[list[Any]]:
    """Draw the hidden tests of a function: lists of arguments, and what it should return for each."""
    first, second = operands
    right = Expression(operation, (first, second))
    cases = [*cases_of(rng, HIDDEN_CASES), *((number,) * len(parameters) for number in SAME)]
    return [list(map(list, cases)), [right.value(dict(zip(parameters, case, strict=True))) for case in cases]]


async def evaluate(given: Mapping[str, Any], output: Mapping[str, str]) -> float:
    """Return 1 where all hidden tests pass with the files that the agent left."""
    rng = random.Random(given["seed"])
    hidden = json.dumps({name: hidden_tests(rng, *right) for name, right in given["right"].items()})
    async with open_sandbox(await asyncio.to_thread(engine)) as sandbox:
        root = f"{sandbox.home}/repository"
        for name in given["right"]:
            await sandbox.write(f"{root}/{name}.py", output.get(f"{name}.py", "").encode(errors="replace"))
        command = ["python3", "-BIS", str(HIDDEN / "check.py"), root]
        result = await sandbox.run(command, stdin=hidden.encode(), timeout_seconds=_SECONDS)
    return float(result.exit_code == 0)


def _words(text: str) -> list[str]:
    return text.format("", "").split()


_FORMS = "repair shell edit done ./check cat -n ok error fail passed [exit code 1] def # return ( ) , : max min"
WORDS = (
    *_FORMS.split(),
    *(word for operation in OPERATIONS.values() for text in (operation.code, *operation.phrases) for word in _words(text)),
    *(word for header in HEADERS for word in header.split()),
    *MODULES,
    *(f"{name}.py" for name in MODULES),
    *NAMES,
    *map(str, range(1, 8)),
)
"""Every word that a conversation is taught with."""
