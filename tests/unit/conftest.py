"""Keeps unit tests in one process: a test that starts another belongs into tests/integration or tests/faults."""

from __future__ import annotations

import sys

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

_STARTS = {"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.exec", "os.system", "os.spawn"}
"""Audit events of CPython that begin a process."""
_running: list[str] = []
"""The unit test that runs in this process, if any."""


class ProcessStartedError(AssertionError):
    """A unit test started a process."""


def _refuse(event: str, args: tuple[object, ...]) -> None:
    if _running and event in _STARTS:
        started = args[0] if args else ""
        if started == "fc-list":  # by matplotlib, which has listed no fonts yet for this user
            return
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


@pytest.fixture
def episode_spans(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    """Spans of episodes that the test plays."""
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer", provider.get_tracer)
    return exporter
