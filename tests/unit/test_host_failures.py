"""Answers of an agent host for what a user's code raises: each attempt is answered, by the stage that failed."""

from __future__ import annotations

import asyncio
import json
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from spangrad.agent.attempt_answer import Stages
from spangrad.agent.command import AgentCommand, ProgramFailure
from spangrad.agent.container import AgentContainer, Container, remove
from spangrad.agent.flushing import Flusher
from spangrad.agent.host import Host
from spangrad.episode.environment import StepResult
from tests.support.runners import is_true, until

CONTAINER = Container("true", "image", (), "host", (), None)
OWN_TASK = "RuntimeError: cancelled by the user's code itself, in a task of its own"


class PanicError(BaseException):
    """Exception as extensions in Rust raise it: no `Exception`."""


def ends(given: object, *_: object) -> float:
    """Raise StopIteration in place of a value."""
    return next(iter([]))


def panics(given: object, *_: object) -> float:
    raise PanicError("index out of bounds")


async def panics_in_loop(given: object, *_: object) -> float:
    raise PanicError("index out of bounds")


async def cancels_own_task(given: object, *_: object) -> float:
    task = asyncio.create_task(asyncio.sleep(60))
    asyncio.get_running_loop().call_soon(task.cancel)
    await task
    return 1.0


def cancelled_in_thread(given: object, *_: object) -> float:
    return asyncio.run(cancels_own_task(given))


def works(given: object, *_: object) -> float:
    return 1.0


class EndsAtStart:
    """Environment that cannot be created."""

    def __init__(self) -> None:
        next(iter([]))

    def reset(self, task: Any) -> Any: ...

    def step(self, action: Any) -> Any: ...


class EndsInStep:
    """Environment whose every step fails."""

    def reset(self, task: Any) -> Any:
        return "begun"

    def step(self, action: Any) -> StepResult:
        return next(iter([]))

    def close(self) -> None:
        panics(None)


class Closes:
    """Value of an initialiser, with a way to close it."""

    def __init__(self, close: Callable[[object], object]) -> None:
        self._close = close

    def close(self) -> object:
        return self._close(None)


async def acts(given: object, environment: Any) -> None:
    await environment.reset(given)
    await environment.step("go")


async def answer_of(stages: Stages) -> Mapping[str, Any]:
    """Return a host's answer for one attempt, whose stages begin as soon as they can."""
    jobs, messages, answered = asyncio.StreamReader(), list[Mapping[str, Any]](), asyncio.Event()

    def receive(message: Mapping[str, Any]) -> None:
        messages.append(message)
        if "stage" in message:
            jobs.feed_data(json.dumps({"go": "a"}).encode() + b"\n")
        else:
            answered.set()

    serving = asyncio.create_task(Host(stages).serve(jobs, receive))
    jobs.feed_data(json.dumps({"id": "a", "input": None}).encode() + b"\n")
    try:
        await asyncio.wait_for(answered.wait(), 30)
    finally:
        jobs.feed_eof()
        await serving
    return messages[-1]


@pytest.mark.parametrize(
    ("stages", "failure", "detail"),
    [
        (Stages(ends), "exception", "RuntimeError: ends raised StopIteration"),
        (Stages(works, evaluator=ends), "evaluation", "RuntimeError: ends raised StopIteration"),
        (Stages(works, initialiser=ends), "environment", "RuntimeError: ends raised StopIteration"),
        (Stages(works, initialiser=EndsAtStart), "environment", "RuntimeError: EndsAtStart raised StopIteration"),
        (Stages(acts, initialiser=EndsInStep), "exception", "RuntimeError: EndsInStep.step raised StopIteration"),
        (Stages(panics), "exception", "RuntimeError: PanicError: index out of bounds"),
        (Stages(panics_in_loop), "exception", "RuntimeError: PanicError: index out of bounds"),
        (Stages(works, evaluator=panics), "evaluation", "RuntimeError: PanicError: index out of bounds"),
        (Stages(works, initialiser=panics), "environment", "RuntimeError: PanicError: index out of bounds"),
        (Stages(cancels_own_task), "exception", OWN_TASK),
        (Stages(cancelled_in_thread), "exception", OWN_TASK),
        (Stages(works, evaluator=cancels_own_task), "evaluation", OWN_TASK),
        (Stages(works, initialiser=cancels_own_task), "environment", OWN_TASK),
        (Stages(ends, on_failure=cancels_own_task), "exception", "RuntimeError: ends raised StopIteration"),
        (Stages(ends, on_failure=panics), "exception", "RuntimeError: ends raised StopIteration"),
    ],
)
async def test_host_answers_exception_that_futures_or_handlers_refuse(stages: Stages, failure: str, detail: str) -> None:
    answer = await answer_of(stages)
    assert (answer["failure"], answer["detail"], answer["stuck"]) == (failure, detail, False)


