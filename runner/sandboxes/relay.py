"""Connects programs in sandboxes with services outside, without a process inside.

In: listeners that `runner.sandboxes.launcher` opened in a sandbox's network and sent. Out: bytes, to and from the services. A socket
belongs to the network in which it was created, and not to that of the process which accepts on it: so the agent's `http://127.0.0.1` ends
in this process, which connects to the service in the network of its own. No socket has a name in the file system, so none is left behind.

Invariant: a listener lives as long as the process that sent it; ports that are no service's are never connected.
"""

from __future__ import annotations

import array
import asyncio
import errno
import fcntl
import logging
import os
import socket
import stat
import struct
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from contextlib import closing
from functools import partial
from types import TracebackType
from typing import Any, Self

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]
_logger = logging.getLogger(__name__)
_MOST_PORTS = 16
_CREDENTIALS = struct.Struct("3i")
_CHUNK_BYTES = 2**16
_RETRY_SECONDS = 0.2
"""Pause before the next try to accept a connection, in seconds, when the system refused one."""
_REMEDY = "Raise the limit of open files (ulimit -Hn), or lower runner.concurrency."
FIRST_DESCRIPTOR = 10
"""Smallest number of the descriptor that sandboxes inherit: shells use the smaller ones."""


class ServiceRelay:
    """Relay of one worker's sandboxes; an async context manager."""

    def __init__(self, services: Mapping[int, tuple[str, int]]) -> None:
        """`services` are host and port outside, by the port inside."""
        self._services = dict(services)
        self._tasks: set[asyncio.Task[None]] = set()
        self._outer, inner = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._outer.setblocking(False)
        self._outer.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        with inner:
            self.descriptor = fcntl.fcntl(inner.fileno(), fcntl.F_DUPFD_CLOEXEC, FIRST_DESCRIPTOR)
        """Descriptor of the socket that sandboxes inherit."""

    async def __aenter__(self) -> Self:
        asyncio.get_running_loop().add_reader(self._outer, self._receive)
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        asyncio.get_running_loop().remove_reader(self._outer)
        self._outer.close()
        os.close(self.descriptor)
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _receive(self) -> None:
        room = socket.CMSG_SPACE(_MOST_PORTS * array.array("i").itemsize) + socket.CMSG_SPACE(_CREDENTIALS.size)
        try:
            data, ancillary, _, _ = self._outer.recvmsg(1024, room)
        except BlockingIOError:
            return
        descriptors, pid = array.array("i"), 0
        for level, kind, payload in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                descriptors.frombytes(payload[: len(payload) - len(payload) % descriptors.itemsize])
            elif (level, kind) == (socket.SOL_SOCKET, socket.SCM_CREDENTIALS):
                pid = _CREDENTIALS.unpack(payload)[0]
        try:
            targets = [self._services.get(int(port)) for port in data.decode().split(",")]
            if len(descriptors) != len(targets):
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            if not all(stat.S_ISSOCK(os.fstat(descriptor).st_mode) for descriptor in descriptors):
                raise OSError(errno.ENOTSOCK, os.strerror(errno.ENOTSOCK))
            lifetime = os.pidfd_open(pid)
        except (OSError, ValueError) as error:
            if not isinstance(error, ProcessLookupError):  # otherwise it has ended
                remedy = f" {_REMEDY}" if isinstance(error, OSError) and error.errno == errno.EMFILE else ""
                _logger.warning("process %d of a sandbox reaches no services: %s.%s", pid, error, remedy)
            for descriptor in descriptors:
                os.close(descriptor)
            return
        listeners = [socket.socket(fileno=descriptor) for descriptor in descriptors]
        task = asyncio.create_task(self._serve(list(zip(listeners, targets, strict=True)), lifetime))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, listeners: list[tuple[socket.socket, tuple[str, int] | None]], lifetime: int) -> None:
        """Serve the listeners of a sandbox until its process has ended."""
        loop = asyncio.get_running_loop()
        ended = asyncio.Event()
        loop.add_reader(lifetime, ended.set)
        accepting: list[asyncio.Task[None]] = []
        try:
            for listener, target in listeners:
                if target is not None:
                    listener.setblocking(False)
                    accepting.append(asyncio.create_task(accept_all(listener, partial(_pass_on, target=target))))
            await ended.wait()
        finally:
            loop.remove_reader(lifetime)
            os.close(lifetime)
            for task in accepting:
                task.cancel()
            await asyncio.gather(*accepting, return_exceptions=True)
            for listener, _ in listeners:
                listener.close()


async def accept_all(listener: socket.socket, serve: Callable[[socket.socket], Coroutine[Any, Any, None]]) -> None:
    """Accept connections until the listener is closed, each with a task of `serve`; cancelling ends them all.

    Connections that the system refuses for now, such as for want of descriptors, wait in the listener until it takes them.
    """
    loop = asyncio.get_running_loop()
    serving: set[asyncio.Task[None]] = set()
    refused = False
    try:
        while True:
            try:
                connection, _ = await loop.sock_accept(listener)
            except OSError as error:
                if listener.fileno() < 0:
                    return
                if not refused:
                    _logger.warning("connections of a sandbox wait, since none can be accepted: %s. %s", error.strerror, _REMEDY)
                refused = True
                await asyncio.sleep(_RETRY_SECONDS)
                continue
            task = asyncio.create_task(serve(connection))
            serving.add(task)
            task.add_done_callback(serving.discard)
    finally:
        for task in serving:
            task.cancel()
        await asyncio.gather(*serving, return_exceptions=True)


async def pass_bytes(connection: socket.socket, connect: Callable[[], Awaitable[Streams]]) -> None:
    """Connect to a service, and pass bytes both ways until both ends are closed, or one is reset; both are closed then.

    Raises:
        Exception: any of `connect`; the connection is closed.
    """
    reader, writer = await asyncio.open_connection(sock=connection)
    with closing(writer):
        service_reader, service_writer = await connect()
        with closing(service_writer):
            copies = [asyncio.create_task(_copy(reader, service_writer)), asyncio.create_task(_copy(service_reader, writer))]
            try:
                await asyncio.gather(*copies)
            except OSError:
                pass  # an end was reset: closing both tells the other one
            finally:
                for copy in copies:
                    copy.cancel()
                await asyncio.gather(*copies, return_exceptions=True)


async def _pass_on(connection: socket.socket, target: tuple[str, int]) -> None:
    try:
        await pass_bytes(connection, partial(asyncio.open_connection, *target))
    except OSError as error:  # the agent's connection is closed, and it retries as it would outside
        _logger.warning("a sandboxed agent asked for the service at %s:%d, which cannot be reached: %s", *target, error)


async def _copy(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    """Copy bytes until the source's end, and pass the end on."""
    while data := await source.read(_CHUNK_BYTES):
        target.write(data)
        await target.drain()
    target.write_eof()
