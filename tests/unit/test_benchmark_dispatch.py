"""The dispatch benchmark's own honesty: checks that see what is lost or done twice, and ratios that compare like with like."""

from __future__ import annotations

import pytest

from benchmarks.dispatch import Measured, check, report

NAMES = ["a", "b", "c"]
GOOD = {"lost": 0, "double": 0, "foreign": 0, "refused": 0}


@pytest.mark.parametrize(
    ("handled", "succeeded", "refused", "wrong"),
    [
        (NAMES, NAMES, 0, {}),
        (NAMES[1:], NAMES, 0, {"lost": 1}),
        (NAMES, NAMES[1:], 0, {"lost": 1}),
        ([*NAMES, "a"], NAMES, 0, {"double": 1}),
        (NAMES, [*NAMES, "a", "a"], 0, {"double": 2}),
        ([*NAMES, "x"], [*NAMES, "x"], 0, {"foreign": 1}),
        (NAMES, NAMES, 2, {"refused": 2}),
    ],
)
def test_dispatch_check_counts_lost_double_and_refused(
    handled: list[str], succeeded: list[str], refused: int, wrong: dict[str, int]
) -> None:
    assert check(NAMES, handled, succeeded, refused) == {**GOOD, **wrong}


def test_dispatch_report_ratio_is_to_fastest_peer() -> None:
    rates = {"ours": 3000.0, "ours_singly": 300.0, "peer_runner": 30.0, "peer_store": 150.0}
    result = report(
        {name: Measured({"rollouts_per_s": rate, "server_cpu_us": 3e5 / rate}, {"lost": len(name)}) for name, rate in rates.items()}
    )
    assert result["ratio"] == {"rollouts_per_s": 20.0, "rollouts_per_s_singly": 10.0, "server_cpu": 20.0, "server_cpu_singly": 10.0}
    assert result["checked"] == {"lost": 4, "singly_lost": 11, "peer_runner_lost": 11, "peer_store_lost": 10}
    assert report({"ours": Measured({"rollouts_per_s": 1.0, "server_cpu_us": 1.0}, {})})["ratio"] == {}
