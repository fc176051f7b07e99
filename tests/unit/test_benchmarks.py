"""The ingest benchmark's own honesty: the same bodies for everybody, and checks that see what is missing, double or refused."""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest, ExportTraceServiceResponse
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from benchmarks import rollout_spans
from benchmarks.ingest import report
from benchmarks.load import Sender
from benchmarks.measure import Measured, check, memory
from benchmarks.meter import Meter, Sample
from benchmarks.receivers import Stored
from benchmarks.rollout_spans import SPANS_A_ROLLOUT, Ids, Mix, RolloutName
from benchmarks.workload import SPANS_A_BODY, Workload, read_bodies, write_bodies
from spangrad import semconv

MIXES = [Workload(3, mix, ids) for mix in Mix for ids in Ids]


def _spans(bodies: list[bytes]) -> list[tuple[str, Span]]:
    """Every span with the name of its scope."""
    return [
        (scope.scope.name, span)
        for body in bodies
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans
        for scope in resource.scope_spans
        for span in scope.spans
    ]


class TestWorkload:
    @pytest.fixture(autouse=True)
    def _short_corpus(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Write few words before each workload: its million takes longer than the bodies of a few rollouts."""
        monkeypatch.setattr(rollout_spans, "_CORPUS_TOKENS", 1 << 15)

    @pytest.mark.parametrize("workload", MIXES, ids=str)
    def test_workload_same_seed_gives_same_bodies(self, workload: Workload) -> None:
        names = workload.names(7)
        bodies = list(workload.bodies(names))
        assert bodies == list(workload.bodies(names))
        assert next(Workload(4, workload.mix, workload.ids).bodies(names)) != bodies[0]

    def test_workload_bodies_differ_only_by_rollout_names(self) -> None:
        workload = Workload(3)
        first_names, second_names = workload.names(5), [RolloutName(f"ro-{number:012d}", f"at-{number:08d}") for number in range(5)]
        (body,), (other) = list(workload.bodies(first_names)), next(workload.bodies(second_names))
        for own, their in zip(first_names, second_names, strict=True):
            body = body.replace(own.rollout.encode(), their.rollout.encode()).replace(own.attempt.encode(), their.attempt.encode())
        assert body == other

    @pytest.mark.parametrize("workload", MIXES, ids=str)
    def test_workload_ids_equal_those_of_its_bodies(self, workload: Workload) -> None:
        spans = _spans(list(workload.bodies(workload.names(12))))
        calls = [span for scope, span in spans if scope == semconv.GATEWAY_SCOPE]
        assert sorted(int.from_bytes(span.span_id) for _, span in spans) == sorted(workload.span_ids(12).tolist())
        assert sorted(int.from_bytes(span.span_id) for span in calls) == sorted(workload.call_ids(12).tolist())
        assert len({span.span_id for _, span in spans}) == len(spans) == 12 * SPANS_A_ROLLOUT

    @pytest.mark.parametrize("mix", Mix)
    def test_workload_tokens_equal_those_of_its_bodies(self, mix: Mix) -> None:
        workload = Workload(3, mix)
        attributes = [
            {item.key: item.value.bytes_value for item in span.attributes}
            for scope, span in _spans(list(workload.bodies(workload.names(5))))
            if scope == semconv.GATEWAY_SCOPE
        ]
        held = [
            sum(len(call[key]) // 4 for call in attributes)
            for key in (semconv.INPUT_TOKEN_IDS, semconv.OUTPUT_TOKEN_IDS, semconv.OUTPUT_LOGPROBS)
        ]
        prompts, responses = workload.tokens(5)
        assert held == [prompts, responses, responses]

    def test_read_bodies_returns_bodies_written(self, tmp_path: Path) -> None:
        workload = Workload(3)
        names = workload.names(7)
        written = write_bodies(tmp_path / "bodies", workload, names)
        read = [bytes(body) for body in read_bodies(memoryview((tmp_path / "bodies").read_bytes()))]
        assert read == list(workload.bodies(names))
        assert [len(read), sum(map(len, read))] == [2, written]
        assert 3_000 < written / (7 * SPANS_A_ROLLOUT) < 3_700


class TestChecks:
    def test_check_of_complete_run_counts_nothing(self) -> None:
        ids = np.array([1, 2, 3], np.uint64)
        part = {"bodies": 2, "refused": [], "resends": 0}
        assert check([Stored("t", ids[::-1], ids)], 2 * SPANS_A_BODY, [part]) == dict.fromkeys(
            ("lost", "double", "foreign", "unacknowledged", "refused", "resends"), 0
        )

    def test_check_counts_each_kind_of_fault(self) -> None:
        sent = np.array([1, 2, 3, 4], np.uint64)
        tables = [Stored("t", np.array([1, 2, 2, 2, 9], np.uint64), sent), Stored("v", np.array([2, 3, 4], np.uint64), sent)]
        parts = [{"bodies": 1, "refused": ["HTTP 400"], "resends": 2}, {"bodies": 1, "refused": [], "resends": 1}]
        assert check(tables, 3 * SPANS_A_BODY, parts) == {
            "lost": 3,
            "double": 2,
            "foreign": 1,
            "unacknowledged": SPANS_A_BODY,
            "refused": 1,
            "resends": 3,
        }

    def test_ingest_report_counts_failures_of_peer(self) -> None:
        figures = {"cpu_us_settled": 50.0, "spans_per_s": 1000, "p50_ms": 4.0, "p99_ms": 8.0}
        slower = {"cpu_us_settled": 400.0, "spans_per_s": 500, "p50_ms": 2.0, "p99_ms": 8.0}
        result = report(Measured(figures, {"lost": 0}, []), {"peer": Measured(slower, {"lost": 5}, [])})
        assert result["ratio"] == {"cpu": 8.0, "throughput": 2.0, "p50": 0.5, "p99": 1.0}
        assert result["checked"] == {"lost": 0, "peer_lost": 5}

    def test_memory_growth_is_measured_from_a_fifth_to_the_end(self) -> None:
        resident = (100, 180, 200, 220, 900, 250, 250, 250, 250, 240, 300)
        samples = [Sample(at, 0.0, rss * 10**6, (80 + 10 * at) * 10**6, at * 100) for at, rss in enumerate(resident)]
        assert memory(samples, samples[0], 1000) == {
            "rss_mb_before": 100,
            "rss_mb_fifth": 200,
            "rss_mb": 240,
            "rss_mb_peak": 900,
            "rss_growth": 0.2,
            "anonymous_mb_before": 20,
            "anonymous_mb_fifth": 100,
            "anonymous_mb": 70,
            "anonymous_mb_peak": 780,
            "anonymous_growth": -0.3,
        }


def test_meter_separates_mapped_file_pages_from_anonymous(tmp_path: Path) -> None:
    file = tmp_path / "queue"
    file.write_bytes(bytes(32 * 2**20))
    meter = Meter([os.getpid()], lambda: 0)
    before = meter.now()
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        assert not any(mapped[:: mmap.PAGESIZE])
        after = meter.now()
    meter.close()
    assert after.mapped - before.mapped >= 30 * 2**20
    assert after.anonymous - before.anonymous < 15 * 2**20


class _Receiver(BaseHTTPRequestHandler):
    """Answers by the body: `again` once with 429, `bad` with 400, `part` with a partial success, all else with 200."""

    protocol_version = "HTTP/1.1"
    asked: dict[bytes, int]

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.asked[body] = self.asked.get(body, 0) + 1
        status, answer = 200, b""
        if body == b"again" and self.asked[body] == 1:
            status = 429
        elif body == b"bad":
            status = 400
        elif body == b"part":
            response = ExportTraceServiceResponse()
            response.partial_success.rejected_spans = 2
            response.partial_success.error_message = "too late"
            answer = response.SerializeToString()
        self.send_response(status)
        self.send_header("Retry-After", "0.01")
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def receiver() -> Iterator[tuple[str, dict[bytes, int]]]:
    """The address of a receiver, and how often it was asked to take each body."""
    asked: dict[bytes, int] = {}
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Receiver", (_Receiver,), {"asked": asked}))
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}/v1/traces", asked
    server.shutdown()
    server.server_close()


def test_sender_retries_when_asked_and_counts_refusals(receiver: tuple[str, dict[bytes, int]]) -> None:
    url, asked = receiver
    bodies = [memoryview(body) for body in (b"unsent", b"one", b"again", b"bad", b"part", b"two")]
    part = Sender(url, bodies, 2).send(1, 6)
    assert asked == {b"one": 1, b"again": 2, b"bad": 1, b"part": 1, b"two": 1}
    assert [part.bodies, part.bytes, part.waits, part.resends] == [3, 11, 1, 0]
    assert sorted(part.refused) == ["2 spans rejected: too late", "HTTP 400: b''"]
    assert len(part.milliseconds) == 3
    assert all(taken > 0 for taken in part.milliseconds)