def nested(depth: int) -> object:
    value: object = 1
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize("output", [defaultdict(list[int], a=[1]), Counter("aab"), nested(800)], ids=["defaultdict", "Counter", "deep"])
async def test_host_answers_output_of_any_dict_or_depth_as_json(output: object) -> None:
    answer = await answer_of(Stages(lambda given: output, outputs=True))  # pyright: ignore[reportUnknownLambdaType]
    assert (answer["failure"], answer["output"]) == (None, output)
    assert json.loads(json.dumps(answer))["output"] == output


@pytest.mark.parametrize(
    ("output", "detail"),
    [
        (nested(100_000), "the output is nested too deeply for JSON: maximum recursion depth exceeded"),
        (nested(801), "the output is nested too deeply for JSON: it has more than 800 levels"),
        ({"a": float("nan")}, "the output {'a': nan} is not JSON: Out of range float values are not JSON compliant"),
    ],
    ids=["deep", "as deep as Python reads", "nan"],
)
async def test_host_output_without_json_is_invalid_and_named(output: object, detail: str) -> None:
    answer = await answer_of(Stages(lambda given: output, outputs=True))  # pyright: ignore[reportUnknownLambdaType]
    assert answer["failure"] == "invalid_output"
    assert answer["detail"].startswith(detail)


class UnprintableError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


def raises_unprintable(given: object, *_: object) -> float:
    raise UnprintableError


async def test_host_exception_without_message_is_failure_of_its_stage() -> None:
    answer = await answer_of(Stages(raises_unprintable))
    assert (answer["failure"], answer["detail"]) == ("exception", "UnprintableError: ")
    answer = await answer_of(Stages(works, evaluator=raises_unprintable))
    assert (answer["failure"], answer["detail"]) == ("evaluation", "UnprintableError: ")


async def test_host_cancel_that_is_read_with_its_job_is_answered() -> None:
    async def hangs(given: object) -> None:
        await asyncio.sleep(60)

    jobs, messages = asyncio.StreamReader(), list[Mapping[str, Any]]()
    serving = asyncio.create_task(Host(Stages(hangs)).serve(jobs, messages.append))
    jobs.feed_data(b'{"id": "a", "input": null}\n{"cancel": "a"}\n')
    try:
        await until(lambda: is_true(messages), 30)
    finally:
        jobs.feed_eof()
        await serving
    assert (messages[-1]["failure"], messages[-1]["stuck"]) == ("timeout", False)


async def test_host_logs_traceback_of_own_cancelled_task(capsys: pytest.CaptureFixture[str]) -> None:
    await answer_of(Stages(cancels_own_task))
    assert "in cancels_own_task\n    await task\n" in capsys.readouterr().err


@pytest.mark.parametrize("close", [ends, panics, cancels_own_task])
async def test_host_attempt_keeps_result_where_close_raises(close: Callable[[object], object]) -> None:
    def initialise(given: object) -> Closes:
        return Closes(close)

    answer = await answer_of(Stages(works, initialiser=initialise))
    assert (answer["reward"], answer["failure"], answer["stuck"]) == (1.0, None, False)


async def test_host_error_of_its_own_is_answered_as_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fails(flusher: Flusher) -> bool:
        raise OSError("no thread for a flush")

    monkeypatch.setattr(Flusher, "flush", fails)
    answer = await answer_of(Stages(works))
    assert (answer["failure"], answer["detail"], answer["stuck"]) == ("crash", "OSError: no thread for a flush", False)


