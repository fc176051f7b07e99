"""`spangrad environments` and `spangrad rewards serve` as processes of their own, under a real worker."""

from __future__ import annotations

import asyncio
import json
import sys
import textwrap
import urllib.request
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

from runner.queue.wire import RolloutState
from runner.rewards.client import RewardClient
from runner.rewards.server import running
from runner.runner import Runner
from runner.workers.agents import CallableAgent
from runner.workers.jobs import AttemptOutcome
from spangrad.processes import Child, answers, free_ports, wait_until
from spangrad.settings import RewardServiceSettings, Settings
from spangrad.types import AttemptFailure, Mode, Task
from tests.support.otlp import HttpServer
from tests.support.processes import ForkedChild
from tests.support.runners import is_state, kill, new_rollouts, queue_settings, runner_services, serving

WORLD = """
    import os, pathlib

    class World:
        \"\"\"A number that its user may raise.\"\"\"

        def __init__(self):
            self.file = pathlib.Path(__file__).parent / f"world-{id(self)}"
            self.reset()

        def begin(self, task):
            return {"file": str(self.file), "before": self.file.read_text()}

        def reset(self):
            self.file.write_text("0")

        def health(self):
            return self.file.exists()

        def close(self):
            self.file.unlink()

    def agent(task, environment):
        assert environment["before"] == "0"
        pathlib.Path(environment["file"]).write_text(str(task))
        return task

    def score(task, output, environment):
        assert pathlib.Path(environment["file"]).read_text() == str(output)
        return {"score": output / 2}
"""


@contextmanager
def process(name: str, directory: Path, *words: str) -> Generator[tuple[Child, str]]:
    """A service of ours, ready, and where it is."""
    (port,) = free_ports(1)
    command = ["-m", "spangrad", *words, "--directory", str(directory), "--port", str(port)]
    child = ForkedChild(name, command, directory / f"{name}.log", inherit_settings=False)
    url = f"http://127.0.0.1:{port}"
    try:
        wait_until(lambda: answers(f"{url}/healthz"), 60, name, [child], poll_seconds=0.05)
        yield child, url
    finally:
        child.stop()


def instances(url: str) -> list[dict[str, Any]]:
    with urllib.request.urlopen(f"{url}/v1/instances") as answer:
        return json.load(answer)["instances"]


def worlds(directory: Path) -> list[Path]:
    return list(directory.glob("world-*"))


async def test_environments_and_rewards_services_serve_rollouts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_PYTHON_DISABLED_INSTRUMENTATIONS", "langchain,openai,httpx,httpx2")
    (tmp_path / "worlds.py").write_text(textwrap.dedent(WORLD))
    with (
        process("environments", tmp_path, "environments", "--factory", "worlds:World", "--instances", "2") as (environments, leases),
        process("rewards", tmp_path, "rewards", "serve", "--evaluator", "worlds:score") as (_, judge),
        runner_services(tmp_path, concurrency=4, max_attempts=1) as services,
    ):
        agent = CallableAgent("worlds:agent", evaluator=judge, directory=tmp_path, environment=leases)
        async with Runner(services.settings, agent) as runner:
            outcomes = await runner.run([Task(str(n), n) for n in range(6)], mode=Mode.TRAIN, group_size=1)
        assert [(outcome.reward, outcome.detail) for outcome in outcomes] == [({"score": n / 2}, "") for n in range(6)]
        # A worker that has ended has given everything back.
        await asyncio.to_thread(
            wait_until, lambda: {instance["state"] for instance in instances(leases)} == {"free"}, 60, "clean instances"
        )
        assert sum(instance["users"] for instance in instances(leases)) == 6
        assert len(worlds(tmp_path)) == 2
        environments.process.terminate()
        assert await asyncio.to_thread(environments.process.wait, 60) == 0
        assert worlds(tmp_path) == []


def ends(given: object, output: object) -> float:
    """Raise StopIteration in place of a reward."""
    return next(iter([]))


async def test_rewards_service_answers_and_logs_evaluator_that_raises(caplog: pytest.LogCaptureFixture) -> None:
    (port,) = free_ports(1)
    async with running(Settings(rewards=RewardServiceSettings(port=port)), ends) as url, aiohttp.ClientSession() as client:
        judged = {"rollout_id": "r", "attempt": 0, "task_id": "t"}
        async with client.post(url, json=judged, timeout=aiohttp.ClientTimeout(60)) as answer:
            assert (answer.status, await answer.json()) == (500, {"error": "RuntimeError: ends raised StopIteration"})
    assert "the evaluator failed on rollout r: RuntimeError: ends raised StopIteration\n" in caplog.text
    assert "in ends\n" in caplog.text, "the log says where"


@pytest.mark.parametrize("content", [b"[" * 100_000, b"{", b"\xff"])
async def test_reward_client_answer_that_is_not_json_is_a_failed_evaluation(content: bytes) -> None:
    class Judge(HttpServer):
        def answer(self, method: str, path: str, headers: dict[str, str], body: bytes) -> tuple[int, dict[str, str], bytes]:
            return 200, {}, content

    with Judge() as judge:
        async with RewardClient(judge.url, None) as client:
            outcome = await client.evaluate({}, 60)
    assert (outcome.rewards, outcome.failure) == (None, AttemptFailure.EVALUATION)
    assert "answers what is not JSON" in outcome.detail


