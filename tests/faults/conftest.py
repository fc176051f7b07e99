"""Fixtures of the fault tests: chance that can be repeated, and figures that are seen while a test runs."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from random import Random

import pytest

Tell = Callable[[str], None]


@pytest.fixture
def tell(capsys: pytest.CaptureFixture[str], request: pytest.FixtureRequest) -> Tell:
    """Prints a line at once, whatever pytest does with output, and where the test fails: nobody hears a worker of pytest-xdist."""

    def say(text: str) -> None:
        request.node.add_report_section("call", "told", text)
        with capsys.disabled():
            print(f"\n  {request.node.name}: {text}", end="", flush=True)

    return say


@pytest.fixture
def chance(tell: Tell) -> Random:
    """Chance, of the seed in FAULTS_SEED; without one, of a new seed, which is printed."""
    seed = int(os.environ.get("FAULTS_SEED", time.time_ns() % 2**31))
    tell(f"FAULTS_SEED={seed}")
    return Random(seed)
