"""The publication benchmark's own honesty: stages that add up to the whole, and checks that see a token of older weights."""

from __future__ import annotations

import pytest

from benchmarks.publish import METHODS, STAGES, Token, first_token, stages_of, went_back

MS = 1_000_000
SPANS = {"train": (0, 100 * MS), "checkpoint": (101 * MS, 150 * MS), "publish": (180 * MS, 260 * MS)}
ENGINE = {"files": 0.005, "check": 0.0, "pause": 0.01, "checksum": 0.005, "update_weight_version": 0.005, "resume": 0.005, "probe": 0.02}
METRICS = {f"seconds_publish_{name}": value for name, value in ENGINE.items()}


@pytest.mark.parametrize("taking", METHODS.values())
@pytest.mark.parametrize("arrival", [300 * MS, 259 * MS], ids=["after the gateway's word", "before it"])
def test_stages_of_sum_to_time_from_optimizer_to_first_token(arrival: int, taking: str) -> None:
    stages = stages_of(SPANS, {**METRICS, f"seconds_publish_{taking}": 0.02}, arrival, taking)
    assert tuple(stages) == STAGES
    assert sum(stages.values()) == pytest.approx((arrival - 100 * MS) / 1e9)
    assert stages["checkpoint"] == pytest.approx(0.05), "what lies between two stages counts"
    assert stages["take"] == pytest.approx(0.02)
    assert stages["commit"] == pytest.approx(0.03)
    assert stages["first_token"] == pytest.approx(max(arrival - 260 * MS, 0) / 1e9)


def test_went_back_counts_tokens_of_older_weights_after_newer() -> None:
    tokens = [Token(name, arrival) for arrival, name in enumerate("abcd")]
    weights = {"a": (1, 1), "b": (1, 2), "c": (2, 2), "d": (2, 2)}
    assert (went_back(tokens, weights), first_token(tokens, weights, 2)) == (0, 2), "a call across the reload is not the first of the new"
    assert went_back(tokens, {**weights, "d": (1, 1)}) == 1
