"""The text-to-SQL models: the policy that writes and rewrites, and the checker that judges.

In: a directory and a seed. Out: the policy there, the checker in DIRECTORY-checker. The policy is shown queries of which each part is
right with probability 0.6 (a value with 0.8), else another one of the grammar; what "average" selects and what "older", "dearer" and
"after" compare is never shown to it. The checker is shown right and wrong queries with the verdict on each; it never sees the right query
beside a wrong one. Questions of held-out patterns are shown to neither.
"""

from __future__ import annotations

import random
from pathlib import Path

from langchain_core.messages import AnyMessage

from examples.learning.tiny import Transcript, make_model, model_command
from examples.text_to_sql.agent import checking, rewriting, writing
from examples.text_to_sql.grammar import PATTERNS, TRAINED, VERDICTS, WORDS, query, verdict
from examples.text_to_sql.task import question

RIGHT = 0.6
NEVER_SHOWN = {"average": 0, "older": 2, "dearer": 2, "after": 2}
"""A question's word -> the part of its query that is always drawn blindly."""
TOLD_ERRS = 0.1
"""Verdicts that are wrong, of those that the policy is shown."""
STEPS, ROWS = 330, 64
CHECKER_STEPS, CHECKER_ROWS = 1000, 64
FAULTS = {"none": 6, "several": 2, "torn": 0.5, "select": 3, "from": 2, "column": 2, "operator": 5}
"""Faults of the queries that the checker is shown, by weight; the hard ones more often than a policy makes them.

A wrong value is not among them: a model of this size does not learn to compare numbers that it has never seen compared."""
_ROLES = {"system": "system", "human": "user"}


def spoiled(rng: random.Random, parts: list[str], right: float, blind: set[int]) -> list[str]:
    """The parts, each kept with a probability, or drawn from the grammar; those of `blind` always drawn."""
    other, changed = rng.choice(PATTERNS), list(parts)
    drawn = other.parts(other.condition.value(rng))
    for part in range(4):
        kept = (right + 1) / 2 if part == 3 else right
        if part in blind or rng.random() >= kept:
            changed[part] = drawn[part]
    return changed


def policy_transcript(rng: random.Random) -> Transcript:
    """Return the transcript of a first query, or of one that corrects another."""
    asked = question(rng, TRAINED)
    text, parts = asked["text"], list(asked["parts"])
    blind = {part for word, part in NEVER_SHOWN.items() if word in text.split()}
    reply = query(spoiled(rng, parts, RIGHT, blind))
    if rng.random() < 0.5:
        return _said(writing(text), reply)
    before = query(spoiled(rng, parts, RIGHT, set()))
    judgement = verdict(before, parts) if rng.random() >= TOLD_ERRS else rng.choice(VERDICTS[:4])
    return _said(rewriting(text, before, judgement), reply)


def checker_transcript(rng: random.Random) -> Transcript:
    """A query and the verdict on it: right, or wrong in one part, or in several, or torn."""
    pattern = rng.choice(TRAINED)
    value = pattern.condition.value(rng)
    parts = list(pattern.parts(value))
    fault = rng.choices(list(FAULTS), list(FAULTS.values()))[0]
    changed = spoiled(rng, parts, RIGHT, set()) if fault == "several" else list(parts)
    other = rng.choice(PATTERNS).parts(value)
    match fault:
        case "select":
            changed[0] = other[0]
        case "from":
            changed[1] = other[1]
        case "column":
            changed[2] = other[2]
        case "operator":
            changed[2] = f"{pattern.condition.column} {rng.choice('=<>')}"
        case _:
            pass
    words = query(changed).split()
    if fault == "torn":
        del words[rng.randrange(len(words))]
    return _said(checking(pattern.text(value), " ".join(words)), verdict(" ".join(words), parts))


def _said(messages: list[AnyMessage], reply: str) -> Transcript:
    return [*({"role": _ROLES[message.type], "content": message.text} for message in messages), {"role": "assistant", "content": reply}]


def make(directory: Path, seed: int) -> None:
    """Make both models."""
    make_model(directory, WORDS, seed, policy_transcript, steps=STEPS, rows=ROWS)
    checker = directory.with_name(f"{directory.name}-checker")
    make_model(checker, WORDS, seed, checker_transcript, steps=CHECKER_STEPS, rows=CHECKER_ROWS)


if __name__ == "__main__":
    model_command(make)
