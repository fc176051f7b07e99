"""`python -m spangrad.agent_host`: hosts an agent in a process of its own, for the runner at the other end of two pipes.

In, on standard input, a JSON object a line: `{"id", "input", "traceparent", "baggage", "endpoint", "log"}` starts an attempt,
`{"cancel": id}` ends one early, `{"flush": id}` sends what spans are left; the end of the pipe ends the host. Out, on what was standard
output, a JSON object a line: first `{"ready": true}` or `{"error": sentence}`, then for each attempt `{"id", "ran": true}` when only its
evaluator is left, and, in the order of their ends, `{"id", "reward", "failure", "detail", "stuck", "flushed"}`, for each flush
`{"id", "flushed"}`, and for each process group of a program `{"program": leader, "ended"}`, when it begins and when it has ended.
Invariant: each attempt is answered once, after its spans were sent, or with `flushed` false; nothing that the agent prints gets
between the answers.

An agent is a callable `agent(input)` or, by that parameter's name, `agent(input, endpoint)`, an evaluator `evaluator(input, output)`;
either may be async. The evaluator's value is the reward, without one the agent's own: a finite number, or a mapping of names to finite
numbers; None is no reward, unless there is no evaluator and the agent has called `span_processors.reward.reward`. `stuck` says that a
thread of a cancelled attempt still runs, so that this process is better replaced.

The agent's modules may have any names, ours included: only `spangrad` and `span_processors` are imported here.
"""

from __future__ import annotations

import argparse
import asyncio
import contextvars
import gc
import inspect
import json
import math
import numbers
import os
import signal
import sys
import traceback
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any, cast

from opentelemetry import context, trace
from opentelemetry.instrumentation.auto_instrumentation import initialize
from opentelemetry.sdk.trace import TracerProvider

from spangrad.agent_command import CommandAgent, ExitCode, InvalidOutput, kill_groups
from spangrad.agent_container import Container, ContainerAgent, remove_running
from spangrad.attempt import AttemptNote, with_note
from spangrad.attempt_log import AttemptLog, begin_log, divide_outputs
from spangrad.callables import load, load_agent
from spangrad.errors import AgentError
from spangrad.processes import MARK, kill_marked
from spangrad.propagation import context_from
from spangrad.types import AttemptFailure

LINE_LIMIT_BYTES = 256 * 2**20
"""Longest line of the protocol."""

_FLUSH_MILLISECONDS = 10_000
_END_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class Answer:
    """How an attempt ended."""

    id: str
    reward: Mapping[str, float] | float | None
    """None exactly when it failed; empty when the agent has rewarded itself."""
    failure: AttemptFailure | None
    """None when it succeeded."""
    detail: str = ""
    """What happened, for people."""
    stuck: bool = False
    """Whether a thread of it still runs."""
    flushed: bool = False
    """Whether its spans were sent."""


def rewards_from(value: object) -> Mapping[str, float] | float | None:
    """Read a reward as agents and evaluators give it; None is none.

    Raises:
        ValueError: it is neither a finite number nor a mapping of names to finite numbers.
    """
    if isinstance(value, Mapping):
        items = cast("Mapping[object, object]", value).items()
        return {_name(name): _finite(one, f"reward {name!r}") for name, one in items} or None
    return None if value is None else _finite(value, "the reward")


def _name(name: object) -> str:
    if not isinstance(name, str) or not name:
        raise ValueError(f"a reward's name is {name!r}, not a text")
    return name


def _finite(value: object, what: str) -> float:
    if not isinstance(value, numbers.Real) or not math.isfinite(value):
        raise ValueError(f"{what} is {value!r:.200}, not a finite number")
    return float(value)


