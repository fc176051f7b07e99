"""Whole answers of known fields are read in one pass; others by name, with the same result (tests/fixtures/gateway)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gateway.dialects import DIALECTS
from gateway.dialects.choices import IN_ORDER, ChoicesDialect
from spangrad.semconv import ANSWER_FIELD

GOLDEN = Path(__file__).parent.parent / "fixtures/gateway"
NAMES = sorted(path.stem for kind in ("chat", "completions") for path in GOLDEN.glob(f"{kind}*.json") if not path.stem.endswith("-stream"))
GIVEN = {name: given for name in NAMES if (given := json.loads((GOLDEN / f"{name}.json").read_text()))["bare"]["status"] == 200}


def choices_dialect(path: str) -> ChoicesDialect[Any]:
    dialect = DIALECTS[path]
    assert isinstance(dialect, ChoicesDialect)
    return dialect


@pytest.mark.parametrize("name", GIVEN)
def test_known_answer_of_vllm_is_read_in_one_pass(name: str) -> None:
    assert choices_dialect(GIVEN[name]["path"]).known(GIVEN[name]["plugged"]["body"].encode()) is not None


@pytest.mark.parametrize("name", GIVEN)
def test_dialect_answer_with_unknown_fields_keeps_them_and_reads_the_same(name: str) -> None:
    given = GIVEN[name]
    dialect = choices_dialect(given["path"])
    request = dialect.parse(json.dumps(given["request"]).encode())
    known, known_client = dialect.read(given["plugged"]["body"].encode(), request)
    top = json.loads(given["plugged"]["body"])
    top["choices"][0] = {"seen first": 1, **top["choices"][0], "seen later": {"a": [1.0]}}
    body = msgspec.json.encode({"top": None, **top})
    answer, client = dialect.read(body, request)
    shown = json.loads(client)
    assert dialect.known(body) is None
    assert (shown.pop("top"), shown["choices"][0].pop("seen first"), shown["choices"][0].pop("seen later")) == (None, 1, {"a": [1.0]})
    assert shown == json.loads(known_client)
    assert (answer.prompts, answer.choices, answer.engine) == (known.prompts, known.choices, known.engine)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_known_answer_writes_every_field_that_it_accepts(path: str) -> None:
    dialect = choices_dialect(path)
    known = dialect.known(b'{"choices": [{"index": 0}]}')
    assert known is not None
    assert known.choices
    assert {*IN_ORDER, ANSWER_FIELD} == set(known.__struct_encode_fields__)
    assert set(dialect.choice_in_order) == set(known.choices[0].__struct_encode_fields__)
