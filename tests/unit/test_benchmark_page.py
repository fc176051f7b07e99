"""The page benchmark's own honesty: times and CPU time are those of the requests, and its store has what it promises."""

from __future__ import annotations

import os
import re
import time

import pytest

from benchmarks import page
from benchmarks.lookup_data import SPANS_A_ROLLOUT, Workload
from benchmarks.page_data import PageWorkload


def test_page_timed_leaves_out_the_time_between_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(page.time, "perf_counter", lambda: now[0])

    def between() -> str:
        now[0] += 50
        return "/"

    def work(path: str) -> None:
        now[0] += 0.125

    figures = page.timed(work, [os.getpid()], [between] * 3)
    assert (figures["p50_ms"], figures["p95_ms"]) == (125, 125)


def test_page_timed_counts_cpu_time_of_its_processes() -> None:
    def work(path: str) -> None:
        until = time.process_time() + 0.1
        while time.process_time() < until:
            pass

    assert 80 <= page.timed(work, [os.getpid()], [lambda: "/"] * 2)["cpu_ms"] < 200


def test_page_workload_has_spans_for_half_of_its_rollouts() -> None:
    workload = PageWorkload(Workload(1024))
    numbers = re.compile(r"AS trace_id,.*FROM numbers\(\d+, (\d+)\)", re.S)
    assert sum(int(match[1]) for match in map(numbers.search, workload.statements()) if match) == 512 * SPANS_A_ROLLOUT
