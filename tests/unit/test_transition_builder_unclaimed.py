"""Calls without a final root: whose they are, and how long they are waited for."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import polars as pl
import pytest

from spangrad.settings import BuilderSettings
from tests.support.spans import SpanFactory
from transition_builder.completeness.rootless_traces import decide_rootless, merge, outdated_rollouts, rollouts_of
from transition_builder.schemas import ACTIVITY, BUILT, OWNERS, ROOTLESS, ROOTS, TRACES

SPEC = BuilderSettings(incomplete_after_seconds=600, quiet_seconds=30)
TIME = SpanFactory.time


def call(**facts: Any) -> pl.DataFrame:
    """A call of a runner's rollout that arrived at second 0."""
    named = {"RunId": "run", "Mode": "train", "RolloutKey": "r", "RolloutKeySource": "rollout", "Attempt": 0, "TraceId": "t"}
    return pl.DataFrame([named | {"IngestedAt": TIME(0)} | facts], schema=dict(ROOTLESS))


def owner(**facts: Any) -> pl.DataFrame:
    """Return the owner of the spans of the call's trace that name no rollout."""
    nothing = {"RunId": "", "Mode": "", "RolloutId": "", "Attempt": 0, "Attempts": 0}
    return pl.DataFrame([{"TraceId": "t"} | nothing | facts], schema=dict(OWNERS))


def active(*rows: dict[str, Any]) -> pl.DataFrame:
    named = {"RunId": "run", "Mode": "train", "RolloutId": "r", "LastArrival": TIME(0)}
    return pl.DataFrame([named | row for row in rows], schema=dict(ACTIVITY))


FOREIGN = {"RunId": "", "Mode": "", "RolloutKey": "t", "RolloutKeySource": "trace"}


@pytest.mark.parametrize(
    ("facts", "owned", "rollout"),
    [
        ({"Attempt": 1}, {"RolloutId": "other", "RunId": "x", "Attempts": 1}, ("run", "train", "r", 1, True)),
        ({"RunId": "", "Mode": ""}, {"RunId": "run", "Mode": "probe"}, ("run", "probe", "r", 0, True)),
        ({"RunId": "", "Mode": ""}, {}, ("", "", "r", 0, False)),
        (FOREIGN, {"RolloutId": "r", "RunId": "run", "Mode": "train", "Attempt": 2, "Attempts": 1}, ("run", "train", "r", 2, True)),
        (FOREIGN, {"RolloutId": "first", "RunId": "run", "Mode": "train", "Attempts": 2}, ("run", "train", "first", 0, True)),
        (FOREIGN, {"RolloutId": "s"}, ("", "", "s", 0, False)),
        (FOREIGN, {"RunId": "run", "Mode": "train"}, ("run", "train", "t", 0, False)),
    ],
)
def test_rollouts_of_call_prefer_its_own_attributes_then_its_trace(
    facts: dict[str, Any], owned: dict[str, Any], rollout: tuple[str, str, str, int, bool]
) -> None:
    rollouts = rollouts_of(call(**facts), owner(**owned), active())
    assert rollouts.select("RunId", "Mode", "RolloutId", "Attempt", "Announced").rows() == [rollout]


@pytest.mark.parametrize(("runs", "expected"), [(["x"], ("x", True)), (["x", "y"], ("", False)), ([], ("", False))])
def test_rollouts_of_call_without_run_id_use_only_run_of_rollout(runs: list[str], expected: tuple[str, bool]) -> None:
    known = active(*({"RunId": run} for run in ["", *runs]))
    rollouts = rollouts_of(call(RunId="", Mode=""), owner(), known)
    assert rollouts.select("RunId", "Announced").rows() == [expected]


