"""Messages between an agent's process and the runner: those of one turn of the event loop are one write, whole and in order."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Generator

import pytest

from runner.workers.jobs import Job
from spangrad.agent.host import LoopWriter


@pytest.fixture
def pipe() -> Generator[tuple[int, int]]:
    read, write = os.pipe()
    yield read, write
    os.close(read)
    os.close(write)


async def test_loop_writer_messages_of_one_turn_are_one_write(pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    writes: list[bytes] = []
    monkeypatch.setattr("spangrad.agent.host.os.write", lambda file, data: writes.append(data) or len(data))
    writer = LoopWriter(pipe[1])
    for number in range(3):
        writer.put({"id": str(number)})
    assert writes == []
    await asyncio.sleep(0)
    writer.put({"id": "3"})
    await asyncio.sleep(0)
    assert [[json.loads(line)["id"] for line in data.splitlines()] for data in writes] == [["0", "1", "2"], ["3"]]


async def test_loop_writer_write_sends_waiting_messages(pipe: tuple[int, int]) -> None:
    writer = LoopWriter(pipe[1])
    writer.put({"id": "last"})
    writer.write()
    assert os.read(pipe[0], 100) == b'{"id": "last"}\n'


def test_job_message_has_every_field() -> None:
    job = Job("r/0", {"question": [1]}, "t", "b", None, "log", {"url": "u"})
    message = job.message()
    assert message == {
        "id": "r/0",
        "input": {"question": [1]},
        "traceparent": "t",
        "baggage": "b",
        "endpoint": None,
        "log": "log",
        "environment": {"url": "u"},
        "image": None,
    }
    assert message["input"] is job.input
