"""The page benchmark's own honesty: times and CPU time are those of the requests, and its store has what it promises."""

from __future__ import annotations

import os
import re
import time

from benchmarks.lookup_data import SPANS_A_ROLLOUT, Workload
from benchmarks.page import timed
from benchmarks.page_data import PageWorkload


def test_page_timed_leaves_out_the_time_between_requests() -> None:
    def between() -> str:
        time.sleep(0.05)
        return "/"

    figures = timed(lambda path: time.sleep(0.001), [os.getpid()], [between] * 3)
    assert 1 <= figures["p50_ms"] <= figures["p95_ms"] < 50


def test_page_timed_counts_cpu_time_of_its_processes() -> None:
    def work(path: str) -> None:
        until = time.process_time() + 0.1
        while time.process_time() < until:
            pass

    assert 80 <= timed(work, [os.getpid()], [lambda: "/"] * 2)["cpu_ms"] < 200


def test_page_workload_has_spans_for_half_of_its_rollouts() -> None:
    workload = PageWorkload(Workload(1024))
    numbers = re.compile(r"AS trace_id,.*FROM numbers\(\d+, (\d+)\)", re.S)
    assert sum(int(match[1]) for match in map(numbers.search, workload.statements()) if match) == 512 * SPANS_A_ROLLOUT
