"""OTLP/gRPC receiver: traces and logs are stored, metrics are accepted and dropped.

Invariant: no message is read of a call without a valid token, and few at once; a sender that should retry gets a retry delay, as OTLP
requires.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import grpc.aio
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.duration_pb2 import Duration
from google.rpc.error_details_pb2 import RetryInfo
from google.rpc.status_pb2 import Status
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceResponse

from collector.auth import Guardian
from collector.database import EngineRefusedError
from collector.otlp.decode import PROTOBUF, UndecodableError
from collector.otlp.receiver_http import RETRY_SECONDS
from collector.otlp.signals import LOGS, TRACES, Signal
from collector.write.ingest import MAX_BODY, Charge, Ingest, QueueFullError
from spangrad.http.client_timeouts import BODY_BYTES_A_SECOND, BODY_SECONDS

MAX_READING = 64
"""Most messages that are read at once: each may unpack to MAX_BODY before it is charged to the budget."""
_READ_SECONDS = BODY_SECONDS + MAX_BODY / BODY_BYTES_A_SECOND
"""Time limit of reading a message: that of the largest one, since gRPC does not report how much has arrived."""
_LONGEST_MESSAGE = 500
"""Most characters of the database's error that are passed on: it may quote a whole value, and clients turn metadata beyond 8 KiB, in which
a message stands twice, into another error, after which they drop the spans."""
_SERVICES = "/opentelemetry.proto.collector.{0}.v1.{1}Service/Export"
_Export = Callable[[Any, Any], Awaitable[bytes]]


class GRPCReceiver(grpc.GenericRpcHandler):
    """Handler of the three OTLP services; bodies stay bytes until a decoding thread takes them."""

    def __init__(self, ingest: Ingest, guardian: Guardian) -> None:
        self._ingest = ingest
        self._guardian = guardian
        self._reading = 0
        self._methods: dict[str, _Export] = {
            _SERVICES.format("trace", "Trace"): self._storing(TRACES),
            _SERVICES.format("logs", "Logs"): self._storing(LOGS),
            _SERVICES.format("metrics", "Metrics"): self._drop,
        }

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        """Return the handler of a method; None when there is none."""
        method = self._methods.get(str(handler_call_details.method))
        # As a handler of a stream, so that the call begins before its message is read and unpacked.
        return grpc.stream_unary_rpc_method_handler(method) if method else None

    def server(self, address: str) -> grpc.aio.Server:
        """Return a server for an address, to be started on the running loop."""
        options = [
            ("grpc.max_receive_message_length", MAX_BODY),
            # A sender's further calls wait at the sender.
            ("grpc.max_concurrent_streams", MAX_READING),
            ("grpc.so_reuseport", 0),
        ]
        server = grpc.aio.server(handlers=[self], options=options)
        server.add_insecure_port(address)
        return server

    def _storing(self, signal: Signal) -> _Export:
        async def export(_: Any, context: Any) -> bytes:
            body = await self._message(context)
            try:
                with Charge(self._ingest.budget) as charge:
                    charge.grow_to(len(body))
                    return (await signal.store(self._ingest, lambda: body, PROTOBUF, charge)).SerializeToString()
            except UndecodableError as error:
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
            except QueueFullError:
                await _abort_with_retry(context, grpc.StatusCode.RESOURCE_EXHAUSTED, "the store's queue is full; send again later")
            except EngineRefusedError as error:
                message = f"not stored: {error}"[:_LONGEST_MESSAGE]
                if error.of_the_data:
                    await context.abort(grpc.StatusCode.INVALID_ARGUMENT, message)
                await _abort_with_retry(context, grpc.StatusCode.UNAVAILABLE, message)
            raise AssertionError("context.abort() raises")

        return export

    async def _drop(self, _: Any, context: Any) -> bytes:
        await self._message(context)
        return ExportMetricsServiceResponse().SerializeToString()

    async def _message(self, context: Any) -> bytes:
        """Read the message of a call that may send one; abort other calls."""
        metadata: dict[str, str] = dict(context.invocation_metadata())
        if not self._guardian.admits_bearer(metadata.get("authorization", "")):
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "the bearer token is wrong or missing")
        if self._reading >= MAX_READING:
            await _abort_with_retry(context, grpc.StatusCode.RESOURCE_EXHAUSTED, f"{MAX_READING} messages are being read; send again later")
        self._reading += 1
        try:
            async with asyncio.timeout(_READ_SECONDS):
                message = await context.read()
                if isinstance(message, bytes):
                    return message
        except TimeoutError:
            await _abort_with_retry(context, grpc.StatusCode.UNAVAILABLE, f"the message did not come within {_READ_SECONDS:g} s")
        finally:
            self._reading -= 1
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the call has no message")
        raise AssertionError("context.abort() raises")


async def _abort_with_retry(context: Any, code: grpc.StatusCode, message: str) -> None:
    """Abort a call with a retry delay: without one, OTLP senders drop what was refused as RESOURCE_EXHAUSTED."""
    detail = AnyMessage()
    detail.Pack(RetryInfo(retry_delay=Duration(seconds=RETRY_SECONDS)))
    status = Status(code=code.value[0], message=message, details=[detail])
    await context.abort(code, message, (("grpc-status-details-bin", status.SerializeToString()),))
