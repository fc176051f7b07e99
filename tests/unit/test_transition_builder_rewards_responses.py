"""Responses of calls, parsed from the records of real engines and conventions."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from spangrad.settings import AirRule, BuilderSettings
from transition_builder.dialects import texts
from transition_builder.rewards.rules import columns

GOLDEN = Path(__file__).parent.parent / "fixtures/gateway"


def golden(name: str) -> str:
    """The body that a real vLLM answered with."""
    return json.loads((GOLDEN / f"{name}.json").read_text())["bare"]["body"]


def parse(text: str) -> list[tuple[int, str, list[tuple[str, str]]]]:
    return [(choice, words, calls) for choice, (words, calls) in texts.response([text]).items()]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("chat", [(0, "rzv}]5]j6|]r", [])]),
        ("chat-two", [(0, "rzv}]5]j6|]r", []), (1, "rzv}]5]j6|]r", [])]),
        ("chat-named", [(0, "", [("weather", '{"city": "lima"}')])]),
        ("completions-many", [(at, text, []) for at, text in enumerate(["Jv,R["] * 2 + ["*,5Jv"] * 2 + ["aC7O1"] * 2)]),
        ("messages", [(0, "*S\\06Jvv.", [])]),
        ("messages-named", [(0, "", [("weather", '{"city": "lima"}')])]),
        ("responses", [(0, "*S\\06Jvv.", [])]),
        ("responses-named", [(0, "", [("weather", '{"city": "lima"}')])]),
    ],
)
def test_parse_response_of_each_dialect(name: str, expected: list[tuple[int, str, list[tuple[str, str]]]]) -> None:
    assert parse(golden(name)) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"choices":[{"message":{"content":null,"function_call":{"name":"f","arguments":"{"}}}]}', [(0, "", [("f", "{")])]),
        ('{"choices":[{"index":1,"message":{"content":[{"type":"text","text":"a"},{"type":"image"}]}}]}', [(1, "a", [])]),
        (
            '[{"role":"assistant","parts":[{"type":"text","content":"hi"},{"type":"tool_call","name":"f","arguments":{"a":1}}]}]',
            [(0, "hi", [("f", '{"a": 1}')])],
        ),
        ('{"content":[{"type":"tool_use","name":"f","input":{},"partial_json":"{\\"a"}]}', [(0, "", [("f", '{"a')])]),
        ('{"output":[{"type":"web_search_call"},{"type":"message","content":"a"}]}', [(0, "a", [])]),
        ('{"content":[{"type":"text","text":"a"},{"type":"text","text":"b"}]}', [(0, "a\nb", [])]),
        ('{"choices":[{"message":{"content":"a\\ud83d","tool_calls":null}}]}', [(0, "a\ufffd", [])]),
        (
            '{"content":[{"type":"tool_use","name":"f","input":{"a":"\\ude00"}},{"type":"text","text":"\\ud83d\\ude00"}]}',
            [(0, "\U0001f600", [("f", '{"a": "\ufffd"}')])],
        ),
        ('{"output":[{"type":"reasoning","content":[{"type":"text","text":"hm"}]},{"type":"message","content":"a"}]}', [(0, "a", [])]),
    ],
)
def test_parse_response_of_older_forms(text: str, expected: list[tuple[int, str, list[tuple[str, str]]]]) -> None:
    assert parse(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        *("", "hello", "{", "[]", "null", '{"choices":1}', '{"choices":[1]}', '{"choices":[{"message":{"tool_calls":[{}]}}]}'),
        *(f'{{"choices":[{{"index":{index},"message":{{"content":"a"}}}}]}}' for index in ("-1", "65536", "Infinity", "[]")),
    ],
)
def test_parse_response_without_answer_has_no_rows(text: str) -> None:
    assert parse(text) == []


def test_used_columns_include_answers_only_where_a_rule_needs_them() -> None:
    def asks(**rule: object) -> bool:
        return not columns.ANSWERS.isdisjoint(columns.used(BuilderSettings(rules=(AirRule(name="r", reward=-1, **rule),))))  # type: ignore[arg-type]

    assert columns.used(BuilderSettings()) == frozenset()
    assert not asks(kind="tool_error", tools=("*",))
    assert not asks(kind="expression", where="Seconds > 1")
    assert asks(kind="expression", where="LENGTH(Text) > 10")
    assert asks(kind="repeated_call", tools=("*",))
    assert asks(kind="unparsable_output", form="json")
    assert asks(kind="python", where="rules:rule")
    assert not asks(kind="python", where="rules:rule", columns=("Seconds",))
