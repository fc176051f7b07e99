"""Issues with tests: tasks, the reward; and small data in the same schema (that of SWE-bench, which SWE-Gym has as well).

In: rows with `instance_id`, `repo`, `base_commit`, `problem_statement`, `test_patch`, `FAIL_TO_PASS`, `PASS_TO_PASS`; clones of their
repositories, OWNER__NAME each. Out: tasks; their trees and tests lie in the run's directory. Invariant: the tests' patch is in no tree and
in no sandbox of an agent; it is applied after the agent's patch, to its files as they were.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from recipes.recipe import Recipe, Row, SmallData
from recipes.swe.workspace import COPY_SECONDS, copy_command, policy_of
from runner.sandboxes.sandbox import OpenSandbox, open_sandbox
from spangrad.errors import AgentError, SandboxError

TEST_SECONDS = 600.0
OPERATORS = ("+", "-", "*")
_TOUCHED = re.compile(r"^(?:---|\+\+\+) [ab]/(.+?)\s*$", re.MULTILINE)


def tasks(data: Iterable[Row], arguments: argparse.Namespace, directory: Path) -> list[dict[str, Any]]:
    """Return the agent's inputs, each with what its evaluator needs.

    Raises:
        AgentError: a repository, a commit of it or its interpreter is not there.
    """
    inputs = list[dict[str, Any]]()
    for row in data:
        name = row["repo"].replace("/", "__")
        tests = directory / "tests" / f"{row['instance_id']}.patch"
        tests.parent.mkdir(exist_ok=True)
        tests.write_text(row["test_patch"])
        inputs.append(
            {
                "problem": row["problem_statement"],
                "tree": str(tree(arguments.repositories / name, row["base_commit"], directory / "trees")),
                "python": str(interpreter(arguments.environments, name)),
                "tests": str(tests),
                "test_files": sorted(set(_TOUCHED.findall(row["test_patch"]))),
                "expected": [*names(row["FAIL_TO_PASS"]), *names(row["PASS_TO_PASS"])],
            }
        )
    return inputs


def names(value: object) -> list[str]:
    """Return names of tests, which some data sets have as JSON."""
    listed: Any = json.loads(value) if isinstance(value, str) else value
    return [str(name) for name in listed]


def tree(clone: Path, commit: str, directory: Path) -> Path:
    """Return a directory with the files of a commit, written once.

    Raises:
        AgentError: there is no such clone, or no such commit in it.
    """
    target = directory / f"{clone.name}-{commit[:12]}"
    if target.is_dir():
        return target.absolute()
    partial = directory / f".{target.name}"
    partial.mkdir(parents=True, exist_ok=True)
    archive = subprocess.run(["git", "-C", str(clone), "archive", commit], capture_output=True, check=False)
    if archive.returncode:
        reason = archive.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        owner_name = clone.name.replace("__", "/")
        raise AgentError(f"{clone} has no commit {commit} ({reason}). Clone github.com/{owner_name} there, or name --repositories.")
    subprocess.run(["tar", "-x", "-C", str(partial)], input=archive.stdout, check=True)
    return partial.rename(target).absolute()


def interpreter(environments: Path | None, name: str) -> Path:
    """Return the interpreter that has a repository's requirements.

    Raises:
        AgentError: there is none.
    """
    if environments is None:
        return Path(sys.executable)
    python = environments / name / "bin" / "python"
    if not python.exists():
        raise AgentError(f"{python} is not there. Make a virtual environment with pytest and the repository's requirements.")
    return python.absolute()


async def evaluate(given: Mapping[str, Any], output: Mapping[str, str]) -> float:
    """Return 1 where the tests that should pass do, with the agent's patch and in a sandbox of their own; else 0."""
    if not output["patch"]:
        return 0.0
    async with open_sandbox(policy_of(given, Path(given["tests"]))) as sandbox:
        root = f"{sandbox.home}/repository"
        copied = await sandbox.run(["sh", "-c", copy_command(given, root)], timeout_seconds=COPY_SECONDS)
        if copied.exit_code:
            raise SandboxError(f"{given['tree']} cannot be copied into a sandbox: {copied.stderr.decode(errors='replace')[-500:]}")
        if not await _applied(sandbox, root, "-", output["patch"].encode(errors="surrogateescape")):
            return 0.0
        for file in given["test_files"]:
            kept = await sandbox.run(["git", "-C", root, "checkout", "-q", "HEAD", "--", file])
            if kept.exit_code:  # the tests add it
                await sandbox.run(["rm", "-rf", f"{root}/{file}"])
        if not await _applied(sandbox, root, given["tests"], b""):
            raise AgentError(f"{given['tests']} does not fit {given['tree']}. Leave the task out.")
        command = [given["python"], "-m", "pytest", "-q", "-p", "no:cacheprovider", *given["expected"]]
        return float((await sandbox.run(command, directory=root, timeout_seconds=TEST_SECONDS)).exit_code == 0)


async def _applied(sandbox: OpenSandbox, root: str, patch: str, stdin: bytes) -> bool:
    result = await sandbox.run(["git", "-C", root, "apply", "--whitespace=nowarn", patch], stdin=stdin, timeout_seconds=COPY_SECONDS)
    return result.exit_code == 0


def small(directory: Path) -> SmallData:
    """Write a repository with a commit for each wrong operator, and return an issue of each."""
    clone = directory / "repositories" / "made__total"
    clone.mkdir(parents=True)
    git = ["git", "-C", str(clone), "-c", "user.name=made", "-c", "user.email=none", "-c", "commit.gpgsign=false"]
    subprocess.run([*git, "init", "-q"], check=True)
    data: list[Row] = []
    for right, wrong in ((right, wrong) for right in OPERATORS for wrong in OPERATORS if right != wrong):
        (clone / "total.py").write_text(f"def total ( a , b ) :\n    return a {wrong} b\n")
        subprocess.run([*git, "add", "-A"], check=True)
        subprocess.run([*git, "commit", "-q", "-m", "change", "--allow-empty"], check=True)
        commit = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
        lines = ["from total import total", "", "", "def test_total():", f"    assert total(7, 3) == {eval(f'7 {right} 3')}"]
        patch = f"--- /dev/null\n+++ b/test_total.py\n@@ -0,0 +1,{len(lines)} @@\n" + "".join(f"+{line}\n" for line in lines)
        data.append(
            {
                "instance_id": f"made__total-{len(data)}",
                "repo": "made/total",
                "base_commit": commit,
                "problem_statement": problem(right),
                "test_patch": patch,
                "FAIL_TO_PASS": json.dumps(["test_total.py::test_total"]),
                "PASS_TO_PASS": "[]",
            }
        )
    return data, data[::2], {"repositories": directory / "repositories", "environments": None}


def problem(operator: str) -> str:
    """Return the text of a small issue."""
    return f"total.py is wrong : it should return a {operator} b"


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--repositories", type=Path, default=Path("data/swe/repositories"), help="clones, OWNER__NAME each")
    parser.add_argument(
        "--environments", type=Path, help="virtual environments with requirements, OWNER__NAME each; default: this interpreter's"
    )


RECIPE = Recipe(
    name="swe",
    train="hf:SWE-Gym/SWE-Gym:train",
    held_out="hf:princeton-nlp/SWE-bench_Verified:test",
    inputs=tasks,
    small=small,
    options=_options,
    parser="words",
)
