"""Texts of others in statements: how they are cut and written."""

from __future__ import annotations

from spangrad.clickhouse import KEYS_A_STATEMENT, batches, constant


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
