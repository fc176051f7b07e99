"""A client that sends bodies as OTLP asks: again and again, until each is acknowledged or refused for good.

In: bodies, and where to send them. Out: what was acknowledged, and how often that took more than one try.
Invariant: nothing is left half sent: `stop` returns when every body that was made has its answer.
"""

from __future__ import annotations

import http.client
import queue
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import grpc
from google.protobuf import json_format
from load_spans import PROTOBUF, Body, Held
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceResponse
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse

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
    """What became of the bodies."""

    acknowledged: list[Held] = field(default_factory=list)
    bodies: int = 0
    """Acknowledged."""
    again: int = 0
    """Answers that asked to come again."""
    broken: int = 0
    """Tries without an answer: nobody knows whether the body was stored."""
    refused: list[str] = field(default_factory=list)
    slowest: float = 0.0
    """Seconds of the longest try that was answered."""

    @property
    def held(self) -> Held:
        """What a store must hold."""
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
            while (said := self._timed(send, body)) == "":
                time.sleep(_PAUSE_SECONDS)
            with self._lock:
                if said is None:
                    self.tally.acknowledged.append(body.held)
                    self.tally.bodies += 1
                else:
                    self.tally.refused.append(said)
        close()

    def _timed(self, send: Send, body: Body) -> str | None:
        began = time.monotonic()
        said = send(body)
        if said is None:
            self.tally.slowest = max(self.tally.slowest, time.monotonic() - began)
        return said

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
    """What an answer says was not stored; None when all was."""
    message = _ANSWERS[signal]()
    if content_type == PROTOBUF:
        message.MergeFromString(answer)
    else:
        json_format.Parse(answer, message)
    told = str(message.partial_success)
    return f"partly refused: {told}" if told else None
