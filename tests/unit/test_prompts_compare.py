"""Significance of a gain: one-sided, paired by task, exact where the assignments of signs can be counted."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from prompts.compare import gain


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(-5, 5), st.integers(-5, 5)), min_size=1, max_size=20))
def test_gain_is_mean_difference_and_one_sided_p(pairs: list[tuple[int, int]]) -> None:
    base, candidate = ({str(i): float(pair[side]) for i, pair in enumerate(pairs)} for side in (0, 1))
    there, back = gain(base, candidate, 0), gain(candidate, base, 0)
    assert there.mean == -back.mean
    assert abs(there.mean - sum(b - a for a, b in pairs) / len(pairs)) < 1e-9
    assert 0 < there.p <= 1
    assert there.p + back.p >= 1
    assert gain(base, base, 0).p == 1


def test_gain_p_of_certain_gain_is_share_of_sign_assignments() -> None:
    assert gain(dict.fromkeys("abcdef", 0.0), dict.fromkeys("abcdef", 1.0), 0).p == 1 / 64
    assert gain({"a": 0.0, "b": 0.0, "c": 1.0}, {"a": 1.0, "b": 1.0, "c": 0.0}, 0).p == 0.5
    many = [f"task {i}" for i in range(40)]
    assert gain(dict.fromkeys(many, 0.0), dict.fromkeys(many, 1.0), 0).p < 1e-3
