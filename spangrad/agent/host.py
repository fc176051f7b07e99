"""Host of an agent in a process of its own (`python -m spangrad.agent.host`), for the runner at the other end of two pipes.

In, on standard input, a JSON object a line: `{"id", "input", "traceparent", "baggage", "endpoint", "log", "environment", "image"}` begins
the first stage of an attempt, `{"go": id}` its next one, `{"cancel": id}` ends one early, `{"flush": id}` sends the spans that are left;
the end of the pipe ends the host. Out, on the original standard output, a JSON object a line: first `{"ready": true}` or
`{"error": sentence}`, then for each attempt `{"id", "stage"}` when a stage is over, with the one that waits for its `go` (`run`,
`evaluate`; `end`: none is left), and `{"id", "reward", "failure", "detail", "stuck", "flushed", "output"}` when it has ended, for each
flush `{"id", "flushed"}`, and for each process group of a program `{"program": leader, "ended"}`, when it begins and when it has ended.
Invariant: each attempt is answered once, after its environment was closed and its spans were sent, or with `stuck` true or `flushed`
false; nothing that the agent prints mixes with the answers.

An agent is a callable `agent(input)`, an evaluator `evaluator(input, output)`; either may be async, and gets the attempt's `endpoint` (an
agent) and `environment`, where it has parameters of those names. The evaluator's value is the reward, without one the agent's own: a finite
number, or a mapping of names to finite numbers; None is no reward, unless there is no evaluator and the agent has called
`span_processors.reward.reward`. Where a service evaluates, the agent's value is answered as `output`. `stuck` means that a thread of a
cancelled attempt still runs, or that its environment does not close, so that this process should be replaced.

The agent's modules may have any names, ours included: only `spangrad` and `span_processors` are imported here.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import inspect
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

from opentelemetry import context
from opentelemetry.instrumentation.auto_instrumentation import initialize

from spangrad.agent.attempt import AttemptNote, with_note
from spangrad.agent.attempt_answer import END_STAGE, AttemptReply, Stages, failed_run, handed_on, is_empty, raised
from spangrad.agent.attempt_log import AttemptLog, begin_log, divide_outputs, private_pipes
from spangrad.agent.command import AgentCommand, ProgramFailure, SandboxLaunch, kill_groups
from spangrad.agent.container import AgentContainer, Container, remove_running
from spangrad.agent.flushing import Flusher, exit_process
from spangrad.agent.local_environment import LocalEnvironment
from spangrad.agent.propagation import context_from
from spangrad.agent.reward_values import rewards_from
from spangrad.callables import load, load_agent
from spangrad.episode.adapters.references import factory_of
from spangrad.episode.user_calls import USER_ERRORS, plain_exceptions, thread_call
from spangrad.errors import AgentError, EnvironmentsError
from spangrad.processes import MARK, kill_marked
from spangrad.types import POLICY_FAILURES, AttemptFailure, Stage

LINE_LIMIT_BYTES = 256 * 2**20
"""Largest line of the protocol, in bytes."""

_END_SECONDS = 2.0
_NO_EVALUATOR = "name an evaluator, or return a number"
_THREADS = 4096
"""Largest number of threads, above the number of attempts at once; they are started as they are needed."""


class Host:
    """Runs attempts side by side: async callables in the event loop, others in threads that carry the attempt's context."""

    def __init__(self, stages: Stages) -> None:
        self._stages = stages
        # The runner limits how many run at once, stage by stage; one that hangs blocks no other's thread.
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="attempt")
        self._accepted = {
            name: inspect.signature(function).parameters.keys() & {"endpoint", "environment", "image", "stage"}
            for name, function in (("agent", stages.agent), ("evaluator", stages.evaluator), ("on_failure", stages.on_failure))
            if function is not None
        }
        self._send: Callable[[Mapping[str, object]], None] = lambda message: None
        self._gates: dict[str, asyncio.Future[None]] = {}
        """Attempts that wait for their next stage."""
        self._threads: set[Future[Any]] = set()
        self._cancelled: set[str] = set()
        self._flusher = Flusher()
        self._left_open = False
        """True if an environment did not close: its thread may still run."""

    async def serve(self, jobs: asyncio.StreamReader, answer: Callable[[Mapping[str, object]], None]) -> bool:
        """Answer jobs until the input ends, then cancel what still runs.

        Returns:
            True if all threads have ended, too.
        """
        self._send = answer
        running: dict[str, asyncio.Task[None]] = {}
        flushes: set[asyncio.Task[None]] = set()

        async def attempt(job: Mapping[str, Any]) -> None:
            try:
                answer((await self._attempt(job)).message())
            except Exception as error:  # of the host itself: without an answer the attempt would wait out its limits
                answer(raised(job["id"], AttemptFailure.CRASH, error).message())
            finally:
                running.pop(job["id"], None)
                self._cancelled.discard(job["id"])

        async def flush(name: str) -> None:
            answer({"id": name, "flushed": await self._flusher.flush()})

        while line := await jobs.readline():
            message: dict[str, Any] = json.loads(line)
            if "cancel" in message:
                if (task := running.get(message["cancel"])) is not None:
                    self._cancelled.add(message["cancel"])
                    task.cancel()
            elif "go" in message:
                if (gate := self._gates.pop(message["go"], None)) is not None and not gate.done():
                    gate.set_result(None)
            elif "flush" in message:
                flushes.add(task := asyncio.create_task(flush(message["flush"])))
                task.add_done_callback(flushes.discard)
            else:
                running[message["id"]] = asyncio.create_task(attempt(message))
                await asyncio.sleep(0)  # a task that is cancelled before it has begun would answer nothing
        unfinished = list(running.values())
        for task in unfinished:
            task.cancel()
        if unfinished:
            await asyncio.wait(unfinished, timeout=_END_SECONDS)
        return not self._threads and not self._left_open

    async def _attempt(self, job: Mapping[str, Any]) -> AttemptReply:
        with closing(AttemptLog(job.get("log"))) as log:
            begin_log(log)
            return await self._noted(job["id"], job, AttemptNote())

    async def _noted(self, name: str, job: Mapping[str, Any], note: AttemptNote) -> AttemptReply:
        context.attach(with_note(context_from({key: job[key] for key in ("traceparent", "baggage") if job.get(key)}), note))
        environment = LocalEnvironment(self._stages.initialiser, self._pool)
        environment.value = job.get("environment")
        closed = False  # a cancellation may come while it is closed
        try:
            try:
                ended = await self._run_stages(name, job, environment, note)
                self._send({"id": name, "stage": END_STAGE})
            finally:
                closed = await environment.close()
        except asyncio.CancelledError as cancelled:
            stuck = not closed or isinstance(cancelled, _StuckError)
            return AttemptReply(name, failure=AttemptFailure.TIMEOUT, detail="cancelled", stuck=stuck)
        finally:
            self._left_open |= not closed
        if name in self._cancelled:  # the agent has turned the cancellation into something else
            return AttemptReply(name, failure=AttemptFailure.TIMEOUT, detail="cancelled", stuck=not closed)
        try:
            flushed = await self._flusher.flush()
        except asyncio.CancelledError:
            flushed = False  # the agent was in time, even if its spans are not sent
        return replace(ended, stuck=not closed, flushed=flushed)

    async def _run_stages(self, name: str, job: Mapping[str, Any], environment: LocalEnvironment, note: AttemptNote) -> AttemptReply:
        """Run the stages, as the runner opens them; what the hook gives takes the place of the result of a stage that raised."""
        given, stages, partial_after = job["input"], self._stages, ""
        if stages.initialiser is not None:
            try:
                with plain_exceptions():
                    await environment.open(self._call, given)
            except USER_ERRORS as error:  # an exception of the user's code ends the attempt, not the host
                return raised(name, AttemptFailure.ENVIRONMENT, error)
            await self._gate(name, Stage.RUN)
        offered: dict[str, object] = {"endpoint": job.get("endpoint"), **({"image": job["image"]} if job.get("image") else {})}
        offered |= {"environment": environment.value} if stages.environments else {}
        try:
            output = await self._call(stages.agent, given, **self._keywords(offered, "agent"))
        except USER_ERRORS as error:
            failed = failed_run(name, error)
            if failed.failure not in POLICY_FAILURES or (output := await self._partial(Stage.RUN, given, error, offered)) is None:
                return failed
            partial_after = failed.detail
        if stages.close_after_run:
            await environment.close()
        if stages.empty_reward is not None and (stages.outputs or stages.evaluator is not None) and is_empty(output):
            return AttemptReply(name, stages.empty_reward, detail=partial_after)
        if stages.outputs:
            reply = handed_on(name, output)
            return reply if reply.failure else replace(reply, detail=partial_after)
        if stages.evaluator is not None:
            await self._gate(name, Stage.EVALUATE)
            try:
                output = await self._call(stages.evaluator, given, output, **self._keywords(offered, "evaluator"))
            except USER_ERRORS as error:
                failed = raised(name, AttemptFailure.EVALUATION, error)
                if (output := await self._partial(Stage.EVALUATE, given, error, offered)) is None:
                    return failed
                partial_after = failed.detail
        reply = self._rewarded(name, output, note)
        return reply if reply.failure else replace(reply, detail=partial_after)

    async def _partial(self, stage: Stage, given: object, error: BaseException, offered: Mapping[str, object]) -> object:
        """Return the result that the hook gives after an exception of a stage. None: there is no hook, or it gives none."""
        if self._stages.on_failure is None:
            return None
        try:
            return await self._call(self._stages.on_failure, given, error, **self._keywords({**offered, "stage": stage}, "on_failure"))
        except USER_ERRORS as fault:
            traceback.print_exception(fault)  # to the attempt's log; the stage's own failure counts
            return None

    def _rewarded(self, name: str, value: object, note: AttemptNote) -> AttemptReply:
        no_evaluator = self._stages.evaluator is None
        try:
            reward = rewards_from(value)
        except ValueError as error:
            # The policy is responsible for its agent's value, not for the evaluator's.
            failure = AttemptFailure.INVALID_OUTPUT if no_evaluator else AttemptFailure.EVALUATION
            return AttemptReply(name, failure=failure, detail=f"{error}: {_NO_EVALUATOR}" if no_evaluator else str(error))
        if reward is None and not (no_evaluator and note.rewarded):
            detail = f"the agent gave no reward: {_NO_EVALUATOR}" if no_evaluator else "the evaluator gave no reward"
            return AttemptReply(name, failure=AttemptFailure.NO_REWARD, detail=detail)
        return AttemptReply(name, {} if reward is None else reward)

    def _keywords(self, offered: Mapping[str, object], role: str) -> dict[str, object]:
        """Return the keyword arguments of a function: those that it has parameters for."""
        return {name: value for name, value in offered.items() if name in self._accepted[role]}

    async def _gate(self, name: str, stage: Stage) -> None:
        """Report that this stage comes next, and wait for a slot in it."""
        gate = self._gates[name] = asyncio.get_running_loop().create_future()
        self._send({"id": name, "stage": stage})
        try:
            await gate
        finally:
            self._gates.pop(name, None)

    async def _call(self, function: Callable[..., Any], *args: object, **kwargs: object) -> Any:
        with plain_exceptions():
            if _is_async(function):
                return await function(*args, **kwargs)
            calls = [thread_call(function, *args, **kwargs)]
            try:
                thread = self._pool.submit(lambda: calls.pop()())
            except RuntimeError as error:
                calls.clear()  # the pool keeps what it had no thread for, and runs it once a thread of another attempt is free
                raise ProgramFailure(AttemptFailure.CRASH, f"the attempt got no thread: {error}") from error
            self._threads.add(thread)
            thread.add_done_callback(self._threads.discard)
            try:
                result = await asyncio.wrap_future(thread)
            except asyncio.CancelledError:
                if not thread.done():
                    raise _StuckError from None
                raise
            return await result if inspect.isawaitable(result) else result


