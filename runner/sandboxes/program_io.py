"""Inputs and outputs of programs in sandboxes: pipes that are fed and read without blocking, up to a limit."""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass
from typing import Any

_CHUNK_BYTES = 2**16
MOST_BYTES = 2**20
"""Bytes of an output that are kept unless told otherwise."""


@dataclass(frozen=True, slots=True)
class ProgramResult:
    """End of a program in a sandbox."""

    exit_code: int
    """Exit code; below 0: it was ended by that signal."""
    stdout: bytes
    stderr: bytes
    truncated: bool
    """True if an output was longer than what was kept."""
    timed_out: bool
    """True if it exceeded its time and was killed."""


async def feed(descriptor: int, data: bytes) -> None:
    """Write a program's input until it reads no more."""
    loop = asyncio.get_running_loop()
    os.set_blocking(descriptor, False)
    try:
        while data:
            try:
                data = data[os.write(descriptor, data) :]
            except BlockingIOError:
                await _until_ready(loop.add_writer, loop.remove_writer, descriptor)
    except BrokenPipeError:
        pass  # it reads no more


async def read_all(descriptor: int, most_bytes: int) -> tuple[bytes, bool]:
    """Read a pipe to its end, or until cancelled; return what is kept, and True if more came."""
    loop = asyncio.get_running_loop()
    os.set_blocking(descriptor, False)
    kept, more = bytearray(), False
    try:
        while True:
            try:
                data = os.read(descriptor, _CHUNK_BYTES)
            except BlockingIOError:
                await _until_ready(loop.add_reader, loop.remove_reader, descriptor)
                continue
            if not data:
                break
            more |= len(kept) + len(data) > most_bytes
            kept += data[: most_bytes - len(kept)]
    except asyncio.CancelledError:
        pass  # a process that was left behind holds the pipe
    return bytes(kept), more


async def _until_ready(add: Any, remove: Any, descriptor: int) -> None:
    ready = asyncio.Event()
    add(descriptor, ready.set)
    try:
        await ready.wait()
    finally:
        remove(descriptor)
