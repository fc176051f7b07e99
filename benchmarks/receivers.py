"""Receivers of spans: our store in a process of its own, alone or behind the real collector; a peer has the same interface.

In: an empty directory. Out: a `Receiver` that answers. Invariant: its processes end with the `with` block; its data stay.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from benchmarks.rollout_spans import SPANS_A_ROLLOUT, RolloutName
from benchmarks.workload import Workload
from spangrad.processes import Child, answers, free_ports, own_command, wait_until
from spangrad.settings import StoreSettings
from spangrad.store.clickhouse import connect

VARIABLE = "SPANGRAD_OTELCOL"
START_SECONDS = 60
DRAIN_SECONDS = 300


@dataclass(frozen=True, slots=True)
class Stored:
    """Span ids in one table, compared with those that it should hold."""

    table: str
    present: NDArray[np.uint64]
    """The span id of every row."""
    sent: NDArray[np.uint64]
    """Every span id that was sent and belongs there."""

    @property
    def lost(self) -> int:
        """Number of ids that were sent and are not in the table."""
        return len(np.setdiff1d(self.sent, self.present))

    @property
    def double(self) -> int:
        """Number of rows beyond one for each id."""
        return len(self.present) - len(np.unique(self.present))

    @property
    def foreign(self) -> int:
        """Number of ids that were never sent."""
        return len(np.setdiff1d(self.present, self.sent))


class Receiver(Protocol):
    """Interface of a receiver of spans that is measured."""

    children: Sequence[Child]
    """Processes whose CPU and memory count."""
    traces_url: str
    """URL to which bodies are posted."""

    def rollouts(self, workload: Workload, count: int) -> list[RolloutName]:
        """Return names of rollouts whose spans the receiver accepts."""
        ...

    def drained(self, spans: int) -> bool:
        """Return whether all `spans` acknowledged spans can be read."""
        ...

    def stored(self, workload: Workload, rollouts: Sequence[RolloutName]) -> list[Stored]:
        """Return the tables' content of these rollouts; called after the measurement."""
        ...

    def facts(self, workload: Workload, rollouts: int) -> Mapping[str, int | float]:
        """Return further figures; those whose names begin with `bad_` must be 0."""
        ...


class SpanStore:
    """Our store, with its data on disk."""

    def __init__(self, settings: StoreSettings, children: Sequence[Child], traces_url: str) -> None:
        self.settings = settings
        self.children = children
        self.traces_url = traces_url
        self._client = connect(settings)

    def rollouts(self, workload: Workload, count: int) -> list[RolloutName]:
        """Return names of the workload; the store accepts any name."""
        return workload.names(count)

    def drained(self, spans: int) -> bool:
        """Return whether the table of spans has at least `spans` rows."""
        return self._one("SELECT count() FROM otel.otel_traces") >= spans

    def stored(self, workload: Workload, rollouts: Sequence[RolloutName]) -> list[Stored]:
        """Return the content of the table of spans, and of the views that are read."""
        spans, calls = workload.span_ids(len(rollouts)), workload.call_ids(len(rollouts))
        return [
            Stored("otel_traces", self._ids("otel.otel_traces"), spans),
            Stored("spans", self._ids("spangrad.rollout_spans WHERE RowKind = 'span'"), spans),
            Stored("calls", self._ids("spangrad.calls"), calls),
        ]

    def facts(self, workload: Workload, rollouts: int) -> Mapping[str, int | float]:
        """Return the numbers of missing token ids and logprobs, and the size of the data on disk."""
        prompts, responses = workload.tokens(rollouts)
        total = "SELECT sum(length({})) FROM spangrad.calls"
        compressed, plain = self._client.query(
            "SELECT sum(data_compressed_bytes), sum(data_uncompressed_bytes) FROM system.parts WHERE active"
            " AND database IN ('otel', 'spangrad_internal')"
        ).result_rows[0]
        return {
            "bad_lost_prompt_ids": prompts - self._one(total.format("PromptIds")),
            "bad_lost_response_ids": responses - self._one(total.format("ResponseIds")),
            "bad_lost_logprobs": responses - self._one(total.format("Logprobs")),
            "disk_bytes_a_span": round(compressed / (rollouts * SPANS_A_ROLLOUT)),
            "compression": round(plain / max(compressed, 1), 2),
        }

    def _ids(self, table: str) -> NDArray[np.uint64]:
        column = self._client.query_arrow(f"SELECT reinterpretAsUInt64(reverse(unhex(SpanId))) AS id FROM {table}").column("id")
        return column.to_numpy().astype(np.uint64)

    def _one(self, query: str) -> int:
        return int(self._client.query(query).result_rows[0][0])


@contextmanager
def embedded(directory: Path) -> Generator[SpanStore]:
    """Run the store alone: bodies go to its own OTLP receiver."""
    settings, child = _store(directory)
    try:
        wait_until(lambda: answers(f"{settings.url}/ping"), START_SECONDS, "the store", [child])
        yield SpanStore(settings, [child], f"{settings.otlp_endpoint}/v1/traces")
    finally:
        child.stop()


@contextmanager
def through_otelcol(directory: Path) -> Generator[SpanStore]:
    """Run the store behind the real collector: acknowledged bodies are in the collector's file queue."""
    settings, store = _store(directory)
    children = [store]
    try:
        wait_until(lambda: answers(f"{settings.url}/ping"), START_SECONDS, "the store", children)
        collector, endpoint, health = _collector(directory, settings)
        children.append(collector)
        wait_until(lambda: answers(health), START_SECONDS, "the collector", children)
        yield SpanStore(settings, children, f"{endpoint}/v1/traces")
    finally:
        for child in reversed(children):
            child.stop()


def _collector(directory: Path, store: StoreSettings) -> tuple[Child, str, str]:
    """Return the collector, the URL at which it receives spans, and the URL of its health check."""
    grpc, http, health = free_ports(3)
    values = {
        "collector.otlp_grpc_port": grpc,
        "collector.otlp_http_port": http,
        "collector.health_port": health,
        "collector.queue_path": directory / "queue",
        "store.url": store.url,
    }
    settings = [word for key, value in values.items() for word in ("--set", f"{key}={value}")]
    # The binary is not a setting, so its variable is passed on.
    binary = {VARIABLE: os.environ[VARIABLE]} if VARIABLE in os.environ else {}
    child = Child("otelcol", own_command("collector", *settings), directory / "otelcol.log", binary, inherit_settings=False)
    return child, f"http://127.0.0.1:{http}", f"http://127.0.0.1:{health}"


def wait_drained(receiver: Receiver, spans: int) -> None:
    """Wait until everything acknowledged can be read."""
    wait_until(lambda: receiver.drained(spans), DRAIN_SECONDS, "what was acknowledged", receiver.children, poll_seconds=0.5)


def _store(directory: Path) -> tuple[StoreSettings, Child]:
    grpc, http, sql = free_ports(3)
    settings = StoreSettings(
        path=directory / "store",
        otlp_grpc_port=grpc,
        otlp_http_port=http,
        clickhouse_port=sql,
        url=f"http://127.0.0.1:{sql}",
        otlp_endpoint=f"http://127.0.0.1:{http}",
    )
    ports = ["--otlp-grpc-port", str(grpc), "--otlp-http-port", str(http), "--clickhouse-port", str(sql)]
    command = own_command("store", "--path", str(settings.path), *ports)
    return settings, Child("store", command, directory / "store.log", inherit_settings=False)
