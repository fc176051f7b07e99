"""Faults around the runner: root spans and processes after a stopped run, failures of store or gateway, and remains of an agent."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from runner import runner as runner_module
from runner.queue.wire import RolloutState
from runner.runner import Runner
from runner.workers import agent_processes
from runner.workers.agent_processes import AgentHost, HostPool
from runner.workers.agents import AgentSpec, CallableAgent
from runner.workers.jobs import AttemptOutcome
from runner.workers.root_spans import RootSpans
from spangrad import semconv
from spangrad.client.task_files import read_tasks
from spangrad.errors import AgentError, StoreError
from spangrad.settings import GatewaySettings, RunnerSettings, Settings, StoreSettings
from spangrad.types import AttemptFailure, Mode, Rollout, RolloutKey, Task
from tests.support.otlp import OtlpSink
from tests.support.runners import AttemptGateway, is_true, kill, until

pytestmark = pytest.mark.usefixtures("quick_agents")

AGENT = """
    import asyncio, os, pathlib, signal, time
    from span_processors.reward import reward

    async def agent(given):
        if given == "raise":
            raise RuntimeError("bad day")
        if given == "raise oddly":
            raise RuntimeError("no tool is called \\ud83d, or \\x00")
        if given == "odd reward":
            return {"half \\ud83d": 0.5}
        if given == "hang":
            await asyncio.sleep(600)
        if given == "daemon":
            child = os.fork()
            if child == 0:
                os.setsid()
                time.sleep(600)
                os._exit(0)
            return child
        if given == "vandal":
            pathlib.Path(__file__).unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        if given == "self":
            return reward(0.5)
        return 1.0
"""

HOST = """#!{python}
import json, sys

def say(**message):
    print(json.dumps(message), flush=True)

ended = dict(reward=1.0, failure=None, detail="", stuck=False, flushed=False)
say(ready=True)
for line in sys.stdin:
    message = json.loads(line)
    if "input" in message:
        given, name = message["input"], message["id"]
        if given["answers"] == "half":
            sys.stdout.write('{{"id": "')
            sys.exit(3)
        if given["answers"] == "at once":
            say(id=name, **ended)
        if given["answers"] == "deep":
            print('{{"id": "a", "output": ' + "[" * 5000 + "]" * 5000 + "}}", flush=True)
        if given["answers"] == "list":
            print('["a"]', flush=True)
    elif "cancel" in message and given["answers"] == "late":
        say(id=name, **ended)
    elif "flush" in message:
        say(id=name, flushed=given["flushes"])
"""

DYING = """#!{python}
import json, os, pathlib, sys

starts = pathlib.Path(__file__).with_name("starts")
with starts.open("a") as out:
    out.write("x")
if len(starts.read_text()) <= {deaths}:
    {death}
print(json.dumps(dict(ready=True)), flush=True)
for line in sys.stdin:
    name = json.loads(line).get("id")
    print(json.dumps(dict(id=name, reward=1.0, failure=None, detail="", stuck=False, flushed=True)), flush=True)
