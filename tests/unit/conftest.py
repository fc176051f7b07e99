"""Keeps unit tests in one process: a test that starts another belongs into tests/integration or tests/faults."""

from __future__ import annotations

import sys

import pytest

_STARTS = {"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.exec", "os.system", "os.spawn"}
"""Audit events of CPython that begin a process."""
_running: list[str] = []
"""The unit test that runs in this process, if any."""


class ProcessStartedError(AssertionError):
    """A unit test started a process."""


def _refuse(event: str, args: tuple[object, ...]) -> None:
    if _running and event in _STARTS:
        started = args[0] if args else ""
        raise ProcessStartedError(f"{_running[-1]} starts a process ({event} {started}): move it to tests/integration.")


sys.addaudithook(_refuse)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> object:
    """Know which test runs, its fixtures included."""
    if "tests/unit" not in item.path.as_posix():
        return (yield)
    _running.append(item.nodeid)
    try:
        return (yield)
    finally:
        _running.pop()
