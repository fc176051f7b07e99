"""Groups that are known to be whole by the rows that have just arrived."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from trainer.data.built_groups import BuiltRow, whole_by_rows

ROWS = st.builds(
    BuiltRow,
    rollout=st.sampled_from("abcde"),
    revision=st.sampled_from([0, 0, 0, 1]),
    dated=st.integers(0, 99),
    mode=st.just("train"),
    group=st.sampled_from("gh"),
    size=st.sampled_from([0, 2, 3]),
)


@given(st.sets(ROWS, max_size=8), st.sets(ROWS, max_size=8))
def test_whole_by_rows_has_only_new_groups_with_all_rollouts_at_first_revision(new: set[BuiltRow], before: set[BuiltRow]) -> None:
    known = new | before
    whole = whole_by_rows(new, known)
    assert whole.keys() <= {(row.mode, row.group) for row in new}
    for (_, group), since in whole.items():
        rows = [row for row in known if row.group == group]
        rollouts = {row.rollout for row in rows}
        assert 0 < max(row.size for row in rows) <= len(rollouts)
        assert not any(row.revision for row in known if row.rollout in rollouts)
        assert since == max(row.dated for row in rows)


def test_whole_by_rows_of_two_rollouts_of_two_is_dated_by_the_later() -> None:
    first, second = BuiltRow("a", 0, 5, "train", "g", 2), BuiltRow("b", 0, 9, "train", "g", 2)
    assert whole_by_rows({second}, {first, second}) == {("train", "g"): 9}
    assert whole_by_rows({second}, {second}) == {}
    assert whole_by_rows({second}, {first, second, BuiltRow("b", 1, 10, "train", "h", 2)}) == {}
