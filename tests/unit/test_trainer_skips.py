"""Which ready groups may be trained."""

from __future__ import annotations

import polars as pl
import pytest

from fakes import transition_row
from trainer.skips import SkipReason, skip_reasons
from trainer.source import Group

GROUP = Group("run", "train", "spec", "group")


def reasons(rows: list[dict[str, object]], lineage: tuple[int, ...] = (0,), max_staleness: int = 0) -> dict[Group, SkipReason]:
    frame = pl.DataFrame(rows or [transition_row("elsewhere", GroupId="other")])
    return skip_reasons([GROUP], frame, lineage=lineage, max_staleness=max_staleness, tokenizer_hash="tokenizer", max_tokens=5)


PAIR = [transition_row("a"), transition_row("b")]


def test_two_rollouts_of_the_newest_version_may_be_trained():
    assert reasons(PAIR) == {}


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        ([], SkipReason.NO_TRANSITIONS),
        ([transition_row("a"), transition_row("a", 1)], SkipReason.ONE_ROLLOUT),
        ([*PAIR, transition_row("c", Version=9)], SkipReason.UNKNOWN_VERSION),
        ([*PAIR, transition_row("c", TokenizerHash="other")], SkipReason.OTHER_TOKENIZER),
        ([*PAIR, transition_row("c", Temperature=0.0)], SkipReason.GREEDY),
        ([transition_row(name, PromptIds=[1, 2, 3, 4]) for name in "ab"], SkipReason.TOO_LONG),
    ],
)
def test_one_call_is_enough_to_skip_a_group(rows: list[dict[str, object]], reason: SkipReason):
    assert reasons(rows) == {GROUP: reason}


def test_a_call_without_a_tokenizer_hash_is_taken():
    assert reasons([*PAIR, transition_row("c", TokenizerHash="")]) == {}


def test_a_group_of_which_some_calls_fit_is_taken():
    assert reasons([*PAIR, transition_row("c", PromptIds=[1] * 9)]) == {}


def test_staleness_counts_committed_versions():
    old = [transition_row("a", Version=4), transition_row("b", Version=6)]
    # 5 was orphaned: 4 is one version behind 6, not two.
    assert reasons(old, lineage=(0, 4, 6), max_staleness=0) == {GROUP: SkipReason.STALE}
    assert reasons(old, lineage=(0, 4, 6), max_staleness=1) == {}
    assert reasons(old, lineage=(0, 4, 6, 7), max_staleness=1) == {GROUP: SkipReason.STALE}
    assert reasons(old, lineage=(0, 4, 6, 7), max_staleness=9) == {}


def test_a_rollout_alone_is_taken_where_nothing_is_compared_within_groups():
    frame = pl.DataFrame([transition_row("a")])
    facts = {"lineage": (0,), "max_staleness": 0, "tokenizer_hash": "tokenizer", "max_tokens": 5}
    assert skip_reasons([GROUP], frame, **facts, alone=True) == {}  # type: ignore[arg-type]


def test_a_group_that_is_not_among_the_live_ones_is_equal():
    frame = pl.DataFrame([*PAIR, *(transition_row(name, GroupId="other") for name in "cd")])
    live = pl.DataFrame({"RunId": ["run"], "Mode": ["train"], "GroupId": ["other"]})
    other = Group("run", "train", "spec", "other")
    facts = {"lineage": (0,), "max_staleness": 0, "tokenizer_hash": "tokenizer", "max_tokens": 5}
    assert skip_reasons([GROUP, other], frame, **facts, live=live) == {GROUP: SkipReason.EQUAL}  # type: ignore[arg-type]
    assert skip_reasons([GROUP, other], frame, **facts) == {}  # type: ignore[arg-type]
