"""The build benchmark's own honesty: seeded rollouts, both sides told the same, and checks that see what is wrong."""

from __future__ import annotations

import numpy as np
import polars as pl

from benchmarks.build import compare, differing, hashes, merge_figures, truth_of
from benchmarks.build_data import COLUMNS, OTHER_SPANS, SPANS_A_TURN, Workload
from trainer.data.merge import merge

WORKLOAD = Workload(3, 8, 32)


def transitions() -> pl.DataFrame:
    """Return the transitions that must be built of the workload, with the columns that merging reads."""
    same = {"RunId": "run-0", "Mode": "train", "GroupId": "g", "GroupSize": 8, "Attempt": 0, "Policy": "policy", "Version": 3}
    same |= {"TokenizerHash": "t", "Temperature": 1.0, "Reshaping": "", "Versions.Start": [0], "Versions.Version": [3]}
    rows = [
        same
        | {"RolloutId": rollout.name, "Turn": number, "CallId": f"{rollout.name}-{number}", "TransitionId": f"{rollout.name}-{number}"}
        | {"PromptIds": turn.prompt.tolist(), "ResponseIds": turn.reply.tolist(), "Logprobs": turn.logprobs.tolist()}
        for rollout in WORKLOAD
        for number, turn in enumerate(rollout.turns)
    ]
    ids = {"PromptIds": pl.List(pl.UInt32), "ResponseIds": pl.List(pl.UInt32), "Logprobs": pl.List(pl.Float32)}
    return pl.DataFrame(rows, schema_overrides=ids)


def test_build_workload_same_seed_gives_same_rollouts() -> None:
    again = list(Workload(3, 8, 32))
    assert [list(one.rows()) for one in WORKLOAD] == [list(one.rows()) for one in again]
    assert list(WORKLOAD.rollout(5).rows()) == list(again[5].rows())
    assert WORKLOAD.rollout(0).name != Workload(4, 8, 32).rollout(0).name


def test_build_workload_has_documented_shape() -> None:
    turns = [turn for rollout in WORKLOAD for turn in rollout.turns]
    rows = [dict(zip(COLUMNS, row, strict=True)) for row in WORKLOAD.rollout(0).rows()]
    assert len(rows) == OTHER_SPANS + 32 * SPANS_A_TURN == len({row["SpanId"] for row in rows})
    assert {row["ParentSpanId"] for row in rows} <= {row["SpanId"] for row in rows} | {""}
    assert {len(turn.reply) for turn in turns} == {len(turn.logprobs) for turn in turns} == {40}
    first, second = WORKLOAD.rollout(0).turns[:2]
    assert [len(first.prompt), len(second.prompt)] == [200, 300]
    assert 0.02 < np.mean([turn.breaks for turn in turns]) < 0.08


def test_merge_figures_count_merges_against_breaks() -> None:
    whole = transitions()
    figures, checked = merge_figures(merge(whole, pl.Series(np.ones(whole.height))), WORKLOAD)
    assert set(checked.values()) == {0}
    assert figures["trained_tokens"] == WORKLOAD.total * 40
    assert figures["merge_ratio"] > 6
    short = whole[:-1]
    _, seen = merge_figures(merge(short, pl.Series(np.ones(short.height))), WORKLOAD)
    assert seen["trained_tokens"] == 40
    assert seen["merged_tokens"] > 0


def test_compare_counts_differing_rollouts() -> None:
    rollout = WORKLOAD.rollout(0)
    right = truth_of(rollout)
    built = [[*row[:4], f"id-{number}", row[4]] for number, row in enumerate(right)]
    assert compare({rollout.name: right}, {"results": {rollout.name: built}}) == {"different": 0}
    without = [[*row[:2], hashes([], [], [])[2], *row[3:]] for row in built]
    assert compare({rollout.name: right}, {"results": {rollout.name: without}}) == {"different": 0}
    wrong = [*built[:4], [*built[4][:3], 7.0, *built[4][4:]], *built[5:-1]]
    assert compare({rollout.name: right}, {"results": {rollout.name: wrong}}) == {"different": 2}
    assert compare({}, {"results": {rollout.name: built}}) == {"different": 32}
    assert differing(right, right[1:]) == 32