class _StuckError(asyncio.CancelledError):
    """Cancelled, while a thread that cannot be stopped still runs."""


def _is_async(function: Callable[..., Any]) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def _write(answers: int, *messages: Mapping[str, object]) -> None:
    lines = b"".join(json.dumps(message).encode() + b"\n" for message in messages)
    while lines:
        lines = lines[os.write(answers, lines) :]


class LoopWriter:
    """Writer of the event loop's messages: those of one turn together, since each write wakes the runner."""

    def __init__(self, answers: int) -> None:
        self._answers = answers
        self._messages: list[Mapping[str, object]] = []

    def put(self, message: Mapping[str, object]) -> None:
        """Write a message at the end of this turn."""
        if not self._messages:
            asyncio.get_running_loop().call_soon(self.write)
        self._messages.append(message)

    def write(self) -> None:
        """Write what waits."""
        messages, self._messages = self._messages, []
        _write(self._answers, *messages)


async def _serve(host: Host, jobs: int, answers: int) -> bool:
    loop = asyncio.get_running_loop()
    # The loop's own pool has a few threads for each CPU: calls of models and tools of agents would wait for each other.
    loop.set_default_executor(ThreadPoolExecutor(_THREADS, "asyncio"))
    reader = asyncio.StreamReader(limit=LINE_LIMIT_BYTES)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(jobs, "rb"))
    writer = LoopWriter(answers)
    try:
        return await host.serve(reader, writer.put)
    finally:
        writer.write()


