"""Connections by the thousand that say nothing, or little: real clients are served all the same, and the idle ones are let go."""

from __future__ import annotations

import resource
import socket
import time
import urllib.request
import uuid
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from random import Random

import pytest

from spangrad.processes import Child
from spangrad.settings import StoreSettings
from tests.support.deliveries import Load, judge
from tests.support.load_spans import Rollouts
from tests.support.processes import open_files, resident_mib
from tests.support.servers import running_store, store_settings

CONNECTIONS = 2000
FEW_FILES = 1024
"""Number of files that a process may open by default on most systems."""
LET_GO_SECONDS = 90
"""Within which a connection that sends no whole request is ended."""
SLOWEST_SECONDS = 5
BEGUN = {
    "idle": b"",
    "half a head": b"POST %s HTTP/1.1\r\nHost: x\r\nContent-Ty",
    "half a body": b"POST %s HTTP/1.1\r\nHost: x\r\nContent-Type: application/x-protobuf\r\nContent-Length: 100000\r\n\r\n\x0a\x10",
}
"""Part of a request that each connection sends, by case; `%s` stands for the path, which depends on the port."""


@contextmanager
def flood(port: int, begin: bytes, count: int) -> Generator[list[socket.socket]]:
    """So many connections, each with the same beginning of a request; those that are refused are left out."""
    opened: list[socket.socket] = []
    try:
        for _ in range(count):
            connection = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
            # The kernel drops what does not fit a backlog, and asks again after one second, three, seven.
            connection.settimeout(20)
            try:
                connection.connect(("127.0.0.1", port))
                connection.sendall(begin)
            except OSError:
                connection.close()
                break
            opened.append(connection)
        yield opened
    finally:
        for connection in opened:
            connection.close()


def begun(kind: str, port: str) -> bytes:
    """The beginning of a request to a port."""
    return BEGUN[kind].replace(b"%s", b"/" if port == "clickhouse_port" else b"/v1/traces")


def left(connections: list[socket.socket], send: bytes) -> list[socket.socket]:
    """Those that the other side has not ended; each is sent a little more."""
    kept: list[socket.socket] = []
    for connection in connections:
        connection.setblocking(False)
        try:
            if connection.recv(1 << 16):
                continue
        except BlockingIOError:
            connection.send(send)
            kept.append(connection)
        except OSError:
            continue
    return kept


def require_served(store: StoreSettings, child: Child, chance: Random, report: Callable[[str], None], what: str) -> None:
    """Spans are stored, questions are answered, and neither takes long."""
    run = uuid.uuid4().hex[:8]
    load = Load(store.otlp_http_port, store.otlp_grpc_port, Rollouts(chance.randrange(2**32), run).bodies, connections=4, timeout=10)
    slowest, end = 0.0, time.monotonic() + 3
    while time.monotonic() < end:
        began = time.monotonic()
        urllib.request.urlopen(f"{store.url}/?query=SELECT+1", timeout=10).close()
        slowest = max(slowest, time.monotonic() - began)
    tally = load.stop(30)
    verdict = judge(store, run, tally.held, build=False)
    pid = child.process.pid
    report(f"{what}: {open_files(pid)} files, {resident_mib(pid)} MiB; {tally.bodies} bodies")
    report(f"slowest body {tally.slowest:.2f} s, slowest question {slowest:.2f} s")
    assert (tally.refused, tally.broken, verdict.faults) == ([], 0, {})
    assert max(slowest, tally.slowest) < SLOWEST_SECONDS


@pytest.mark.slow
@pytest.mark.parametrize("port", ["otlp_http_port", "clickhouse_port", "otlp_grpc_port"])
@pytest.mark.parametrize("begin", BEGUN)
def test_store_flooded_with_connections_serves_other_clients(
    tmp_path: Path, chance: Random, report: Callable[[str], None], port: str, begin: str
) -> None:
    store = store_settings(tmp_path / "data")
    with running_store(store, tmp_path / "log") as child, flood(getattr(store, port), begun(begin, port), CONNECTIONS) as connections:
        assert len(connections) == CONNECTIONS
        require_served(store, child, chance, report, f"{CONNECTIONS} of {begin!r} to {port}")
        child.check()


@pytest.mark.slow
@pytest.mark.parametrize("port", ["otlp_http_port", "clickhouse_port", "otlp_grpc_port"])
def test_store_with_more_connections_than_open_files_serves_other_clients(
    tmp_path: Path, chance: Random, report: Callable[[str], None], port: str
) -> None:
    store = store_settings(tmp_path / "data")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (FEW_FILES, hard))
    try:
        with running_store(store, tmp_path / "log") as child:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            with flood(getattr(store, port), b"", CONNECTIONS):
                require_served(store, child, chance, report, f"{CONNECTIONS} to {port}, at most {FEW_FILES} files")
                child.check()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.slow
def test_store_connections_without_whole_request_are_closed(tmp_path: Path, report: Callable[[str], None]) -> None:
    store = store_settings(tmp_path / "data")
    silent: dict[str, list[socket.socket]] = {}
    slow: dict[str, list[socket.socket]] = {}
    with running_store(store, tmp_path / "log"), ExitStack() as stack:
        for port in ("otlp_http_port", "clickhouse_port"):
            for kind in BEGUN:
                silent[f"{kind}, {port}"] = stack.enter_context(flood(getattr(store, port), begun(kind, port), 20))
            body = begun("half a body", port)
            slow[f"a byte a second, {port}"] = stack.enter_context(flood(getattr(store, port), body, 20))
        end = time.monotonic() + LET_GO_SECONDS
        while time.monotonic() < end:
            time.sleep(1)
            slow = {name: left(connections, b"x") for name, connections in slow.items()}
        kept = {name: len(left(connections, b"")) for name, connections in {**silent, **slow}.items()}
    report(f"of 20 each, after {LET_GO_SECONDS} s: {kept}")

    assert kept == dict.fromkeys(kept, 0)
