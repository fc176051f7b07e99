"""Agents that are container images, through real hosts and a `docker` that does what the real one does to processes."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import textwrap
import time
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from runner.queue.wire import RolloutState
from runner.runner import Runner
from runner.workers.agents import ContainerAgent
from spangrad import semconv
from spangrad.agent.command import ExitCode, ProgramFailure
from spangrad.agent.container import AgentContainer as Hosted
from spangrad.agent.container import Container, reachable, reached_at, run_command
from spangrad.errors import AgentError
from spangrad.http.queue_messages import new_rollout
from spangrad.leases import this_process
from spangrad.processes import MARK, wait_until
from spangrad.settings.runner import ContainerSettings
from spangrad.types import AttemptFailure, Mode, Task
from tests.support.runners import RunnerServices, is_state, kill, runner_services, until
from tests.support.worker_kills import runs

AGENT = """
    read given
    case "$given" in
        *exit*) echo broken >&2; exit 3;;
        *hang*) trap '' TERM; sleep 600;;
        *look*) echo "\\"$OPENAI_BASE_URL $SPANGRAD_HOST $TRACEPARENT\\"";;
        *) echo 0.5;;
    esac
"""
# What the container sees: its attempt's endpoint, not the variable by which descendants of the host are found, the attempt's span.
JUDGE = """
def judge(given, output):
    return output if given != "look" else float("/rollout/" in output.split(" ")[0] and output.split(" ")[1:][0] == "" and " 00-" in output)
"""
PROGRAM = Path(__file__).resolve().parents[1] / "programs/docker.py"


@dataclass(frozen=True)
class FakeDocker:
    """Stand-in for docker, with its arguments and its processes."""

    directory: Path

    @classmethod
    def install(cls, directory: Path) -> FakeDocker:
        """Make the program `docker` in a directory that is put before PATH's others by the caller."""
        (directory / "containers").mkdir(parents=True)
        program = directory / "docker"
        program.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S {PROGRAM} {directory} "$@"\n')
        program.chmod(0o755)
        return cls(directory)

    def calls(self, verb: str) -> list[list[str]]:
        """Arguments of each call that began with a word, in order."""
        file = self.directory / "calls.jsonl"
        calls: list[list[str]] = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
        return [call for call in calls if call[0] == verb]

    def containers(self) -> dict[str, dict[str, str]]:
        """Labels of the containers that are there, by name."""
        return {file.name: json.loads(file.read_text())["labels"] for file in (self.directory / "containers").iterdir()}

    def leave(self, name: str, **labels: str) -> int:
        """A container whose command line is gone; its process."""
        process = subprocess.Popen(["sleep", "600"], start_new_session=True)
        known = {"pid": process.pid, "labels": {key.replace("_", "."): value for key, value in labels.items()}}
        (self.directory / "containers" / name).write_text(json.dumps(known))
        return process.pid


