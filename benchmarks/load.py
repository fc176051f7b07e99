"""The client of the ingest benchmark, in a process of its own: bodies out, acknowledgements timed.

In: a file of bodies (workload.write_bodies) and the address; on standard input a line for each part of the bodies to send: connections,
first index, end index. Out: JSON lines on standard output: {"ready"}, then while sending {"acknowledged"}, and for each part its `Part`.
Invariant: each body is sent until it is acknowledged or refused for good; nothing is sent again that was answered.
"""

from __future__ import annotations

import argparse
import http.client
import json
import mmap
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse

from benchmarks.workload import read_bodies

HEADERS = {"Content-Type": "application/x-protobuf"}
REPORT_SECONDS = 0.2
TIMEOUT_SECONDS = 300
_RETRIABLE = (429, 502, 503, 504)


@dataclass(slots=True)
class Part:
    """Result of sending one part of the bodies."""

    seconds: float = 0.0
    bodies: int = 0
    """Number of acknowledged bodies."""
    bytes: int = 0
    """Bytes of the acknowledged bodies."""
    waits: int = 0
    """Number of responses that asked to retry later."""
    resends: int = 0
    """Bodies sent again because a connection broke: the receiver may have received them already."""
    refused: list[str] = field(default_factory=list)
    """Error of each body that was refused permanently or in part."""
    milliseconds: list[float] = field(default_factory=list)
    """Milliseconds from the first byte sent to the acknowledgement, one value a body."""
    cpu_seconds: float = 0.0
    """CPU seconds of this process."""


class Sender:
    """Sends a part of the bodies over several connections, one body at a time on each."""

    def __init__(self, url: str, bodies: list[memoryview], connections: int) -> None:
        parts = urlsplit(url)
        self._host, self._port, self._path = parts.hostname or "127.0.0.1", parts.port or 80, parts.path
        self._bodies = bodies
        self._connections = connections
        self._lock = threading.Lock()
        self._part = Part()

    def send(self, first: int, last: int) -> Part:
        """Send the bodies [first, last), and report how far it is."""
        self._part = part = Part()
        order = iter(range(first, last))
        threads = [threading.Thread(target=self._work, args=(order,)) for _ in range(min(self._connections, last - first))]
        wall, cpu = time.perf_counter(), time.process_time()
        for thread in threads:
            thread.start()
        for thread in threads:
            while thread.is_alive():
                thread.join(REPORT_SECONDS)
                print_json({"acknowledged": part.bodies})
        part.seconds, part.cpu_seconds = time.perf_counter() - wall, time.process_time() - cpu
        return part

    def _work(self, order: Iterator[int]) -> None:
        connection = http.client.HTTPConnection(self._host, self._port, timeout=TIMEOUT_SECONDS)
        while True:
            with self._lock:
                index = next(order, None)
            if index is None:
                connection.close()
                return
            began = time.perf_counter()
            reason = self._deliver(connection, self._bodies[index])
            took = time.perf_counter() - began
            with self._lock:
                if reason:
                    self._part.refused.append(reason)
                else:
                    self._part.bodies += 1
                    self._part.bytes += len(self._bodies[index])
                    self._part.milliseconds.append(round(took * 1000, 3))

    def _deliver(self, connection: http.client.HTTPConnection, body: memoryview) -> str:
        """Send until there is an answer that counts; why it was refused, or nothing."""
        while True:
            try:
                connection.request("POST", self._path, body, HEADERS)
                response = connection.getresponse()
                answer = response.read()
            except (OSError, http.client.HTTPException):
                connection.close()
                with self._lock:
                    self._part.resends += 1
                time.sleep(0.1)
                continue
            if response.status in _RETRIABLE:
                with self._lock:
                    self._part.waits += 1
                time.sleep(float(response.headers.get("Retry-After", "0.1")))
                continue
            if response.status != 200:
                return f"HTTP {response.status}: {answer[:200]!r}"
            rejected = ExportTraceServiceResponse.FromString(answer).partial_success
            return f"{rejected.rejected_spans} spans rejected: {rejected.error_message}" if rejected.rejected_spans else ""


def print_json(value: object) -> None:
    """Print a value as one JSON line for the process that measures."""
    print(json.dumps(value), flush=True)


def main() -> None:
    """Send what standard input asks for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bodies", type=Path, required=True)
    parser.add_argument("--url", required=True)
    arguments = parser.parse_args()
    with arguments.bodies.open("rb") as file:
        data = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    bodies = read_bodies(data)
    print_json({"ready": len(bodies)})
    for line in sys.stdin:
        connections, first, last = map(int, line.split())
        print_json(asdict(Sender(arguments.url, bodies, connections).send(first, last)))


if __name__ == "__main__":
    main()
