"""What is written when some of it is written already."""

from __future__ import annotations

import polars as pl

import fakes
from spangrad.settings import BuilderSettings
from transition_builder.build import build
from transition_builder.frames import Built
from transition_builder.sink import only_new

CALL = ["RunId", "RolloutId", "Attempt", "CallId"]


def some() -> Built:
    """Two rollouts, each of a transition and a drop."""
    spans = fakes.SpanFactory()
    for rollout in ("a", "b"):
        root = spans.root(rollout)
        spans.evaluation(root)
        spans.call(root, rollout=rollout)
        spans.call(root, rollout=rollout, Logprobs=[])
    return build(spans.frames(), BuilderSettings())


def names(frame: pl.DataFrame) -> list[str]:
    return frame["RolloutId"].to_list()


def test_what_is_new_is_written_whole() -> None:
    built = some()
    fresh = only_new(built, built.drops.select(CALL).clear())
    assert (names(fresh.rewards), names(fresh.transitions), names(fresh.drops)) == (["a", "b"], ["a", "b"], ["a", "b"])


def test_what_is_written_is_not_written_again() -> None:
    built = some()
    fresh = only_new(built, pl.concat([built.transitions.select(CALL), built.drops.select(CALL)]))
    assert (names(fresh.rewards), names(fresh.transitions), names(fresh.drops)) == ([], [], [])


def test_transitions_without_their_drops_get_them() -> None:
    built = some()
    fresh = only_new(built, built.transitions.filter(pl.col("RolloutId") == "a").select(CALL))
    assert (names(fresh.rewards), names(fresh.transitions), names(fresh.drops)) == (["b"], ["b"], ["a", "b"])
    assert fresh.drops["Reason"].to_list() == ["no_logprobs", "no_logprobs"]


def test_a_call_that_turns_up_after_its_rollout_was_built_drops() -> None:
    built = some()
    fresh = only_new(built, built.drops.select(CALL))
    assert names(fresh.transitions) == []
    assert fresh.drops.select("CallId", "Reason", "Detail").rows() == [
        (call, "incomplete", "arrived after its rollout was built") for call in built.transitions["CallId"]
    ]
