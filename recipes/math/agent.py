"""The calculator's agent (examples/calculator) with a system message and a calculator of whole expressions: it knows nothing of training.

In: {"question": "Natalia sold clips to 48 ..."}. Out: what it said last, which ends with "answer 72" if it keeps to the form. Address and
key of the model come from OPENAI_BASE_URL and OPENAI_API_KEY.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Mapping
from functools import cache
from typing import Any

from autogen_core.tools import FunctionTool
from autogen_ext.models.openai import OpenAIChatCompletionClient

from examples.calculator.agent import solve

SYSTEM = "Solve the problem step by step and calculate with the tool . End with the word answer and the number ."
CALLS = 8
LONGEST = 512
"""Tokens of a reply."""
_OPERATORS: dict[type[ast.AST], Any] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.USub: operator.neg,
}


def value_of(expression: str) -> float:
    """Return the value of an expression of numbers, + - * / // % and parentheses.

    Raises:
        ValueError: it is none, or has no value.
    """
    try:
        return float(_value(ast.parse(expression.replace(",", "").strip(), mode="eval").body))
    except (SyntaxError, ArithmeticError, RecursionError, KeyError):
        raise ValueError(f"{expression[:100]!r} is no expression with a value") from None


def _value(node: ast.AST) -> float:
    match node:
        case ast.Constant(value=int() | float() as number):
            return number
        case ast.BinOp(left=left, op=kind, right=right):
            return _OPERATORS[type(kind)](_value(left), _value(right))
        case ast.UnaryOp(op=kind, operand=operand):
            return _OPERATORS[type(kind)](_value(operand))
        case _:
            raise KeyError(node)


async def calculate(expression: str) -> str:
    """Calculate an expression of numbers, + - * / and parentheses."""
    try:
        return f"{value_of(expression):.10g}"
    except ValueError as error:
        return f"error : {error}"


@cache
def _client() -> OpenAIChatCompletionClient:
    return OpenAIChatCompletionClient(
        model="policy",
        max_tokens=LONGEST,
        temperature=1.0,
        model_info={"vision": False, "function_calling": True, "json_output": False, "structured_output": False, "family": "unknown"},
    )


@cache
def _tool() -> FunctionTool:
    return FunctionTool(calculate, name="calculate", description="Calculate an expression of numbers, + - * / and parentheses.")


async def agent(given: Mapping[str, Any]) -> str:
    """Answer one question."""
    return await solve(given["question"], _client(), _tool(), calls=CALLS, system=SYSTEM)
