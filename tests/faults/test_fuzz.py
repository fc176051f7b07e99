"""Fuzzing of the store's receivers: each broken body gets an answer of its protocol, and sound bodies are stored right.

FAULTS_BODIES is the number of bodies, 10,000 unless set; the quick run sends a few hundred. Sound bodies are sent at the same time, large
enough that the engine decodes broken and sound ones together.
"""

from __future__ import annotations

import gzip
import http.client
import os
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import grpc
import lz4.block
import pytest
from google.protobuf import json_format
from google.rpc.status_pb2 import Status
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceResponse
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest, ExportMetricsServiceResponse
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse

from spangrad.processes import wait_until
from spangrad.settings import StoreSettings
from tests.support.deliveries import Load, judge
from tests.support.load_spans import JSON, PROTOBUF, Rollouts, otlp_json
from tests.support.otlp import LZ4, ZSTD, frame, logs, packed, traces
from tests.support.processes import height_mib
from tests.support.servers import running_store, store_answers, store_settings

BODIES = int(os.environ.get("FAULTS_BODIES", "10000"))
SLOWEST_SECONDS = 50
SENDERS = 4
_RESPONSES: dict[str, Any] = {
    "traces": ExportTraceServiceResponse,
    "logs": ExportLogsServiceResponse,
    "metrics": ExportMetricsServiceResponse,
}
_SERVICES = {"traces": "trace.v1.TraceService", "logs": "logs.v1.LogsService", "metrics": "metrics.v1.MetricsService"}
_REFUSALS = frozenset({grpc.StatusCode.INVALID_ARGUMENT})
_STATEMENTS = (
    b"SELECT number, toString(number) AS t FROM numbers(10) WHERE number % 2 = 1 ORDER BY t FORMAT JSONEachRow",
    b"INSERT INTO default.fuzzed FORMAT JSONEachRow\n" + b'{"n": 1, "t": "x", "m": {"a": "b"}, "l": [1, 2]}\n' * 3,
    b"INSERT INTO default.fuzzed (n, t) VALUES (1, 'x'), (2, 'y')",
    b"WITH a AS (SELECT 1 AS n UNION ALL SELECT 2) SELECT a.n, t.m['k'] FROM a LEFT JOIN default.fuzzed AS t USING (n) FORMAT Native",
    b"CREATE TABLE IF NOT EXISTS default.other (n UInt8, s String DEFAULT 'x') ENGINE = MergeTree ORDER BY n",
    b"SELECT arrayMap(x -> x + 1, [1, 2, 3]), map('a', 1), '\\'quoted\\'' /* comment */ -- end\n",
    b"DESCRIBE TABLE otel.otel_traces",
    b"SELECT {n:UInt8} + 1",
    b"EXPLAIN SELECT * FROM spangrad.rollout_spans WHERE RowKind = 'span' AND RunId = 'x' LIMIT 1 BY TraceId",
)


# Sound bodies made unsound: bits flipped, pieces cut, doubled, moved, lengths made to lie; the same for the same seed.

_ODD_BYTES = (0, 1, 0x7F, 0x80, 0xFF, 0x0A, 0x22, 0x27, 0x5C, 0x7B)
_ODD_LENGTHS = (b"\x00", b"\x7f", b"\xff\x01", b"\xff\xff\xff\xff\x07", b"\xff" * 9 + b"\x01", b"\xff" * 12)
_ODD_TEXTS = (
    b"\x00",
    b"\xc3\x28",
    b"NaN",
    b"-1",
    b"1e999",
    b"null",
    b"{}",
    b"[[[[",
    b'"',
    b"'",
    b"`",
    b"\xed\xa0\x80",
    b"99999999999999999999",
)
_LONGEST = 1 << 16


class Mutator:
    """Makes bodies out of a corpus."""

    def __init__(self, random: Random, corpus: Sequence[bytes]) -> None:
        self._random = random
        self._corpus = corpus
        self._ways: tuple[Callable[[bytearray], None], ...] = (
            *(self._flip, self._flip, self._set, self._cut, self._drop, self._double, self._move, self._splice, self._lie, self._odd),
        )

    def body(self) -> bytes:
        """One body."""
        mutant = bytearray(self._random.choice(self._corpus))
        for _ in range(self._random.choice((1, 1, 1, 2, 3, 8))):
            if mutant:
                self._random.choice(self._ways)(mutant)
        return bytes(mutant[:_LONGEST])

    def _at(self, mutant: bytearray) -> int:
        return self._random.randrange(len(mutant))

    def _piece(self, mutant: bytearray) -> slice:
        at = self._at(mutant)
        return slice(at, at + self._random.choice((1, 2, 8, 64)))

    def _flip(self, mutant: bytearray) -> None:
        mutant[self._at(mutant)] ^= 1 << self._random.randrange(8)

    def _set(self, mutant: bytearray) -> None:
        mutant[self._at(mutant)] = self._random.choice(_ODD_BYTES)

    def _cut(self, mutant: bytearray) -> None:
        del mutant[self._at(mutant) :]

    def _drop(self, mutant: bytearray) -> None:
        del mutant[self._piece(mutant)]

    def _double(self, mutant: bytearray) -> None:
        piece = self._piece(mutant)
        mutant[piece] = mutant[piece] * 2

    def _move(self, mutant: bytearray) -> None:
        piece = self._piece(mutant)
        moved = mutant[piece]
        del mutant[piece]
        at = self._random.randint(0, len(mutant))
        mutant[at:at] = moved

    def _splice(self, mutant: bytearray) -> None:
        other = self._random.choice(self._corpus)
        at = self._random.randrange(len(other) or 1)
        mutant[self._at(mutant) :] = other[at:]

    def _lie(self, mutant: bytearray) -> None:
        at = self._at(mutant)
        mutant[at : at + 1] = self._random.choice(_ODD_LENGTHS)

    def _odd(self, mutant: bytearray) -> None:
        at = self._at(mutant)
        mutant[at:at] = self._random.choice(_ODD_TEXTS)


