"""Merging: which calls become one sequence, what is trained in it, and that nothing sampled is ever changed."""

from __future__ import annotations

from typing import Any

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.policies import transition_row
from trainer.data.merge import Sequences, merge, separate


def call(turn: int, prompt: list[int], response: list[int], rollout: str = "a", **changes: Any) -> dict[str, object]:
    logprobs = [-token / 8 for token in response]
    return transition_row(rollout, turn, PromptIds=prompt, ResponseIds=response, Logprobs=logprobs, **changes)


def frame(rows: list[dict[str, object]]) -> pl.DataFrame:
    return pl.DataFrame(
        rows, schema_overrides={name: pl.List(pl.UInt32) for name in ("PromptIds", "ResponseIds")} | {"Logprobs": pl.List(pl.Float32)}
    )


def described(sequences: Sequences) -> list[tuple[list[str], str]]:
    """Each sequence's calls, by turn, and its tokens: the prompt | then sampled tokens in brackets."""
    rows = []
    for i, calls in enumerate(sequences.calls.to_list()):
        begin, end = sequences.offsets[i], sequences.offsets[i + 1]
        words = [f"[{token}]" if on else str(token) for token, on in zip(sequences.ids[begin:end], sequences.mask[begin:end], strict=True)]
        words.insert(int(sequences.prompts[i]), "|")
        rows.append(([name.removeprefix("call-") for name in calls], " ".join(words)))
    return rows


def merged(*rows: dict[str, object]) -> list[tuple[list[str], str]]:
    return described(merge(frame(list(rows)), pl.Series([1.0] * len(rows))))


def test_merge_growing_conversation_is_one_sequence():
    rows = frame([call(0, [1, 2], [3, 4]), call(1, [1, 2, 3, 4, 5], [6]), call(2, [1, 2, 3, 4, 5, 6], [7, 8])])
    sequences = merge(rows, pl.Series([0.5, -1.0, 2.0]))
    assert described(sequences) == [(["a-0", "a-1", "a-2"], "1 2 | [3] [4] 5 [6] [7] [8]")]
    assert sequences.logprobs.tolist() == [0, 0, -0.375, -0.5, 0, -0.75, -0.875, -1.0]
    assert sequences.advantages.tolist() == [0, 0, 0.5, 0.5, 0, -1.0, 2.0, 2.0]
    assert (sequences.offsets.tolist(), sequences.prompts.tolist(), sequences.temperature.tolist()) == ([0, 8], [2], [1.0])
    assert sequences.versions.tolist() == [-1, -1, 0, 0, -1, 0, 0, 0]
    assert (sequences.rollout.tolist(), sequences.group.tolist()) == ([0], [0])
    assert (sequences.tokens, sequences.separate_tokens, sequences.trained_tokens, sequences.merge_ratio) == (8, 18, 5, 2.25)
    assert (sequences.logprobs.dtype, sequences.ids.dtype) == (np.float32, np.uint32)


def test_merge_rewritten_history_forks_sequences():
    first, rewritten = call(0, [1], [2, 3]), call(1, [1, 2, 9, 4], [5])
    assert merged(first, rewritten) == [(["a-0"], "1 | [2] [3]"), (["a-1"], "1 2 9 4 | [5]")]
    # What follows a break goes on from it, and what goes back to the first end goes on from there.
    after, back = call(2, [1, 2, 9, 4, 5, 6], [7]), call(3, [1, 2, 3, 8], [9])
    assert merged(first, rewritten, after, back) == [(["a-0", "a-3"], "1 | [2] [3] 8 [9]"), (["a-1", "a-2"], "1 2 9 4 | [5] 6 [7]")]


def test_merge_history_cut_within_response_forks_sequence():
    assert merged(call(0, [1], [2, 3]), call(1, [1, 2], [3])) == [(["a-0"], "1 | [2] [3]"), (["a-1"], "1 2 | [3]")]


def test_merge_choices_of_one_call_fork_and_next_call_continues_its_own():
    left = call(0, [1], [2])
    right = {**call(0, [1], [3]), "CallId": "call-a-0b"}
    assert merged(left, right, call(1, [1, 3, 4], [5])) == [(["a-0"], "1 | [2]"), (["a-0b", "a-1"], "1 | [3] 4 [5]")]
    equal = {**left, "CallId": "call-a-0b"}
    assert merged(left, equal, call(1, [1, 2], [5])) == [(["a-0"], "1 | [2]"), (["a-0b", "a-1"], "1 | [2] [5]")]


def test_merge_two_calls_that_extend_same_end_first_continues():
    assert merged(call(0, [1], [2]), call(1, [1, 2, 3], [4]), call(2, [1, 2, 5], [6])) == [
        (["a-0", "a-1"], "1 | [2] 3 [4]"),
        (["a-2"], "1 2 5 | [6]"),
    ]


def test_merge_continues_longest_end():
    assert merged(call(0, [1], [2]), call(1, [1, 2, 3, 4], [5]), call(2, [1], [2, 3]), call(3, [1, 2, 3, 9], [7])) == [
        (["a-0", "a-1"], "1 | [2] 3 4 [5]"),
        (["a-2", "a-3"], "1 | [2] [3] 9 [7]"),
    ]


