"""Process of many sessions (`python -m runner.sessions.shard`): creates environments, and plays in each.

In: frames from the server, on sockets that are inherited. Out: frames. Invariant: a session's requests are applied in order, in the thread
in which its environment was created; the process ends with the server, and leaves no process.

An environment whose reset and step are async lives in the event loop, which it must not block; another has a thread of its own.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import inspect
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from types import FrameType
from typing import Any, Literal, TypedDict

import msgspec
import uvloop

from runner.sessions.frames import Frame, FrameKind, FrameReader
from runner.sessions.instance import Call, SessionInstance, failure_text
from runner.sessions.messages import ErrorCode, SessionError, SessionOpening
from runner.sessions.players import PlayersInstance
from runner.sessions.step_spans import PlayedSpans
from spangrad.callables import load
from spangrad.episode.adapters.references import factory_of
from spangrad.episode.environment import Environment, checked_list, is_environment, member, prompt_of
from spangrad.episode.openenv_fields import ACTIONS, FORFEIT, ROLES
from spangrad.episode.user_calls import USER_ERRORS, plain_exceptions
from spangrad.errors import EnvironmentsError, SpangradError
from spangrad.processes import kill_group
from spangrad.text_sanitizer import storable, storable_trace

log = logging.getLogger(__name__)
Factory = Callable[[], Environment]
_CANCEL_SECONDS = 0.5
"""Time that a request under way has to end when its session ends, in seconds; then it is cancelled, where it is async."""
_END_SECONDS = 3.0
"""Time that environments have to close when the process ends, and async ones also when their session does, in seconds."""


class EnvironmentMetadata(TypedDict, total=False):
    """Description of an environment for its clients; what follows the first two fields is beyond OpenEnv's protocol."""

    name: str
    description: str
    system_prompt: str | None
    tools: list[dict[str, Any]]
    roles: list[str]
    """Roles of several players. Left out: there is one; the fields below are left out, too."""
    system_prompts: dict[str, str | None]
    """Text of the system message of each role."""
    forfeits: bool
    """True if a player may forfeit."""


class EnvironmentDescription(msgspec.Struct, frozen=True):
    """Facts about the environments of a server, as OpenEnv's routes have them."""

    metadata: EnvironmentMetadata
    schema: dict[Literal["action", "observation", "state"], dict[str, Any]]
    """JSON schemas."""


