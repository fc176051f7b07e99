"""A real OpenTelemetry Collector before a store, for tests: `spangrad collector` on free ports, started, ready, stopped.

In: a store's settings and a directory. Out: a `RunningCollector` that takes OTLP. Invariant: the process never outlives the test run.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from binaries import binary

from spangrad.processes import Child, answers, free_ports, own_command, wait_until
from spangrad.settings import StoreSettings

PORTS = ("otlp_http_port", "otlp_grpc_port", "health_port", "zpages_port")


def otelcol() -> str:
    """The Collector's program; skips the test where there is none."""
    return binary("SPANGRAD_OTELCOL", "otelcol-spangrad")


@dataclass(frozen=True)
class RunningCollector:
    """A Collector that takes OTLP, and how to start it again."""

    child: Child
    url: str
    grpc: str


def collector_values(directory: Path, **changes: object) -> dict[str, object]:
    """Settings of the section `collector`, on free ports, with the queue in `directory`."""
    return {**dict(zip(PORTS, free_ports(len(PORTS)), strict=True)), "queue_path": str(directory / "queue"), **changes}


def start_collector(store: StoreSettings, values: dict[str, object], log: Path) -> Child:
    """Start `spangrad collector`; it may not be ready yet."""
    token = store.token.get_secret_value() if store.token else None
    named = {"store.url": store.url, "store.token": token, **{f"collector.{key}": value for key, value in values.items()}}
    flags = [f"--set={key}={json.dumps(value)}" for key, value in named.items() if value is not None]
    return Child("spangrad collector", own_command("collector", *flags), log, {"SPANGRAD_OTELCOL": otelcol()}, inherit_settings=False)


@contextmanager
def running_collector(store: StoreSettings, values: dict[str, object], log: Path) -> Generator[RunningCollector]:
    """A Collector that answers, stopped at the end."""
    child = start_collector(store, values, log)
    try:
        wait_until(lambda: answers(f"http://127.0.0.1:{values['health_port']}"), 60, "the collector", [child], poll_seconds=0.05)
        yield RunningCollector(child, f"http://127.0.0.1:{values['otlp_http_port']}", f"127.0.0.1:{values['otlp_grpc_port']}")
    finally:
        child.stop(grace_seconds=10)


def post(url: str, body: bytes, content_type: str = "application/x-protobuf", **headers: str) -> int:
    """The status that an OTLP endpoint answers a body with."""
    request = urllib.request.Request(url, body, {"Content-Type": content_type, **headers})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        return error.code
