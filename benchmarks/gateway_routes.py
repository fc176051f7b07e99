"""Routes from an agent to the engine, each with its record: our gateway with our store, and the interface of a peer's.

In: an empty directory, the upstream's address. Out: a `Setup` that answers. Invariant: its processes end with the `with` block; only the
processes that carry the answers count as its cost, not those that keep the record.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Protocol

from benchmarks.gateway_bodies import POLICY, Bodies
from benchmarks.receivers import SpanStore, embedded
from spangrad.processes import Child, answers, free_ports, own_command, wait_until
from spangrad.settings import StoreSettings
from spangrad.store.clickhouse import connect

START_SECONDS = 60
ROLLOUT = "/rollout/bench/attempt/0"


class Kind(StrEnum):
    """Form of a response."""

    WHOLE = "whole"
    """One JSON response."""
    STREAM = "stream"
    """A stream of one event a token."""


class Setup(Protocol):
    """Interface of a route that is measured: a proxy between agent and engine, with its record of calls."""

    url: str
    """URL for agents, without /v1."""
    kinds: frozenset[Kind]
    """Forms of responses that are measured."""
    children: Sequence[Child]
    """Processes whose CPU and memory count."""

    def recorded(self) -> int:
        """Return the number of calls in the record."""
        ...

    def check(self, ids: Sequence[str], bodies: Bodies) -> Mapping[str, int]:
        """Return counts that must be 0 once calls with these ids have been answered and the record is complete."""
        ...


class Gateway:
    """Our route: `spangrad gateway`, which exports its spans to a `spangrad store`."""

    def __init__(self, gateway: Child, port: int, store: StoreSettings) -> None:
        self.kinds = frozenset(Kind)
        self.url = f"http://127.0.0.1:{port}{ROLLOUT}"
        self.children: Sequence[Child] = [gateway]
        self._store = connect(store)

    def recorded(self) -> int:
        """Return the number of rows of the table below the view of calls."""
        return int(self._store.query("SELECT count() FROM spangrad_internal.calls").result_rows[0][0])

    def check(self, ids: Sequence[str], bodies: Bodies) -> Mapping[str, int]:
        """Count response ids that do not occur once in view and delivered spans, and calls without the engine's ids and logprobs."""
        occurrences = Counter(str(row[0]) for row in self._store.query("SELECT ResponseId FROM spangrad.calls").result_rows)
        delivered, spans = self._store.query("SELECT count(), uniqExact(SpanId) FROM otel.otel_traces").result_rows[0]
        right = "PromptIds = {prompt:Array(UInt32)} AND ResponseIds = {response:Array(UInt32)} AND Logprobs = {logprobs:Array(Float32)}"
        arrays = {"prompt": bodies.prompt_ids, "response": bodies.response_ids, "logprobs": bodies.logprobs}
        query = f"SELECT countIf(NOT ({right})), countIf(empty(`Versions.Version`) OR ErrorType != '') FROM spangrad.calls"
        wrong_ids, incomplete = self._store.query(query, parameters=arrays).result_rows[0]
        return {
            "lost": sum(one not in occurrences for one in ids),
            "double": sum(count - 1 for count in occurrences.values()) + int(delivered) - int(spans),
            "foreign": len(occurrences.keys() - set(ids)),
            "repeated_answers": len(ids) - len(set(ids)),
            "wrong_ids": int(wrong_ids),
            "incomplete": int(incomplete),
        }


@contextmanager
def ours(directory: Path, upstream: str) -> Generator[Mapping[str, Setup]]:
    """Run store and gateway, each in a process of its own."""
    with embedded(directory) as store:
        gateway, port = _gateway(directory, upstream, store)
        try:
            wait_until(lambda: answers(f"http://127.0.0.1:{port}/readyz"), START_SECONDS, "the gateway", [gateway])
            yield {"ours": Gateway(gateway, port, store.settings)}
        finally:
            gateway.stop()


class Bare:
    """A proxy that records nothing (benchmarks.gateway_bare), as a measure of the machine."""

    def __init__(self, child: Child, url: str) -> None:
        self.kinds = frozenset({Kind.WHOLE})
        self.url = url
        self.children: Sequence[Child] = [child]

    def recorded(self) -> int:
        """Return more than any benchmark sends: there is no record to wait for."""
        return sys.maxsize

    def check(self, ids: Sequence[str], bodies: Bodies) -> Mapping[str, int]:
        """Return nothing."""
        return {}


@contextmanager
def bare(directory: Path, upstream: str) -> Generator[Mapping[str, Setup]]:
    """Run the bare proxy in a process of its own."""
    (port,) = free_ports(1)
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "benchmarks.gateway_bare", "--port", str(port), "--upstream", upstream]
    child = Child("bare proxy", command, directory / "bare.log")
    try:
        wait_until(lambda: answers(f"{url}/is_paused"), START_SECONDS, "the bare proxy", [child])
        yield {"bare": Bare(child, url)}
    finally:
        child.stop()


def _gateway(directory: Path, upstream: str, store: SpanStore) -> tuple[Child, int]:
    (port,) = free_ports(1)
    command = own_command(
        "gateway",
        *("--port", str(port), "--engine-url", upstream, "--policy", POLICY),
        *("--set", f"gateway.spill_path={directory / 'spill'}"),
        *("--set", f"store.otlp_endpoint={store.settings.otlp_endpoint}"),
    )
    return Child("gateway", command, directory / "gateway.log", inherit_settings=False), port
