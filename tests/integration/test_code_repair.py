"""The repairing agent in real sandboxes: its repositories fail before and pass after the repair, by their own tests and by hidden ones."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Generator
from dataclasses import replace

import pytest

from examples.code_repair import agent as repairing
from examples.code_repair import task
from examples.code_repair.model import SimulatedRepository
from examples.code_repair.repository import Repository
from runner.tools.toolbox import open_toolbox
from spangrad.errors import SandboxError
from tests.support.scripted_servers import WordPolicy


@pytest.fixture(autouse=True)
def _sandboxes() -> None:
    try:
        repairing.engine()
        task.engine()
    except SandboxError as error:
        pytest.skip(str(error))


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Generator[tuple[Repository, task.Question]]:
    rng = random.Random(3)
    state = rng.getstate()
    drawn = task.repository(rng, held_out=True)
    rng.setstate(state)
    repairing.client.cache_clear()
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    yield drawn, task.question(rng, held_out=True)
    repairing.client.cache_clear()


async def test_repository_fails_before_and_passes_after_the_repair(asked: tuple[Repository, task.Question]) -> None:
    drawn, question = asked
    right = Repository(tuple(replace(function, written=function.right) for function in drawn.functions))
    assert await task.evaluate(question, drawn.files) == 0.0
    assert await task.evaluate(question, right.files) == 1.0
    exits = {**right.files, f"{drawn.broken.name}.py": "import os\nos._exit(0)\n"}
    assert await task.evaluate(question, exits) == 0.0
    assert await task.evaluate(question, {}) == 0.0
    async with open_toolbox(repairing.engine()) as toolbox:
        for repository in (drawn, right):
            simulated = SimulatedRepository(repository.functions)
            for name, text in repository.files.items():
                await toolbox.write_file(f"{toolbox.sandbox.home}/repository/{name}", text)
            await toolbox.call("shell", {"command": "cd $HOME/repository; chmod +x check"})
            assert (await toolbox.call("shell", {"command": "./check"})).split() == simulated.check().split()
            for name in simulated.functions:
                assert (await toolbox.call("shell", {"command": f"cat -n {name}.py"})).split() == simulated.show(name).split()
        hidden = await toolbox.call("shell", {"command": f"cat {task.HIDDEN}/check.py"})
        assert "No such file" in hidden


async def test_agent_repairs_by_scripted_commands(asked: tuple[Repository, task.Question], monkeypatch: pytest.MonkeyPatch) -> None:
    drawn, question = asked
    broken = drawn.broken
    replies = [
        "shell ./check", f"shell cat -n {broken.name}.py", "edit missing.py 1 x", f"edit {broken.name}.py 99 x",
        f"edit {broken.name}.py {broken.line} return {broken.right.code}", "shell ./check",
    ]  # fmt: skip
    with WordPolicy(lambda messages: replies[len(messages) // 2]) as policy:
        monkeypatch.setenv("OPENAI_BASE_URL", f"{policy.url}/v1")
        files = await asyncio.wait_for(repairing.agent(question), 60)
        assert len(policy.chats) == repairing.CALLS
    shown = [message["content"] for message in policy.chats[-1]["messages"] if message["role"] == "tool"]
    assert [shown[0], *shown[2:]] == [f"fail {broken.name}.py [exit code 1]", "error", "error", "ok"]
    assert await task.evaluate(question, files) == 1.0
