"""Benchmarks as commands, on small loads: they end well, count what they did, and everything that must be 0 is 0."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.credit_run import Result
from benchmarks.rollout_spans import Mix

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.slow


def result_of(name: str, *options: str, may_miss_bounds: bool = False) -> dict[str, Any]:
    """Return what a benchmark printed last; unless it may miss bounds, which a small load does not fit, it must have ended well."""
    command = [sys.executable, "-m", f"benchmarks.{name}", *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert may_miss_bounds or done.returncode == 0, done.stdout + done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["benchmark"] == name
    return result


def test_build_benchmark_of_256_calls_builds_every_call() -> None:
    result = result_of("build", "--calls", "256")
    assert [result["ours"]["calls"], result["ours"]["calls_32"]["calls"]] == [256, 256]
    assert set(result["checked"].values()) == {0}
    assert result["checked"].keys() >= {"lost", "double", "wrong", "different", "trained_tokens"}


def test_credit_benchmark_resumes_after_kill(tmp_path: Path) -> None:
    there = Result("inbox", "own", 0, 4, 1, [0.5], [4.0], final=0.25)
    (tmp_path / "runs.jsonl").write_text(json.dumps(there.json()) + "\n")
    summary = result_of("credit", "--tasks", "inbox", "--steps", "1", "--group", "4", "--seeds", "0", "1", "--out", str(tmp_path))
    assert summary["ours"]["inbox"]["final"][0] == 0.25
    assert [json.loads(line)["seed"] for line in (tmp_path / "runs.jsonl").read_text().splitlines()] == [0, 1, 0, 1]
    assert set(summary["checked"].values()) == {0}


def test_gateway_benchmark_small_run_finds_every_span() -> None:
    result = result_of("gateway", "--rounds", "1", "--calls", "200", "--streams", "16", "--alone", "10")
    assert [result["ours"]["calls"], result["ours"]["calls_stream"]] == [200, 16]
    assert set(result["checked"].values()) == {0}
    assert result["checked"].keys() >= {"lost", "double", "wrong_ids", "wrong_answers"}
    assert result["ours"]["cpu_us"] > 0


def test_logprob_gap_benchmark_of_small_model_is_within_limits() -> None:
    result = result_of("logprob_gap", "--models", "two-tools")
    assert len(result["ours"]) == 5
    assert result["checked"] == {"beyond_the_default_limits": 0}


def test_affinity_benchmark_small_run_computes_no_prompt_anew() -> None:
    result = result_of("affinity", "--rollouts", "4", "--at-once", "4", "--turns", "3")
    assert result["ours"]["computed_tokens"] < result["ours"]["prompt_tokens"] / 2
    assert set(result["checked"].values()) == {0}


def test_idle_trainer_benchmark_small_run_misses_no_group() -> None:
    result = result_of("idle_trainer", "--steps", "10", "100", "--looks", "20", "--peer-looks", "1", may_miss_bounds=True)
    assert [result["checked"][name] for name in ("missed", "early", "duplicated", "not_noticed_as_trained")] == [0, 0, 0, 0]


@pytest.mark.parametrize("mix", Mix)
def test_ingest_benchmark_small_run_finds_every_span(mix: Mix, tmp_path: Path) -> None:
    plot = tmp_path / "plot.png"
    result = result_of("ingest", "--spans", "2000", "--mix", mix, "--plot", str(plot))
    assert [result["ours"]["spans"], set(result["checked"].values())] == [2000, {0}]
    assert result["ours"]["cpu_us_settled"] > 0
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_page_benchmark_finds_all_rollouts_and_rows_of_the_public_table() -> None:
    result = result_of("page", "--rollouts", "1024", "--requests", "2")
    assert set(result["checked"].values()) == {0}
    assert (result["rollouts"], result["spans"]) == (1024, 512 * 20 + 600 + 4 * 6)
