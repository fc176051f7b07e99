"""The calculator: whole numbers from 0 to 99.

In: two numbers and an operator. Out: a number, or ValueError where there is none in that range.
"""

from __future__ import annotations

HIGHEST = 99
CALLS = 3
"""Most calls of the calculator for one question."""
OPERATORS = ("+", "-", "*", "/")


def calculate(a: int, operator: str, b: int) -> int:
    """Calculate `a operator b`.

    Raises:
        ValueError: the operator is unknown, or the result is no whole number from 0 to 99.
    """
    match operator:
        case "+":
            result = a + b
        case "-":
            result = a - b
        case "*":
            result = a * b
        case "/" if b and a % b == 0:
            result = a // b
        case _:
            raise ValueError("error")
    if not 0 <= result <= HIGHEST:
        raise ValueError("error")
    return result
