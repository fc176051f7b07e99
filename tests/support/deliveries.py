"""A client that sends until each body is acknowledged, the Collector before a store, and a check that each was stored once."""

from __future__ import annotations

import http.client
import queue
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
from google.protobuf import json_format
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceResponse
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse

from spangrad import semconv
from spangrad.processes import Child, answers, wait_until
from spangrad.settings import BuilderSettings, Selection, Settings, StoreSettings
from spangrad.store.clickhouse import connect
from spangrad.store.names import stored
from tests.support.load_spans import OWN_ID, PROTOBUF, Body, Held, Rollouts
from tests.support.servers import collector_values, otelcol, start_collector, start_store, store_answers, store_settings
from transition_builder.loop import build_once

# A client that sends bodies as OTLP asks: again and again, until each is acknowledged or refused for good.

AGAIN = frozenset({429, 502, 503, 504})
"""Answers after which OTLP has a client send again."""
_AGAIN_GRPC = frozenset({grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.DEADLINE_EXCEEDED})
_PAUSE_SECONDS = 0.05
_AHEAD = 100
_SERVICES = {"traces": "trace.v1.TraceService", "logs": "logs.v1.LogsService"}
_ANSWERS = {"traces": ExportTraceServiceResponse, "logs": ExportLogsServiceResponse}
_RECONNECT = [("grpc.initial_reconnect_backoff_ms", 100), ("grpc.min_reconnect_backoff_ms", 100), ("grpc.max_reconnect_backoff_ms", 300)]

Bodies = Callable[[Callable[[], bool]], Iterator[Body]]
"""Makes bodies until it is told that they are enough, and then those that belong to what it has begun."""
Send = Callable[[Body], str | None]
"""Sends once. None: acknowledged; empty: send again; else why it was refused for good."""


@dataclass
class Tally:
    """Outcomes of the bodies that a load has sent."""

    acknowledged: list[Held] = field(default_factory=list)
    bodies: int = 0
    """Acknowledged."""
    again: int = 0
    """Answers that asked to come again."""
    broken: int = 0
    """Tries without an answer, after which it is unknown whether the body was stored."""
    refused: list[str] = field(default_factory=list)
    slowest: float = 0.0
    """Seconds of the longest try that was answered."""

    @property
    def held(self) -> Held:
        """Rows that a store must hold of the acknowledged bodies."""
        return Held.of(self.acknowledged)


class Load:
    """Bodies on their way, over several connections."""

    def __init__(self, http_port: int, grpc_port: int, bodies: Bodies, *, connections: int = 14, timeout: float = 30) -> None:
        """Send `bodies` to the receivers on these ports, every fourth connection by gRPC, giving each try `timeout` seconds."""
        # Made ahead, so that a store that comes up is under full load at once.
        self._ready: queue.Queue[Body] = queue.Queue(_AHEAD)
        self._bodies = bodies
        self._enough = threading.Event()
        self._made = threading.Event()
        self._lock = threading.Lock()
        self._timeout = timeout
        self.tally = Tally()
        threading.Thread(target=self._make, daemon=True).start()
        self._threads = [
            threading.Thread(target=self._work, args=(grpc_port if place % 4 == 3 else http_port, place % 4 == 3), daemon=True)
            for place in range(connections)
        ]
        for thread in self._threads:
            thread.start()

    def stop(self, seconds: float = 120) -> Tally:
        """Have no further body made, and wait until each that was is answered."""
        self._enough.set()
        end = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))
        stuck = sum(thread.is_alive() for thread in self._threads)
        assert not stuck, f"{stuck} bodies had no answer within {seconds} s"
        return self.tally

    def _make(self) -> None:
        for body in self._bodies(self._enough.is_set):
            self._ready.put(body)
        self._made.set()

    def _work(self, port: int, by_grpc: bool) -> None:
        send, close = self._grpc(port) if by_grpc else self._http(port)
        while True:
            try:
                body = self._ready.get(timeout=0.1)
            except queue.Empty:
                if self._made.is_set():
                    break
                continue
            while (refusal := self._timed(send, body)) == "":
                time.sleep(_PAUSE_SECONDS)
            with self._lock:
                if refusal is None:
                    self.tally.acknowledged.append(body.held)
                    self.tally.bodies += 1
                else:
                    self.tally.refused.append(refusal)
        close()

    def _timed(self, send: Send, body: Body) -> str | None:
        began = time.monotonic()
        refusal = send(body)
        if refusal is None:
            self.tally.slowest = max(self.tally.slowest, time.monotonic() - began)
        return refusal

    def _http(self, port: int) -> tuple[Send, Callable[[], None]]:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=self._timeout)

        def send(body: Body) -> str | None:
            try:
                connection.request("POST", f"/v1/{body.signal}", body.content, dict(body.headers))
                response = connection.getresponse()
                answer = response.read()
            except (OSError, http.client.HTTPException):
                connection.close()
                self._count("broken")
                return ""
            if response.status in AGAIN:
                self._count("again")
                return ""
            if response.status != 200:
                return f"HTTP {response.status}: {answer[:300]!r}"
            return _rejected(body.signal, answer, body.headers["Content-Type"])

        return send, connection.close

    def _grpc(self, port: int) -> tuple[Send, Callable[[], None]]:
        channel = grpc.insecure_channel(f"127.0.0.1:{port}", options=_RECONNECT)
        methods: dict[str, Any] = {
            signal: channel.unary_unary(f"/opentelemetry.proto.collector.{service}/Export") for signal, service in _SERVICES.items()
        }

        def send(body: Body) -> str | None:
            try:
                answer: bytes = methods[body.signal](body.plain, timeout=self._timeout)
            except grpc.RpcError as error:
                code = error.code()  # type: ignore[attr-defined]
                if code not in _AGAIN_GRPC:
                    return f"gRPC {code}: {error}"
                self._count("again" if code == grpc.StatusCode.RESOURCE_EXHAUSTED else "broken")
                return ""
            return _rejected(body.signal, answer, PROTOBUF)

        return send, channel.close

    def _count(self, what: str) -> None:
        with self._lock:
            setattr(self.tally, what, getattr(self.tally, what) + 1)


