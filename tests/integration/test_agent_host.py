"""The agent host's protocol, over real pipes to a real process."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest

from spangrad.agent.command import AgentCommand
from spangrad.agent.reward_values import rewards_from
from spangrad.errors import AgentError
from spangrad.processes import wait_until
from spangrad.semconv import ROLLOUT_ID
from tests.support.otlp import OtlpSink
from tests.support.worker_kills import runs

AGENT = """
    import asyncio, os, sys, threading, time
    from opentelemetry import trace
    from span_processors.reward import reward
    import runner, gateway.inner, trainer, collector, tests

    tracer = trace.get_tracer("agent")
    SOME = {}

    async def agent(given):
        print("noise on stdout", given)
        os.system("echo noise of a child")
        tracer.start_span("async").end()
        if given == "hang":
            await asyncio.sleep(60)
        return given

    def in_thread(given, endpoint):
        tracer.start_span("sync").end()
        if given == "hang":
            time.sleep(60)
        if given == "raise":
            raise KeyError("no such thing")
        if given == "exit":
            sys.exit(3)
        return {"endpoint": endpoint, "given": given}

    def evaluate(given, output):
        assert output["given"] == given
        if given == "broken":
            raise RuntimeError("cannot judge")
        return given if isinstance(given, dict) else None if given == "none" else len(output["endpoint"])

    async def stubborn(given):
        tracer.start_span("begun").end()
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            return 1.0

    async def rewards_itself(given):
        if given is not None:
            reward(given)

    def rewards_itself_in_a_thread(given):
        if given is not None:
            thread = threading.Thread(target=reward, args=[given])
            thread.start()
            thread.join()

    met = threading.Barrier(40)

    async def meets_others(given):
        await asyncio.to_thread(met.wait, 60)
        return 1.0

    def undecided(given, output):
        return None

    def where(given):
        return {module.__name__: float(module.MINE) for module in (runner, gateway.inner, trainer, collector, tests)}
