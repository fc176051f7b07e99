"""Times at which the queue's server first saw rollouts that have ended without a build."""

from __future__ import annotations

import time

from runner.process.processing import ObservedEnds


def test_observed_ends_of_many_rollouts_count_from_the_first_look() -> None:
    ends, rollouts = ObservedEnds(), [f"r{number}" for number in range(100_002)]
    assert {ends.seconds_since(rollout, now=5.0) for rollout in rollouts} == {0.0}
    assert {ends.seconds_since(rollout, now=130.0) for rollout in rollouts} == {125.0}


def test_observed_ends_of_many_rollouts_are_forgotten_without_a_pause() -> None:
    ends = ObservedEnds()
    for number in range(100_000):
        ends.seconds_since(f"r{number}", now=0.0)
    began = time.process_time()
    assert ends.seconds_since("r0", now=3601.0) == 3601.0
    assert time.process_time() - began < 2
    assert ends.seconds_since("r1", now=3602.0) == 0.0, "all others are forgotten"


def test_observed_ends_forgotten_rollout_is_seen_anew() -> None:
    ends = ObservedEnds()
    assert [ends.seconds_since("built", now) for now in (0.0, 10.0)] == [0.0, 10.0]
    ends.forget("built")
    assert ends.seconds_since("built", 20.0) == 0.0
    ends.forget("never seen")


def test_observed_ends_rollout_is_forgotten_after_an_hour() -> None:
    ends = ObservedEnds()
    assert ends.seconds_since("old", 0.0) == 0.0
    assert ends.seconds_since("other", 3601.0) == 0.0
    assert [ends.seconds_since("old", now) for now in (3602.0, 7203.0, 7204.0)] == [0.0, 3601.0, 0.0]
