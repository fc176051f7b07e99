"""The cancellation benchmark's own honesty: it sees sequences that are left, and calls that begin after the cut."""

from __future__ import annotations

import pytest

from benchmarks.cancel import evaluate
from benchmarks.cancel_engine import Sequence

CUT = Sequence("a", began=0.0, ended=10.2)


@pytest.mark.parametrize(
    ("later", "wait_ms", "checked"),
    [
        ([], 200.0, {"sequences_left": 0, "begun_after_cut": 0}),
        ([Sequence("a", began=10.1, ended=10.4)], 400.0, {"sequences_left": 0, "begun_after_cut": 0}),
        ([Sequence("a", began=10.3, ended=10.4)], 400.0, {"sequences_left": 0, "begun_after_cut": 1}),
        ([Sequence("a", began=9.9)], 200.0, {"sequences_left": 1, "begun_after_cut": 0}),
        ([Sequence("b", began=11.0)], 200.0, {"sequences_left": 0, "begun_after_cut": 0}),
    ],
)
def test_cancel_evaluate_counts_calls_that_outlive_the_cut(later: list[Sequence], wait_ms: float, checked: dict[str, int]) -> None:
    figures, counts = evaluate({"a": 10.0}, [CUT, *later])
    assert counts == checked
    assert figures["p99_ms"] == pytest.approx(wait_ms)


def test_cancel_evaluate_leaves_out_attempts_between_two_calls() -> None:
    figures, _ = evaluate({"a": 10.0, "b": 10.0}, [CUT, Sequence("b", began=0.0, ended=9.0, answered=True)])
    assert figures["cancels"] == 1
