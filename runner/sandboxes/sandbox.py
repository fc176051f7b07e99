"""A sandbox that stays: programs, files and ports in it, for the process outside.

In: a policy. Out: a `Sandbox`, in the shape of the runtimes of verifiers: start, run, open a process, read, write, expose, stop. Invariant:
when the block is left, or this process dies, nothing of the sandbox is left.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import itertools
import os
import socket
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial

from runner.sandboxes import supervisor
from runner.sandboxes.engines import SandboxEngine, prepare
from runner.sandboxes.policy import SandboxPolicy, inner_environment, inner_interpreter
from runner.sandboxes.program_io import MOST_BYTES, ProgramResult, SandboxProcess, end_program, feed, read_all
from runner.sandboxes.relay import FIRST_DESCRIPTOR, Streams, accept_all, pass_bytes
from runner.sandboxes.remote import RemoteSandbox
from spangrad.errors import SandboxError, SandboxRequestError
from spangrad.processes import dying_with_parent, kill_group
from spangrad.types import SandboxRung

_START_SECONDS = 30.0
_GRACE_SECONDS = 5.0
_DRAIN_SECONDS = 0.2
"""Time for which outputs are read after a program has ended, in seconds: processes that it left behind may hold them open."""
_OF_PLACES = ("open", "write", "connect")
"""Requests whose first argument is the path or port that an error names."""


class Sandbox:
    """A running sandbox; `open_sandbox` starts it."""

    def __init__(self, engine: SandboxEngine, process: asyncio.subprocess.Process, control: socket.socket) -> None:
        """`process` runs the supervisor, which `engine` confines, at the other end of `control`."""
        self.rung = engine.rung
        self.image = engine.image
        self.home = ""
        """Private, writable directory inside; empty until `ready` is done."""
        self.process = process
        self._control = control
        self._turn = asyncio.Lock()
        """Turn to send: requests keep their order while the socket is full."""
        self._has_room = asyncio.Event()
        self._ids = itertools.count()
        self._answers: dict[int, tuple[asyncio.Future[tuple[list[str], list[int]]], asyncio.Future[int] | None]] = {}
        """Answers that are waited for, by number of the request; with the exit code of the program that it starts, if it does."""
        self._ends: dict[int, asyncio.Future[int]] = {}
        """Exit codes of programs that run, by process."""
        self._tasks: set[asyncio.Task[None]] = set()
        """Ports that are served, and programs that are being ended."""
        self.ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when the supervisor answers; failed if the sandbox ended before."""
        asyncio.get_running_loop().add_reader(control, self._receive)

    def _receive(self) -> None:
        try:
            data, descriptors, flags, _ = socket.recv_fds(self._control, supervisor.MESSAGE_BYTES, 8)
        except BlockingIOError:
            return
        except OSError:
            data, descriptors, flags = b"", [], 0
        if not data:
            self._fail()
            return
        kind, *fields = (field.decode(errors="surrogateescape") for field in data.split(supervisor.SEPARATOR))
        if flags & socket.MSG_CTRUNC:  # this process can open nothing more
            fields = ["error", str(errno.EMFILE), os.strerror(errno.EMFILE)]
        if kind == "ended":
            process, code = map(int, fields)
            if (ended := self._ends.pop(process, None)) is not None and not ended.done():
                ended.set_result(code)
        elif kind == "ready":
            (self.home,) = fields
            self.ready.set_result(None)
        else:
            answer, ended = self._answers.pop(int(kind), (None, None))
            if ended is not None and fields[0] == "ok":  # here, since its end may be the next message
                self._ends[int(fields[1])] = ended
            if answer is not None and not answer.done():
                answer.set_result((fields, descriptors))
            else:
                self._undo(fields, descriptors, ended)

    def _undo(self, fields: list[str], descriptors: list[int], ended: asyncio.Future[int] | None) -> None:
        """Close the descriptors and end the program of an answer whose request was cancelled meanwhile."""
        for descriptor in descriptors:
            os.close(descriptor)
        if ended is not None and fields[0] == "ok":
            self._tasks.add(task := asyncio.create_task(end_program(self, int(fields[1]), ended)))
            task.add_done_callback(self._tasks.discard)

    def _fail(self) -> None:
        """Answer all that wait: the sandbox has ended."""
        asyncio.get_running_loop().remove_reader(self._control)
        self._go_on_sending()
        error = SandboxRequestError("the sandbox has ended: its supervisor was killed, or the sandbox was stopped. Start another one.")
        for waiting in (self.ready, *(answer for answer, _ in self._answers.values()), *self._ends.values()):
            if not waiting.done():
                waiting.set_exception(error)
                waiting.exception()  # it may be that no caller waits
        self._answers.clear()
        self._ends.clear()

    async def ask(
        self, do: str, *arguments: object, descriptors: Sequence[int] = (), ended: asyncio.Future[int] | None = None
    ) -> tuple[str, list[int]]:
        """Send a request to the supervisor, and return the value of its answer with the descriptors that it opened.

        `descriptors` go with the request; `ended` gets the exit code of the program that it starts, if it starts one.

        Raises:
            SandboxRequestError: the sandbox has ended, the request cannot be sent, or it failed inside.
        """
        request = _message(number := next(self._ids), do, arguments)
        try:
            await self._send(request, descriptors)
        except OSError as error:
            raise SandboxRequestError(f"the sandbox takes no request ({error.strerror}): it has ended. Start another one.") from None
        answer: asyncio.Future[tuple[list[str], list[int]]] = asyncio.get_running_loop().create_future()
        self._answers[number] = answer, ended
        try:
            (state, value, *reason), opened = await answer
        except asyncio.CancelledError:
            if answer.done() and not answer.cancelled() and answer.exception() is None:  # cancelled in the step in which it came
                self._undo(*answer.result(), ended)
            raise
        if state == "error":
            place = arguments[0] if do in _OF_PLACES else "program"
            raise SandboxRequestError(f"{do} in the sandbox: {reason[0]} ({place}).", int(value))
        return value, opened

    async def _send(self, request: bytes, descriptors: Sequence[int]) -> None:
        """Send a request as soon as the socket has room for it."""
        async with self._turn:
            while True:
                try:
                    socket.send_fds(self._control, [request], descriptors)
                    return
                except BlockingIOError:
                    self._has_room.clear()
                    asyncio.get_running_loop().add_writer(self._control, self._go_on_sending)
                    await self._has_room.wait()

    def _go_on_sending(self) -> None:
        asyncio.get_running_loop().remove_writer(self._control)
        self._has_room.set()

    async def start_program(
        self,
        command: Sequence[str],
        descriptors: Sequence[int],
        *,
        environment: Mapping[str, str] | None = None,
        directory: str | None = None,
        terminal: bool = False,
    ) -> tuple[int, asyncio.Future[int]]:
        """Start a program with these descriptors as its first ones; return its process inside, and the future of its exit code.

        This process may close the descriptors afterwards; with `terminal` the second one becomes the terminal. Others are as of `run`.

        Raises:
            SandboxRequestError: it cannot be started.
        """
        variables = [f"{name}={value}" for name, value in (environment or {}).items()]
        arguments = ["terminal" if terminal else "", directory or "", len(command), *command, *variables]
        ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        process, _ = await self.ask("start", *arguments, descriptors=descriptors, ended=ended)
        return int(process), ended

    async def open_process(
        self, command: Sequence[str], *, environment: Mapping[str, str] | None = None, directory: str | None = None
    ) -> SandboxProcess:
        """Start a program, with arguments as of `run`; the caller waits for its end, and closes its pipes.

        Raises:
            SandboxRequestError: it cannot be started.
        """
        pipes: list[int] = []
        try:
            for _ in range(3):
                pipes += os.pipe()
            inner_in, outer_in, outer_out, inner_out, outer_err, inner_err = pipes
            inner = [inner_in, inner_out, inner_err]
            process, ended = await self.start_program(command, inner, environment=environment, directory=directory)
        except BaseException:
            for descriptor in pipes:
                os.close(descriptor)
            raise
        for descriptor in inner:
            os.close(descriptor)
        return SandboxProcess(self, process, ended, outer_in, outer_out, outer_err)

    async def run(
        self,
        command: Sequence[str],
        *,
        stdin: bytes = b"",
        environment: Mapping[str, str] | None = None,
        directory: str | None = None,
        timeout_seconds: float | None = None,
        most_bytes: int = MOST_BYTES,
    ) -> ProgramResult:
        """Run a program to its end.

        Args:
            command: program and arguments, looked up inside.
            stdin: its input.
            environment: added to the sandbox's own.
            directory: working directory inside. None: that of the policy.
            timeout_seconds: time limit, in seconds; the program is killed then. None: none.
            most_bytes: bytes of each output that are kept; the rest is read and dropped.

        Raises:
            SandboxRequestError: it cannot be started, or the sandbox has ended.
        """
        process = await self.open_process(command, environment=environment, directory=directory)
        outputs = [asyncio.create_task(read_all(descriptor, most_bytes)) for descriptor in (process.stdout, process.stderr)]
        # Not after the waits below: where a scope of anyio cancels this, it cancels each of them.
        outputs[0].add_done_callback(lambda _: os.close(process.stdout))
        outputs[1].add_done_callback(lambda _: os.close(process.stderr))
        feeding = asyncio.create_task(feed(process.stdin, stdin))
        feeding.add_done_callback(lambda _: process.close_stdin())
        timed_out = False
        try:
            try:
                async with asyncio.timeout(timeout_seconds):
                    await asyncio.shield(process.ended)
            except TimeoutError:
                timed_out = True
                await process.kill()
            code = await asyncio.shield(process.ended)
            await asyncio.wait(outputs, timeout=_DRAIN_SECONDS)
        except asyncio.CancelledError:
            await process.end()
            raise
        finally:
            for task in (feeding, *outputs):
                task.cancel()
            read = await asyncio.gather(*outputs, return_exceptions=True)
            await asyncio.gather(feeding, return_exceptions=True)
        (stdout, more), (stderr, still_more) = (part if isinstance(part, tuple) else (b"", True) for part in read)
        return ProgramResult(code, stdout, stderr, more or still_more, timed_out)

    async def read(self, path: str, most_bytes: int = MOST_BYTES) -> bytes:
        """Return the first bytes of a regular file inside.

        Raises:
            SandboxRequestError: it cannot be opened.
        """
        _, (descriptor,) = await self.ask("open", path)
        with os.fdopen(descriptor, "rb") as file:
            return await asyncio.to_thread(file.read, most_bytes)

    async def write(self, path: str, content: bytes) -> None:
        """Write a file inside, and the directories above it.

        Raises:
            SandboxRequestError: it cannot be written.
        """
        with os.fdopen(os.memfd_create("content"), "wb") as file:
            file.write(content)
            file.seek(0)
            await self.ask("write", path, descriptors=[file.fileno()])

    async def expose(self, port: int) -> str:
        """Serve a port of the sandbox's loopback on this machine's, until the sandbox is stopped; return the address there.

        Raises:
            SandboxRequestError: the sandbox shares this machine's network.
        """
        if self.rung is not SandboxRung.BUBBLEWRAP:
            raise SandboxRequestError(f"a sandbox of {self.rung} has no network of its own: nothing in it listens. Use bubblewrap.")
        listener = socket.create_server(("127.0.0.1", 0))
        listener.setblocking(False)
        self._tasks.add(asyncio.create_task(self._serve_port(listener, port)))
        return f"http://127.0.0.1:{listener.getsockname()[1]}"

    async def _serve_port(self, listener: socket.socket, port: int) -> None:
        with listener:
            await accept_all(listener, partial(self._connect, port=port))

    async def _connect(self, connection: socket.socket, port: int) -> None:
        async def connect() -> Streams:
            _, (descriptor,) = await self.ask("connect", port)
            return await asyncio.open_connection(sock=socket.socket(fileno=descriptor))

        try:
            await pass_bytes(connection, connect)
        except SandboxRequestError:
            pass  # no program listens there: the connection is closed

    async def stop(self) -> None:
        """End all programs and the sandbox; idempotent."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._control.fileno() >= 0:
            self._fail()
            self._control.close()
        try:
            await asyncio.wait_for(self.process.wait(), _GRACE_SECONDS)
        except TimeoutError:
            self.process.terminate()
            await asyncio.sleep(0.1)
        finally:
            kill_group(self.process.pid)
            await self.process.wait()


OpenSandbox = Sandbox | RemoteSandbox
"""Sandbox of any rung."""


@asynccontextmanager
async def open_sandbox(policy: SandboxPolicy | SandboxEngine) -> AsyncGenerator[OpenSandbox]:
    """Start a sandbox by the engine that fits a policy, or by one that `prepare` returned, for as long as the block.

    Raises:
        SandboxError: none works here, or it did not start.
    """
    prepared = policy if isinstance(policy, SandboxEngine) else await asyncio.to_thread(prepare, policy)
    if prepared.remote is not None:
        async with RemoteSandbox(prepared.remote, prepared.directory) as remote:
            yield remote
        return
    sandbox = await start(prepared)
    try:
        yield sandbox
    finally:
        await sandbox.stop()


async def start(engine: SandboxEngine) -> Sandbox:
    """Start a sandbox of this machine by an engine that `prepare` returned; the caller stops it.

    Raises:
        SandboxError: it did not start.
    """
    try:
        return await _started(engine)
    except (OSError, SandboxRequestError) as error:
        reason = str(error) or f"it was not ready after {_START_SECONDS:g} s"
        raise SandboxError(f"a sandbox of {engine.rung} did not start: {reason}. See that the machine has processes and memory.") from None


async def _started(engine: SandboxEngine) -> Sandbox:
    outer, inner = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    outer.setblocking(False)
    descriptor = fcntl.fcntl(inner.fileno(), fcntl.F_DUPFD_CLOEXEC, FIRST_DESCRIPTOR)
    inner.close()
    try:
        command = [*engine.prefix, str(inner_interpreter(engine.image)), "-I", "-S", supervisor.__file__, str(descriptor)]
        process = await asyncio.create_subprocess_exec(
            *dying_with_parent(command, environment := inner_environment(engine.image)),
            stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL, env=environment,
            pass_fds=[descriptor], start_new_session=True)  # fmt: skip
    finally:
        os.close(descriptor)
    sandbox = Sandbox(engine, process, outer)
    try:
        await asyncio.wait_for(asyncio.shield(sandbox.ready), _START_SECONDS)
    except BaseException:
        await sandbox.stop()
        raise
    return sandbox


def _message(number: int, do: str, arguments: Sequence[object]) -> bytes:
    """Return a request as the supervisor reads it."""
    try:
        fields = [str(field).encode(errors="surrogateescape") for field in (number, do, *arguments)]
        unusable = next((field.decode(errors="replace") for field in fields if supervisor.SEPARATOR in field), None)
    except UnicodeEncodeError as error:
        fields, unusable = [], error.object
    if unusable is not None:
        raise SandboxRequestError(f"{do} in the sandbox: {unusable[:100]!r} has a character that no path, word or variable can have.")
    message = supervisor.SEPARATOR.join(fields)
    if len(message) > (most := supervisor.MESSAGE_BYTES):
        raise SandboxRequestError(f"{do} in the sandbox: a request of {len(message):,} bytes exceeds {most:,}. Write long words to a file.")
    return message
