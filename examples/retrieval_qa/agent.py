"""An agent that searches before it answers, written with OpenAI's Agents SDK, that knows nothing of being trained.

In: {"text": "who runs the capital of siniland ?"}. Out: what it said last, "answer mito katoson" if it keeps to the form; "" if it went on
searching for four turns. The model's address and key come from OPENAI_BASE_URL and OPENAI_API_KEY.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, RunConfig, Runner, function_tool
from agents.exceptions import MaxTurnsExceeded
from openai import AsyncOpenAI

from examples.retrieval_qa import facts


@function_tool
async def search(query: str) -> str:
    """Find the facts that fit the query best."""
    return " ".join(facts.search(query.split())) or facts.NOTHING


@cache
def _researcher() -> Agent[None]:
    return Agent(
        name="researcher",
        tools=[search],
        model=OpenAIChatCompletionsModel(model="policy", openai_client=AsyncOpenAI()),
        model_settings=ModelSettings(temperature=1.0, max_tokens=6),
    )


async def agent(given: Mapping[str, Any]) -> str:
    """Answer one question."""
    # The SDK's own traces would go to OpenAI.
    config = RunConfig(tracing_disabled=True)
    try:
        result = await Runner.run(_researcher(), given["text"], max_turns=facts.SEARCHES + 1, run_config=config)
    except MaxTurnsExceeded:
        return ""
    return str(result.final_output)
