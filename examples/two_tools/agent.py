"""An agent with two tools, written with LangGraph and langchain-openai, that knows nothing of being trained.

In: {"city": "paris"}. Out: {"outcome": "right" | "wrong_city" | "malformed" | "gave_up", "turns": n}.
The model is told "say paris" and must reply "TOOL CITY". A tool raises for a user whose city it does not serve; the model is then told
"error" and may try again, three times in all. The model's address and key come from OPENAI_BASE_URL and OPENAI_API_KEY.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from functools import cache
from typing import Annotated, Any, NotRequired, TypedDict

from langchain_core.messages import AnyMessage, HumanMessage, ToolMessage
from langchain_core.tools import BaseTool, ToolException, tool
from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, StateGraph
from langgraph.types import Command

TURNS = 3


@tool
async def weather(user_city: str, city: str) -> str:
    """Tell the weather of a city, to users in paris and oslo."""
    return _answer("weather", {"paris", "oslo"}, user_city, city)


@tool
async def clock(user_city: str, city: str) -> str:
    """Tell the time in a city, to users in rome and lima."""
    return _answer("clock", {"rome", "lima"}, user_city, city)


def _answer(name: str, served: set[str], user_city: str, city: str) -> str:
    if user_city not in served:
        raise ToolException(f"{name} does not serve {user_city}")
    return f"{name} of {city}"


TOOLS: dict[str, BaseTool] = {"weather": weather, "clock": clock}


class State(TypedDict):
    """State that the graph's nodes share."""

    city: str
    messages: Annotated[list[AnyMessage], operator.add]
    turns: int
    outcome: NotRequired[str]


async def call_model(state: State) -> Command[str]:
    """Ask the model; what does not begin with a tool's name ends the conversation."""
    reply = await _client().ainvoke(state["messages"])
    update = {"messages": [reply], "turns": state["turns"] + 1}
    words = reply.text.split()
    if words and words[0] in TOOLS:
        return Command(goto="tools", update=update)
    return Command(goto=END, update={**update, "outcome": "malformed"})


async def call_tool(state: State) -> Command[str]:
    """Call the tool that the model named; a tool's error goes back to the model while there are turns."""
    name, *words = state["messages"][-1].text.split()
    city = " ".join(words)
    try:
        await TOOLS[name].ainvoke({"user_city": state["city"], "city": city})
    except ToolException:
        if state["turns"] == TURNS:
            return Command(goto=END, update={"outcome": "gave_up"})
        # The model's calls are plain text, so the id that the wire format wants refers to nothing.
        return Command(goto="model", update={"messages": [ToolMessage("error", tool_call_id=f"call-{state['turns']}")]})
    return Command(goto=END, update={"outcome": "right" if city == state["city"] else "wrong_city"})


@cache
def _client() -> ChatOpenAI:
    return ChatOpenAI(model="policy", max_completion_tokens=3, temperature=1.0)


@cache
def _graph() -> Any:
    graph = StateGraph(State)
    graph.add_node("model", call_model, destinations=("tools", END))
    graph.add_node("tools", call_tool, destinations=("model", END))
    graph.add_edge(START, "model")
    return graph.compile()


async def agent(given: Mapping[str, str]) -> dict[str, object]:
    """Answer one user."""
    city = given["city"]
    end = await _graph().ainvoke({"city": city, "messages": [HumanMessage(f"say {city}")], "turns": 0})
    return {"outcome": end["outcome"], "turns": end["turns"]}
