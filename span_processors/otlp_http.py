"""Sending of one OTLP/HTTP request with spans, and reading of its response.

In: an encoded `ExportTraceServiceRequest`. Out: whether it was accepted, and if not, whether to retry.
Invariant: only the standard library is used, so that no instrumentation of an agent's HTTP client records the request.
"""

from __future__ import annotations

import http.client
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import SplitResult, urlsplit

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse

from spangrad.http.retries import RETRIED_STATUSES, retry_after

_REQUEST_TIMEOUT_SECONDS = 10.0


@dataclass(slots=True)
class OtlpRefusal:
    """Reason for which a request was not acknowledged."""

    reason: str
    retry: bool
    after_seconds: float | None = None
    """Wait that the endpoint requested, in seconds. None: it requested none."""


class Poster:
    """Sender of request bodies over one persistent connection."""

    def __init__(self, url: str, headers: Mapping[str, str], certificate: str | None) -> None:
        self._parts: SplitResult = urlsplit(url)
        if self._parts.scheme not in {"http", "https"} or not self._parts.hostname:
            raise ValueError(f"{url!r} is not an http(s) URL: give the OTLP endpoint as http://HOST:PORT")
        self._target = self._parts.path + (f"?{self._parts.query}" if self._parts.query else "")
        self._headers = {"content-type": "application/x-protobuf", "user-agent": "spangrad", **headers}
        self._certificate = certificate
        self._connection: http.client.HTTPConnection | None = None

    def forget_connection(self) -> None:
        """Drop the connection without closing it: it belongs to the process that opened it."""
        self._connection = None

    def __call__(self, body: bytes) -> int | OtlpRefusal:
        """Post one body, once.

        Returns:
            Number of spans that an accepting endpoint rejected, or the reason for which it did not accept.
        """
        kept = self._connection is not None
        try:
            status, after, answer = self._exchange(body)
        except (OSError, http.client.HTTPException, ValueError) as error:
            self._connection = None
            # A failure of TLS may be a ValueError too.
            if isinstance(error, ValueError | http.client.InvalidURL) and not isinstance(error, OSError):
                # The error's own text may show a header's value, which is a secret.
                remedy = "fix the host, port and path of the URL, and the headers"
                return OtlpRefusal(f"no request can be made ({type(error).__name__}): {remedy}", retry=False)
            if kept:  # the endpoint may have closed an idle connection, which says nothing about its health
                return self(body)
            return OtlpRefusal(f"{type(error).__name__}: {error}", retry=True)
        if 200 <= status < 300:
            return _rejected(answer)
        reason = f"HTTP {status} {answer[:200].decode(errors='replace').strip()}"
        # A span is made once, so that any fault of the endpoint itself is waited out.
        return OtlpRefusal(reason, retry=status in RETRIED_STATUSES or status >= 500, after_seconds=after)

    def _exchange(self, body: bytes) -> tuple[int, float | None, bytes]:
        if self._connection is None:
            self._connection = self._connect()
        self._connection.request("POST", self._target, body, self._headers)
        response = self._connection.getresponse()
        return response.status, retry_after(response.headers.get("retry-after")), response.read()

    def _connect(self) -> http.client.HTTPConnection:
        host, port = self._parts.hostname or "", self._parts.port
        if self._parts.scheme == "https":
            secure = ssl.create_default_context(cafile=self._certificate)
            return http.client.HTTPSConnection(host, port, timeout=_REQUEST_TIMEOUT_SECONDS, context=secure)
        return http.client.HTTPConnection(host, port, timeout=_REQUEST_TIMEOUT_SECONDS)


def _rejected(answer: bytes) -> int:
    """Return the number of spans that a 2xx response reports as rejected; 0 for a response that is not OTLP's."""
    try:
        return ExportTraceServiceResponse.FromString(answer).partial_success.rejected_spans
    except Exception:  # protobuf's DecodeError has several homes
        return 0
