"""Rests of the builder between passes, by a clock that only waits, passes and rests move."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from spangrad.errors import RuleError, StoreError
from spangrad.settings import Settings
from transition_builder import loop
from transition_builder.loop import repeat


class OverError(Exception):
    """The last event was built."""


def passes(events: Sequence[float], pass_seconds: float, *, longest_rest: float = 10, urgent: bool = True) -> list[float]:
    """Return the begin of each pass of a builder for which something arrives at these times."""
    now, left, begins = [0.0], list(events), list[float]()

    def wait() -> bool:
        if not left:
            raise OverError
        now[0] = max(now[0], left[0])
        return urgent

    def build(_: bool) -> None:
        begins.append(now[0])
        left[:] = [event for event in left if event > now[0]]
        now[0] += pass_seconds

    def sleep(seconds: float) -> None:
        now[0] += seconds

    with pytest.raises(OverError):
        repeat(wait, build, longest_rest, clock=lambda: now[0], sleep=sleep)
    return begins


def test_repeat_builds_at_once_after_pass_that_followed_a_wait() -> None:
    assert passes([5, 5.5], 1) == [5, 6]
    assert passes([5, 7], 1) == [5, 7]


def test_repeat_rests_as_long_as_pass_lasted_while_events_follow_each_other() -> None:
    assert passes([5, 5.5, 6.5, 7, 7.5, 8.5, 9.5], 1) == [5, 6, 8, 10]


def test_repeat_counts_short_wait_as_part_of_rest() -> None:
    assert passes([0.25, 0.5], 1) == [0.25, 2]


def test_repeat_rests_no_longer_than_limit_and_not_after_pass_without_urgency() -> None:
    assert passes([0, 0.5], 1, longest_rest=0.25) == [0, 1.25]
    assert passes([0, 0.5], 1, urgent=False) == [0, 1]


@pytest.mark.parametrize(
    ("outcomes", "error", "expected_passes"),
    [
        pytest.param([StoreError("away"), None, StoreError("away"), RuleError("wrong"), None], OverError, 5, id="store is away"),
        pytest.param([StoreError("away"), RuleError("wrong")], RuleError, 2, id="rule fails in the first pass"),
    ],
)
def test_follow_first_pass_survives_outage_and_ends_by_rule_error(
    monkeypatch: pytest.MonkeyPatch, outcomes: list[Exception | None], error: type[Exception], expected_passes: int
) -> None:
    count = 0

    class Builder:
        def build_ready(self, *, urgent: bool = False) -> None:
            nonlocal count
            count += 1
            if (outcome := outcomes[count - 1]) is not None:
                raise outcome

        def wait(self) -> bool:
            if count == len(outcomes):
                raise OverError
            return False

    monkeypatch.setattr(loop, "_started", lambda settings: Builder())
    monkeypatch.setattr(loop.tenacity.nap.time, "sleep", lambda seconds: None)
    with pytest.raises(error):
        loop.follow(Settings())
    assert count == expected_passes
