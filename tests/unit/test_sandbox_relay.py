"""Connections of sandboxes while this process can open no more files: they wait, and are served later."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import struct
from functools import partial
from pathlib import Path

import pytest

from runner.sandboxes.relay import ServiceRelay, accept_all, pass_bytes
from tests.support.processes import own_open_files
from tests.support.runners import is_true, no_descriptors, until


async def answer(connection: socket.socket) -> None:
    with connection:
        await asyncio.get_running_loop().sock_sendall(connection, b"served")


async def test_accept_all_without_descriptors_serves_connections_later(caplog: pytest.LogCaptureFixture) -> None:
    loop = asyncio.get_running_loop()
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket() as waiting, socket.socket() as later:
        for each in (listener, waiting, later):
            each.setblocking(False)
        accepting = asyncio.create_task(accept_all(listener, answer))
        with no_descriptors():
            await loop.sock_connect(waiting, listener.getsockname())
            await until(lambda: is_true(caplog.records))
            await asyncio.sleep(0.5)
        await loop.sock_connect(later, listener.getsockname())
        for connection in (waiting, later):
            assert await asyncio.wait_for(loop.sock_recv(connection, 100), 10) == b"served"
        (record,) = caplog.records
        assert (record.levelno, accepting.done()) == (logging.WARNING, False)
        assert "Too many open files. Raise the limit of open files" in record.getMessage()
        accepting.cancel()
        await asyncio.gather(accepting, return_exceptions=True)


async def test_accept_all_of_a_closed_listener_ends() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    listener.setblocking(False)
    listener.close()
    await asyncio.wait_for(accept_all(listener, answer), 30)


async def test_service_relay_listeners_that_are_cut_off_are_closed(caplog: pytest.LogCaptureFixture) -> None:
    failures: list[dict[str, object]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, failure: failures.append(failure))
    async with ServiceRelay({1: ("127.0.0.1", 1), 2: ("127.0.0.1", 1)}) as relay:
        with socket.socket(fileno=os.dup(relay.descriptor)) as sandbox, socket.create_server(("127.0.0.1", 0)) as listener:
            before = own_open_files()
            socket.send_fds(sandbox, [b"1,2"], [listener.fileno()])
            await until(lambda: is_true(caplog.records))
            assert own_open_files() == before
    assert f"process {os.getpid()} of a sandbox reaches no services: [Errno 24] Too many open files. Raise the limit" in caplog.text
    assert failures == []


@pytest.mark.parametrize(("ports", "reason"), [(b"1", "Socket operation on non-socket"), (b"x", "invalid literal")])
async def test_service_relay_descriptor_that_is_no_listener_is_closed(
    ports: bytes, reason: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    failures: list[dict[str, object]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, failure: failures.append(failure))
    async with ServiceRelay({1: ("127.0.0.1", 1)}) as relay:
        with socket.socket(fileno=os.dup(relay.descriptor)) as sandbox, (tmp_path / "file").open("w") as file:
            before = own_open_files()
            socket.send_fds(sandbox, [ports], [file.fileno()])
            await until(lambda: is_true(caplog.records or failures))
            assert own_open_files() == before
    assert reason in caplog.text
    assert "Raise the limit" not in caplog.text
    assert failures == []


async def test_pass_bytes_connects_to_any_address_of_a_service(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = asyncio.get_running_loop()
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket() as refusing:
        listener.setblocking(False)
        refusing.bind(("127.0.0.1", 0))  # it refuses connections, and no other process gets the port
        addresses = [(socket.AF_INET, socket.SOCK_STREAM, 0, "", each.getsockname()) for each in (refusing, listener)]

        async def resolve(*_: object, **__: object) -> list[object]:
            return [*addresses]

        monkeypatch.setattr(loop, "getaddrinfo", resolve)
        connect = partial(asyncio.open_connection, "localhost", 80)
        agent, connection = socket.socketpair()
        with agent:
            agent.setblocking(False)
            passing = asyncio.create_task(pass_bytes(connection, connect))
            service, _ = await loop.sock_accept(listener)
            with service:
                await loop.sock_sendall(agent, b"asked")
                agent.shutdown(socket.SHUT_WR)
                assert [await loop.sock_recv(service, 100) for _ in range(2)] == [b"asked", b""]
                await loop.sock_sendall(service, b"answered")
            assert [await loop.sock_recv(agent, 100) for _ in range(2)] == [b"answered", b""]
        await asyncio.wait_for(passing, 10)
        addresses.pop()
        agent, connection = socket.socketpair()
        with agent:
            agent.setblocking(False)
            with pytest.raises(ConnectionRefusedError):
                await pass_bytes(connection, connect)
            assert await loop.sock_recv(agent, 100) == b""


async def test_pass_bytes_of_an_end_that_is_reset_closes_the_other() -> None:
    loop = asyncio.get_running_loop()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        agent, connection = socket.socketpair()
        with agent:
            agent.setblocking(False)
            passing = asyncio.create_task(pass_bytes(connection, partial(asyncio.open_connection, *listener.getsockname())))
            service, _ = await loop.sock_accept(listener)
            service.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            service.close()
            assert await asyncio.wait_for(loop.sock_recv(agent, 100), 10) == b""
            await asyncio.wait_for(passing, 10)
