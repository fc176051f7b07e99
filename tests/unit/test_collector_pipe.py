"""Pipe between a statement and its answer: it is untouched until bytes are written, also while a reader waits."""

from __future__ import annotations

import asyncio
import os

from collector.sql.pipe import Pipe


async def test_pipe_with_waiting_reader_is_untouched_until_written() -> None:
    pipe = Pipe()
    assert pipe.is_untouched()
    waiting = asyncio.create_task(pipe.read())
    await asyncio.sleep(0)
    assert pipe.is_untouched(), "a statement that takes no OUTFILE clause runs without it, however long it took to say so"
    os.write(pipe.descriptor, b"some")
    assert not pipe.is_untouched()
    assert await waiting == b"some"
    assert not pipe.is_untouched(), "it was read, and cannot be answered twice"
    pipe.close_writing()
    assert await pipe.read() == b""
    pipe.close_reading()


async def test_pipe_with_empty_answer_is_untouched() -> None:
    pipe = Pipe()
    waiting = asyncio.create_task(pipe.read())
    await asyncio.sleep(0)
    assert pipe.is_untouched()
    pipe.close_writing()
    assert await waiting == b""
    pipe.close_reading()
