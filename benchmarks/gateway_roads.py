"""Roads from an agent to the engine, each with its record: our gateway with our store, and what a peer has to look like.

In: an empty directory, the upstream's address. Out: a `Road` that answers. Invariant: its processes end with the `with` block; only the
processes that carry the answers count as its cost, not those that keep the record.
"""

from __future__ import annotations

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
    """How an answer comes."""

    WHOLE = "whole"
    """In one piece."""
    STREAM = "stream"
    """Token by token."""


class Road(Protocol):
    """What the benchmark asks of whoever carries the answers."""

    url: str
    """Where agents ask, without /v1."""
    kinds: frozenset[Kind]
    """What is measured of it."""
    children: Sequence[Child]
    """The processes whose cost counts."""

    def recorded(self) -> int:
        """How many calls stand in the record."""
        ...

    def check(self, ids: Sequence[str], bodies: Bodies) -> Mapping[str, int]:
        """What must be 0, when calls with these ids have been answered and the record is complete."""
        ...


class Gateway:
    """Ours: `spangrad gateway`, which hands its spans to a `spangrad store`."""

    def __init__(self, gateway: Child, port: int, store: StoreSettings) -> None:
        self.kinds = frozenset(Kind)
        self.url = f"http://127.0.0.1:{port}{ROLLOUT}"
        self.children: Sequence[Child] = [gateway]
        self._store = connect(store)

    def recorded(self) -> int:
        """Rows of the table that every reader's view of calls is made of."""
        return int(self._store.query("SELECT count() FROM otel.calls").result_rows[0][0])

    def check(self, ids: Sequence[str], bodies: Bodies) -> Mapping[str, int]:
        """Every answer's id once, in what readers see and in what was delivered; and in each call what the engine read and sampled."""
        found = Counter(str(row[0]) for row in self._store.query("SELECT ResponseId FROM otel.v_calls").result_rows)
        delivered, spans = self._store.query("SELECT count(), uniqExact(SpanId) FROM otel.otel_traces").result_rows[0]
        right = "PromptIds = {prompt:Array(UInt32)} AND ResponseIds = {response:Array(UInt32)} AND Logprobs = {logprobs:Array(Float32)}"
        arrays = {"prompt": bodies.prompt_ids, "response": bodies.response_ids, "logprobs": bodies.logprobs}
        query = f"SELECT countIf(NOT ({right})), countIf(empty(`Versions.Version`) OR ErrorType != '') FROM otel.v_calls"
        wrong_ids, incomplete = self._store.query(query, parameters=arrays).result_rows[0]
        return {
            "lost": sum(one not in found for one in ids),
            "double": sum(count - 1 for count in found.values()) + int(delivered) - int(spans),
            "foreign": len(found.keys() - set(ids)),
            "repeated_answers": len(ids) - len(set(ids)),
            "wrong_ids": int(wrong_ids),
            "incomplete": int(incomplete),
        }


@contextmanager
def ours(directory: Path, upstream: str) -> Generator[Mapping[str, Road]]:
    """Store and gateway, each in a process of its own."""
    with embedded(directory) as store:
        gateway, port = _gateway(directory, upstream, store)
        try:
            wait_until(lambda: answers(f"http://127.0.0.1:{port}/readyz"), START_SECONDS, "the gateway", [gateway])
            yield {"ours": Gateway(gateway, port, store.settings)}
        finally:
            gateway.stop()


def _gateway(directory: Path, upstream: str, store: SpanStore) -> tuple[Child, int]:
    (port,) = free_ports(1)
    command = own_command(
        "gateway",
        *("--port", str(port), "--engine-url", upstream, "--policy", POLICY),
        *("--set", f"gateway.spill_path={directory / 'spill'}"),
        *("--set", f"store.otlp_endpoint={store.settings.otlp_endpoint}"),
    )
    return Child("gateway", command, directory / "gateway.log", inherit_settings=False), port
