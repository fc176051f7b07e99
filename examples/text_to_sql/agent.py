"""Three agents that answer a question in SQL, written with LangGraph, that know nothing of being trained.

In: {"text": "total age of singers with albums dearer than 51", ...}. Out: {"query": the last query, "queries": all of them,
"verdicts": what the checker said}. The writer writes a query; it is run; the checker, a model of its own, says what it thinks of it; the
rewriter mends what is thought wrong, and so on, three queries in all. The models' address and key come from OPENAI_BASE_URL and
OPENAI_API_KEY.

With `"oracle": true` the checker is no model: it compares with the right query's parts and errs in one case of ten.
"""

from __future__ import annotations

import operator
import random
from collections.abc import Mapping
from functools import cache
from typing import Annotated, Any, TypedDict

from langchain_core.messages import AnyMessage, HumanMessage, SystemMessage
from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, StateGraph
from langgraph.types import Command

from examples.text_to_sql.database import outcome
from examples.text_to_sql.grammar import VERDICTS, WORDS, verdict

QUERIES = 3
LONGEST = 24
"""Words of a reply."""
ORACLE_ERRS = 0.1
_WORDS = frozenset(WORDS)


class State(TypedDict):
    """What the graph's nodes share."""

    given: Mapping[str, Any]
    queries: Annotated[list[str], operator.add]
    verdicts: Annotated[list[str], operator.add]


def writing(text: str) -> list[AnyMessage]:
    """What the writer is told."""
    return [SystemMessage("write sql"), HumanMessage(text)]


def checking(text: str, query: str) -> list[AnyMessage]:
    """What the checker is told."""
    return [SystemMessage("check sql"), HumanMessage(f"question : {text} sql : {query} : {outcome(query)}")]


def rewriting(text: str, query: str, said: str) -> list[AnyMessage]:
    """What the rewriter is told."""
    return [SystemMessage("fix sql"), HumanMessage(f"question : {text} sql : {query} : {outcome(query)} checker : {said}")]


async def write(state: State) -> Command[str]:
    """Write a first query."""
    said = await _said(_policy(), writing(state["given"]["text"]))
    return Command(goto=_after(said, 1), update={"queries": [said]})


async def check(state: State) -> Command[str]:
    """Say what is thought of the last query."""
    given, query = state["given"], state["queries"][-1]
    said = _oracle(given, query) if given.get("oracle") else await _said(_checker(), checking(given["text"], query))
    return Command(goto=END if said == "ok" else "rewriter_agent", update={"verdicts": [said]})


async def rewrite(state: State) -> Command[str]:
    """Mend the last query."""
    said = await _said(_policy(), rewriting(state["given"]["text"], state["queries"][-1], state["verdicts"][-1]))
    return Command(goto=_after(said, len(state["queries"]) + 1), update={"queries": [said]})


async def _said(model: ChatOpenAI, told: list[AnyMessage]) -> str:
    """The words of a model's reply; vLLM begins the text of a tokenizer of words with a space."""
    return " ".join((await model.ainvoke(told)).text.split())


def _after(query: str, written: int) -> str:
    """Where a query goes: nowhere, where it is the last one or cannot be told to a model."""
    words = query.split()
    sayable = 0 < len(words) < LONGEST and all(word in _WORDS for word in words)
    return "checker_agent" if sayable and written < QUERIES else END


def _oracle(given: Mapping[str, Any], query: str) -> str:
    rng = random.Random(f"{given['text']} {query}")
    said = verdict(query, given["parts"])
    if rng.random() >= ORACLE_ERRS:
        return said
    return rng.choice(VERDICTS[1:4] if said == "ok" else VERDICTS[:4])


@cache
def _policy() -> ChatOpenAI:
    return ChatOpenAI(model="policy", max_completion_tokens=LONGEST, temperature=1.0)


@cache
def _checker() -> ChatOpenAI:
    return ChatOpenAI(model="checker", max_completion_tokens=3, temperature=0.0)


@cache
def _graph() -> Any:
    graph = StateGraph(State)
    graph.add_node("writer_agent", write, destinations=("checker_agent", END))
    graph.add_node("checker_agent", check, destinations=("rewriter_agent", END))
    graph.add_node("rewriter_agent", rewrite, destinations=("checker_agent", END))
    graph.add_edge(START, "writer_agent")
    return graph.compile()


async def agent(given: Mapping[str, Any]) -> dict[str, Any]:
    """Answer one question."""
    end = await _graph().ainvoke({"given": given, "queries": [], "verdicts": []})
    return {"query": end["queries"][-1], "queries": end["queries"], "verdicts": end["verdicts"]}
