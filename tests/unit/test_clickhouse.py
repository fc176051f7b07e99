"""Texts of others in statements: how they are cut and written."""

from __future__ import annotations

import clickhouse_connect
import pytest

from spangrad.settings import StoreSettings
from spangrad.store.clickhouse import KEYS_A_STATEMENT, batches, connect, constant


def test_keys_are_cut_by_number_and_by_bytes_and_each_comes_once() -> None:
    names = [str(number) for number in range(KEYS_A_STATEMENT + 1)]
    assert [len(some) for some in batches([*names, *names])] == [KEYS_A_STATEMENT, 1]
    long = [f"{number:02}" + "é" * 10_000 for number in range(5)]
    whole = [one.encode() for one in long]
    assert list(batches(long)) == [(whole[0], whole[1]), (whole[2], whole[3]), (whole[4],)]
    assert list(batches([])) == []


def test_a_key_longer_than_a_statement_and_one_that_is_no_utf8_are_alone() -> None:
    huge, odd = b"x" * 10**6, b"a\xffb"
    assert list(batches([b"1", huge, b"2", odd, b"3"])) == [(b"1",), (huge,), (b"2",), (odd,), (b"3",)]


def test_a_constant_has_none_of_the_words_of_its_texts() -> None:
    assert constant(["file(1)"]) == "[unhex('66696c65283129')]"
    assert constant([b"a\xffb"]) == "[unhex('61ff62')]"
    assert constant(["url(", b"s3("]) == r"splitByChar('\xFF', unhex('75726c28ff733328'))"


@pytest.mark.parametrize(
    ("facts", "consistent", "expected"),
    [
        ({}, True, {}),
        ({"cluster": "spans"}, True, {"select_sequential_consistency": 1}),
        ({"cluster": "spans"}, False, {}),
        ({"cluster": "spans", "sequential_consistency": False}, True, {}),
        ({"sequential_consistency": True}, True, {"select_sequential_consistency": 1}),
    ],
)
def test_connect_where_a_client_concludes_from_missing_rows_asks_a_replicated_store_for_sequential_consistency(
    facts: dict[str, object], consistent: bool, expected: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = dict[str, object]()
    monkeypatch.setattr(clickhouse_connect, "get_client", lambda **options: asked.update(options))
    connect(StoreSettings(**facts), consistent=consistent)  # type: ignore[arg-type]
    assert asked["settings"] == expected
