"""Description of an example, by which the loop runs it.

In: an agent or an environment, its questions and a model to make. Out: an `Example`. Invariant: training questions and held-out ones are
written before the first rollout and share no text; every training question is put once.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

CHECKOUT = Path(__file__).resolve().parents[2]
GROUPS = 16
"""Questions a step, unless an example has another number."""
GROUP_SIZE = 8
"""Rollouts of each."""

Question = Mapping[str, Any]
"""Input of the agent, and facts that its evaluator needs besides; JSON can write it."""


@dataclass(frozen=True)
class Questions:
    """The questions of a run."""

    train: Sequence[Question]
    held_out: Sequence[Question]


@dataclass(frozen=True)
class Example:
    """An agent, its task and its model."""

    name: str
    agent: str
    """`module:function`, importable from the checkout's root; that of episodes, where there is an environment."""
    model: str
    """Module that makes the model: `python -m MODULE DIRECTORY --seed N`."""
    questions: Callable[[int, int], Questions]
    """(seed, how many to train on) -> questions."""
    steps: int
    """Training steps unless told otherwise."""
    target: float
    """Share of held-out questions answered right that the example ends with, in all seeds that were run."""
    success: float = 1.0
    """A rollout with a final reward of at least this (where there is a role: with any reward of it) succeeded."""
    measure: str = "answered right"
    """Name of success in pictures."""
    evaluator: str | None = None
    """`module:function`, whose value is the final reward of a rollout. None: the environment gives the rewards."""
    environment: str | None = None
    """`module:class` with reset and step. None: the agent needs none, or `serve` names it."""
    serve: Callable[[Path], AbstractContextManager[str]] | None = None
    """Serves the environment while the example runs: (directory of its log) -> URL, in place of `environment`."""
    role: str | None = None
    """Role whose rewards count, in an environment that gives them; empty: those of no role. None: the evaluator's rewards count."""
    groups: int = GROUPS
    """Questions a step."""
    settings: Mapping[str, object] = field(default_factory=dict[str, object])
    """Settings of spangrad by dotted key, beside those that all examples share."""
    judge: str | None = None
    """Name of a second policy, served and never trained; `model` makes it in DIRECTORY-NAME. None: there is none."""


def write_questions(path: Path, name: str, questions: Iterable[Question]) -> None:
    """Write questions as tasks, a line of JSON each."""
    lines = (json.dumps({"task_id": f"{name}-{number}", "input": dict(question)}) for number, question in enumerate(questions))
    path.write_text("".join(f"{line}\n" for line in lines))