class SessionShard(asyncio.Protocol):
    """Sessions of this process, and its end of the connection for requests."""

    def __init__(self, factory: Factory, responses: socket.socket) -> None:
        """`factory` creates an environment; `responses` is a stream to the server, to which any thread writes."""
        self.over = asyncio.Event()
        """Set when the server has closed the connection."""
        self._factory = factory
        self._in_loop = all(inspect.iscoroutinefunction(getattr(factory, name, None)) for name in ("reset", "step"))
        self._loop = asyncio.get_running_loop()
        self._reader = FrameReader()
        self._responses = responses
        self._sending = threading.Lock()
        self._unsent: list[bytes] = []
        """Frames of this turn of the event loop."""
        self._requests: dict[int, Callable[[bytes | None], None]] = {}
        """Queue of each session; None ends it."""
        self._threads: set[threading.Thread] = set()
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._cancellations: dict[int, asyncio.TimerHandle] = {}
        """Timers that cancel the requests of sessions that have ended."""
        self._spans = PlayedSpans()

    async def describe(self) -> EnvironmentDescription:
        """Create an environment, and close it; return its description.

        Raises:
            EnvironmentsError: it lacks a method.
            Exception: any of the factory's.
        """
        environment = created(self._factory)
        try:
            return await description_of(environment)
        finally:
            await _close(partial(call_here, getattr(environment, "close", lambda: None)))

    async def close(self) -> None:
        """Close all environments, in bounded time, and send the spans that are left."""
        for end in list(self._requests.values()):
            end(None)
        if self._tasks:
            await asyncio.wait(self._tasks.values(), timeout=_END_SECONDS)
        threads = list(self._threads)
        for thread in threads:
            await asyncio.to_thread(thread.join, _END_SECONDS / len(threads))
        await asyncio.to_thread(self._spans.close)

    def send(self, frame: Frame) -> None:
        """Send a frame; after the server's end it is lost."""
        self._write(frame.encode())

    def data_received(self, data: bytes) -> None:
        """Hand each frame to its session."""
        for frame in self._reader.feed(data):
            match frame.kind:
                case FrameKind.MESSAGE:
                    if (put := self._requests.get(frame.session)) is not None:
                        put(frame.payload)
                case FrameKind.OPEN:
                    self._open(frame)
                case FrameKind.CLOSE:
                    self._end(frame.session)
                case _:
                    self.send(frame)  # a ping

    def connection_lost(self, exc: Exception | None) -> None:
        """Note the server's end."""
        self.over.set()

    def _open(self, opening: Frame) -> None:
        """Begin a session: in this event loop if the environment's methods are async, else in a thread of its own."""
        number = opening.session
        if self._in_loop:
            messages = asyncio.Queue[bytes | None]()
            self._requests[number] = messages.put_nowait
            task = self._tasks[number] = asyncio.create_task(self._run(opening, messages.get, call_here, self._send_soon))
            task.add_done_callback(lambda _: self._tasks.pop(number, None))
            return
        requests = SimpleQueue[bytes | None]()
        self._requests[number] = requests.put

        async def next_request() -> bytes | None:
            return requests.get()

        work = self._run(opening, next_request, self._call_in_loop, self.send)
        thread = threading.Thread(target=self._drive, args=(work,), name=f"session {number}", daemon=True)
        self._threads.add(thread)
        try:
            thread.start()
        except RuntimeError as error:  # none is left for now: raised from here, it would end the connection, and with it all sessions
            self._threads.discard(thread)
            self._requests.pop(number, None)
            work.close()
            sentence = f"no environment can be created: {error}. Raise the limit of processes, or lower the capacity"
            self.send(Frame(FrameKind.OPEN, number, SessionError(ErrorCode.FACTORY_ERROR, sentence).encode()))

    def _end(self, number: int) -> None:
        """End a session; a request that is under way in the event loop is cancelled."""
        if (end := self._requests.pop(number, None)) is not None:
            end(None)
        if (task := self._tasks.get(number)) is not None:
            self._cancellations[number] = self._loop.call_later(_CANCEL_SECONDS, task.cancel)

    def _drive(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a session's coroutine in this thread: it waits for nothing by the event loop."""
        try:
            work.send(None)
        except StopIteration:
            pass
        finally:
            self._threads.discard(threading.current_thread())

    async def _run(
        self, opening: Frame, next_request: Callable[[], Awaitable[bytes | None]], call: Call, send: Callable[[Frame], None]
    ) -> None:
        """Serve one session; what ends it by itself is sent as an error."""
        number = opening.session
        try:
            try:
                with plain_exceptions():
                    environment = created(self._factory)
                    kind = PlayersInstance if member(environment, ROLES) else SessionInstance
                    opened = msgspec.json.decode(opening.payload, type=SessionOpening)
                    instance = kind(environment, opened, self._spans, call, number)
            except USER_ERRORS as error:
                name = getattr(self._factory, "__name__", str(self._factory))
                sentence = f"no environment can be created: {failure_text(error)}"
                log.warning("%s\n%s", sentence, storable_trace(error))
                send(Frame(FrameKind.OPEN, number, SessionError(ErrorCode.FACTORY_ERROR, sentence, factory_name=name).encode()))
                return
            send(Frame(FrameKind.OPEN, number))
            try:
                while (payload := await next_request()) is not None:
                    send(await instance.answer(payload))
            finally:
                if (cancellation := self._cancellations.pop(number, None)) is not None:  # the request has ended; its close has longer
                    cancellation.cancel()
                    self._loop.call_later(_END_SECONDS, self._tasks[number].cancel)
                await _close(instance.close)
        except BaseException as error:  # such as an interrupt by the user's code, which must not end the process
            if number in self._requests:  # else the server has ended the session
                sentence = f"the environment ended its session by {failure_text(error)}. Open a new one"
                send(Frame(FrameKind.OPEN, number, SessionError(ErrorCode.EXECUTION_ERROR, sentence).encode()))
        finally:
            self._requests.pop(number, None)
            self._cancellations.pop(number, None)

    async def _call_in_loop(self, method: Callable[[], Any]) -> Any:
        """Call a method in a session's thread; what it awaits runs in the event loop, while the thread waits."""
        with plain_exceptions():
            result = method()
        if not inspect.isawaitable(result):
            return result
        value, error = asyncio.run_coroutine_threadsafe(_awaited(result), self._loop).result()
        if error is not None:
            raise error
        return value

    def _send_soon(self, frame: Frame) -> None:
        """Send a frame at the end of this turn of the event loop, with the others."""
        if not self._unsent:
            self._loop.call_soon(self._flush)
        self._unsent.append(frame.encode())

    def _flush(self) -> None:
        data = b"".join(self._unsent)
        self._unsent.clear()
        self._write(data)

    def _write(self, data: bytes) -> None:
        try:
            with self._sending:
                self._responses.sendall(data)
        except OSError:
            pass


async def _close(close: Callable[[], Awaitable[Any]]) -> None:
    """Close an environment; an error ends nothing."""
    try:
        await close()
    except USER_ERRORS as error:
        print(f"close: {type(error).__name__}: {error}", file=sys.stderr, flush=True)


async def call_here(method: Callable[..., Any], *arguments: object) -> Any:
    """Call a method, and wait for its result where it is awaitable."""
    with plain_exceptions():
        result = method(*arguments)
        return await result if inspect.isawaitable(result) else result


async def _awaited(result: Awaitable[Any]) -> tuple[Any, BaseException | None]:
    """Return what is awaited, or what it raised: an exit or an interrupt that ends a task ends the event loop, too."""
    try:
        with plain_exceptions():
            return await result, None
    except BaseException as error:
        return None, error


def created(factory: Factory) -> Environment:
    """Create an environment.

    Raises:
        EnvironmentsError: it lacks a method.
        Exception: any of the factory's.
    """
    environment = factory()
    if not is_environment(environment):
        raise EnvironmentsError(f"the factory gave {type(environment).__name__}, which lacks reset(task) or step(action). Write both.")
    return environment


async def description_of(environment: Environment) -> EnvironmentDescription:
    """Return the description of an environment; its own `schemas` comes before ours.

    Raises:
        EnvironmentsError: its roles, tools, prompts or schemas have another type, or are no JSON.
    """
    name = type(environment).__name__
    roles = checked_list(f"{name}.roles", member(environment, ROLES))
    tools = checked_list(f"{name}.tools", await call_here(lambda: member(environment, "tools")))
    text = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}
    call = {
        "type": "object",
        "properties": {"type": {"const": "call_tool"}, "tool_name": {"type": "string"}, "arguments": {"type": "object"}},
        "required": ["type", "tool_name", "arguments"],
    }
    state = {"type": "object", "properties": {"episode_id": {"type": ["string", "null"]}, "step_count": {"type": "integer"}}}
    own = call if tools else text
    by_role = {"type": "object", "properties": {ACTIONS: {"type": "object", "additionalProperties": own}, FORFEIT: {"enum": roles}}}
    schema = {"action": by_role if roles else own, "observation": {"type": "object"}, "state": state}
    prompt = None if roles else await call_here(lambda: member(environment, "system_prompt"))
    metadata = {"name": name, "description": inspect.getdoc(type(environment)) or "", "system_prompt": prompt, "tools": tools}
    if roles:
        prompts = {role: await prompt_of(environment, role, call_here) for role in roles}
        metadata |= {ROLES: roles, "system_prompts": prompts, "forfeits": hasattr(environment, FORFEIT)}
    own_schemas = member(environment, "schemas") or {}
    try:  # in this process, whose error the server can show
        facts = msgspec.to_builtins({"metadata": metadata, "schema": {**schema, **own_schemas}})
        return msgspec.convert(facts, EnvironmentDescription)
    except (msgspec.ValidationError, TypeError) as error:
        raise EnvironmentsError(f"{name} has a member of a wrong type: {error}. Fix roles, tools, system_prompt or schemas.") from None