"""


class Stage:
    """A runner with what is around it."""

    def __init__(self, runner: Runner, sink: OtlpSink, gateway: AttemptGateway) -> None:
        self.runner = runner
        self.sink = sink
        self.gateway = gateway

    def roots(self) -> list[tuple[object, ...]]:
        """Task, attempt, failure, whether it is the last, calls and number of rewards of each."""
        keys = (semconv.TASK_ID, semconv.ROLLOUT_ATTEMPT, semconv.ROLLOUT_FAILURE, semconv.ROLLOUT_FINAL, semconv.ROLLOUT_CALLS)
        rows = [(*(root.attributes.get(key) for key in keys), len(root.events)) for root in self.sink.named("rollout")]
        return sorted(rows, key=lambda root: root[:2])


@asynccontextmanager
async def stage(directory: Path, agent: AgentSpec, **settings: object) -> AsyncGenerator[Stage]:
    (directory / "mine.py").write_text(textwrap.dedent(AGENT))
    with OtlpSink() as sink, AttemptGateway() as gateway:
        chosen = Settings(
            store=StoreSettings(otlp_endpoint=sink.url),
            gateway=GatewaySettings(url=gateway.url),
            runner=RunnerSettings.model_validate({"run_id": "run", "directory": directory / "runner", **settings}),
        )
        async with Runner(chosen, agent) as runner:
            yield Stage(runner, sink, gateway)


def callable_agent(directory: Path) -> CallableAgent:
    return CallableAgent("mine:agent", directory=directory)


async def test_runner_stopped_between_attempts_ends_root_span(tmp_path: Path) -> None:
    async with stage(tmp_path, callable_agent(tmp_path), concurrency=1, max_attempts=2, failure_rewards={"exception": None}) as on:
        # While the root waits, the rollout is not queued again, and the other one begins.
        on.sink.refusals = [(503, {"retry-after": "1"})] * 100
        run = asyncio.create_task(on.runner.run([Task("bad", "raise"), Task("long", "hang")], mode=Mode.TRAIN, group_size=1))
        await until(lambda: is_true(len(on.gateway.announced) == 2), 60)
        on.sink.refusals.clear()
        await asyncio.to_thread(on.sink.wait_for, lambda: bool(on.sink.spans))
        run.cancel()
        with pytest.raises(asyncio.CancelledError):
            await run
        assert on.roots() == [
            ("bad", 0, "exception", False, 0, 0),
            ("bad", 1, "cancelled", True, 0, 0),
            ("long", 0, "cancelled", True, None, 0),
        ]


async def test_runner_agent_that_cannot_be_reloaded_ends_root_span(tmp_path: Path) -> None:
    async with stage(tmp_path, callable_agent(tmp_path), concurrency=1, max_attempts=2) as on:
        with pytest.raises(AgentError, match="'mine:agent' cannot be loaded"):
            await on.runner.run([Task("t", "vandal")], mode=Mode.TRAIN, group_size=1)
        assert on.roots() == [("t", 0, "crash", False, 0, 0), ("t", 1, "cancelled", True, 0, 0)]


async def test_runner_unstorable_text_of_agent_is_sanitized_in_its_attempt_only(tmp_path: Path) -> None:
    async with stage(tmp_path, callable_agent(tmp_path), max_attempts=1) as on:
        tasks = [Task(what, what) for what in ("odd reward", "raise oddly", "well")]
        outcomes = await on.runner.run(tasks, mode=Mode.TRAIN, group_size=1)
        assert [(outcome.reward, outcome.failure, outcome.detail) for outcome in outcomes] == [
            ({"half ?": 0.5}, None, ""),
            ({"reward": 0.0}, AttemptFailure.EXCEPTION, "RuntimeError: no tool is called ?, or "),
            ({"reward": 1.0}, None, ""),
        ]
        assert on.roots() == [
            ("odd reward", 0, None, True, 0, 1),
            ("raise oddly", 0, "exception", True, 0, 1),
            ("well", 0, None, True, 0, 1),
        ]


async def test_runner_root_span_refused_by_store_is_not_completed_in_queue(tmp_path: Path) -> None:
    async with stage(tmp_path, callable_agent(tmp_path), max_attempts=1) as on:
        on.sink.refusals = [(400, {})]
        with pytest.raises(
            StoreError, match=r"root spans did not get into the store at \S+ \(HTTP 400 not now\), and the queue is not informed"
        ):
            await on.runner.run([Task("t", "well")], mode=Mode.TRAIN, group_size=1)
        (rollout,) = (await on.runner.queue.rollouts(run_id="run")).rollouts
        assert (rollout.state, [one.reason for one in rollout.attempts]) == (RolloutState.CANCELLED, [AttemptFailure.CANCELLED])


async def test_worker_that_drains_while_store_is_away_ends_with_its_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner_module, "_STORE_RETRY_SECONDS", 1.0)
    async with stage(tmp_path, callable_agent(tmp_path), max_attempts=1) as on:
        run = asyncio.create_task(on.runner.run([Task("long", "hang")], mode=Mode.TRAIN, group_size=1))
        await until(lambda: is_true(bool(on.gateway.announced)), 60)
        on.sink.refusals = [(503, {})] * 1000
        async with asyncio.timeout(60):
            for work in (on.runner._worker.drain(0), run):
                with pytest.raises(StoreError, match="has not taken root spans for 1 s"):
                    await work


def test_root_spans_open_gives_same_ids_per_key_and_other_ids_per_run() -> None:
    roots = RootSpans(StoreSettings(otlp_endpoint="http://127.0.0.1:9"))
    keys = [RolloutKey(run, "r", attempt) for run in ("one", "other") for attempt in (0, 1)]
    openings = [[roots.open(Rollout(key, Task("t", 1), Mode.TRAIN, "g", 1)).ids for key in keys] for _ in range(2)]
    first, again = [[(one.trace, one.span) for one in spans] for spans in openings]
    assert first == again
    assert len({trace for trace, _ in first}) == len({span for _, span in first}) == 4


async def test_root_span_after_clock_was_moved_back_lasts_no_less_than_nothing() -> None:
    with OtlpSink() as sink:
        roots = RootSpans(StoreSettings(otlp_endpoint=sink.url))
        span = roots.open(Rollout(RolloutKey("run", "r", 0), Task("t", None), Mode.TRAIN, "g", 1))
        roots.close(span, AttemptOutcome(1.0, None), 0, final=True, ended=span.began - 10**9)
        await roots.shut()
        assert [(root.began, root.seconds) for root in sink.named("rollout")] == [(span.began, 0.0)]


async def test_runner_attempt_forgotten_by_gateway_fails_as_uncounted(tmp_path: Path) -> None:
    async with stage(tmp_path, callable_agent(tmp_path), max_attempts=2) as on:
        on.gateway.forgotten = {0}
        (outcome,) = await on.runner.run([Task("t", "well")], mode=Mode.TRAIN, group_size=1)
        assert (outcome.reward, outcome.failure, outcome.key.attempt) == ({"reward": 1.0}, None, 1)
        assert on.roots() == [("t", 0, "uncounted", False, None, 0), ("t", 1, None, True, 0, 1)]


async def test_runner_agent_that_rewards_itself_succeeds_without_reward(tmp_path: Path) -> None:
    async with stage(tmp_path, callable_agent(tmp_path), max_attempts=1) as on:
        (outcome,) = await on.runner.run([Task("t", "self")], mode=Mode.TRAIN, group_size=1)
        assert (outcome.reward, outcome.failure) == ({}, None)
        assert on.roots() == [("t", 0, None, True, 0, 0)]
        assert [len(span.events) for span in on.sink.named("reward")] == [1]


async def test_runner_daemon_left_by_agent_does_not_delay_end(tmp_path: Path) -> None:
    async with asyncio.timeout(120):
        async with stage(tmp_path, callable_agent(tmp_path), max_attempts=1) as on:
            (outcome,) = await on.runner.run([Task("t", "daemon")], mode=Mode.TRAIN, group_size=1)
        assert outcome.reward is not None
        kill(int(outcome.reward["reward"]))


@pytest.mark.parametrize(
    ("answers", "flushes", "reward", "failure"),
    [
        ("at once", True, {"reward": 1.0}, None),
        ("at once", False, None, AttemptFailure.UNFLUSHED),
        ("late", True, {"reward": 1.0}, None),
        ("late", False, None, AttemptFailure.UNFLUSHED),
        ("half", False, None, AttemptFailure.CRASH),
    ],
)
async def test_agent_host_that_cannot_flush_or_dies_fails_attempt(
    tmp_path: Path, answers: str, flushes: bool, reward: object, failure: AttemptFailure | None
) -> None:
    host = tmp_path / "host.py"
    host.write_text(HOST.format(python=sys.executable))
    host.chmod(0o755)
    agent = CallableAgent("any:agent", python=host)
    async with stage(tmp_path, agent, max_attempts=1, timeout_seconds=0.5 if answers == "late" else 10) as on:
        (outcome,) = await on.runner.run([Task("t", {"answers": answers, "flushes": flushes})], mode=Mode.TRAIN, group_size=1)
        assert (outcome.reward, outcome.failure) == (reward, failure)
        assert on.roots() == [("t", 0, failure, True, 0, 0 if failure else 1)]


@pytest.mark.parametrize(
    ("deaths", "death", "starts", "problem"),
    [
        (2, "os.kill(os.getpid(), 9)", 3, None),
        (9, "os.kill(os.getpid(), 9)", 4, "the agent cannot be loaded: the agent's process ended with exit code -9"),
        (1, "sys.exit(3)", 1, "the agent cannot be loaded: the agent's process ended with exit code 3"),
    ],
)
async def test_agent_host_killed_while_loading_is_restarted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, deaths: int, death: str, starts: int, problem: str | None
) -> None:
    monkeypatch.setattr(agent_processes, "_LOAD_PAUSES", (0.0, 0.01, 0.02))
    host = tmp_path / "host.py"
    host.write_text(DYING.format(python=sys.executable, deaths=deaths, death=death))
    host.chmod(0o755)
    agent = CallableAgent("any:agent", python=host)
    with pytest.raises(AgentError, match=problem) if problem else contextlib.nullcontext():
        async with stage(tmp_path, agent, max_attempts=1) as on:
            (outcome,) = await on.runner.run([Task("t", "well")], mode=Mode.TRAIN, group_size=1)
            assert outcome.reward == {"reward": 1.0}
    assert (tmp_path / "starts").read_text() == "x" * starts


@pytest.fixture
async def pool(tmp_path: Path) -> AsyncGenerator[HostPool]:
    """Yield a pool of one host, not started yet."""
    host = tmp_path / "host.py"
    host.write_text(HOST.format(python=sys.executable))
    host.chmod(0o755)
    settings = RunnerSettings(directory=tmp_path / "runner", concurrency=1, workers=1)
    pool = HostPool(CallableAgent("any:agent", python=host), settings, os.environ)
    yield pool
    await pool.close()


async def end_host(host: AgentHost, directory: Path) -> None:
    """Remove the directory of a host's log, and kill the host."""
    shutil.rmtree(directory)
    kill(host._process.pid)
    await until(lambda: is_true(host.ended))


