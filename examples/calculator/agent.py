"""An agent that solves word problems with a calculator, written with AutoGen, that knows nothing of being trained.

In: {"text": "tom has 12 coins . tom finds 7 . how many coins ?"}. Out: what it said last, "answer 19" if it keeps to the form.
The model may call the calculator three times; what it says after a fourth call is the call's result, and no answer. The model's address and
key come from OPENAI_BASE_URL and OPENAI_API_KEY.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any, Literal

from autogen_agentchat.agents import AssistantAgent
from autogen_agentchat.messages import BaseTextChatMessage
from autogen_core.tools import FunctionTool
from autogen_ext.models.openai import OpenAIChatCompletionClient

from examples.calculator.arithmetic import CALLS, calculate


async def calc(a: int, operator: Literal["+", "-", "*", "/"], b: int) -> int:
    """Calculate with whole numbers from 0 to 99."""
    return calculate(a, operator, b)


@cache
def _client() -> OpenAIChatCompletionClient:
    return OpenAIChatCompletionClient(
        model="policy",
        max_tokens=6,
        temperature=1.0,
        model_info={"vision": False, "function_calling": True, "json_output": False, "structured_output": False, "family": "unknown"},
    )


@cache
def _tool() -> FunctionTool:
    return FunctionTool(calc, name="calc", description="Calculate with whole numbers from 0 to 99.")


async def solve(task: str, client: OpenAIChatCompletionClient, tool: FunctionTool, *, calls: int = CALLS, system: str | None = None) -> str:
    """Answer a question with a tool that may be used so often; the last text, or "" where that is no text."""
    solver = AssistantAgent("solver", client, tools=[tool], system_message=system, max_tool_iterations=calls + 1)
    last = (await solver.run(task=task)).messages[-1]
    return last.content if isinstance(last, BaseTextChatMessage) else ""


async def agent(given: Mapping[str, Any]) -> str:
    """Answer one question."""
    return await solve(given["text"], _client(), _tool())