class Host:
    """Runs attempts side by side: async callables in the event loop, others in threads that carry the attempt's context."""

    def __init__(
        self,
        agent: Callable[..., Any],
        evaluator: Callable[..., Any] | None,
        concurrency: int,
        *,
        evaluations: int = 1,
        log_bytes: int = 0,
    ) -> None:
        self._agent = agent
        self._wants_endpoint = "endpoint" in inspect.signature(agent).parameters
        self._evaluator = evaluator
        self._pool = ThreadPoolExecutor(concurrency, thread_name_prefix="agent")
        self._judging = ThreadPoolExecutor(evaluations, thread_name_prefix="evaluator")
        self._evaluations = asyncio.Semaphore(evaluations)
        self._tell: Callable[[Mapping[str, object]], None] = lambda message: None
        self._threads: set[Future[Any]] = set()
        self._log_bytes = log_bytes
        self._cancelled: set[str] = set()
        self._flusher = _Flusher()

    async def serve(self, jobs: asyncio.StreamReader, answer: Callable[[Mapping[str, object]], None]) -> bool:
        """Answer jobs until there will be no more, then end what still runs.

        Returns:
            whether all threads have ended, too.
        """
        self._tell = answer
        running: dict[str, asyncio.Task[None]] = {}
        flushes: set[asyncio.Task[None]] = set()

        async def attempt(job: Mapping[str, Any]) -> None:
            try:
                answer(asdict(await self._attempt(job)))
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
            elif "flush" in message:
                flushes.add(task := asyncio.create_task(flush(message["flush"])))
                task.add_done_callback(flushes.discard)
            else:
                running[message["id"]] = asyncio.create_task(attempt(message))
        left = list(running.values())
        for task in left:
            task.cancel()
        if left:
            await asyncio.wait(left, timeout=_END_SECONDS)
        return not self._threads

    async def _attempt(self, job: Mapping[str, Any]) -> Answer:
        name: str = job["id"]
        note = AttemptNote()
        log = AttemptLog(job.get("log"), self._log_bytes)
        begin_log(log)
        try:
            return await self._noted(name, job, note)
        finally:
            log.close()

    async def _noted(self, name: str, job: Mapping[str, Any], note: AttemptNote) -> Answer:
        context.attach(with_note(context_from({key: job[key] for key in ("traceparent", "baggage") if job.get(key)}), note))
        try:
            reward, failure, detail = await self._run(name, job["input"], job.get("endpoint"), note)
        except asyncio.CancelledError as cancelled:
            return Answer(name, None, AttemptFailure.TIMEOUT, "cancelled", stuck=isinstance(cancelled, _StuckError))
        if name in self._cancelled:  # the agent has made something else of it
            return Answer(name, None, AttemptFailure.TIMEOUT, "cancelled")
        try:
            flushed = await self._flusher.flush()
        except asyncio.CancelledError:
            flushed = False  # the agent was in time, whatever becomes of its spans
        return Answer(name, reward, failure, detail, flushed=flushed)

    async def _run(
        self, name: str, given: object, endpoint: str | None, note: AttemptNote
    ) -> tuple[Mapping[str, float] | float | None, AttemptFailure | None, str]:
        try:
            output = await self._call(self._pool, self._agent, given, **({"endpoint": endpoint} if self._wants_endpoint else {}))
        except ExitCode as error:
            return None, AttemptFailure.EXIT_CODE, str(error)
        except InvalidOutput as error:
            return None, AttemptFailure.INVALID_OUTPUT, str(error)
        except (Exception, SystemExit) as error:  # whatever the agent raises is the attempt's end, not ours
            traceback.print_exc()
            return None, AttemptFailure.EXCEPTION, f"{type(error).__name__}: {error}"[:1000]
        try:
            value = output if self._evaluator is None else await self._evaluate(name, self._evaluator, given, output)
        except (Exception, SystemExit) as error:
            traceback.print_exc()
            return None, AttemptFailure.EVALUATION, f"{type(error).__name__}: {error}"[:1000]
        try:
            reward = rewards_from(value)
        except ValueError as error:
            return None, AttemptFailure.INVALID_OUTPUT, str(error)
        if reward is None and self._evaluator is None and note.rewarded:
            return {}, None, ""
        if reward is None:
            return None, AttemptFailure.NO_REWARD, f"{'the agent' if self._evaluator is None else 'the evaluator'} gave no reward"
        return reward, None, ""

    async def _evaluate(self, name: str, evaluator: Callable[..., Any], given: object, output: object) -> object:
        """Evaluate when there is room; the attempt's place among those that run is free from here on."""
        self._tell({"id": name, "ran": True})
        async with self._evaluations:
            return await self._call(self._judging, evaluator, given, output)

    async def _call(self, pool: ThreadPoolExecutor, function: Callable[..., Any], *args: object, **kwargs: object) -> Any:
        if _is_async(function):
            return await function(*args, **kwargs)
        thread = pool.submit(contextvars.copy_context().run, function, *args, **kwargs)
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
    """Cancelled, while a thread that cannot be stopped runs on."""