"""


class Hosted:
    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process

    def send(self, *jobs: dict[str, object]) -> None:
        assert self.process.stdin is not None
        self.process.stdin.writelines(json.dumps(job) + "\n" for job in jobs)
        self.process.stdin.flush()

    def answer(self) -> dict[str, object]:
        """The next answer to a job; what is told on its way there is passed over, and each stage is let begin."""
        assert self.process.stdout is not None
        while {"program", "stage"} & (message := json.loads(self.process.stdout.readline())).keys():
            if "stage" in message:
                self.send({"go": message["id"]})
        return message


@contextmanager
def hosted(directory: Path, endpoint: str, *arguments: str, code: int = 0) -> Generator[Hosted]:
    (directory / "gateway").mkdir()
    for file in ("runner.py", "trainer.py", "collector.py", "tests.py", "gateway/inner.py"):
        (directory / file).write_text("MINE = True\n")
    (directory / "gateway" / "__init__.py").write_text("")
    (directory / "mine.py").write_text(textwrap.dedent(AGENT))
    command = [sys.executable, "-P", "-m", "spangrad.agent.host", "--path", str(directory), *arguments]
    env = {**os.environ, "OTEL_EXPORTER_OTLP_ENDPOINT": endpoint, "OTEL_PYTHON_DISABLED_INSTRUMENTATIONS": "langchain,openai,httpx,httpx2"}
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env, text=True)
    watchdog = threading.Timer(120, process.kill)  # ends a wait for an answer that does not come
    watchdog.start()
    try:
        yield Hosted(process)
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(60) == code
    finally:
        watchdog.cancel()
        process.kill()
        process.wait()


def job(name: str, given: object, endpoint: str | None = None) -> dict[str, object]:
    trace_id = name.encode().hex().rjust(32, "0")
    carried = {"traceparent": f"00-{trace_id}-00000000000000aa-01", "baggage": f"{ROLLOUT_ID}={name}"}
    return {"id": name, "input": given, "endpoint": endpoint, **carried}


def answered(
    name: str,
    reward: object = None,
    failure: str | None = None,
    detail: str = "",
    *,
    stuck: bool = False,
    flushed: bool = True,
    output: object = None,
) -> dict[str, object]:
    facts = {"reward": reward, "failure": failure, "detail": detail, "stuck": stuck, "flushed": flushed, "output": output}
    return {"id": name, **facts}


def test_agent_host_async_attempts_run_concurrently(tmp_path: Path) -> None:
    with OtlpSink() as sink, hosted(tmp_path, sink.url, "--agent", "mine:agent") as host:
        assert host.answer() == {"ready": True}
        host.send(job("a", "hang"), job("b", 0.5))
        assert host.answer() == answered("b", 0.5)
        b = sink.named("async")
        assert {(span.trace_id, span.attributes[ROLLOUT_ID]) for span in b if span.parent_id == "00000000000000aa"} >= {
            (b"b".hex().rjust(32, "0"), "b")
        }
        host.send({"cancel": "a"}, {"cancel": "unknown"})
        assert host.answer() == answered("a", failure="timeout", detail="cancelled", flushed=False)
        host.send(job("c", {"x": 1, "y": -2.5}), {**job("d", None)})
        assert [host.answer(), host.answer()] == [
            answered("c", {"x": 1.0, "y": -2.5}),
            answered("d", None, "no_reward", "the agent gave no reward: name an evaluator, or return a number"),
        ]
        host.send(job("e", "text"))
        assert host.answer() == answered(
            "e", failure="invalid_output", detail="the reward is 'text', not a finite number: name an evaluator, or return a number"
        )


def test_agent_host_attempts_in_threads_run_evaluator(tmp_path: Path) -> None:
    with OtlpSink() as sink, hosted(tmp_path, sink.url, "--agent", "mine:in_thread", "--evaluator", "mine:evaluate") as host:
        assert host.answer() == {"ready": True}
        answers: list[dict[str, object]] = []
        for name, given in [("a", "x"), ("b", "raise"), ("c", "exit"), ("d", "none"), ("e", "broken"), ("f", {"k": float("nan")})]:
            host.send(job(name, given, "http://e"))
            answers.append(host.answer())
        assert answers == [
            answered("a", 8.0),
            answered("b", failure="exception", detail="KeyError: 'no such thing'"),
            answered("c", failure="exception", detail="SystemExit: 3"),
            answered("d", failure="no_reward", detail="the evaluator gave no reward"),
            answered("e", failure="evaluation", detail="RuntimeError: cannot judge"),
            answered("f", failure="evaluation", detail="reward 'k' is nan, not a finite number"),
        ]
        assert [span.attributes[ROLLOUT_ID] for span in sink.named("sync")] == ["a", "b", "c", "d", "e", "f"]
        host.send(job("g", "hang"))
        sink.wait_for(lambda: len([span for span in sink.spans if span.name == "sync"]) == 7)
        host.send({"cancel": "g"})
        assert host.answer() == answered("g", failure="timeout", detail="cancelled", stuck=True, flushed=False)


def test_agent_host_threads_of_async_attempts_run_concurrently(tmp_path: Path) -> None:
    names = {f"{number:02}" for number in range(40)}  # more than the default pool of any event loop has threads
    with OtlpSink() as sink, hosted(tmp_path, sink.url, "--agent", "mine:meets_others") as host:
        assert host.answer() == {"ready": True}
        host.send(*(job(name, None) for name in names))
        answers = [host.answer() for _ in names]
        assert {(answer["id"], answer["reward"]) for answer in answers} == {(name, 1.0) for name in names}


def test_agent_host_attempt_that_ended_in_time_stands_while_store_is_away(tmp_path: Path) -> None:
    with OtlpSink() as sink, hosted(tmp_path, sink.url, "--agent", "mine:agent") as host:
        assert host.answer() == {"ready": True}
        sink.refusals = [(503, {})] * 1000
        host.send(job("a", 0.5))
        sink.wait_for(lambda: bool(sink.requests))
        host.send({"cancel": "a"})
        assert host.answer() == answered("a", 0.5, flushed=False)
        assert sink.named("async") == []
        sink.refusals = []
        host.send({"flush": "a"})
        assert host.answer() == {"id": "a", "flushed": True}
        assert [span.attributes[ROLLOUT_ID] for span in sink.named("async")] == ["a"]


def test_agent_host_cancel_ignored_by_agent_answers_timeout(tmp_path: Path) -> None:
    with OtlpSink() as sink, hosted(tmp_path, sink.url, "--agent", "mine:stubborn") as host:
        assert host.answer() == {"ready": True}
        host.send(job("a", None))
        sink.wait_for(lambda: bool(sink.named("begun")))
        host.send({"cancel": "a"})
        assert host.answer() == answered("a", failure="timeout", detail="cancelled", flushed=False)


@pytest.mark.parametrize("agent", ["rewards_itself", "rewards_itself_in_a_thread"])
def test_agent_that_rewards_itself_may_return_none(tmp_path: Path, agent: str) -> None:
    with OtlpSink() as sink, hosted(tmp_path, sink.url, "--agent", f"mine:{agent}") as host:
        assert host.answer() == {"ready": True}
        host.send(job("a", 0.5))
        assert host.answer() == answered("a", {})
        event = ("gen_ai.evaluation.result", {"gen_ai.evaluation.name": "reward", "gen_ai.evaluation.score.value": 0.5})
        assert [span.events for span in sink.spans] == [(event,)]
        host.send(job("b", None))
        assert host.answer() == answered("b", None, "no_reward", "the agent gave no reward: name an evaluator, or return a number")


def test_evaluator_overrides_reward_of_agent(tmp_path: Path) -> None:
    with OtlpSink() as sink, hosted(tmp_path, sink.url, "--agent", "mine:rewards_itself", "--evaluator", "mine:undecided") as host:
        assert host.answer() == {"ready": True}
        host.send(job("a", 0.5))
        assert host.answer() == answered("a", None, "no_reward", "the evaluator gave no reward")


def test_agent_command_with_too_long_last_line_answers_invalid_output(tmp_path: Path) -> None:
    program = json.dumps([sys.executable, "-c", "print('first'); print('1' * (2**20 + 1))"])
    with OtlpSink() as sink, hosted(tmp_path, sink.url, "--command", program) as host:
        assert host.answer() == {"ready": True}
        host.send(job("a", None))
        assert host.answer() == answered("a", None, "invalid_output", "the last line of output is longer than 1048576 bytes")


def test_agent_command_with_last_line_nested_too_deep_answers_as_with_text(tmp_path: Path) -> None:
    program = json.dumps([sys.executable, "-c", "print('[' * 100_000)"])
    with OtlpSink() as sink, hosted(tmp_path, sink.url, "--command", program) as host:
        assert host.answer() == {"ready": True}
        host.send(job("a", None))
        assert host.answer()["failure"] == "invalid_output"


def test_agent_command_that_system_cannot_start_is_no_failure_of_policy(tmp_path: Path) -> None:
    with OtlpSink() as sink, hosted(tmp_path, sink.url, "--command", '["true"]', "--leased") as host:
        assert host.answer() == {"ready": True}
        host.send({**job("a", None), "environment": "x" * 2**22})  # more than any variable holds
        detail = "the program 'true' could not be run: [Errno 7] Argument list too long: 'true'"
        assert host.answer() == answered("a", None, "crash", detail)


@pytest.mark.parametrize(
    ("printed", "output"),
    [
        ('words\n{"a": "one\u2028two\x85three"}\r\n', {"a": "one\u2028two\x85three"}),
        ("one\u2028two\n", "one\u2028two"),
        ("x" * 2**21 + "\n0.5\n\n", 0.5),
        ("\n \n", None),
    ],
)
async def test_agent_command_output_is_last_line_printed(tmp_path: Path, printed: str, output: object) -> None:
    (tmp_path / "printed").write_bytes(printed.encode())
    assert await AgentCommand(["cat", "printed"], tmp_path, instrument=False)(None, None) == output


@pytest.mark.parametrize("program", ["agent.sh", "./agent.sh", "below/../agent.sh"])
async def test_agent_command_in_its_directory_runs(tmp_path: Path, program: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (directory := tmp_path / "directory").mkdir()
    (directory / "below").mkdir()
    (directory / "agent.sh").write_text("#!/bin/sh\necho 1\n")
    (directory / "agent.sh").chmod(0o755)
    assert await AgentCommand([program], directory, instrument=False)(None, None) == 1
    monkeypatch.chdir(directory)
    with pytest.raises(AgentError, match="is neither in PATH nor in"):
        AgentCommand([program], tmp_path, instrument=False)


async def test_agent_command_cancelled_at_its_start_ends_its_process_group(tmp_path: Path) -> None:
    (tmp_path / "agent.sh").write_text("sleep 600 & echo $! > pid; wait")
    attempt = asyncio.create_task(AgentCommand(["sh", "agent.sh"], tmp_path, instrument=False)(None, None))
    pid = tmp_path / "pid"
    while not (pid.exists() and pid.read_text().endswith("\n")):
        await asyncio.sleep(0)
        time.sleep(0.05)  # noqa: ASYNC251  # the program goes on, and not our event loop, which has yet to see that it has begun
    attempt.cancel()
    with pytest.raises(asyncio.CancelledError):
        await attempt
    wait_until(lambda: not runs(int(pid.read_text())), 60, "the program's end", poll_seconds=0.01)


def test_agent_host_terminated_ends_process_tree_of_programs(tmp_path: Path) -> None:
    program = json.dumps(["sh", "-c", "sleep 600 & echo $! > pid; wait"])
    with OtlpSink() as sink, hosted(tmp_path, sink.url, "--command", program, code=-signal.SIGTERM) as host:
        assert host.answer() == {"ready": True}
        host.send(job("a", None))
        pid = tmp_path / "pid"
        wait_until(lambda: pid.exists() and pid.read_text().endswith("\n"), 60, "the program")
        host.process.terminate()
        host.process.wait(60)
        wait_until(lambda: not runs(int(pid.read_text())), 60, "the program's end")


@pytest.mark.parametrize("kind", ["callable", "decorator", "program"])
def test_agent_modules_with_names_of_spangrad_are_imported(tmp_path: Path, kind: str) -> None:
    (tmp_path / "decorated.py").write_text("import spangrad\nfrom mine import where\nspangrad.rollout(where)\n")
    (tmp_path / "program.py").write_text("import json\nfrom mine import where\nprint(json.dumps(where(None)))\n")
    arguments = {
        "callable": ["--agent", "mine:where"],
        "decorator": ["--agent", str(tmp_path / "decorated.py")],
        "program": ["--command", json.dumps([sys.executable, "program.py"])],
    }
    with OtlpSink() as sink, hosted(tmp_path, sink.url, *arguments[kind]) as host:
        assert host.answer() == {"ready": True}
        host.send(job("a", None))
        assert host.answer() == answered("a", dict.fromkeys(("runner", "gateway.inner", "trainer", "collector", "tests"), 1.0))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--agent", "nothing:agent"], "'nothing:agent' cannot be loaded from {path}: ModuleNotFoundError: No module named 'nothing'"),
        (
            ["--agent", "mine:nothing"],
            "'mine:nothing' cannot be loaded from {path}: AttributeError: module 'mine' has no attribute 'nothing'",
        ),
        (["--agent", "mine:SOME"], "'mine:SOME' is dict, which cannot be called: name a function."),
        (
            ["--agent", "mine"],
            "'mine' has no function that is decorated with @spangrad.rollout. Decorate the agent, or name it: mine:FUNCTION.",
        ),
        (["--agent", "mine:agent", "--evaluator", "mine"], "'mine' does not name a callable: give it as module:function."),
        (["--command", '["no-such-program"]'], "the agent's program 'no-such-program' is neither in PATH nor in {path}."),
    ],
)
def test_agent_host_unloadable_agent_answers_error(tmp_path: Path, arguments: list[str], message: str) -> None:
    with OtlpSink() as sink, hosted(tmp_path, sink.url, *arguments, code=1) as host:
        assert host.answer() == {"error": message.format(path=tmp_path)}


@pytest.mark.parametrize(
    ("value", "reward"),
    [
        (None, None),
        ({}, None),
        (True, 1.0),
        (2, 2.0),
        (-0.5, -0.5),
        ({"a": 1, "b": False}, {"a": 1.0, "b": 0.0}),
        ({"a": {"white": 1, "black": -1}, "b": 2}, {"a": {"white": 1.0, "black": -1.0}, "b": 2.0}),
        ({"a": {}, "b": 2}, {"b": 2.0}),
        ({"a": {}}, None),
    ],
)
def test_rewards_from_valid_value_gives_reward(value: object, reward: object) -> None:
    assert rewards_from(value) == reward


@pytest.mark.parametrize(
    "value",
    [
        float("inf"),
        pytest.param(10**400, id="beyond_floats"),
        {"a": {"b": 10**400}},
        "1",
        [1.0],
        {"": 1},
        {1: 1.0},
        {"a": None},
        {"a": "1"},
        {"a": {"": 1}},
        {"a": {"white": "1"}},
        {"a": {"white": {"b": 1}}},
        object(),
    ],
)
def test_rewards_from_invalid_value_raises(value: object) -> None:
    with pytest.raises(ValueError, match="not a"):
        rewards_from(value)
