"""Small repositories with one bug each, made by a seed.

In: a random generator. Out: a `Repository`: three modules of a function each, a comment that says what it computes, unit tests, and a
script that runs them. Invariant: the tests of one module fail, they pass once its function is what its comment says, and the others pass
anyway.
"""

from __future__ import annotations

import operator
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

MODULES = ("shop", "bank", "farm", "mill", "port", "mine", "dock", "yard", "camp", "club", "park", "road")
NAMES = ("price", "count", "weight", "rate", "stock", "limit", "width", "height", "speed", "score", "age", "load")
"""Names of parameters."""
HEADERS = ("import math", "import sys")
"""Lines above a function, none or one or both."""
SIZE = 3
"""Modules of a repository, and parameters of a function."""
CASES = 3
"""Tests of a function."""
HIGHEST = 9
"""Largest argument of a test; the smallest is 1."""


@dataclass(frozen=True)
class Operation:
    """A computation with two operands."""

    code: str
    phrases: tuple[str, ...]
    compute: Callable[[int, int], int]


OPERATIONS: Mapping[str, Operation] = {
    "sum": Operation("{0} + {1}", ("the sum of {0} and {1}", "{0} and {1} together"), operator.add),
    "difference": Operation("{0} - {1}", ("{0} without {1}", "{0} less {1}"), operator.sub),
    "product": Operation("{0} * {1}", ("the product of {0} and {1}", "{0} times {1}"), operator.mul),
    "quotient": Operation("{0} // {1}", ("{0} shared by {1}", "{0} split into {1}"), operator.floordiv),
    "larger": Operation("max ( {0} , {1} )", ("the larger of {0} and {1}", "the best of {0} and {1}"), max),
    "smaller": Operation("min ( {0} , {1} )", ("the smaller of {0} and {1}", "the worst of {0} and {1}"), min),
    "at_least": Operation("{0} >= {1}", ("whether {0} is at least {1}", "whether {0} reaches {1}"), operator.ge),
    "above": Operation("{0} > {1}", ("whether {0} is above {1}", "whether {0} exceeds {1}"), operator.gt),
}

CHECK = '''#!/usr/bin/env -S python3 -BS
"""Run the tests, and name the modules whose tests fail."""
import os
import sys

failed = []
for name in sorted(os.listdir()):
    if name.startswith("test_"):
        try:
            __import__(name.removesuffix(".py"))
        except BaseException:
            failed.append(name.removeprefix("test_"))
print(*(f"fail {name}" for name in failed), sep="\\n") if failed else print("passed")
sys.exit(bool(failed))
'''
"""Program `check` of each repository."""


@dataclass(frozen=True)
class Expression:
    """Expression that a function returns."""

    operation: str
    operands: tuple[str, str]

    @property
    def code(self) -> str:
        """Python code, its tokens apart."""
        return OPERATIONS[self.operation].code.format(*self.operands)

    def value(self, arguments: Mapping[str, int]) -> int:
        """Compute it."""
        first, second = (arguments[name] for name in self.operands)
        return OPERATIONS[self.operation].compute(first, second)


@dataclass(frozen=True)
class Function:
    """A module's function."""

    name: str
    headers: tuple[str, ...]
    parameters: tuple[str, ...]
    comment: str
    """Description of the value that it should return."""
    right: Expression
    written: Expression
    """Expression that the module has."""
    cases: tuple[tuple[int, ...], ...]
    """Arguments of its tests."""

    @property
    def line(self) -> int:
        """Number of the line that returns."""
        return len(self.headers) + 3

    @property
    def module(self) -> str:
        """Text of the module."""
        head = f"def {self.name} ( {' , '.join(self.parameters)} ) :"
        return "".join(f"{line}\n" for line in (*self.headers, head, f"    # {self.comment}", f"    return {self.written.code}"))

    @property
    def tests(self) -> str:
        """Text of the module with its tests."""
        calls = ((f"{self.name}{case}", self.right.value(dict(zip(self.parameters, case, strict=True)))) for case in self.cases)
        return f"from {self.name} import {self.name}\n\n" + "".join(f"assert {call} == {value}\n" for call, value in calls)

    @property
    def passes(self) -> bool:
        """Return whether its tests pass."""
        return all(agrees(self, case) for case in self.cases)


@dataclass(frozen=True)
class Repository:
    """Modules of which one has a bug."""

    functions: tuple[Function, ...]

    @property
    def broken(self) -> Function:
        """The function with the bug."""
        return next(function for function in self.functions if function.written != function.right)

    @property
    def files(self) -> dict[str, str]:
        """Texts of all files, by name."""
        modules = {f"{function.name}.py": function.module for function in self.functions}
        tests = {f"test_{function.name}.py": function.tests for function in self.functions}
        return {**modules, **tests, "check": CHECK}


def agrees(function: Function, case: Sequence[int]) -> bool:
    """Return whether a function returns for these arguments what it should."""
    arguments = dict(zip(function.parameters, case, strict=True))
    return function.written.value(arguments) == function.right.value(arguments)


def cases_of(rng: random.Random, count: int) -> tuple[tuple[int, ...], ...]:
    """Draw arguments of tests."""
    return tuple(tuple(rng.randint(1, HIGHEST) for _ in range(SIZE)) for _ in range(count))


def comment_of(rng: random.Random) -> tuple[str, Expression]:
    """Draw what a function should compute: the words and the expression."""
    operation = rng.choice(list(OPERATIONS))
    first, second = rng.sample(NAMES, 2)
    return rng.choice(OPERATIONS[operation].phrases).format(first, second), Expression(operation, (first, second))


def broken_expression(rng: random.Random, function: Function) -> Expression:
    """Draw a bug: another operation, the operands the wrong way round, or another operand."""
    first, second = function.right.operands
    (other,) = set(function.parameters) - {first, second}
    swapped, wrong = (second, first), rng.choice([(first, other), (other, second)])
    match rng.randrange(4):
        case 0:
            return replace(function.right, operands=swapped)
        case 1:
            return replace(function.right, operands=wrong)
        case _:
            return replace(function.right, operation=rng.choice([name for name in OPERATIONS if name != function.right.operation]))


def function_of(rng: random.Random, name: str, comment: str, right: Expression) -> Function:
    """Draw the rest of a function that is right."""
    parameters = [*right.operands, rng.choice([other for other in NAMES if other not in right.operands])]
    rng.shuffle(parameters)
    headers = tuple(header for header in HEADERS if rng.random() < 0.5)
    return Function(name, headers, tuple(parameters), comment, right, right, cases_of(rng, CASES))


def repository_of(rng: random.Random, comments: Sequence[tuple[str, Expression]]) -> Repository:
    """Draw a repository of functions that should compute this, of which one has a bug that its tests find."""
    functions = [function_of(rng, name, *comment) for name, comment in zip(rng.sample(MODULES, len(comments)), comments, strict=True)]
    broken = rng.randrange(len(functions))
    while functions[broken].passes:
        written = broken_expression(rng, functions[broken])
        functions[broken] = replace(functions[broken], written=written, cases=cases_of(rng, CASES))
    return Repository(tuple(functions))