class _Flusher:
    """Flushes the tracer provider off the event loop; attempts that end during a flush share the next one."""

    def __init__(self) -> None:
        self._turn = asyncio.Lock()
        self._next: asyncio.Task[bool] | None = None

    async def flush(self) -> bool:
        """Send all spans that have ended; False when that takes too long."""
        if self._next is None:
            self._next = asyncio.create_task(self._flush())
        return await asyncio.shield(self._next)

    async def _flush(self) -> bool:
        async with self._turn:
            self._next = None  # spans that end from here on need another flush
            provider = trace.get_tracer_provider()
            if not isinstance(provider, TracerProvider) or await asyncio.to_thread(provider.force_flush, _FLUSH_MILLISECONDS):
                return True
            print(f"spangrad: spans are not taken for {_FLUSH_MILLISECONDS / 1000:g} s; going on, they stay queued", file=sys.stderr)
            return False


def _is_async(function: Callable[..., Any]) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def _private_pipes() -> tuple[int, int]:
    """Take the two pipes away from the agent: its input is empty, and what it prints goes to the log."""
    jobs, answers = os.dup(0), os.dup(1)
    empty = os.open(os.devnull, os.O_RDONLY)
    os.dup2(empty, 0)
    os.close(empty)
    os.dup2(2, 1)
    return jobs, answers


def _write(answers: int, message: Mapping[str, object]) -> None:
    line = json.dumps(message).encode() + b"\n"
    while line:
        line = line[os.write(answers, line) :]


async def _serve(host: Host, jobs: int, answers: int) -> bool:
    reader = asyncio.StreamReader(limit=LINE_LIMIT_BYTES)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(jobs, "rb"))
    return await host.serve(reader, lambda answer: _write(answers, answer))


def _end_all_on_sigterm() -> None:
    """SIGTERM is the runner's death: end the agent's programs and our own children, then do whatever else SIGTERM does here.

    A parent's death reaches only its own children, so those of our children would stay.
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


def _agent(args: argparse.Namespace, tell: Callable[[int, bool], None]) -> tuple[Callable[..., Any], Callable[..., Any] | str | None]:
    """The agent that the arguments name, and the evaluator that its decorator does.

    Raises:
        AgentError: it cannot be loaded.
    """
    directory: Path = args.path.resolve()
    if args.container:
        return ContainerAgent(Container.read(args.container), directory, tell=tell), None
    if args.command:
        return CommandAgent(json.loads(args.command), directory, instrument=args.instrument, tell=tell), None
    return load_agent(args.agent or "")


def main() -> None:
    """Host an agent until the runner is done with it."""
    parser = argparse.ArgumentParser(prog="python -m spangrad.agent_host")
    parser.add_argument("--agent", help="the agent, as module:function; or a module or file with one decorated agent")
    parser.add_argument("--command", help="the agent, as a JSON list of a program and its arguments, instead of --agent")
    parser.add_argument("--container", help="the agent, as a JSON object of a container image and how it is run, instead of --agent")
    parser.add_argument("--instrument", action="store_true", help="run the command under opentelemetry-instrument")
    parser.add_argument("--evaluator", help="the evaluator, as module:function")
    parser.add_argument("--path", type=Path, default=Path(), help="where modules are looked for first, and the command runs")
    parser.add_argument("--concurrency", type=int, default=1)
    parser.add_argument("--evaluations", type=int, default=1, help="evaluators at once")
    parser.add_argument("--log-bytes", type=int, default=0, help="that an attempt may write to its own log; 0: there is none")
    args = parser.parse_args()
    jobs, answers = _private_pipes()
    initialize()
    sys.path.insert(0, str(args.path.resolve()))
    _end_all_on_sigterm()
    try:
        agent, marked = _agent(args, lambda leader, ended: _write(answers, {"program": leader, "ended": ended}))
        evaluator: Callable[..., Any] | str | None = args.evaluator or marked
        host = Host(
            agent,
            load(evaluator) if isinstance(evaluator, str) else evaluator,
            args.concurrency,
            evaluations=args.evaluations,
            log_bytes=args.log_bytes,
        )
    except AgentError as error:
        _write(answers, {"error": str(error)})
        sys.exit(error.exit_code)
    divide_outputs()
    gc.freeze()  # what frameworks leave at import is never garbage: spare each collection the walk
    _write(answers, {"ready": True})
    if not asyncio.run(_serve(host, jobs, answers)):
        # An agent's thread that never ends would be waited for at an ordinary exit.
        provider = trace.get_tracer_provider()
        if isinstance(provider, TracerProvider):
            provider.shutdown()
        sys.stderr.flush()
        os._exit(0)


if __name__ == "__main__":
    main()
