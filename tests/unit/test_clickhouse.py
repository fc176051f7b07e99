"""Texts of others in statements: how they are cut and written."""

from __future__ import annotations

import clickhouse_connect
import pytest

from spangrad.errors import StoreError
from spangrad.settings import StoreSettings
from spangrad.store.clickhouse import KEYS_A_STATEMENT, batches, connect, constant


def test_batches_split_keys_by_count_and_bytes_without_duplicates() -> None:
    names = [str(number) for number in range(KEYS_A_STATEMENT + 1)]
    assert [len(some) for some in batches([*names, *names])] == [KEYS_A_STATEMENT, 1]
    long = [f"{number:02}" + "é" * 10_000 for number in range(5)]
    whole = [one.encode() for one in long]
    assert list(batches(long)) == [(whole[0], whole[1]), (whole[2], whole[3]), (whole[4],)]
    assert list(batches([])) == []


def test_batches_put_oversized_and_non_utf8_keys_alone() -> None:
    huge, odd = b"x" * 10**6, b"a\xffb"
    assert list(batches([b"1", huge, b"2", odd, b"3"])) == [(b"1",), (huge,), (b"2",), (odd,), (b"3",)]


def test_constant_contains_no_word_of_its_texts() -> None:
    assert constant(["file(1)"]) == "[unhex('66696c65283129')]"
    assert constant([b"a\xffb"]) == "[unhex('61ff62')]"
    assert constant(["url(", b"s3("]) == r"splitByChar('\xFF', unhex('75726c28ff733328'))"


def test_store_errors_do_not_show_the_password_of_the_url() -> None:
    with pytest.raises(StoreError, match=r"^the span store at http://127\.0\.0\.1:9 does not answer") as caught:
        connect(StoreSettings(url="http://u:s3cret@127.0.0.1:9"))
    assert "s3cret" not in str(caught.value)


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
def test_connect_consistent_to_replicated_store_asks_sequential_consistency(
    facts: dict[str, object], consistent: bool, expected: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = dict[str, object]()
    monkeypatch.setattr(clickhouse_connect, "get_client", lambda **options: asked.update(options))
    connect(StoreSettings(**facts), consistent=consistent)  # type: ignore[arg-type]
    assert asked["settings"] == expected