def exported(port: int, body: Body) -> bytes:
    """The answer to a body that is sent once, by gRPC.

    Raises:
        grpc.RpcError: it is an error.
    """
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        return channel.unary_unary(f"/opentelemetry.proto.collector.{_SERVICES[body.signal]}/Export")(body.plain, timeout=30)


def _rejected(signal: str, answer: bytes, content_type: str) -> str | None:
    """Return an answer's message on the part of a body that was not stored; None when all was."""
    message = _ANSWERS[signal]()
    if content_type == PROTOBUF:
        message.MergeFromString(answer)
    else:
        json_format.Parse(answer, message)
    refusal = str(message.partial_success)
    return f"partly refused: {refusal}" if refusal else None


# Law 1, checked: what was acknowledged is stored, and counts once for every reader.


@dataclass(frozen=True)
class Verdict:
    """Result of the comparison of a store with the acknowledged bodies."""

    spans: int
    """Acknowledged."""
    calls: int
    delivered: int
    """Rows of otel_traces: more than spans, when some were delivered again after they had been stored."""
    missing: dict[str, int] = field(default_factory=dict)
    double: dict[str, int] = field(default_factory=dict)
    strange: dict[str, int] = field(default_factory=dict)
    """Number of rows, by kind, that were not acknowledged or hold values of others."""

    @property
    def faults(self) -> dict[str, dict[str, int]]:
        """Counts of missing, double and strange rows, by kind; empty when the store is right."""
        kinds = {"missing": self.missing, "double": self.double, "strange": self.strange}
        return {name: counts for name, counts in kinds.items() if counts}


def judge(store: StoreSettings, run: str, held: Held, *, build: bool = True) -> Verdict:
    """Compare a run with what must be there of it, a build of its transitions included."""
    settings = Settings(store=store, builder=BuilderSettings(selection=Selection(agents=f".*|{run}")))
    if build:
        build_once(settings)
    client = connect(store)

    def rows(sql: str) -> list[tuple[Any, ...]]:
        return [tuple(row) for row in client.query(sql).result_rows]

    def names(sql: str) -> list[str]:
        return [row[0] for row in rows(sql)]

    ours, raw = f"RunId = '{run}'", f"otel.otel_traces WHERE SpanAttributes['{semconv.RUN_ID}'] = '{run}'"
    calls = rows(f"SELECT CallId, PromptIds, ResponseIds, Logprobs FROM spangrad.calls WHERE {ours}")
    judged = "if(RowKind = 'evaluation_log', concat('log ', SpanId), SpanId)"
    compared: dict[str, tuple[Iterable[str], list[str]]] = {
        "spans": (held.spans, names(f"SELECT SpanId FROM spangrad.rollout_spans WHERE RowKind = 'span' AND {ours}")),
        "raw spans": (
            held.spans,
            names(f"SELECT DISTINCT SpanId FROM {raw}"),
        ),
        "rollouts": (held.rollouts, names(f"SELECT RolloutId FROM spangrad.attempts WHERE {ours}")),
        "calls": (held.calls, [row[0] for row in calls]),
        "evaluations": (
            held.evaluations,
            names(f"SELECT {judged} FROM spangrad_internal.rollout_spans FINAL WHERE {ours} AND RowKind != 'span'"),
        ),
        "records": (
            held.records,
            names(f"SELECT DISTINCT LogAttributes['{OWN_ID}'] FROM otel.otel_logs WHERE LogAttributes['{semconv.RUN_ID}'] = '{run}'"),
        ),
    }
    if build:
        compared["transitions"] = (held.calls, names(f"SELECT CallId FROM spangrad.transitions WHERE {ours}"))
        compared["drops"] = ([], names(f"SELECT concat(Reason, ' ', CallId) FROM spangrad.drops WHERE {ours}"))
    altered = names(
        f"SELECT SpanId FROM otel.otel_traces WHERE SpanAttributes['spangrad.run.id'] = '{run}' AND SpanAttributes['{OWN_ID}'] != SpanId"
    )
    wrong = [row[0] for row in calls if row[0] in held.calls and tuple(map(list, row[1:])) != held.calls[row[0]]]
    ((delivered,),) = rows(f"SELECT count() FROM {raw}")
    client.close()
    verdict = Verdict(len(held.spans), len(held.calls), delivered, strange=_counted({"values": len(altered) + len(wrong)}))
    for what, (expected, got) in compared.items():
        expected_ids, seen = set(expected), Counter(got)
        verdict.missing.update(_counted({what: len(expected_ids - seen.keys())}))
        verdict.double.update(_counted({what: sum(count > 1 for count in seen.values())}))
        verdict.strange.update(_counted({what: len(seen.keys() - expected_ids)}))
    return verdict