async def test_host_pool_host_killed_without_its_log_is_answered_and_replaced(pool: HostPool, tmp_path: Path) -> None:
    await pool.start()
    busy = await pool.take()
    answered = busy.expect("a")
    await end_host(busy, tmp_path / "runner")
    answer = await asyncio.wait_for(answered, 60)
    assert answer["failure"] == AttemptFailure.CRASH
    assert answer["detail"].endswith("agent-host-0.log:\nIt cannot be read: No such file or directory.")
    pool.give(busy, freed=False)
    idle = await asyncio.wait_for(pool.take(), 60)
    pool.give(idle, freed=False)
    await end_host(idle, tmp_path / "runner")
    replacing = await asyncio.wait_for(pool.take(), 60)
    assert replacing not in (busy, idle)
    pool.give(replacing, freed=False)


@pytest.mark.parametrize("answer", ["deep", "list"])
async def test_host_pool_host_whose_answer_cannot_be_read_is_replaced(pool: HostPool, answer: str) -> None:
    await pool.start()
    host = await pool.take()
    answered = [host.expect(name) for name in ("a", "b")]
    host.send({"id": "a", "input": {"answers": answer}})
    answers = await asyncio.wait_for(asyncio.gather(*answered), 60)
    assert [answer["failure"] for answer in answers] == [AttemptFailure.CRASH] * 2, "the other one waits no longer, either"
    pool.give(host, freed=False)
    replacing = await asyncio.wait_for(pool.take(), 60)
    assert replacing is not host
    pool.give(replacing, freed=False)