def _end(number: int, frame: FrameType | None) -> None:
    """End at once, with all child processes: the server has died."""
    kill_group(os.getpid())


async def serve(factory: str, requests: socket.socket, responses: socket.socket) -> None:
    """Serve sessions of an environment (module:class) until the server ends; the sockets are streams from it and to it."""
    try:
        shard = SessionShard(factory_of(factory, load), responses)
        description = await shard.describe()
    except SpangradError as error:
        responses.sendall(Frame(FrameKind.BROKEN, payload=str(error).encode()).encode())
        return
    except USER_ERRORS as error:
        sentence = storable(f"no environment can be created: {type(error).__name__}: {error}. Fix {factory}.")
        log.warning("%s\n%s", sentence, storable_trace(error))
        responses.sendall(Frame(FrameKind.BROKEN, payload=sentence.encode()).encode())
        return
    gc.freeze()  # what is imported is never garbage: collections need not scan it
    shard.send(Frame(FrameKind.READY, payload=msgspec.json.encode(description)))
    await asyncio.get_running_loop().create_connection(lambda: shard, sock=requests)
    await shard.over.wait()
    await shard.close()


def run_to_end(loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine in an event loop to its end: an exit or an interrupt in another task of the loop ends that task alone."""
    task = loop.create_task(work)
    while not task.done():
        try:
            loop.run_until_complete(task)
        except (SystemExit, KeyboardInterrupt) as error:
            if task.done() and task.exception() is error:
                raise
            print(f"a task of an environment has ended by {failure_text(error)}", file=sys.stderr, flush=True)


def main() -> None:
    """Serve the sessions that the server opens, until it ends."""
    parser = argparse.ArgumentParser(prog="python -m runner.sessions.shard")
    parser.add_argument("--factory", required=True, help="the environment, as module:class")
    parser.add_argument("--path", type=Path, required=True, help="directory in which modules are looked for first")
    parser.add_argument("--sockets", type=int, nargs=2, required=True, help="descriptors of the connections for requests and responses")
    args = parser.parse_args()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the server's to handle
    signal.signal(signal.SIGTERM, _end)
    sys.path.insert(0, str(args.path.resolve()))
    requests, responses = (socket.socket(fileno=number) for number in args.sockets)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        run_to_end(runner.get_loop(), serve(args.factory, requests, responses))
        kill_group(os.getpid())  # what environments have left running, and threads that hang


if __name__ == "__main__":
    main()
