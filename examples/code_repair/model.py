"""The repairing model: it knows the form of commands and edits, and to copy names, and seldom which code a comment means.

In: a directory and a seed. Out: there, the model after supervised steps on made-up transcripts of a simulated sandbox. In those each step
is the sensible one with probability 0.8, and the operation of an edit the right one with 0.5, else drawn blindly. Held-out comments are
never shown.
"""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

from examples.code_repair.agent import CALLS
from examples.code_repair.repository import OPERATIONS, Expression, Function
from examples.code_repair.task import WORDS, prompt, repository
from examples.learning.tiny import Transcript, make_model, model_command

SENSIBLE = 0.8
RIGHT_OPERATION = 0.5
STEPS = 500
ROWS = 32
DONE = "done"


class SimulatedRepository:
    """A repository, its files and what commands answer, without a sandbox."""

    def __init__(self, functions: tuple[Function, ...]) -> None:
        self.functions = {function.name: function for function in functions}

    def check(self) -> str:
        """Return what `./check` prints."""
        failed = sorted(name for name, function in self.functions.items() if not function.passes)
        return "".join(f"fail {name}.py " for name in failed) + "[exit code 1]" if failed else "passed"

    def show(self, name: str) -> str:
        """Return what `cat -n` prints of a module."""
        lines = self.functions[name].module.splitlines()
        return " ".join(f"{number} {' '.join(line.split())}" for number, line in enumerate(lines, 1))

    def edit(self, name: str, expression: Expression) -> None:
        """Replace what a function returns."""
        self.functions[name] = replace(self.functions[name], written=expression)


def guess(rng: random.Random, function: Function) -> Expression:
    """Draw an expression for a function, seldom the right one."""
    right = function.right
    operation = right.operation if rng.random() < RIGHT_OPERATION else rng.choice(list(OPERATIONS))
    first, second = (operand if rng.random() < SENSIBLE else rng.choice(function.parameters) for operand in right.operands)
    return Expression(operation, (first, second))


def transcript(rng: random.Random) -> Transcript:
    """Draw a conversation of an agent that repairs, or tries to."""
    drawn = repository(rng, held_out=False)
    simulated = SimulatedRepository(drawn.functions)
    messages = [{"role": "user", "content": prompt(drawn)}]
    seen, last, names = list[str](), "", list(simulated.functions)
    for _ in range(CALLS):
        failing = drawn.broken.name if rng.random() < SENSIBLE else rng.choice(names)
        if last == "passed" or (last == "ok" and rng.random() < 0.4):
            break
        if last == "ok" or (not last and rng.random() < SENSIBLE):
            command, last = "shell ./check", simulated.check()
        elif failing not in seen:
            seen.append(failing)
            command, last = f"shell cat -n {failing}.py", simulated.show(failing)
        else:
            function = simulated.functions[failing]
            expression = guess(rng, function)
            command, last = f"edit {failing}.py {function.line} return {expression.code}", "ok"
            simulated.edit(failing, expression)
        messages += [{"role": "assistant", "content": command}, {"role": "tool", "content": last}]
    else:
        return messages
    return [*messages, {"role": "assistant", "content": DONE}]


def make(directory: Path, seed: int) -> None:
    """Make the model."""
    make_model(directory, WORDS, seed, transcript, steps=STEPS, rows=ROWS)


if __name__ == "__main__":
    model_command(make)
