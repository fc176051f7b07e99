"""The three SQL agents (examples/text_to_sql) on any SQLite database, with one model in all three roles: they know nothing of training.

In: {"question": ..., "schema": CREATE statements, "database": path of a SQLite file, ...}. Out: {"query": the last query, "queries": all of
them, "verdicts": what the checker said}. Address and key of the model come from OPENAI_BASE_URL and OPENAI_API_KEY.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from typing import Any

from langchain_core.messages import AnyMessage, HumanMessage, SystemMessage
from langchain_openai import ChatOpenAI

from examples.text_to_sql.agent import SqlTeam
from recipes.spider.database import rows, shown

LONGEST = 512
"""Tokens of a reply."""
WRITER = "Write one SQLite query that answers the question . Reply with the query in a code block ."
CHECKER = "Check whether the query answers the question . Reply with the word ok , or with what is wrong ."
REWRITER = "The query was found wrong . Write a better one . Reply with the query in a code block ."
_BLOCK = re.compile(r"```(?:sql|sqlite)?\s(.*?)```", re.S | re.I)


def query_of(reply: str) -> str:
    """Return the query in a reply, on one line: its last code block, else all of it."""
    blocks = _BLOCK.findall(f"{reply} ")
    return " ".join((blocks[-1] if blocks else reply).split()).rstrip("; ")


def accepts(verdict: str) -> bool:
    """Return whether a checker's first word is ok."""
    return re.match(r"\W*ok\b", verdict, re.I) is not None


def _messages(system: str, given: Mapping[str, Any], *more: str) -> list[AnyMessage]:
    return [SystemMessage(system), HumanMessage("\n".join((given["schema"], f"question : {given['question']}", *more)))]


def _ran(given: Mapping[str, Any], query: str) -> str:
    return f"query : {query}\nresult : {shown(rows(given['database'], query))}"


@cache
def _model() -> ChatOpenAI:
    return ChatOpenAI(model="policy", max_completion_tokens=LONGEST, temperature=1.0)


TEAM = SqlTeam(
    policy=_model,
    checker=_model,
    writing=lambda given: _messages(WRITER, given),
    checking=lambda given, query: _messages(CHECKER, given, _ran(given, query)),
    rewriting=lambda given, query, verdict: _messages(REWRITER, given, _ran(given, query), f"checker : {verdict}"),
    is_checked=bool,
    accepts=accepts,
    query=query_of,
)
_graph = cache(TEAM.graph)


async def agent(given: Mapping[str, Any]) -> dict[str, Any]:
    """Answer one question."""
    return await TEAM.answer(_graph(), given)
