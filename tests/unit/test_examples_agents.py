"""The agents of examples and recipes, each in its real framework, against a policy that says what a script says."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from langchain_openai.chat_models import _client_utils

from examples.calculator import agent as calculator
from examples.from_scratch import agent as from_scratch
from examples.retrieval_qa import agent as retrieval
from examples.retrieval_qa import facts
from examples.text_to_sql import agent as sql
from recipes.math import agent as math
from recipes.musique import agent as musique
from recipes.spider import agent as spider
from recipes.spider.data import RECIPE as SPIDER
from tests.support.otlp import HttpServer
from tests.support.scripted_servers import WordPolicy, word_calls

Messages = list[tuple[str, str]]


@pytest.fixture
def policy(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., WordPolicy]]:
    """Starts a scripted policy and points every framework at it."""
    running: list[WordPolicy] = []

    def start(reply: Callable[[Messages], str]) -> WordPolicy:
        running.append(WordPolicy(reply))
        monkeypatch.setenv("OPENAI_BASE_URL", f"{running[-1].url}/v1")
        return running[-1]

    monkeypatch.setenv("OPENAI_API_KEY", "none")
    connections = _client_utils._cached_async_httpx_client  # by address: they may be of an earlier policy's port, and event loop
    clients = (calculator._client, from_scratch._client, retrieval._researcher, sql._policy, sql._checker, connections)
    for client in clients:
        client.cache_clear()
    yield start
    for fake in running:
        fake.close()
    for client in clients:
        client.cache_clear()


def script(*replies: str) -> Callable[[Messages], str]:
    """Says one after the other."""
    left = iter(replies)
    return lambda messages: next(left)


COUNTED = {"text": "tom has 12 coins . tom finds 7 . how many coins ?", "answer": 19}
CONVERSATIONS: list[tuple[list[str], str, Messages]] = [
    (["calc 12 + 7", "answer 19"], "answer 19", [("assistant", "calc 12 + 7"), ("tool", "19")]),
    (["calc 12 / 7", "calc 12 - 7", "answer 5"], "answer 5", [("assistant", "calc 12 - 7"), ("tool", "5")]),
    (["answer 3"], "answer 3", [("user", COUNTED["text"])]),
    (["calc + 7"], "calc + 7", [("user", COUNTED["text"])]),
    (["calc 12 ? 7"], "calc 12 ? 7", [("user", COUNTED["text"])]),
    ([""], "", [("user", COUNTED["text"])]),
]


@pytest.mark.parametrize(("replies", "answer", "expected"), CONVERSATIONS)
async def test_calculator_agent_follows_conversation(
    policy: Callable[..., WordPolicy], replies: list[str], answer: str, expected: Messages
) -> None:
    seen: list[Messages] = []
    answers = script(*replies)
    fake = policy(lambda messages: (seen.append(messages), answers(messages))[1])
    assert (await calculator.agent(COUNTED)).strip() == answer
    assert seen[-1][-len(expected) :] == expected
    assert seen[-1][0] == ("user", COUNTED["text"])
    asked = {(chat["model"], chat["max_tokens"], chat["temperature"], chat["tools"][0]["function"]["name"]) for chat in fake.chats}
    assert (asked, len(seen)) == ({("policy", 6, 1.0, "calc")}, len(replies))


@pytest.mark.parametrize(("replies", "answer", "expected"), CONVERSATIONS)
async def test_from_scratch_agent_equals_calculator_at_own_endpoint(
    policy: Callable[..., WordPolicy], replies: list[str], answer: str, expected: Messages
) -> None:
    seen: list[Messages] = []
    answers = script(*replies)
    fake = policy(lambda messages: (seen.append(messages), answers(messages))[1])
    assert (await from_scratch.agent(COUNTED, f"{fake.url}/rollout/r/attempt/0/v1")).strip() == answer
    assert seen[-1][-len(expected) :] == expected
    assert set(fake.paths) == {"/rollout/r/attempt/0/v1/chat/completions"}


async def test_calculator_agent_fourth_calculation_is_no_answer(policy: Callable[..., WordPolicy]) -> None:
    fake = policy(lambda messages: "calc 1 + 1")
    assert await calculator.agent(COUNTED) == "2"
    assert (await from_scratch.agent(COUNTED, f"{fake.url}/v1")).strip() == "calc 1 + 1"
    assert len(fake.chats) == 8


def researcher(messages: Messages) -> str:
    """Searches for the capital, then for its mayor, then answers with the mayor."""
    country = messages[0][1].split()[-2]
    match len(messages):
        case 1:
            return f"search capital {country}"
        case 3:
            return f"search mayor {facts.facts()['capital', country]}"
        case _:
            return f"answer {messages[-1][1].split(' . ')[0].split(' is ')[1]}"


async def test_retrieval_qa_agent_answers_and_passes_malformed_replies(policy: Callable[..., WordPolicy]) -> None:
    country = facts.COUNTRIES[0]
    mayor = facts.facts()["mayor", facts.facts()["capital", country]]
    fake = policy(researcher)
    assert await retrieval.agent({"text": f"who runs the capital of {country} ?"}) == f" answer {mayor}"
    assert [message["role"] for message in fake.chats[-1]["messages"]] == ["user", "assistant", "tool", "assistant", "tool"]
    policy(lambda messages: "search x")
    retrieval._researcher.cache_clear()
    assert await retrieval.agent({"text": "who rules x ?"}) == "", "it went on searching"
    for malformed in ("search", "find it", ""):
        retrieval._researcher.cache_clear()
        policy(lambda messages, reply=malformed: reply)
        assert (await retrieval.agent({"text": "who rules x ?"})).strip() == malformed


RIGHT = "select count ( * ) from singer where age > 30"
WRONG = "select name from singer where age > 30"
ASKED: dict[str, Any] = {"text": "how many singers older than 30", "parts": ["count ( * )", "singer", "age >", "30"], "oracle": False}


async def test_text_to_sql_agent_asks_writer_checker_and_rewriter(policy: Callable[..., WordPolicy]) -> None:
    seen: list[Messages] = []
    answers = script(WRONG, "wrong select", RIGHT, "ok")
    fake = policy(lambda messages: (seen.append(messages), answers(messages))[1])
    assert await sql.agent(ASKED) == {"query": RIGHT, "queries": [WRONG, RIGHT], "verdicts": ["wrong select", "ok"]}
    question = f"question : {ASKED['text']} sql :"
    assert seen == [
        [("system", "write sql"), ("user", ASKED["text"])],
        [("system", "check sql"), ("user", f"{question} {WRONG} : rows")],
        [("system", "fix sql"), ("user", f"{question} {WRONG} : rows checker : wrong select")],
        [("system", "check sql"), ("user", f"{question} {RIGHT} : rows")],
    ]
    requests = [(chat["model"], chat["max_completion_tokens"], chat["temperature"]) for chat in fake.chats]
    assert requests == [("policy", 24, 1.0), ("checker", 3, 0.0)] * 2


@pytest.mark.parametrize(
    ("replies", "queries", "calls"),
    [
        ([WRONG, "wrong where", WRONG, "garbage", RIGHT], [WRONG, WRONG, RIGHT], 5),  # the third query is the last, and unchecked
        (["select * from nothing at all"], ["select * from nothing at all"], 1),  # of words that no model has
        ([""], [""], 1),
        ([" ".join(["("] * 24)], [" ".join(["("] * 24)], 1),
    ],
)
async def test_text_to_sql_agent_ends_after_bounded_calls(
    policy: Callable[..., WordPolicy], replies: list[str], queries: list[str], calls: int
) -> None:
    fake = policy(script(*replies))
    assert (await sql.agent(ASKED))["queries"] == queries
    assert len(fake.chats) == calls


async def test_text_to_sql_oracle_asks_no_model_and_errs_in_a_tenth(policy: Callable[..., WordPolicy]) -> None:
    fake = policy(lambda messages: RIGHT)
    ends = [(await sql.agent({**ASKED, "oracle": True, "text": f"how many singers older than {n}"}))["verdicts"][0] for n in range(31, 71)]
    assert 0 < sum(verdict != "ok" for verdict in ends) < 10
    assert {chat["model"] for chat in fake.chats} == {"policy"}


def test_word_calls_arguments_are_parsed_from_words() -> None:
    calc = {"properties": {"a": {"type": "integer"}, "operator": {"type": "string", "enum": ["+", "-"]}, "b": {"type": "integer"}}}
    text = {"properties": {"query": {"type": "string"}}}
    read = word_calls().arguments_of
    assert [read(words.split(), calc) for words in ("1 + 2", "1 ? 2", "a + 2", "1 +", "1 + 2 3", "")] == [
        {"a": 1, "operator": "+", "b": 2},
        *[None] * 5,
    ]
    assert [read(words.split(), text) for words in ("mayor siniton", "x", "")] == [{"query": "mayor siniton"}, {"query": "x"}, None]


async def test_math_recipe_agent_calculates_expressions(policy: Callable[..., WordPolicy]) -> None:
    math._client.cache_clear()
    seen: list[Messages] = []
    answers = script("calculate ( 12 + 7 ) * 2", "calculate 1 / 0", "so answer 38")
    policy(lambda messages: (seen.append(messages), answers(messages))[1])
    assert (await math.agent({"question": "how many ?"})).strip() == "so answer 38"
    assert seen[0] == [("system", math.SYSTEM), ("user", "how many ?")]
    assert [words for role, words in seen[-1] if role == "tool"] == ["38", "error : '1 / 0' is no expression with a value"]


async def test_spider_recipe_agent_asks_one_model_in_three_roles(policy: Callable[..., WordPolicy], tmp_path: Path) -> None:
    spider._model.cache_clear()
    SPIDER.write_small(tmp_path)
    file = tmp_path / "database/singers/singers.sqlite"
    seen: list[Messages] = []
    answers = script("```sql\nselect sid from singer where age > 99\n```", "that finds nothing", "select 1", "OK", "never asked")
    fake = policy(lambda messages: (seen.append(messages), answers(messages))[1])
    ended = await spider.agent({"question": "which ?", "schema": "create table singer", "database": str(file)})
    assert ended == {
        "query": "select 1",
        "queries": ["select sid from singer where age > 99", "select 1"],
        "verdicts": ["that finds nothing", "OK"],
    }
    assert [messages[0] for messages in seen] == [
        ("system", text) for text in (spider.WRITER, spider.CHECKER, spider.REWRITER, spider.CHECKER)
    ]
    feedback = "query : select sid from singer where age > 99\nresult : empty\nchecker : that finds nothing"
    assert seen[2][1] == ("user", f"create table singer\nquestion : which ?\n{feedback}")
    assert seen[3][1][1].endswith("query : select 1\nresult : 1")
    assert {chat["model"] for chat in fake.chats} == {"policy"}


class Retrieval(HttpServer):
    """Answers every query with two paragraphs."""

    def answer(self, method: str, path: str, headers: dict[str, str], body: bytes) -> tuple[int, dict[str, str], bytes]:
        assert (method, path) == ("POST", "/search")
        asked = json.loads(body)
        assert asked["count"] == musique.PARAGRAPHS
        return 200, {"content-type": "application/json"}, json.dumps({"documents": [asked["query"], "more"]}).encode()


async def test_musique_recipe_agent_queries_until_it_answers(policy: Callable[..., WordPolicy], monkeypatch: pytest.MonkeyPatch) -> None:
    query, last = "<think> x </think> <query> river of x </query>", "<think> y </think> <answer> ruso </answer>"
    with Retrieval() as service:
        monkeypatch.setenv("RETRIEVAL_URL", service.url)
        seen: list[Messages] = []
        for replies, calls in (((query, last), 2), (("nothing in tags",), 1), ((query,) * 9, musique.QUERIES + 1)):
            musique._clients.cache_clear()
            seen.clear()
            answers = script(*replies)
            fake = policy(lambda messages, answers=answers: (seen.append(messages), answers(messages))[1])
            ended = await musique.agent({"question": "what is the river ?"})
            assert len(seen) == calls
            assert ended.split("\n")[-1].strip() == replies[calls - 1]
        assert fake.chats[0]["stop"] == ["</query>", "</answer>"]
        assert fake.chats[0]["include_stop_str_in_output"]
        assert seen[1][2:] == [("assistant", query), ("user", "<information> river of x more </information>")]
