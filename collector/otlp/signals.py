"""Signals that are stored, with the preparation of their bodies and their responses; shared by both OTLP protocols.

In: a body. Out: rows, and after the commit the response message. Invariant: the response counts what could not be stored, and says why.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from google.protobuf.message import Message
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest, ExportLogsServiceResponse
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest, ExportTraceServiceResponse

from collector.otlp.decode import decode
from collector.otlp.requests import trace_body
from collector.otlp.rows import encode_logs
from collector.write.ingest import Body, Charge, Ingest, Inserter


@dataclass(frozen=True, slots=True)
class Signal:
    """A signal that is stored: traces or logs."""

    request: type[Message]
    response: type[Message]
    prepare: Callable[[Any, bytes], Body]
    """Function that makes the inserter's body of the message and its protobuf bytes."""
    rejected_field: str
    inserter: Callable[[Ingest], Inserter[Any]]

    async def store(self, ingest: Ingest, unpack: Callable[[], bytes], content_type: str, charge: Charge) -> Message:
        """Store a request's body; return the response after the commit.

        Raises:
            UndecodableError: the body is not such a request.
            QueueFullError: the budget is spent.
            EngineRefusedError: the rows could not be committed.
        """

        def prepare() -> Body:
            return self.prepare(*decode(self.request, unpack(), content_type))

        refused = await ingest.store(self.inserter(ingest), prepare, charge)
        if not refused.count:
            return self.response()
        return self.response(partial_success={self.rejected_field: refused.count, "error_message": refused.reason})


TRACES = Signal(ExportTraceServiceRequest, ExportTraceServiceResponse, trace_body, "rejected_spans", lambda ingest: ingest.traces)
LOGS = Signal(
    ExportLogsServiceRequest,
    ExportLogsServiceResponse,
    lambda request, _: encode_logs(request),
    "rejected_log_records",
    lambda ingest: ingest.logs,
)
