"""The bounds of benchmarks: what exceeds them fails, and a slow machine has as much more as its calibrations say."""

from __future__ import annotations

import pytest

from benchmarks.build_small import beyond_bounds
from benchmarks.loop import missed_goals
from benchmarks.meter import CALIBRATION_MS, calibration, slowness

SMALL = {"cpu_ms": 190.0, "wall_ms": 240.0, "cpu_ms_beside": 390.0, "wall_ms_beside": 490.0, "idle_cores": 0.019, "slowness": 1.0}
LOOP = {"trainer_idle": 0.09, "engine_idle": 0.09, "ready_to_leased_p50_ms": 149.0, "slowness": 1.0}


def test_slowness_is_median_against_fast_day_and_at_least_1() -> None:
    assert slowness([2 * CALIBRATION_MS, 3 * CALIBRATION_MS, 90 * CALIBRATION_MS]) == 3
    assert slowness([CALIBRATION_MS / 2]) == 1
    assert calibration() > 0


@pytest.mark.parametrize(
    ("name", "check"),
    [
        ("cpu_ms", "too_much_cpu"),
        ("wall_ms", "too_slow"),
        ("cpu_ms_beside", "too_much_beside"),
        ("wall_ms_beside", "too_much_beside"),
        ("idle_cores", "not_idle"),
    ],
)
def test_small_build_bound_exceeded_fails_unless_machine_is_as_slow(name: str, check: str) -> None:
    assert set(beyond_bounds(SMALL).values()) == {0}
    slower = SMALL | {name: 1.9 * SMALL[name]}
    assert [failed for failed, count in beyond_bounds(slower).items() if count] == [check]
    assert set(beyond_bounds(slower | {"slowness": 2.0}).values()) == {0}


@pytest.mark.parametrize(("name", "check"), [("trainer_idle", "trainer_idles"), ("engine_idle", "engine_idles")])
def test_loop_idle_share_fails_on_any_machine(name: str, check: str) -> None:
    assert set(missed_goals(LOOP, {"steps_per_s": 1.8}).values()) == {0}
    missed = missed_goals(LOOP | {name: 0.11, "slowness": 9.0}, {"steps_per_s": 1.8})
    assert [failed for failed, count in missed.items() if count] == [check]


def test_loop_gain_and_wait_fail_beyond_goals() -> None:
    assert missed_goals(LOOP, {"steps_per_s": 1.79})["overlap_gains_little"] == 1
    late = LOOP | {"ready_to_leased_p50_ms": 280.0}
    assert missed_goals(late, {"steps_per_s": 2.0})["leased_late"] == 1
    assert missed_goals(late | {"slowness": 1.9}, {"steps_per_s": 2.0})["leased_late"] == 0
