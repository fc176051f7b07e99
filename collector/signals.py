"""The signals that are stored, and how each becomes rows and answers; what both OTLP protocols have in common.

In: a body. Out: rows, and after the commit the response message. Invariant: what could not be stored is named in the response.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from google.protobuf.message import Message
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest, ExportLogsServiceResponse
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest, ExportTraceServiceResponse

from collector.decode import decode
from collector.ingest import Charge, Ingest, Inserter
from collector.rows import Rows, encode_logs, encode_traces


@dataclass(frozen=True, slots=True)
class Signal:
    """Traces or logs."""

    request: type[Message]
    response: type[Message]
    encode: Callable[[Any], Rows]
    rejected_field: str
    inserter: Callable[[Ingest], Inserter]

    async def store(self, ingest: Ingest, unpack: Callable[[], bytes], content_type: str, charge: Charge) -> Message:
        """Store a request's body; returns the response, after the commit.

        Raises:
            UndecodableError: the body is not such a request.
            QueueFullError: the budget is spent.
            EngineRefusedError: the rows could not be committed.
        """
        rows = await ingest.store(self.inserter(ingest), lambda: self.encode(decode(self.request, unpack(), content_type)), charge)
        if not rows.rejected:
            return self.response()
        return self.response(partial_success={self.rejected_field: rows.rejected, "error_message": rows.reason})


TRACES = Signal(ExportTraceServiceRequest, ExportTraceServiceResponse, encode_traces, "rejected_spans", lambda ingest: ingest.traces)
LOGS = Signal(ExportLogsServiceRequest, ExportLogsServiceResponse, encode_logs, "rejected_log_records", lambda ingest: ingest.logs)
