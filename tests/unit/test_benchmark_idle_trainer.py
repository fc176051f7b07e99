"""The idle trainer's benchmark: its report sees what is too dear, and a tiny run of it finds everything."""

from __future__ import annotations

import pytest

from benchmarks.idle_trainer import Cost, report

GOOD = {"missed": 0, "too_much_cpu": 0, "grows_with_history": 0}


@pytest.mark.parametrize(
    ("few", "many", "wrong"),
    [
        (8.0, 9.0, {}),
        (8.0, 12.5, {"grows_with_history": 1}),
        (15.0, 20.5, {"too_much_cpu": 1}),
        (8.0, 80.0, {"too_much_cpu": 1, "grows_with_history": 1}),
    ],
)
def test_report_counts_a_look_that_costs_too_much_or_grows_with_history(few: float, many: float, wrong: dict[str, int]) -> None:
    ours = {"1k": Cost(few / 2, few / 2, 1.0), "10k": Cost(many / 2, many / 2, 1.0)}
    peer = {"1k": Cost(few, few, 1.0), "10k": Cost(10 * many, 10 * many, 1.0)}
    result = report(ours, peer, {"missed": 0})
    assert result["checked"] == {**GOOD, **wrong}
    assert result["ratio"] == {"cpu_1k": 2.0, "cpu_10k": 20.0}
    assert (result["ours"]["cpu_ms_1k"], result["ours"]["cpu_ms_10k"]) == (few, many)
