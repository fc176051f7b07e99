"""Files of forges: each change runs `.ci/run`, and the weekly job's parts hold every slow test once."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]


def load(name: str) -> dict[str, Any]:
    return yaml.safe_load((ROOT / name).read_text())


def test_each_change_runs_the_readmes_commands() -> None:
    github = load(".github/workflows/ci.yml")["jobs"]["check-and-test"]["steps"]
    assert ([step["run"] for step in github if "run" in step], load(".gitlab-ci.yml")["check-and-test"]["script"]) == (
        [".ci/run"],
        [".ci/run"],
    )


def test_the_weekly_jobs_parts_hold_each_slow_test_once() -> None:
    github = load(".github/workflows/weekly.yml")["jobs"]["slow"]["strategy"]["matrix"]["part"]
    (gitlab,) = load(".gitlab-ci.yml")["slow"]["parallel"]["matrix"]
    assert gitlab["PART"] == github
    slow = [path.relative_to(ROOT) for path in (ROOT / "tests").rglob("test_*.py") if "mark.slow" in path.read_text()]
    assert len(slow) > 10
    for path in slow:
        parts = [part for part in github if path.is_relative_to(part.split()[0]) and str(path) not in re.findall(r"--ignore (\S+)", part)]
        assert len(parts) == 1, (path, parts)


@pytest.mark.parametrize("name", [".github/workflows/ci.yml", ".github/workflows/weekly.yml", ".gitlab-ci.yml"])
def test_targets_and_programs_exist(name: str) -> None:
    text = (ROOT / name).read_text()
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    assert set(re.findall(r"\bmake ([a-z-]+)", text)) <= targets
    assert (ROOT / ".ci" / "run").exists()
