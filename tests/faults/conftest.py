"""Fixtures of the fault tests: chance that can be repeated, and figures that are seen while a test runs."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from random import Random

import pytest

Report = Callable[[str], None]


@pytest.fixture
def report(capsys: pytest.CaptureFixture[str], request: pytest.FixtureRequest) -> Report:
    """Return a function that prints a line at once, uncaptured, and in a failed test's report: pytest-xdist's workers show no output."""

    def print_line(text: str) -> None:
        request.node.add_report_section("call", "reported", text)
        with capsys.disabled():
            print(f"\n  {request.node.name}: {text}", end="", flush=True)

    return print_line


@pytest.fixture
def chance(report: Report) -> Random:
    """Chance, of the seed in FAULTS_SEED; without one, of a new seed, which is printed."""
    seed = int(os.environ.get("FAULTS_SEED", time.time_ns() % 2**31))
    report(f"FAULTS_SEED={seed}")
    return Random(seed)