async def test_host_pool_idle_hosts_that_die_are_forgotten(pool: HostPool) -> None:
    await pool.start()
    for _ in range(2):
        host = await asyncio.wait_for(pool.take(), 60)
        pool.give(host, freed=False)
        kill(host._process.pid)
        await until(lambda host=host: is_true(host.ended))
    last = await asyncio.wait_for(pool.take(), 60)
    assert list(pool._busy) == [last]
    pool.give(last, freed=False)


async def test_host_pool_host_that_cannot_be_replaced_fails_its_slots(pool: HostPool, tmp_path: Path) -> None:
    await pool.start()
    host = await pool.take()
    pool.give(host, freed=False)
    shutil.rmtree(tmp_path / "runner")
    (tmp_path / "runner").touch()
    kill(host._process.pid)
    await until(lambda: is_true(host.ended))
    with pytest.raises(
        AgentError, match=r"the agent's process cannot be started: .*/runner.*\. See that runner\.directory can be written to\."
    ):
        await asyncio.wait_for(pool.take(), 60)


@pytest.mark.parametrize("refusals", [2, 3])
async def test_host_pool_start_without_resources_is_tried_again(pool: HostPool, monkeypatch: pytest.MonkeyPatch, refusals: int) -> None:
    monkeypatch.setattr(agent_processes, "_LOAD_PAUSES", (0.0, 0.01))
    errors = [OSError(errno.EMFILE, "Too many open files"), BlockingIOError(errno.EAGAIN, "Try again"), OSError(errno.ENOMEM, "No memory")]
    del errors[: 3 - refusals]
    pipe = os.pipe

    def pipe_later() -> tuple[int, int]:
        if errors:
            raise errors.pop()
        return pipe()

    monkeypatch.setattr(os, "pipe", pipe_later)
    refused = pytest.raises(AgentError, match=r"the agent's process cannot be started: Too many open files\. Raise the limits")
    with refused if refusals > 2 else contextlib.nullcontext():
        await pool.start()
    assert errors == []