def lacking(store: StoreSettings, run: str, held: Held) -> int:
    """Return the number of spans, calls and records that are not there yet: an insert writes its spans first, then its views' rows."""
    there = 0
    with connect(store) as client:
        for table, attributes in (("otel_traces", "SpanAttributes"), ("otel_logs", "LogAttributes")):
            asked = f"SELECT uniqExact({attributes}['{OWN_ID}']) FROM {stored(table)} WHERE {attributes}['{semconv.RUN_ID}'] = '{run}'"
            there += int(client.query(asked).result_rows[0][0])
        there += int(client.query(f"SELECT uniqExact(CallId) FROM spangrad_internal.calls WHERE RunId = '{run}'").result_rows[0][0])
    return max(0, len(held.spans) + len(held.calls) + len(held.records) - there)


def _counted(counts: dict[str, int]) -> dict[str, int]:
    return {name: count for name, count in counts.items() if count}


# A store and the real Collector before it, for tests that kill either.

DRAIN_SECONDS = 90


class Pipeline:
    """A store and a Collector before it, each of which can be killed and started again."""

    def __init__(self, directory: Path, **changes: object) -> None:
        """Keep everything in `directory`; `changes` are settings of the Collector."""
        self.store = store_settings(directory / "data")
        self._values = collector_values(directory, **changes)
        self._directory = directory
        self.run = uuid.uuid4().hex[:8]
        self._children: dict[str, Child] = {}

    def start_store(self) -> None:
        """Start the store, and wait until it answers."""
        child = self._children["store"] = start_store(self.store, self._directory / "store.log")
        wait_until(lambda: store_answers(self.store), 60, "the store", [child], poll_seconds=0.02)

    def start_collector(self) -> None:
        """Start the Collector, and wait until it takes bodies."""
        child = self._children["collector"] = start_collector(self.store, self._values, self._directory / "collector.log")
        wait_until(lambda: answers(f"http://127.0.0.1:{self._values['health_port']}"), 60, "the collector", [child], poll_seconds=0.02)

    def kill(self, name: str) -> None:
        """End a part as a power cut would."""
        self._children[name].process.kill()
        self._children[name].process.wait()

    def close(self) -> None:
        """Stop both."""
        for child in reversed(self._children.values()):
            child.stop(grace_seconds=10)

    def load(self, seed: int) -> Load:
        """Bodies for the Collector."""
        return Load(*self._ports(), Rollouts(seed, self.run).bodies)

    def judge(self, tally: Tally, *, build: bool = True) -> Verdict:
        """Wait until all that was acknowledged has come through the Collector's queue, or long enough, then compare."""
        held, end = tally.held, time.monotonic() + DRAIN_SECONDS
        while lacking(self.store, self.run, held) and time.monotonic() < end:
            time.sleep(0.5)
        return judge(self.store, self.run, held, build=build)

    def _ports(self) -> tuple[int, int]:
        return int(str(self._values["otlp_http_port"])), int(str(self._values["otlp_grpc_port"]))


@contextmanager
def running_pipeline(directory: Path, **changes: object) -> Generator[Pipeline]:
    """Both parts, started; stopped at the end. Skips the test where there is no Collector."""
    otelcol()
    services = Pipeline(directory, **changes)
    try:
        services.start_store()
        services.start_collector()
        yield services
    finally:
        services.close()