@pytest.mark.parametrize(
    "other",
    [{"Temperature": 0.5}, {"Policy": "q"}, {"TokenizerHash": "t"}, {"RolloutId": "b"}, {"Attempt": 1}, {"GroupId": "h"}],
)
def test_merge_joins_calls_of_same_rollout_policy_tokenizer_and_temperature_only(other: dict[str, Any]):
    rows = [call(0, [1], [2]), {**call(1, [1, 2, 3], [4]), **other}]
    assert sorted(described(merge(frame(rows), pl.Series([1.0, 1.0])))) == [(["a-0"], "1 | [2]"), (["a-1"], "1 2 3 | [4]")]


def test_merge_calls_of_several_versions_keep_version_of_each_token():
    first = {**call(0, [1], [2, 2, 2]), "Versions.Start": [0, 1], "Versions.Version": [3, 4], "Version": 3}
    second = {**call(1, [1, 2, 2, 2, 5], [6, 6]), "Versions.Start": [0, 1], "Versions.Version": [4, 7], "Version": 4}
    sequences = merge(frame([first, second]), pl.Series([1.0, 2.0]))
    assert described(sequences) == [(["a-0", "a-1"], "1 | [2] [2] [2] 5 [6] [6]")]
    assert sequences.versions.tolist() == [-1, 3, 4, 4, -1, 4, 7]


def test_merge_compares_whole_ids_not_bytes():
    """513 is 1 and 2 in its first two bytes: a prefix of bytes must be one of tokens."""
    assert merged(call(0, [1, 2], [3]), call(1, [513, 3, 3], [4])) == [(["a-0"], "1 2 | [3]"), (["a-1"], "513 3 3 | [4]")]
    big = [2**31 + 5, 2**32 - 1]
    assert merged(call(0, big, [7]), call(1, [*big, 7, 8], [9])) == [(["a-0", "a-1"], f"{big[0]} {big[1]} | [7] 8 [9]")]


def test_separate_keeps_each_call_in_its_place():
    rows = frame([call(1, [1, 2, 3], [4]), call(0, [1], [2, 2])])
    separated = separate(rows, pl.Series([1.0, -1.0]))
    assert described(separated) == [(["a-1"], "1 2 3 | [4]"), (["a-0"], "1 | [2] [2]")]
    assert separated.advantages.tolist() == [0, 0, 0, 1, 0, -1, -1]
    assert (separated.merge_ratio, separated.trained_tokens) == (1.0, 3)


def versions_by_token(row: dict[str, Any]) -> tuple[int, ...]:
    """The version of each response token of a row."""
    spans = list(zip(row["Versions.Start"], row["Versions.Version"], strict=True))
    return tuple(max(span for span in spans if span[0] <= at)[1] for at in range(len(row["ResponseIds"])))


TOKENS = st.lists(st.integers(1, 2), min_size=1, max_size=3)


@given(data=st.data())
def test_merge_trains_every_sampled_token_once_in_its_context(data: st.DataObject):
    """Sampled tokens are trained once in rollouts that grow, break, fork and repeat; in a small alphabet prefixes meet by accident."""
    rows: list[dict[str, object]] = []
    for rollout in ("a", "b"):
        ends: list[list[int]] = [[]]
        for turn in range(data.draw(st.integers(0, 6))):
            prompt = [*data.draw(st.sampled_from(ends)), *data.draw(TOKENS if ends == [[]] else st.one_of(st.just([]), TOKENS))] or [1]
            response = data.draw(TOKENS)
            first = data.draw(st.sampled_from([0, 0, 0, 1]))
            spans = {0: first, **({data.draw(st.integers(1, len(response) - 1)): first + 1} if len(response) > 1 else {})}
            labels = {"Version": first, "Versions.Start": [*spans], "Versions.Version": [*spans.values()]}
            rows.append(call(turn, prompt, response, rollout, **labels))
            ends.append(prompt + response)
    advantages = pl.Series([float(i + 1) for i in range(len(rows))], dtype=pl.Float64)
    whole = frame(rows) if rows else frame([call(0, [1], [1])]).clear()
    sequences = merge(whole, advantages)

    contexts = sorted(
        (tuple(row["PromptIds"]), tuple(row["ResponseIds"]), i + 1.0, versions_by_token(row))  # type: ignore[arg-type]
        for i, row in enumerate(rows)
    )
    seen = []
    for i in range(len(sequences)):
        ids, mask, worth, versions = (
            values[sequences.offsets[i] : sequences.offsets[i + 1]].tolist()
            for values in (sequences.ids, sequences.mask, sequences.advantages, sequences.versions)
        )
        assert [version < 0 for version in versions] == [not on for on in mask]
        assert not any(mask[: sequences.prompts[i]])
        for value in sorted({value for value, on in zip(worth, mask, strict=True) if on}):
            places = [place for place, other in enumerate(worth) if other == value]
            assert places == list(range(places[0], places[-1] + 1)), "a response is in one piece"
            response = slice(places[0], places[-1] + 1)
            seen.append((tuple(ids[: places[0]]), tuple(ids[response]), value, tuple(versions[response])))
    assert sorted(seen) == contexts
    alone = separate(whole, advantages)
    assert (sequences.trained_tokens, sequences.separate_tokens) == (alone.trained_tokens, alone.tokens)
    assert sequences.tokens <= alone.tokens
    longest = [len(row["PromptIds"]) + len(row["ResponseIds"]) for row in rows]  # type: ignore[arg-type]
    assert max(np.diff(sequences.offsets), default=0) == max(longest, default=0), "no sequence is longer than the longest call"

    order = data.draw(st.permutations(range(len(rows))))
    again = merge(whole[order], advantages[order])
    assert described(again) == described(sequences)
    assert (again.advantages.tolist(), again.logprobs.tolist()) == (sequences.advantages.tolist(), sequences.logprobs.tolist())