def test_run_command_sigterm_ends_and_sends_root_spans(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(textwrap.dedent(AGENT))
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps({"task_id": what, "input": what}) + "\n" for what in ("well", "hang")))
    command = [sys.executable, "-m", "spangrad", "run", "--agent", "mine:agent", "--directory", ".", "--tasks", "tasks.jsonl"]
    with OtlpSink() as sink, AttemptGateway() as gateway:
        settings = ["--set", f"store.otlp_endpoint={sink.url}", "--set", f"gateway.url={gateway.url}", "--group-size", "1"]
        run = subprocess.Popen([*command, *settings], cwd=tmp_path, stdout=subprocess.DEVNULL)
        try:
            sink.wait_for(lambda: bool(sink.named("rollout")), 120)
            run.terminate()
            assert run.wait(60) == 128 + signal.SIGTERM
        finally:
            run.kill()
            run.wait()
        keys = (semconv.TASK_ID, semconv.ROLLOUT_FAILURE, semconv.ROLLOUT_FINAL)
        assert [tuple(root.attributes.get(key) for key in keys) for root in sink.named("rollout")] == [
            ("well", None, True),
            ("hang", "cancelled", True),
        ]


def test_read_tasks_splits_lines_at_newline_only(tmp_path: Path) -> None:
    tasks = [Task("a", "one\u2028two\x85three"), Task("b", 2)]
    (tmp_path / "tasks.jsonl").write_bytes(
        "\r\n".join(json.dumps({"task_id": t.task_id, "input": t.input}, ensure_ascii=False) for t in tasks).encode()
    )
    assert read_tasks(tmp_path / "tasks.jsonl") == tasks