def is_latin(given: object, output: object) -> float:
    """Return 1 for the text of a file in Latin-1, as `git diff` and `surrogateescape` give it."""
    return float(output == b"caf\xe9".decode(errors="surrogateescape"))


async def test_rewards_service_judges_output_with_half_a_surrogate_pair() -> None:
    async with running(Settings(rewards=RewardServiceSettings(port=free_ports(1)[0])), is_latin) as url, RewardClient(url, None) as client:
        body = {"rollout_id": "r", "attempt": 0, "task_id": "t", "output": b"caf\xe9".decode(errors="surrogateescape")}
        assert await client.evaluate(body, 60) == AttemptOutcome(1.0, None)


def refuses(given: object, output: object) -> float:
    """Raise an error that quotes the output."""
    raise LookupError(f"no reward for {output}")


async def test_rewards_service_error_that_quotes_half_a_surrogate_pair_is_the_detail(caplog: pytest.LogCaptureFixture) -> None:
    async with running(Settings(rewards=RewardServiceSettings(port=free_ports(1)[0])), refuses) as url, RewardClient(url, None) as client:
        body = {"rollout_id": "r", "attempt": 0, "task_id": "t", "output": b"caf\xe9".decode(errors="surrogateescape")}
        outcome = await client.evaluate(body, 60)
    assert outcome.failure is AttemptFailure.EVALUATION
    assert "LookupError: no reward for caf?" in outcome.detail
    assert b"LookupError: no reward for caf?" in caplog.text.encode()


def exits(given: object, output: object) -> float:
    """Exit for one input, as argparse does for wrong arguments."""
    if given == "exit":
        sys.exit(2)
    return 1.0


async def exits_in_loop(given: object, output: object) -> float:
    return exits(given, output)


@pytest.mark.parametrize("evaluator", [exits, exits_in_loop])
async def test_rewards_service_outlives_evaluator_that_exits(evaluator: Callable[..., Any]) -> None:
    (port,) = free_ports(1)
    async with running(Settings(rewards=RewardServiceSettings(port=port)), evaluator) as url, aiohttp.ClientSession() as client:
        judged = {"rollout_id": "r", "attempt": 0, "task_id": "t"}
        async with client.post(url, json={**judged, "input": "exit"}, timeout=aiohttp.ClientTimeout(60)) as answer:
            assert (answer.status, await answer.json()) == (500, {"error": "SystemExit: 2"})
        async with client.post(url, json=judged, timeout=aiohttp.ClientTimeout(60)) as answer:
            assert (answer.status, await answer.json()) == (200, 1.0)


async def test_rewards_service_ends_while_an_evaluator_hangs(tmp_path: Path) -> None:
    (tmp_path / "endless.py").write_text(
        "import pathlib, time\ndef score(task, output):\n    pathlib.Path(task).touch()\n    time.sleep(3600)"
    )
    began = tmp_path / "began"
    judged = {"rollout_id": "r", "attempt": 0, "task_id": "t", "input": str(began)}
    with process("rewards", tmp_path, "rewards", "serve", "--evaluator", "endless:score") as (service, url):
        async with aiohttp.ClientSession() as client:
            request = asyncio.create_task(client.post(url, json=judged))
            await asyncio.to_thread(wait_until, began.exists, 60, "the evaluator")
            request.cancel()
        service.process.terminate()
        assert await asyncio.to_thread(service.process.wait, 60) == 0


@pytest.mark.slow
async def test_environment_lease_of_killed_worker_expires(tmp_path: Path) -> None:
    (tmp_path / "worlds.py").write_text(textwrap.dedent(WORLD))
    settings = queue_settings(f"sqlite:///{tmp_path}/queue.db", queue__lease_seconds=1, max_attempts=2)
    words = ("environments", "--factory", "worlds:World", "--set", "environments.lease_seconds=2")
    with (
        process("environments", tmp_path, *words) as (_, leases),
        runner_services(tmp_path, queue__url=settings.queue.url, concurrency=1) as services,
    ):
        async with serving(settings) as (client, _):
            (rollout,) = new_rollouts(1)
            await client.enqueue("run", [msgspec.structs.replace(rollout, input=msgspec.Raw(b'"hang"'))])
            worker = services.start_worker("--environment", leases)
            await asyncio.to_thread(wait_until, lambda: bool(services.processes()), 60, "the agent's program")
            assert [(instance["state"], instance["rollout_id"]) for instance in instances(leases)] == [("leased", "r0")]
            assert any(b'SPANGRAD_ENVIRONMENT={"file": ' in environ for environ in variables(services.directory))
            kill(worker.process.pid)
            worker.process.wait()
            await asyncio.to_thread(wait_until, lambda: instances(leases)[0]["state"] == "free", 30, "the lease's end")
            assert instances(leases)[0]["users"] == 1
            # Another worker gets it, for the next attempt.
            services.start_worker("--environment", leases)
            await asyncio.to_thread(wait_until, lambda: instances(leases)[0]["users"] == 2, 60, "the next user")
            assert await is_state(client, "r0", RolloutState.RUNNING)


def variables(directory: Path) -> list[bytes]:
    """The environments of processes that work in a directory."""
    environs: list[bytes] = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if (process / "cwd").readlink() == directory:
                environs.append((process / "environ").read_bytes())
        except OSError:
            continue  # it has ended, or is somebody else's
    return environs