def _end_all_on_sigterm() -> None:
    """Handle SIGTERM, which means the runner's death: kill the agent's programs and our children, then run the previous handler.

    A parent's death signals only its own children, so the children of ours would survive.
    """
    before = signal.getsignal(signal.SIGTERM)

    def kill_and_die(number: int, frame: FrameType | None) -> None:
        if mark := os.environ.get(MARK):
            kill_marked(mark)
        kill_groups()
        remove_running()
        if callable(before):
            before(number, frame)
        else:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    signal.signal(signal.SIGTERM, kill_and_die)


def _agent(args: argparse.Namespace, on_group: Callable[[int, bool], None]) -> tuple[Callable[..., Any], Callable[..., Any] | str | None]:
    """Load the agent that the arguments name, and the evaluator that its decorator names.

    Raises:
        AgentError: it cannot be loaded.
    """
    directory: Path = args.path.resolve()
    if args.container:
        return AgentContainer(Container(**json.loads(args.container)), directory, args.worker, on_group=on_group), None
    if args.command:
        sandbox = SandboxLaunch(**json.loads(args.sandbox)) if args.sandbox else None
        command = json.loads(args.command)
        return AgentCommand(command, directory, instrument=args.instrument, on_group=on_group, sandbox=sandbox), None
    return load_agent(args.agent or "")


