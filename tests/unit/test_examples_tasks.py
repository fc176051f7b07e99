"""The examples' questions, rewards and demonstrations: nothing held out is shown, and every word is one that the model has."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from examples.calculator import arithmetic
from examples.calculator import model as calculator_model
from examples.calculator import task as calculator
from examples.learning.example import Question, Questions, write_questions
from examples.math_lora import model as math_model
from examples.math_lora.problem import MALFORMED, WordProblem
from examples.retrieval_qa import facts
from examples.retrieval_qa import model as retrieval_model
from examples.retrieval_qa import task as retrieval
from examples.text_to_sql import database, grammar
from examples.text_to_sql import model as sql_model
from examples.text_to_sql import task as sql
from spangrad.client.task_files import read_tasks

EXAMPLES = Path(__file__).parents[2] / "examples"
DRAWN: dict[str, tuple[Callable[[int], Questions], Sequence[str], int]] = {
    "calculator": (lambda seed: calculator.questions(seed, 400), calculator.WORDS, 300),
    "retrieval_qa": (lambda seed: retrieval.questions(seed, 400), retrieval.WORDS, 256),
    "text_to_sql": (lambda seed: sql.questions(seed, 400, oracle=False), grammar.WORDS, 256),
}


@pytest.mark.parametrize("name", DRAWN)
def test_questions_depend_on_seed_and_exclude_held_out(name: str) -> None:
    draw, words, held_out = DRAWN[name]
    drawn, again, other = draw(1), draw(1), draw(2)
    assert drawn == again
    assert drawn.train != other.train
    assert drawn.held_out == other.held_out
    assert (len(drawn.train), len(drawn.held_out)) == (400, held_out)
    assert not {question["text"] for question in drawn.train} & {question["text"] for question in drawn.held_out}
    assert {word for question in (*drawn.train, *drawn.held_out) for word in question["text"].split()} <= set(words)


def test_questions_held_out_patterns_and_chains_are_not_trained() -> None:
    asked = retrieval.questions(3, 2000)

    def chains(part: Sequence[Question]) -> set[object]:
        return {(question["hops"][0][1], *[relation for relation, _ in question["hops"]]) for question in part}

    assert not chains(asked.train) & chains(asked.held_out)
    assert (len(grammar.TRAINED), len(grammar.HELD_OUT)) == (68, 16)
    assert not set(grammar.TRAINED) & set(grammar.HELD_OUT)


@pytest.mark.parametrize(
    ("draw", "words", "held_out"),
    [
        (calculator_model.transcript, calculator.WORDS, calculator.held_out_questions()),
        (math_model.transcript, calculator.WORDS, calculator.held_out_questions()),
        (sql_model.policy_transcript, grammar.WORDS, sql.questions(0, 0, oracle=False).held_out),
        (sql_model.checker_transcript, grammar.WORDS, sql.questions(0, 0, oracle=False).held_out),
        (retrieval_model.transcript, retrieval.WORDS, ()),  # its names are changed, so that texts say nothing
    ],
)
def test_transcripts_have_known_words_and_nothing_held_out(draw: Callable[..., list[dict[str, str]]], words, held_out) -> None:
    rng = random.Random(1)
    shown = [draw(rng) for _ in range(300)]
    assert {word for messages in shown for message in messages for word in message["content"].split()} <= set(words)
    assert all(messages[-1]["role"] == "assistant" for messages in shown)
    texts = {message["content"] for messages in shown for message in messages if message["role"] == "user"}
    assert not [
        question["text"] for question in held_out if any(question["text"] == text or f": {question['text']} sql" in text for text in texts)
    ]


def test_policy_transcript_does_not_reveal_sql_functions() -> None:
    """The right function answers a conversation with "average" no more often than its share in the grammar."""
    rng = random.Random(0)
    answers = Counter(
        messages[-1]["content"].split()[1]
        for messages in (sql_model.policy_transcript(rng) for _ in range(4000))
        if any("average" in message["content"].split() for message in messages[:-1])
    )
    assert 0.15 < answers["avg"] / answers.total() < 0.35


def test_calculator_questions_have_right_answers() -> None:
    for question in calculator.questions(0, 300).train:
        value = question["start"]
        for operator, operand in question["steps"]:
            value = arithmetic.calculate(value, operator, operand)
        assert value == question["answer"]
    assert {len(question["steps"]) for question in calculator.held_out_questions()} == {1, 2}


def test_word_problem_rewards_an_expression_with_the_right_value() -> None:
    problem = WordProblem()
    for question in calculator.held_out_questions():
        assert problem.reset(question) == question["text"]
        right = " ".join([str(question["start"]), *(f"{operator} {operand}" for operator, operand in question["steps"])])
        assert (problem.step(right).reward, problem.step(right).done) == (1.0, True)
    problem.reset({"text": "", "answer": 38})
    replies = ("12 + 7 * 2", "38", "12 + 7", "12 +", "calc 12", "", "90 + 9 + 1", "7 / 2")
    assert [problem.step(reply).reward for reply in replies] == [1.0, 1.0, 0.0, *[MALFORMED] * 5]


@pytest.mark.parametrize(("a", "operator", "b"), [(7, "/", 2), (7, "/", 0), (98, "+", 2), (1, "-", 2), (1, "^", 2)])
def test_calculate_invalid_operation_raises(a: int, operator: str, b: int) -> None:
    with pytest.raises(ValueError, match="error"):
        arithmetic.calculate(a, operator, b)


def test_evaluate_of_each_example_gives_rewards() -> None:
    numbers = {answer: calculator.evaluate({"answer": 19}, answer) for answer in ("answer 19", "answer 18", "19", "", "answer 19 19")}
    assert numbers == {"answer 19": 1.0, "answer 18": 0.0, "19": -0.2, "": -0.2, "answer 19 19": -0.2}
    given = {"answer": "mito katoson"}
    answers = ("answer mito katoson", "answer mito", "answer x", "mito", "answer")
    people = {answer: round(retrieval.evaluate(given, answer), 3) for answer in answers}
    assert people == {"answer mito katoson": 1.0, "answer mito": 0.7, "answer x": 0.1, "mito": 0.0, "answer": 0.0}
    parts = {"parts": ("count ( * )", "singer", "age >", "30")}
    queries = (
        "select count ( * ) from singer where age > 30",
        "select count ( sid ) from singer where 30 < age",
        "select name from singer where age > 30",
        "select count ( * ) from where",
        "delete from singer",
        "",
    )
    assert [sql.evaluate(parts, {"query": query}) for query in queries] == [1.0, 1.0, 0.0, 0.0, 0.0, 0.0]
    assert database.rows("select count ( * ) from singer") == ((80,),)


def test_verdict_names_first_part_that_differs() -> None:
    parts = ("sum ( age )", "singer natural join album", "price >", "51")
    right = grammar.query(parts)
    assert right == "select sum ( age ) from singer natural join album where price > 51"
    verdicts = {
        right: "ok",
        right.replace("sum", "avg"): "wrong select",
        right.replace("album", "concert"): "wrong from",
        right.replace("51", "50"): "wrong where",
        right.replace(" where ", " "): "wrong sql",
        "select from singer where age > 5": "wrong sql",
        "": "wrong sql",
    }
    assert {query: grammar.verdict(query, parts) for query in verdicts} == verdicts
    assert [database.outcome(query) for query in (right, right.replace("51", "99"), right.replace(")", ""))] == ["rows", "empty", "error"]


def test_database_rows_from_threads_with_refused_queries() -> None:
    asked = ("count ( * )", "count ( * ) )", "nothing")
    queries = [f"select {what} from singer natural join album where age > {age}" for age in range(18, 71) for what in asked]
    for _ in range(10):
        database.rows.cache_clear()
        with ThreadPoolExecutor(16) as threads:
            rows = list(threads.map(database.rows, queries))
        assert [row is None for row in rows] == [False, True, True] * (len(queries) // 3)


@pytest.mark.parametrize(
    "query", [f"select count ( * ) from {' , '.join(['album'] * 5)}", "select * from album , album a2 , singer", "select 1; select 2"]
)
def test_database_rows_of_refused_query_is_none(query: str) -> None:
    assert database.rows(query) is None


def test_facts_search_finds_fact_first() -> None:
    for (relation, entity), value in facts.facts().items():
        assert facts.search([relation, entity])[0] == f"the {relation} of {entity} is {value} ."
    assert facts.search(["capital", facts.COUNTRIES[0]]) == facts.search([facts.COUNTRIES[0], "capital", "capital"])
    assert facts.search(["nobody"]) == ()
    assert len(facts.facts()) == 300


def test_write_questions_are_read_as_tasks(tmp_path: Path) -> None:
    drawn = sql.questions(0, 3, oracle=True).train
    write_questions(tmp_path / "train.jsonl", "train", drawn)
    tasks = read_tasks(tmp_path / "train.jsonl")
    assert [task.task_id for task in tasks] == ["train-0", "train-1", "train-2"]
    assert [task.input for task in tasks] == json.loads(json.dumps(drawn))


@pytest.mark.parametrize(
    ("example", "files"),
    [
        ("calculator", ("agent", "arithmetic")),
        ("from_scratch", ("agent",)),
        ("retrieval_qa", ("agent", "facts")),
        ("text_to_sql", ("agent", "database", "grammar", "queries")),
    ],
)
def test_example_agents_do_not_mention_spangrad(example: str, files: Sequence[str]) -> None:
    for file in files:
        text = (EXAMPLES / example / f"{file}.py").read_text()
        assert "spangrad" not in text
        assert "examples.learning" not in text
