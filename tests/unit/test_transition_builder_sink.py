"""Revisions of a rollout: changed contents make a new one, the same rows do not."""

from __future__ import annotations

from typing import Any

import polars as pl

from spangrad.settings import BuilderSettings
from spangrad.types import transition_id
from tests.support.spans import SpanFactory
from transition_builder.build import build
from transition_builder.frames import Built, Frames, empty
from transition_builder.schemas import BUILDS, BUILT, DROPS, REWARDS, TRANSITIONS
from transition_builder.source.sink import Written, contents, revise

SPEC = BuilderSettings().spec
TIME = SpanFactory.time


def new_rollouts(reward: float = 1.0) -> tuple[Frames, Built]:
    """Two rollouts, each of a transition and a drop."""
    spans = SpanFactory()
    for rollout in ("a", "b"):
        root = spans.root(rollout, LastArrival=TIME(5), Rows=7)
        spans.evaluation(root, reward if rollout == "b" else 1.0)
        spans.call(root, rollout=rollout)
        spans.call(root, rollout=rollout, Logprobs=[])
    frames = spans.frames()
    return frames, build(frames, BuilderSettings())


def before(written: Written) -> pl.DataFrame:
    return written.builds.with_columns(IngestedAt=pl.lit(TIME(9))).select(*BUILT)


def names(written: Written) -> list[list[Any]]:
    rows = written.rows
    return [frame["RolloutId"].to_list() for frame in (rows.rewards, rows.transitions, rows.drops, written.builds)]


def test_revise_new_rollout_is_revision_0() -> None:
    frames, built = new_rollouts()
    written = revise(built, frames.rollouts, empty(BUILT), SPEC, "me")
    assert names(written) == [["a", "b"]] * 4
    assert [frame.schema for frame in (written.rows.transitions, written.rows.drops, written.rows.rewards, written.builds)] == [
        pl.Schema(dict(schema)) for schema in (TRANSITIONS, DROPS, REWARDS, BUILDS)
    ]
    content = dict(contents(built).select("RolloutId", "Content").iter_rows())
    of_calls = (2, 1, 1, 1, 3, 2, 0, 0, ["runner"], ["policy"], [3], ["reward"], [""], [1.0], 1)
    begun = written.builds["StartedAt"].to_list()
    assert begun == [frames.spans.filter(RolloutKey=rollout, SpanName="rollout")["Timestamp"].item() for rollout in ("a", "b")]
    assert written.builds.rows() == [
        ("run", "train", SPEC, "g", 2, "t", rollout, 0, 0, content[rollout], *of_calls, at, 0.0, [], [], "", TIME(5), 7, "me")
        for rollout, at in zip(("a", "b"), begun, strict=True)
    ]
    for rows in (written.rows.transitions, written.rows.drops):
        assert rows.select("RolloutId", "Revision", "Content").rows() == [("a", 0, content["a"]), ("b", 0, content["b"])]
    assert content["a"] != content["b"]
    assert written.rows.transitions["TransitionId"].to_list() == [transition_id(call, SPEC, 0) for call in built.transitions["CallId"]]


def test_revise_same_rows_in_any_order_writes_nothing() -> None:
    frames, built = new_rollouts()
    first = revise(built, frames.rollouts, empty(BUILT), SPEC)
    turned = Built(built.transitions.reverse(), built.drops.reverse(), built.rewards.reverse())
    assert names(revise(turned, frames.rollouts, before(first), SPEC)) == [[], [], [], []]


def test_revise_other_reward_is_next_revision_of_its_rollout_only() -> None:
    frames, built = new_rollouts()
    first = revise(built, frames.rollouts, empty(BUILT), SPEC)
    frames, better = new_rollouts(reward=2.0)
    second = revise(better, frames.rollouts, before(first), SPEC)
    assert names(second) == [["b"]] * 4
    assert [frame["Revision"].to_list() for frame in (second.rows.transitions, second.rows.drops, second.builds)] == [[1]] * 3
    assert second.rows.transitions["TransitionId"].to_list() == [transition_id(better.transitions["CallId"][1], SPEC, 1)]
    assert second.rows.transitions["Rewards.Value"].to_list() == [[2.0]]
    assert names(revise(better, frames.rollouts, before(second), SPEC)) == [["a"]] * 4  # which nobody has built, as far as is known


def test_contents_change_with_late_call() -> None:
    _, built = new_rollouts()
    fewer = Built(built.transitions, built.drops.filter(pl.col("RolloutId") == "a"), built.rewards)
    whole, less = (dict(contents(one).select("RolloutId", "Content").iter_rows()) for one in (built, fewer))
    assert whole["a"] == less["a"]
    assert whole["b"] != less["b"]
