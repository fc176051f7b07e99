"""OTLP/HTTP receiver: traces and logs are stored, metrics are accepted and dropped.

Invariant: every refusal states in the request's own content type what is wrong, and whether to retry.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from aiohttp import web
from google.protobuf import json_format
from google.protobuf.message import Message
from google.rpc.code_pb2 import Code
from google.rpc.status_pb2 import Status
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceResponse

from collector.auth import Guardian
from collector.database import EngineRefusedError
from collector.encodings import EncodingError, TooLargeError, decompress
from collector.otlp.decode import JSON, PROTOBUF, UndecodableError
from collector.otlp.received import received
from collector.otlp.signals import LOGS, TRACES, Signal
from collector.write.ingest import MAX_BODY, Charge, Ingest, QueueFullError
from spangrad.http.client_timeouts import TooSlowError
from spangrad.http.server import site_guards

RETRY_SECONDS = 1
"""Delay after which a sender that was refused for now should retry."""


class HTTPReceiver:
    """Handlers of the three OTLP/HTTP endpoints."""

    def __init__(self, ingest: Ingest, guardian: Guardian) -> None:
        self._ingest = ingest
        self._guardian = guardian

    def application(self) -> web.Application:
        """Return the endpoints as an aiohttp application."""
        application = web.Application(middlewares=site_guards(self._guardian.token, "store"))
        application.router.add_post("/v1/traces", self._endpoint(self._storing(TRACES)))
        application.router.add_post("/v1/logs", self._endpoint(self._storing(LOGS)))
        application.router.add_post("/v1/metrics", self._endpoint(self._drop))
        return application

    def _endpoint(self, accept: Callable[[web.Request, Charge], Awaitable[Message]]) -> Callable[[web.Request], Awaitable[web.Response]]:
        async def handle(request: web.Request) -> web.Response:
            kind = request.content_type
            if not self._guardian.admits_bearer(request.headers.get("Authorization", "")):
                return _refuse(kind, 401, Code.UNAUTHENTICATED, "the bearer token is wrong or missing")
            if kind not in {PROTOBUF, JSON}:
                return _refuse(kind, 415, Code.INVALID_ARGUMENT, f"content type {kind!r} is not supported; send {PROTOBUF} or {JSON}")
            try:
                with Charge(self._ingest.budget) as charge:
                    return _respond(kind, 200, await accept(request, charge))
            except (UndecodableError, EncodingError) as error:
                return _refuse(kind, 400, Code.INVALID_ARGUMENT, str(error))
            except TooLargeError as error:
                return _refuse(kind, 413, Code.INVALID_ARGUMENT, str(error))
            except TooSlowError as error:
                # Not 408, after which OTLP's senders drop the body.
                return _refuse(kind, 503, Code.UNAVAILABLE, str(error))
            except QueueFullError:
                return _refuse(kind, 429, Code.RESOURCE_EXHAUSTED, "the store's queue is full; send again later")
            except EngineRefusedError as error:
                if error.of_the_data:
                    return _refuse(kind, 400, Code.INVALID_ARGUMENT, f"not stored: {error}")
                return _refuse(kind, 503, Code.UNAVAILABLE, f"not stored: {error}")

        return handle

    def _storing(self, signal: Signal) -> Callable[[web.Request, Charge], Awaitable[Message]]:
        async def accept(request: web.Request, charge: Charge) -> Message:
            body = await received(request, MAX_BODY, charge)
            encoding = request.headers.get("Content-Encoding", "")

            def unpack() -> bytes:
                return decompress(body, encoding, MAX_BODY, charge.grow_to)

            return await signal.store(self._ingest, unpack, request.content_type, charge)

        return accept

    async def _drop(self, request: web.Request, charge: Charge) -> Message:
        await received(request, MAX_BODY, charge)
        return ExportMetricsServiceResponse()


def _refuse(kind: str, status: int, code: int, message: str) -> web.Response:
    response = _respond(kind, status, Status(code=code, message=message))
    if status in {429, 503}:
        response.headers["Retry-After"] = str(RETRY_SECONDS)
    return response


def _respond(kind: str, status: int, message: Message) -> web.Response:
    if kind == JSON:
        return web.Response(status=status, text=json_format.MessageToJson(message, indent=None), content_type=JSON)
    return web.Response(status=status, body=message.SerializeToString(), content_type=PROTOBUF)
