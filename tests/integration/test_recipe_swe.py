"""The recipe for issues on its small data: trees without later history, hidden tests, patches that are judged in a fresh sandbox."""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import Generator
from pathlib import Path

import pytest

from recipes.command import arguments_of
from recipes.recipe import Prepared
from recipes.swe import agent as repairing
from recipes.swe.data import RECIPE, evaluate, names
from recipes.swe.workspace import policy_of
from runner.sandboxes.engines import prepare
from spangrad.errors import AgentError, SandboxError
from tests.support.scripted_servers import WordPolicy


@pytest.fixture(scope="module")
def prepared() -> Generator[Prepared]:
    with tempfile.TemporaryDirectory() as base:
        (directory := Path(base)).chmod(0o755)
        arguments = arguments_of(RECIPE, ["--tiny"])
        vars(arguments).update(RECIPE.write_small(directory))
        built = RECIPE.prepare(arguments, directory)
        try:
            prepare(policy_of(built.train[0]))
        except SandboxError as error:
            pytest.skip(str(error))
        yield built


async def test_swe_agent_repairs_by_commands_and_hidden_tests_pass(prepared: Prepared, monkeypatch: pytest.MonkeyPatch) -> None:
    given = prepared.train[0]  # + is right, - is written
    repairing.client.cache_clear()
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    replies = [
        "bash ls -a ; git log --oneline | wc -l", f"bash cat {given['tests']}", "bash sed -i s/-/+/ total.py", "repaired",
    ]  # fmt: skip
    with WordPolicy(lambda messages: replies[len(messages) // 2 - 1]) as policy:
        monkeypatch.setenv("OPENAI_BASE_URL", f"{policy.url}/v1")
        output = await asyncio.wait_for(repairing.agent(given), 60)
    repairing.client.cache_clear()
    shown = [message["content"].split() for message in policy.chats[-1]["messages"] if message["role"] == "tool"]
    assert shown[0] == [".", "..", ".git", "total.py", "1"]
    assert "No such file or directory" in " ".join(shown[1])
    assert "+    return a + b" in output["patch"]
    assert await evaluate(given, output) == 1.0
    cheat = "--- /dev/null\n+++ b/test_total.py\n@@ -0,0 +1,2 @@\n+def test_total():\n+    pass\n"
    wrong = output["patch"].replace("a + b", "a * b")
    assert [await evaluate(given, {"patch": patch}) for patch in ("", "nonsense", wrong, cheat)] == [0.0] * 4


def test_swe_rows_give_trees_of_their_commits(prepared: Prepared, tmp_path: Path) -> None:
    assert (len(prepared.train), len(prepared.held_out)) == (6, 3)
    assert len({task["tree"] for task in prepared.train}) == 6
    for task in prepared.train:
        assert [path.name for path in Path(task["tree"]).iterdir()] == ["total.py"]
        assert (task["test_files"], task["expected"]) == (["test_total.py"], ["test_total.py::test_total"])
    assert names('["a", "b"]') == names(["a", "b"]) == ["a", "b"]
    assert json.loads(json.dumps(prepared.train[0])) == prepared.train[0]
    arguments = arguments_of(RECIPE, ["--tiny"])
    vars(arguments).update(RECIPE.write_small(tmp_path))
    arguments.environments = tmp_path
    with pytest.raises(AgentError, match=r"bin/python is not there\. Make a virtual environment with pytest"):
        RECIPE.prepare(arguments, tmp_path)
    arguments.environments, arguments.repositories = None, tmp_path / "nowhere"
    with pytest.raises(AgentError, match=r"has no commit .* Clone github.com/made/total there, or name --repositories"):
        RECIPE.prepare(arguments, tmp_path)
