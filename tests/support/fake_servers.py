"""Servers in threads that stand for others: a sink of OTLP for a store, attempts' announcements for a gateway."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


class HttpServer:
    """A small HTTP server in a thread of its own; a subclass answers with (status, headers, body)."""

    def __init__(self, port: int = 0) -> None:
        fake = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def _handle(self) -> None:
                body = self.rfile.read(int(self.headers.get("content-length", 0)))
                status, headers, answer = fake.answer(self.command, self.path, dict(self.headers.items()), body)
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.send_header("content-length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            do_GET = do_POST = do_PUT = _handle  # noqa: N815  # http.server's names

            def log_message(self, format: str, *args: object) -> None:
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 256

        self._server = Server(("127.0.0.1", port), Handler)
        self.port = int(self._server.server_address[1])
        self.url = f"http://127.0.0.1:{self.port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)
        self._thread.start()

    def answer(self, method: str, path: str, headers: dict[str, str], body: bytes) -> tuple[int, dict[str, str], bytes]:
        raise NotImplementedError

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


@dataclass(frozen=True)
class SunkSpan:
    """A span as it arrived at an OtlpSink; ids are hex, a root's parent is ''."""

    name: str
    trace_id: str
    span_id: str
    parent_id: str
    status: str
    attributes: dict[str, object]
    events: tuple[tuple[str, dict[str, object]], ...]
    service: str
    scope: str
    seconds: float


class OtlpSink(HttpServer):
    """Takes spans by OTLP/HTTP, or answers with `refusals` (status, headers) first; `requests` holds each request's headers."""

    def __init__(self, port: int = 0, refusals: Sequence[tuple[int, dict[str, str]]] = ()) -> None:
        self.spans: list[SunkSpan] = []
        self.requests: list[dict[str, str]] = []
        self.refusals = list(refusals)
        self.changed = threading.Condition()
        super().__init__(port)

    def answer(self, method: str, path: str, headers: dict[str, str], body: bytes) -> tuple[int, dict[str, str], bytes]:
        with self.changed:
            self.requests.append({name.lower(): value for name, value in headers.items()})
            self.changed.notify_all()
            if path != "/v1/traces":
                return 404, {}, b"no such path"
            if self.refusals:
                status, more = self.refusals.pop(0)
                return status, more, b"not now"
            for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                service = str(_plain(resource.resource.attributes).get("service.name", ""))
                for scope in resource.scope_spans:
                    self.spans += [_sunk(span, service, scope.scope.name) for span in scope.spans]
            self.changed.notify_all()
        return 200, {"content-type": "application/x-protobuf"}, b""

    def wait_for(self, condition: Callable[[], bool], seconds: float = 10) -> None:
        with self.changed:
            assert self.changed.wait_for(condition, seconds), f"not within {seconds} s; names so far: {[span.name for span in self.spans]}"

    def named(self, name: str) -> list[SunkSpan]:
        with self.changed:
            return [span for span in self.spans if span.name == name]


def _plain(attributes: Iterable[Any]) -> dict[str, object]:
    return {one.key: _plain_value(one.value) for one in attributes}


def _plain_value(value: Any) -> object:
    kind = value.WhichOneof("value")
    return [_plain_value(one) for one in value.array_value.values] if kind == "array_value" else getattr(value, kind) if kind else None


def _sunk(span: Any, service: str, scope: str) -> SunkSpan:
    return SunkSpan(
        name=span.name,
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        status={0: "UNSET", 1: "OK", 2: "ERROR"}[span.status.code],
        attributes=_plain(span.attributes),
        events=tuple((event.name, _plain(event.attributes)) for event in span.events),
        service=service,
        scope=scope,
        seconds=(span.end_time_unix_nano - span.start_time_unix_nano) / 1e9,
    )


_ANSWER = "JSONExtractRaw(SpanAttributes['output.value'], 'choices', 1)"


IDS_OF_ANSWERS = f"""SELECT JSONExtract(SpanAttributes['output.value'], 'prompt_token_ids', 'Array(UInt32)') AS prompt,
    JSONExtract({_ANSWER}, 'token_ids', 'Array(UInt32)') AS response
FROM otel.otel_traces
WHERE TraceId IN ({{}}) AND position(SpanAttributes['output.value'], '"token_ids"') > 0
ORDER BY length(prompt)"""
"""Token ids in the answers that agents' spans keep, of the traces of a subquery or a list."""


@contextmanager
def raw_server(answers: list[bytes]) -> Generator[str]:
    """Yield the URL of a server that sends raw bytes to each connection and closes it: `answers` in turn, the last one again and again."""

    def serve() -> None:
        while True:
            try:
                connection, _ = server.accept()
            except OSError:
                return  # the test is over
            with connection:
                connection.recv(65536)
                connection.sendall(answers.pop(0) if len(answers) > 1 else answers[0])

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}"
        server.shutdown(socket.SHUT_RDWR)
        thread.join()