def verdict(
    at: float,
    facts: dict[str, Any] | None = None,
    *,
    open_span: bool = False,
    spans: float = 0,
    rollout: float = 0,
    root: bool | None = None,
    force: bool = False,
) -> list[tuple[Any, ...]]:
    """Return the verdict on one call; `spans` and `rollout` are the arrival times of the newest span of its trace and of its rollout."""
    known = active({"RolloutId": (facts or {}).get("RolloutKey", "r"), "LastArrival": TIME(rollout)})
    traces = pl.DataFrame([{"TraceId": "t", "LastArrival": TIME(spans), "HasOpenSpan": open_span}], schema=dict(TRACES))
    row = {"RunId": "run", "RolloutId": "r", "Attempt": 0, "GroupId": "g", "GroupSize": 4, "TaskId": "task", "Final": root}
    roots = pl.DataFrame([] if root is None else [row], schema=dict(ROOTS))
    calls = rollouts_of(call(**facts or {}), owner(), known.clear())
    judged = decide_rootless(calls, roots, known, traces, TIME(at), SPEC, force=force)
    assert judged["LastArrival"].to_list() == [TIME(max(spans, rollout))] * judged.height
    awaited = judged.filter(Verdict="waiting")
    for changes_at in awaited["ChangesAt"]:
        for before, waits in ((timedelta(milliseconds=1), True), (timedelta(0), False)):
            (later,) = decide_rootless(calls, roots, known, traces, changes_at - before, SPEC, force=force)["Verdict"]
            assert (later == "waiting") == waits
    judged = judged.join(awaited, on="RolloutId", how="anti")
    assert judged["ChangesAt"].to_list() == [None] * judged.height
    return judged.select("RunId", "Mode", "RolloutId", "GroupId", "Verdict", "Detail").rows()


def test_judge_announced_rollout_is_incomplete_after_incomplete_after_seconds() -> None:
    without = [("run", "train", "r", "", "incomplete", "no final root arrived")]
    assert (verdict(599.9), verdict(600)) == ([], without)
    assert (verdict(650, spans=100), verdict(700, spans=100)) == ([], without)
    assert (verdict(650, rollout=100), verdict(700, rollout=100)) == ([], without)
    assert verdict(600, root=False) == [("run", "train", "r", "g", "incomplete", "no final root arrived")]
    assert verdict(1e6, root=True) == []


def test_judge_rootless_trace_is_complete_after_quiet_seconds() -> None:
    whole = [("", "production", "t", "", "complete", "")]
    assert (verdict(29.9, FOREIGN), verdict(30, FOREIGN)) == ([], whole)
    assert (verdict(30, FOREIGN, spans=10), verdict(40, FOREIGN, spans=10)) == ([], whole)


def test_judge_trace_with_open_span_waits() -> None:
    assert (verdict(599.9, FOREIGN, open_span=True), len(verdict(600, FOREIGN, open_span=True))) == ([], 1)


def test_judge_with_force_waits_only_for_a_runner_or_an_open_span() -> None:
    assert len(verdict(0, FOREIGN, force=True)) == 1
    assert (verdict(599, FOREIGN, open_span=True, force=True), len(verdict(600, FOREIGN, open_span=True, force=True))) == ([], 1)
    assert (verdict(599, force=True), len(verdict(600, force=True))) == ([], 1)


def built(run: str, at: float) -> dict[str, Any]:
    return {"RunId": run, "RolloutId": "r", "Revision": 0, "Content": 1, "Watermark": TIME(at), "RowsRead": 1, "IngestedAt": TIME(at)}


def arrived(*rows: tuple[str, float]) -> pl.DataFrame:
    facts = [{"RunId": run, "RolloutId": "r", "IngestedAt": TIME(at)} for run, at in rows]
    return pl.DataFrame(facts, schema_overrides={"IngestedAt": ROOTLESS["IngestedAt"]})


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([("x", 5)], []),
        ([("x", 4), ("x", 6)], [("x", "r", TIME(6))]),
        ([("y", 6)], []),
        ([("z", 6)], []),  # which was never built
        ([("", 6)], [("x", "r", TIME(6))]),  # it names no run: any may be meant
        ([("", 9), ("x", 6)], [("x", "r", TIME(9)), ("y", "r", TIME(9))]),
    ],
)
def test_stale_builds_have_rows_that_arrived_later(rows: list[tuple[str, float]], expected: list[tuple[Any, ...]]) -> None:
    known = pl.DataFrame([built("x", 5), built("y", 8)], schema=dict(BUILT))
    assert sorted(outdated_rollouts(arrived(*rows), known).rows()) == expected


def test_merge_known_traces_keeps_one_row_with_newest_time() -> None:
    known = call().with_columns(DueAt=pl.lit(TIME(3)))
    merged = merge(known, pl.concat([call(IngestedAt=TIME(9)), call(TraceId="u", IngestedAt=TIME(2))]))
    assert merged.select("TraceId", "IngestedAt", "DueAt").rows() == [("t", TIME(9), TIME(9)), ("u", TIME(2), TIME(2))]
