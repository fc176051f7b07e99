"""Files of forges: each change runs `.ci/run`, and the weekly job's parts hold every slow test once; groups and reports of tests."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.conftest import files_of_part, groups_of_files

ROOT = Path(__file__).parents[2]


def load(name: str) -> dict[str, Any]:
    return yaml.safe_load((ROOT / name).read_text())


def test_ci_workflows_run_ci_script() -> None:
    github = load(".github/workflows/ci.yml")["jobs"]["check-and-test"]["steps"]
    assert ([step["run"] for step in github if "run" in step], load(".gitlab-ci.yml")["check-and-test"]["script"]) == (
        [".ci/run"],
        [".ci/run"],
    )


def test_files_of_part_cover_each_slow_test_file_once() -> None:
    github = load(".github/workflows/weekly.yml")["jobs"]["slow"]["strategy"]["matrix"]["part"]
    (gitlab,) = load(".gitlab-ci.yml")["slow"]["parallel"]["matrix"]
    assert gitlab["PART"] == github
    slow = [path for path in (ROOT / "tests").rglob("test_*.py") if "mark.slow" in path.read_text()]
    assert len(slow) > 10
    assert sorted(path for part in github for path in files_of_part(slow, part)) == sorted(slow)


@pytest.mark.parametrize("part", ["0/4", "5/4", "1", "1/0", "a/b", "1/4/2"])
def test_files_of_part_invalid_part_raises(part: str) -> None:
    with pytest.raises(pytest.UsageError, match="is not K/N"):
        files_of_part([], part)


@pytest.mark.parametrize("name", [".github/workflows/ci.yml", ".github/workflows/weekly.yml", ".gitlab-ci.yml"])
def test_ci_workflows_name_existing_make_targets(name: str) -> None:
    text = (ROOT / name).read_text()
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    assert set(re.findall(r"\bmake ([a-z-]+)", text)) <= targets
    assert (ROOT / ".ci" / "run").exists()


def test_groups_of_files_are_those_that_take_shared_servers() -> None:
    groups = groups_of_files(ROOT)
    ray = {file for file, group in groups.items() if group == "ray"}
    assert ray == {f"tests/integration/ray_cluster/test_{name}.py" for name in ("distributed_parity", "trainer_ray")}
    assert groups["tests/integration/test_gateway_vllm.py"] == "vllm"


def test_report_with_half_of_a_surrogate_pair_is_escaped_for_the_controller(pytestconfig: pytest.Config) -> None:
    report = pytest.TestReport("a", ("a", None, "a"), {}, "failed", "caf\udce9", "call", sections=[("log", "caf\udce9 \U0001f600")])
    sent = pytestconfig.hook.pytest_report_to_serializable(config=pytestconfig, report=report)
    assert (sent["longrepr"], sent["sections"]) == (r"caf\udce9", [("log", "caf\\udce9 \U0001f600")])