async def test_host_cancel_while_an_environment_closes_is_stuck() -> None:
    closing, released = threading.Event(), threading.Event()

    def close(_: object) -> None:
        closing.set()
        released.wait(60)

    def initialise(given: object) -> Closes:
        return Closes(close)

    jobs, messages = asyncio.StreamReader(), list[Mapping[str, Any]]()
    serving = asyncio.create_task(Host(Stages(works, initialiser=initialise)).serve(jobs, messages.append))
    try:
        jobs.feed_data(b'{"id": "a", "input": null}\n')
        await until(lambda: is_true(messages))
        jobs.feed_data(b'{"go": "a"}\n')
        assert await asyncio.to_thread(closing.wait, 10)
        jobs.feed_data(b'{"cancel": "a"}\n')
        jobs.feed_eof()
        assert not await asyncio.wait_for(serving, 30)  # its thread is left, so the process cannot end by itself
    finally:
        released.set()
    assert (messages[-1]["failure"], messages[-1]["stuck"]) == ("timeout", True)


def refuse_thread(*_: object, **__: object) -> Any:
    raise RuntimeError("can't start new thread")


def ignore(*_: object) -> None:
    pass


async def test_host_attempt_without_thread_is_no_failure_of_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spangrad.agent.host.ThreadPoolExecutor.submit", refuse_thread)
    answer = await answer_of(Stages(works))
    assert (answer["failure"], answer["detail"]) == ("crash", "the attempt got no thread: can't start new thread")


async def test_host_attempt_without_thread_is_not_run_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pool has queued its call: the thread of another attempt would run it once that has ended."""
    ran, goes_on, jobs, answers = list[str](), threading.Event(), asyncio.StreamReader(), dict[str, Mapping[str, Any]]()
    start = threading.Thread.start

    def start_unless_of_attempt(thread: threading.Thread) -> None:
        return refuse_thread() if "attempt" in thread.name else start(thread)

    def agent(given: str) -> float:
        ran.append(given)
        goes_on.wait(60)
        return 1.0

    def send(name: str) -> None:
        jobs.feed_data(json.dumps({"id": name, "input": name}).encode() + b"\n")

    serving = asyncio.create_task(Host(Stages(agent)).serve(jobs, lambda message: answers.update({str(message["id"]): message})))
    try:
        send("first")
        await until(lambda: is_true(ran == ["first"]))
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", start_unless_of_attempt)
            send("refused")
            await until(lambda: is_true("failure" in answers.get("refused", {})))
        goes_on.set()
        send("last")
        await until(lambda: is_true("reward" in answers.get("last", {})))
    finally:
        goes_on.set()
        jobs.feed_eof()
        await serving
    assert (ran, answers["refused"]["failure"]) == (["first", "last"], "crash")


@pytest.mark.parametrize("call", ["to_thread", "create_subprocess_exec"])
@pytest.mark.parametrize(
    "program", [AgentCommand(["true"], Path(), instrument=False), AgentContainer(CONTAINER, Path(), "")], ids=["command", "container"]
)
async def test_host_program_without_thread_is_no_failure_of_policy(
    monkeypatch: pytest.MonkeyPatch, call: str, program: AgentCommand | AgentContainer
) -> None:
    monkeypatch.setattr("spangrad.agent.container.remove", ignore)
    monkeypatch.setattr(asyncio, call, refuse_thread)
    with pytest.raises(ProgramFailure, match="the program 'true' could not be run: can't start new thread") as raised:
        await program({}, None)
    assert raised.value.failure == "crash"


async def test_host_container_without_thread_for_its_removal_is_no_failure_of_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    to_thread = asyncio.to_thread

    def refuse_removal(function: Callable[..., Any], *arguments: object) -> Any:
        return refuse_thread() if function is remove else to_thread(function, *arguments)

    monkeypatch.setattr(asyncio, "create_subprocess_exec", refuse_thread)
    monkeypatch.setattr(asyncio, "to_thread", refuse_removal)
    with pytest.raises(ProgramFailure) as raised:
        await AgentContainer(CONTAINER, Path(), "")({}, None)
    assert raised.value.failure == "crash"