@dataclass(frozen=True)
class Door:
    """A way into the store that mutated bodies are sent by."""

    name: str
    corpus: Sequence[bytes]
    send: Callable[[http.client.HTTPConnection, bytes], str]
    """Sends a body; what kind of answer came. Fails when it is none that the protocol knows."""
    port: int


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["OTLP/HTTP", "OTLP/gRPC", "ClickHouse"])
def test_store_receivers_fuzzed_10000_times_answer_and_store_sound_bodies(
    tmp_path: Path, chance: Random, report: Callable[[str], None], kind: str
) -> None:
    fuzz(tmp_path, chance, report, kind, BODIES)


@pytest.mark.parametrize("kind", ["OTLP/HTTP", "OTLP/gRPC", "ClickHouse"])
def test_store_receivers_fuzzed_120_times_answer_and_store_sound_bodies(tmp_path: Path, report: Callable[[str], None], kind: str) -> None:
    # The same ones each time: what chance finds is for the slow tests.
    fuzz(tmp_path, Random(0), report, kind, 120)


def fuzz(directory: Path, chance: Random, report: Callable[[str], None], kind: str, bodies: int) -> None:
    """Send broken bodies among sound ones, and look at every answer, and at what became of the sound ones."""
    store, run = store_settings(directory / "data"), uuid.uuid4().hex[:8]
    with running_store(store, directory / "log") as child:
        doors = _doors(store)[kind]
        load = Load(store.otlp_http_port, store.otlp_grpc_port, Rollouts(chance.randrange(2**32), run).bodies, connections=6)
        began = time.monotonic()
        senders = [_Sender(doors, Random(chance.randrange(2**32)), bodies // SENDERS) for _ in range(SENDERS)]
        for sender in senders:
            sender.start()
        for sender in senders:
            sender.join()
        took, slowest = time.monotonic() - began, max(sender.slowest for sender in senders)
        wait_until(lambda: sum(len(held.spans) for held in load.tally.acknowledged) > 1000, 120, "sound bodies to speak of", [child])
        tally = load.stop()
        child.check()
        height = height_mib(child.process.pid)
        assert store_answers(store)
        verdict = judge(store, run, tally.held, build=False)
    answers = sum((sender.told for sender in senders), Counter[str]())
    report(f"{answers.total()} bodies in {took:.0f} s, slowest answer {slowest:.2f} s, {height} MiB at most: {dict(answers.most_common())}")
    report(f"among them {tally.bodies} sound bodies; {verdict}")

    assert [failure for sender in senders for failure in sender.failed] == []
    assert answers.total() == bodies // SENDERS * SENDERS
    assert slowest < SLOWEST_SECONDS
    assert (tally.refused, verdict.faults) == ([], {})


class _Sender(threading.Thread):
    """Sends mutated bodies, one after the other."""

    def __init__(self, doors: Sequence[Door], random: Random, bodies: int) -> None:
        super().__init__(daemon=True)
        self._ways = [(door, Mutator(random, door.corpus), _connection(door.port)) for door in doors]
        self._random = random
        self._bodies = bodies
        self.told: Counter[str] = Counter()
        self.slowest = 0.0
        self.failed: list[str] = []

    def run(self) -> None:
        for _ in range(self._bodies):
            door, mutator, connection = self._random.choice(self._ways)
            body = mutator.body()
            began = time.monotonic()
            try:
                answer = door.send(connection, body)
            except Exception as error:
                answer = "no answer that the protocol knows"
                self.failed.append(f"{door.name}, after {time.monotonic() - began:.1f} s: {error!r:.400}; body {body.hex()[:4000]}")
                connection.close()
            self.slowest = max(self.slowest, time.monotonic() - began)
            self.told[f"{door.name}: {answer}"] += 1


def _doors(store: StoreSettings) -> dict[str, list[Door]]:
    otlp: dict[str, list[Any]] = {
        "traces": [traces(seed, 6, odd=0.5) for seed in range(12)],
        "logs": [logs(seed, 6, odd=0.5) for seed in range(12)],
        "metrics": [ExportMetricsServiceRequest()],
    }
    plain = {signal: [request.SerializeToString() for request in requests] for signal, requests in otlp.items()}
    as_json = {signal: [otlp_json(request) for request in requests] for signal, requests in otlp.items()}
    channel = grpc.insecure_channel(f"127.0.0.1:{store.otlp_grpc_port}")
    by_http = [
        *(Door(f"{signal} protobuf", plain[signal], _http(signal, PROTOBUF), store.otlp_http_port) for signal in otlp),
        *(Door(f"{signal} JSON", as_json[signal], _http(signal, JSON), store.otlp_http_port) for signal in otlp),
        Door("traces gzip", [gzip.compress(one) for one in plain["traces"]], _http("traces", PROTOBUF, "gzip"), store.otlp_http_port),
        Door("logs zstd", [packed("zstd", one) for one in plain["logs"]], _http("logs", PROTOBUF, "zstd"), store.otlp_http_port),
    ]
    by_grpc = [Door(signal, plain[signal], _grpc(channel, signal), store.otlp_grpc_port) for signal in otlp]
    return {"OTLP/HTTP": by_http, "OTLP/gRPC": by_grpc, "ClickHouse": _clickhouse_doors(store)}


def _clickhouse_doors(store: StoreSettings) -> list[Door]:
    connection = _connection(store.clickhouse_port)
    table = b"CREATE TABLE default.fuzzed (n UInt8, t String, m Map(String, String), l Array(UInt32)) ENGINE = MergeTree ORDER BY n"
    assert _ask(connection, table, "") == (200, b"")
    row = b"SELECT toUInt8(number) AS n, toString(n) AS t, map('a', t) AS m, [toUInt32(n)] AS l FROM numbers(5) FORMAT Native"
    native = _ask(connection, row, "")[1]
    insert = "query=INSERT+INTO+default.fuzzed+FORMAT+Native"
    frames = [frame(LZ4, _lz4(native), size=len(native)), frame(ZSTD, packed("zstd", native), size=len(native))]
    doors = {
        "statements": (_STATEMENTS, "param_n=1"),
        "statements gzip": ([gzip.compress(one) for one in _STATEMENTS], "param_n=1&"),
        "Native": ([native], insert),
        "frames": (frames, f"{insert}&decompress=1"),
        "answers in frames": (_STATEMENTS, "param_n=1&compress=1"),
    }
    port = store.clickhouse_port
    return [Door(name, corpus, _clickhouse(parameters, "gzip" in name), port) for name, (corpus, parameters) in doors.items()]


def _http(signal: str, kind: str, encoding: str = "") -> Callable[[http.client.HTTPConnection, bytes], str]:
    headers = {"Content-Type": kind, **({"Content-Encoding": encoding} if encoding else {})}

    def send(connection: http.client.HTTPConnection, body: bytes) -> str:
        connection.request("POST", f"/v1/{signal}", body, headers)
        answer = connection.getresponse()
        content = answer.read()
        message = _RESPONSES[signal]() if answer.status == 200 else Status()
        if kind == JSON:
            json_format.Parse(content, message)
        else:
            message.ParseFromString(content)
        # 5xx and 429 would make a sender come again with the same body, for ever.
        assert answer.status == 200 or (answer.status in {400, 413} and message.message), (answer.status, content[:300])
        return str(answer.status)

    return send


def _grpc(channel: grpc.Channel, signal: str) -> Callable[[http.client.HTTPConnection, bytes], str]:
    export: Any = channel.unary_unary(f"/opentelemetry.proto.collector.{_SERVICES[signal]}/Export")

    def send(_: http.client.HTTPConnection, body: bytes) -> str:
        try:
            _RESPONSES[signal]().ParseFromString(export(body, timeout=60))
        except grpc.RpcError as error:
            code: grpc.StatusCode = error.code()  # type: ignore[attr-defined]
            if code not in _REFUSALS or not error.details():  # type: ignore[attr-defined]
                raise
            return code.name
        return "OK"

    return send


def _clickhouse(parameters: str, zipped: bool) -> Callable[[http.client.HTTPConnection, bytes], str]:
    def send(connection: http.client.HTTPConnection, body: bytes) -> str:
        status, content = _ask(connection, body, f"{parameters}&max_execution_time=5&max_result_rows=100000", zipped)
        if "compress=1" in parameters and "decompress" not in parameters:
            return str(status)
        assert status == 200 or content.startswith(b"Code: "), (status, content[:300])
        return str(status)

    return send


def _ask(connection: http.client.HTTPConnection, body: bytes, parameters: str, zipped: bool = False) -> tuple[int, bytes]:
    connection.request("POST", f"/?{parameters}", body, {"Content-Encoding": "gzip"} if zipped else {})
    answer = connection.getresponse()
    content = answer.read()
    assert answer.status == 200 or answer.headers["X-ClickHouse-Exception-Code"]
    return answer.status, content


def _connection(port: int) -> http.client.HTTPConnection:
    return http.client.HTTPConnection("127.0.0.1", port, timeout=60)


def _lz4(body: bytes) -> bytes:
    return lz4.block.compress(body, store_size=False)