def main() -> None:
    """Host an agent until the runner closes the input."""
    parser = argparse.ArgumentParser(prog="python -m spangrad.agent.host")
    parser.add_argument("--agent", help="the agent, as module:function; or a module or file with one decorated agent")
    parser.add_argument("--command", help="the agent, as a JSON list of a program and its arguments, instead of --agent")
    parser.add_argument("--container", help="the agent, as a JSON object of a container image and how it is run, instead of --agent")
    parser.add_argument("--sandbox", help="JSON object of how the command is confined; none: it is not")
    parser.add_argument("--worker", default="", help="worker that starts the containers, for their labels")
    parser.add_argument("--instrument", action="store_true", help="run the command under opentelemetry-instrument")
    parser.add_argument("--evaluator", help="the evaluator, as module:function")
    parser.add_argument("--outputs", action="store_true", help="answer with the agent's output, for a service to evaluate")
    parser.add_argument("--environment", help="the initialiser, as module:function, or an environment with reset and step")
    parser.add_argument("--leased", action="store_true", help="each job brings its environment, instead of --environment")
    parser.add_argument("--on-failure", help="function that may give a partial result after an exception, as module:function")
    parser.add_argument("--empty-reward", type=float, help="reward of an empty output, which is not evaluated")
    parser.add_argument("--close-after-run", action="store_true", help="close the environment before the output is evaluated")
    parser.add_argument("--path", type=Path, default=Path(), help="directory in which modules are looked for first, and the command runs")
    args = parser.parse_args()
    jobs, answers = private_pipes()
    initialize()
    sys.path.insert(0, str(args.path.resolve()))
    _end_all_on_sigterm()
    try:
        agent, marked = _agent(args, lambda leader, ended: _write(answers, {"program": leader, "ended": ended}))
        evaluator: Callable[..., Any] | str | None = args.evaluator or (None if args.outputs else marked)
        stages = Stages(
            agent,
            factory_of(args.environment, load) if args.environment else None,
            load(evaluator) if isinstance(evaluator, str) else evaluator,
            args.leased,
            args.outputs,
            load(args.on_failure) if args.on_failure else None,
            args.empty_reward,
            args.close_after_run,
        )
        host = Host(stages)
    except (AgentError, EnvironmentsError) as error:
        _write(answers, {"error": str(error)})
        sys.exit(error.exit_code)
    divide_outputs()
    gc.freeze()  # objects of imported frameworks are never garbage: collections need not scan them
    _write(answers, {"ready": True})
    if not asyncio.run(_serve(host, jobs, answers)):
        exit_process()  # an ordinary exit would wait for an agent's thread that never ends


if __name__ == "__main__":
    main()