def has_ended(pid: int, seconds: float = 60) -> bool:
    """Return whether a process ends within so many seconds; one that only waits to be collected has ended."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if not runs(pid):
            return True
        time.sleep(0.01)
    return False


@pytest.fixture
def docker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeDocker:
    """The fake on PATH."""
    fake = FakeDocker.install(tmp_path / "bin")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("OTEL_PYTHON_DISABLED_INSTRUMENTATIONS", "langchain,openai,httpx,httpx2")
    (tmp_path / "contained.sh").write_text(textwrap.dedent(AGENT))
    return fake


def agent(services: RunnerServices, image: str = "org/agent:1", command: tuple[str, ...] = ("sh", "contained.sh")) -> ContainerAgent:
    return ContainerAgent(image, command, directory=services.directory, container=ContainerSettings(arguments=["--memory", "1g"]))


def test_run_command_of_container_gives_engine_arguments() -> None:
    container = Container("podman", "org/agent:1", ("agent", "--fast"), "host", ("--gpus", "all"), None)
    environment = {
        "OPENAI_API_KEY": "secret",
        "OPENAI_BASE_URL": "http://127.0.0.1:8180/rollout/r/attempt/0/v1",
        "OTEL_SERVICE_NAME": "agent",
        "TRACEPARENT": "00-1-2-01",
        "BAGGAGE": "a=b",
        "PATH": "/bin",
        "MY_OPENAI_KEY": "not passed",
        "SPANGRAD_ENVIRONMENT": "{}",
        "SPANGRAD_PROMPT_VARIABLE": "ASK_LIKE_THIS",
        "ASK_LIKE_THIS": "politely",
        "SPANGRAD_QUEUE__TOKEN": "not passed",
        MARK: "mark",
    }
    labels = {semconv.RUN_ID: "run", semconv.ROLLOUT_ID: "r", semconv.ROLLOUT_ATTEMPT: "0", "spangrad.host": "mark"}
    assert run_command(container, "name", environment, labels) == [
        *["podman", "run", "--rm", "--interactive", "--name", "name", "--network", "host"],
        *["--label", "spangrad.run.id=run", "--label", "spangrad.rollout.id=r", "--label", "spangrad.rollout.attempt=0"],
        *["--label", "spangrad.host=mark"],
        *[
            "--env",
            "ASK_LIKE_THIS",
            "--env",
            "BAGGAGE",
            "--env",
            "OPENAI_API_KEY",
            "--env",
            "OPENAI_BASE_URL",
            "--env",
            "OTEL_SERVICE_NAME",
        ],
        *["--env", "SPANGRAD_ENVIRONMENT", "--env", "SPANGRAD_PROMPT_VARIABLE", "--env", "TRACEPARENT"],
        *["--gpus", "all", "org/agent:1", "agent", "--fast"],
    ]


@pytest.mark.parametrize(
    ("engine", "network", "platform", "address"),
    [
        ("docker", "host", "linux", None),
        ("docker", "bridge", "linux", "host.docker.internal"),
        ("docker", "host", "darwin", "host.docker.internal"),
        ("/usr/bin/podman", "mine", "linux", "host.containers.internal"),
    ],
)
def test_reached_at_engine_network_and_platform_gives_host_address(engine: str, network: str, platform: str, address: str | None) -> None:
    assert reached_at(engine, network, platform) == address


def test_reachable_loopback_addresses_are_rewritten_for_container() -> None:
    ours = {
        "OPENAI_BASE_URL": "http://127.0.0.1:8180/v1",
        "OTEL_EXPORTER_OTLP_ENDPOINT": "http://localhost:4318",
        "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "https://[::1]:4318/v1/traces",
        "OPENAI_PROXY": "http://gateway.example:80/?of=http://127.0.0.1",
        "HOME": "http://127.0.0.1",
        "OPENAI_WEBSITE": "http://[::1",
        "SPANGRAD_PROMPT": "Say http://127.0.0.1",
        "SPANGRAD_ENVIRONMENT": '{"url": "http://127.0.0.1:8191/e"}',
    }
    assert reachable(ours, None) == ours
    assert reachable(ours, "host.docker.internal") == {
        "OPENAI_BASE_URL": "http://host.docker.internal:8180/v1",
        "OTEL_EXPORTER_OTLP_ENDPOINT": "http://host.docker.internal:4318",
        "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "https://host.docker.internal:4318/v1/traces",
        "OPENAI_PROXY": "http://gateway.example:80/?of=http://127.0.0.1",
        "HOME": "http://127.0.0.1",
        "OPENAI_WEBSITE": "http://[::1",
        "SPANGRAD_PROMPT": "Say http://127.0.0.1",
        "SPANGRAD_ENVIRONMENT": '{"url": "http://host.docker.internal:8191/e"}',
    }


async def test_container_agent_runs_attempts_and_removes_their_containers(tmp_path: Path, docker: FakeDocker) -> None:
    (tmp_path / "judge.py").write_text(JUDGE)
    ours = this_process()
    left = docker.leave("left", spangrad_worker=_dead_worker())
    alive = docker.leave("alive", spangrad_worker=ours)
    try:
        images = ContainerSettings(images=["org/*"])
        with runner_services(tmp_path, concurrency=4, timeout_seconds=120, max_attempts=1, container=images) as services:
            tasks = [Task(what, what) for what in ("well", "exit", "look")]
            image = replace(agent(services), evaluator="judge:judge")
            async with Runner(services.settings, image) as runner:
                hung = new_rollout("hang", "hang", "g", rollout_id="hung", timeout_seconds=10, max_attempts=1, image="org/hung:2")
                other = new_rollout("other", "other", "g", rollout_id="other", max_attempts=3, image="evil/agent:1")
                await runner.queue.enqueue("run", [hung, other])
                outcomes = await runner.run(tasks, mode=Mode.TRAIN, group_size=1)
                await until(lambda: is_state(runner.queue, "hung", RolloutState.FAILED), 60)
                (refused,) = (await runner.queue.rollout("other")).attempts
                assert (refused.reason, refused.detail) == (
                    AttemptFailure.NO_HANDLER,
                    "the handler of the rollout may not run image 'evil/agent:1': runner.container.images does not allow it.",
                )
            assert [(o.task_id, o.reward, o.failure, o.detail) for o in outcomes] == [
                ("well", {"reward": 0.5}, None, ""),
                ("exit", {"reward": 0.0}, AttemptFailure.EXIT_CODE, "exit code 3"),
                ("look", {"reward": 1.0}, None, ""),
            ]
            roots = services.roots()
            assert {root[semconv.TASK_ID]: root.get(semconv.ROLLOUT_FAILURE) for root in roots.values()} == {
                "well": None, "exit": "exit_code", "hang": "timeout", "look": None, "other": "no_handler",
            }  # fmt: skip
            (call,) = [call for call in docker.calls("run") if "spangrad.rollout.id=hung" in call]
            assert {f"spangrad.worker={ours}", "spangrad.run.id=run", "spangrad.rollout.attempt=0"} <= set(call)
            assert call[-5:] == ["--memory", "1g", "org/hung:2", "sh", "contained.sh"], "the image that the rollout names"
            name = call[call.index("--name") + 1]
            assert name in [argument for call in docker.calls("rm") for argument in call[3:]]
        assert docker.containers().keys() == {"alive"}
        assert has_ended(left)
        assert not has_ended(alive, 0.1)
    finally:
        kill(alive)


async def test_agent_host_killed_leaves_no_container(tmp_path: Path, docker: FakeDocker) -> None:
    with runner_services(tmp_path, concurrency=1, timeout_seconds=60, max_attempts=1) as services:
        async with Runner(services.settings, agent(services)) as runner:
            running = asyncio.create_task(runner.run([Task("hang", "hang")], mode=Mode.TRAIN, group_size=1))
            await asyncio.to_thread(wait_until, lambda: bool(docker.containers()), 30, "the container")
            (file,) = (docker.directory / "containers").iterdir()
            pid = json.loads(file.read_text())["pid"]
            kill(_host_of(next(iter(docker.containers().values()))["spangrad.host"]))
            (outcome,) = await running
            assert outcome.failure is AttemptFailure.CRASH
            assert has_ended(pid)
            assert docker.containers() == {}


def _dead_worker() -> str:
    """Return the name of a worker of this machine that has ended."""
    name = "from spangrad.leases import this_process; print(this_process())"
    return subprocess.run([sys.executable, "-c", name], capture_output=True, text=True, check=True).stdout.strip()


def _host_of(mark: str) -> int:
    """The agent host that has a mark."""
    for path in Path("/proc").glob("[0-9]*"):
        try:
            marked = f"{MARK}={mark}".encode() in (path / "environ").read_bytes().split(b"\0")
            if marked and b"spangrad.agent.host" in (path / "cmdline").read_bytes():
                return int(path.name)
        except OSError:
            continue
    raise AssertionError("there is no host of that mark")


@pytest.mark.parametrize(
    ("image", "command", "code", "means"),
    [
        ("agent", ("./contained.sh",), 126, "the image's command is there and cannot be run"),
        ("agent", ("no-such-command",), 127, "the image has no such command"),
        ("agent", ("sh", "-c", "kill -9 $$"), 137, "the container was killed by SIGKILL"),
    ],
)
async def test_exit_code_of_container_engine_is_explained(
    tmp_path: Path, docker: FakeDocker, image: str, command: tuple[str, ...], code: int, means: str
) -> None:
    hosted = Hosted(Container("docker", image, command, "host", (), None), tmp_path, "worker")
    with pytest.raises(ExitCode) as raised:
        await hosted("anything", None)
    assert str(raised.value).startswith(f"exit code {code}: {means}")
    assert docker.containers() == {}


async def test_container_that_engine_does_not_start_is_no_failure_of_the_policy(tmp_path: Path, docker: FakeDocker) -> None:
    hosted = Hosted(Container("docker", "missing", (), "host", (), None), tmp_path, "worker")
    with pytest.raises(ProgramFailure) as raised:
        await hosted("anything", None)
    assert raised.value.failure is AttemptFailure.CRASH
    assert str(raised.value).startswith("the container engine 'docker' started no container of 'missing': the attempt's log has the reason")
    assert docker.containers() == {}


async def test_container_agent_without_engine_in_path_raises(tmp_path: Path) -> None:
    with runner_services(tmp_path) as services:
        image = ContainerAgent("agent:1", directory=tmp_path, container=ContainerSettings(engine="no-such-engine"))
        with pytest.raises(AgentError, match="'no-such-engine' is not in PATH"):
            await Runner(services.settings, image).__aenter__()
