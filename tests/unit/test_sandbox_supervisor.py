"""Supervisor of a sandbox: requests that fail or wait leave it able to answer the next ones."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from collections.abc import Generator

import pytest

from runner.sandboxes.supervisor import SandboxSupervisor
from tests.support.processes import own_open_files


@pytest.fixture
def supervisor() -> Generator[SandboxSupervisor]:
    inner, outer = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with inner, outer:
        yield SandboxSupervisor(inner)


def test_supervisor_start_beyond_the_limit_of_processes_leaves_no_file_open(
    supervisor: SandboxSupervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> int:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr(os, "fork", refuse)
    before = own_open_files()
    with pytest.raises(BlockingIOError):
        supervisor.do_start([b"", b"", b"1", b"true"], [], [])
    assert own_open_files() == before


async def test_supervisor_connect_to_a_port_that_accepts_nothing_does_not_wait(supervisor: SandboxSupervisor) -> None:
    opened: list[int] = []
    with socket.create_server(("127.0.0.1", 0), backlog=0) as listener:
        port = b"%d" % listener.getsockname()[1]
        for _ in range(3):  # the first ones fill the queue of the listener
            await asyncio.wait_for(asyncio.to_thread(supervisor.do_connect, [port], [], opened), 30)
    for descriptor in opened:
        os.close(descriptor)
