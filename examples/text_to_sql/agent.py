"""Three agents that answer a question in SQL, written with LangGraph, that know nothing of being trained.

In: {"text": "total age of singers with albums dearer than 51", ...}. Out: {"query": the last query, "queries": all of them,
"verdicts": what the checker said}. The writer writes a query; it is run; the checker, a model of its own, judges it; the
rewriter corrects what is judged wrong, and so on, three queries in all. The models' address and key come from OPENAI_BASE_URL and
OPENAI_API_KEY.

With `"oracle": true` the checker is no model: it compares with the right query's parts and errs in one case of ten.
"""

from __future__ import annotations

import operator
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, TypedDict

from langchain_core.messages import AIMessage, AnyMessage, HumanMessage, SystemMessage
from langchain_core.runnables import Runnable
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
    """State that the graph's nodes share."""

    given: Mapping[str, Any]
    queries: Annotated[list[str], operator.add]
    verdicts: Annotated[list[str], operator.add]


def writing(text: str) -> list[AnyMessage]:
    """Return the messages to the writer."""
    return [SystemMessage("write sql"), HumanMessage(text)]


def checking(text: str, query: str) -> list[AnyMessage]:
    """Return the messages to the checker."""
    return [SystemMessage("check sql"), HumanMessage(f"question : {text} sql : {query} : {outcome(query)}")]


def rewriting(text: str, query: str, judgement: str) -> list[AnyMessage]:
    """Return the messages to the rewriter."""
    return [SystemMessage("fix sql"), HumanMessage(f"question : {text} sql : {query} : {outcome(query)} checker : {judgement}")]


@dataclass(frozen=True)
class SqlTeam:
    """A writer, a checker and a rewriter, and what makes them answer questions about one kind of database."""

    policy: Callable[[], Runnable[Any, AIMessage]]
    """Model of the writer and the rewriter."""
    checker: Callable[[], Runnable[Any, AIMessage]]
    writing: Callable[[Mapping[str, Any]], list[AnyMessage]]
    """Messages to the writer about a question."""
    checking: Callable[[Mapping[str, Any], str], list[AnyMessage]]
    """Messages to the checker about a question and a query."""
    rewriting: Callable[[Mapping[str, Any], str, str], list[AnyMessage]]
    """Messages to the rewriter about a question, a query and the checker's verdict."""
    is_checked: Callable[[str], bool]
    """Decides whether a query, but the last one, goes to the checker."""
    accepts: Callable[[str], bool] = "ok".__eq__
    """Decides by the checker's verdict whether it accepts."""
    query: Callable[[str], str] = lambda reply: " ".join(reply.split())
    """The query in a reply; vLLM begins the text of a tokenizer of words with a space."""
    oracle: Callable[[Mapping[str, Any], str], str] | None = None
    """Stands in for the checker where a question asks for it."""

    async def write(self, state: State) -> Command[str]:
        """Write a first query."""
        return self._after(self.query((await self.policy().ainvoke(self.writing(state["given"]))).text), 1)

    async def check(self, state: State) -> Command[str]:
        """Say what is thought of the last query."""
        given, query = state["given"], state["queries"][-1]
        if self.oracle and given.get("oracle"):
            verdict = self.oracle(given, query)
        else:
            verdict = " ".join((await self.checker().ainvoke(self.checking(given, query))).text.split())
        return Command(goto=END if self.accepts(verdict) else "rewriter_agent", update={"verdicts": [verdict]})

    async def rewrite(self, state: State) -> Command[str]:
        """Correct the last query."""
        messages = self.rewriting(state["given"], state["queries"][-1], state["verdicts"][-1])
        return self._after(self.query((await self.policy().ainvoke(messages)).text), len(state["queries"]) + 1)

    def _after(self, query: str, written: int) -> Command[str]:
        """A query, and where it goes: nowhere, where it is the last one or not worth checking."""
        goes_on = written < QUERIES and self.is_checked(query)
        return Command(goto="checker_agent" if goes_on else END, update={"queries": [query]})

    def graph(self) -> Any:
        """The three as a graph, whose nodes' names are the agents' in spans."""
        graph = StateGraph(State)
        graph.add_node("writer_agent", self.write, destinations=("checker_agent", END))
        graph.add_node("checker_agent", self.check, destinations=("rewriter_agent", END))
        graph.add_node("rewriter_agent", self.rewrite, destinations=("checker_agent", END))
        graph.add_edge(START, "writer_agent")
        return graph.compile()

    async def answer(self, graph: Any, given: Mapping[str, Any]) -> dict[str, Any]:
        """Answer one question by the team's graph."""
        end = await graph.ainvoke({"given": given, "queries": [], "verdicts": []})
        return {"query": end["queries"][-1], "queries": end["queries"], "verdicts": end["verdicts"]}


def _is_sayable(query: str) -> bool:
    """Return whether a model's vocabulary and length limit admit a query."""
    words = query.split()
    return 0 < len(words) < LONGEST and all(word in _WORDS for word in words)


def _oracle(given: Mapping[str, Any], query: str) -> str:
    rng = random.Random(f"{given['text']} {query}")
    judgement = verdict(query, given["parts"])
    if rng.random() >= ORACLE_ERRS:
        return judgement
    return rng.choice(VERDICTS[1:4] if judgement == "ok" else VERDICTS[:4])


@cache
def _policy() -> ChatOpenAI:
    return ChatOpenAI(model="policy", max_completion_tokens=LONGEST, temperature=1.0)


@cache
def _checker() -> ChatOpenAI:
    return ChatOpenAI(model="checker", max_completion_tokens=3, temperature=0.0)


TEAM = SqlTeam(
    policy=_policy,
    checker=_checker,
    writing=lambda given: writing(given["text"]),
    checking=lambda given, query: checking(given["text"], query),
    rewriting=lambda given, query, judgement: rewriting(given["text"], query, judgement),
    is_checked=_is_sayable,
    oracle=_oracle,
)
_graph = cache(TEAM.graph)


async def agent(given: Mapping[str, Any]) -> dict[str, Any]:
    """Answer one question."""
    return await TEAM.answer(_graph(), given)
