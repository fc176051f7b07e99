"""Groups that are known to be whole by their members."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from trainer.data.built_groups import BuiltRow, whole_groups


def row(rollout: str, dated: int = 0, mode: str = "train", group: str = "g", size: int = 2) -> BuiltRow:
    return BuiltRow(rollout, 0, dated, mode, group, size, attempt=0, content=1, transitions=1, rewards=1, failure="", drops=0)


ROWS = st.builds(
    row,
    rollout=st.sampled_from("abcde"),
    dated=st.integers(0, 99),
    mode=st.sampled_from(["train", "greedy"]),
    group=st.sampled_from("gh"),
    size=st.sampled_from([0, 2, 3]),
)


@given(st.lists(ROWS, max_size=8, unique_by=lambda row: (row.group, row.rollout)), st.booleans())
def test_whole_groups_have_as_many_sized_rollouts_as_their_size(members: list[BuiltRow], greedy: bool) -> None:
    whole = whole_groups(members, greedy=greedy)
    for key in {(row.mode, row.group) for row in members}:
        rows = [row for row in members if (row.mode, row.group) == key and row.size]
        is_whole = bool(rows) and max(row.size for row in rows) <= len(rows)
        compared = not greedy or (key[0] == "train" and any(row.mode == "greedy" and row.group == key[1] for row in members))
        assert whole.get(key) == (max(row.dated for row in rows) if is_whole and compared else None)


def test_whole_groups_of_two_rollouts_of_two_are_dated_by_the_later() -> None:
    first, second = row("a", 5), row("b", 9)
    assert whole_groups([first, second]) == {("train", "g"): 9}
    assert whole_groups([second]) == whole_groups([first, row("b", size=0)]) == {}
