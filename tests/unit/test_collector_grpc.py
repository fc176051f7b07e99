"""OTLP/gRPC before a message is read: who may send one, how many at once, and for how long."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import pytest
from google.rpc.error_details_pb2 import RetryInfo
from google.rpc.status_pb2 import Status
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest, ExportTraceServiceResponse

from collector.auth import Guardian
from collector.database import EngineRefusedError
from collector.otlp import receiver_grpc
from collector.otlp.receiver_grpc import GRPCReceiver
from collector.write.ingest import Ingest, Inserter, Refused
from spangrad.processes import free_ports

EXPORT = "/opentelemetry.proto.collector.trace.v1.TraceService/Export"
WRITER = (("authorization", "Bearer write-secret"),)
BODY = ExportTraceServiceRequest().SerializeToString()
RETRY = (grpc.StatusCode.RESOURCE_EXHAUSTED, 1)


def accept(bodies: Sequence[Any]) -> list[Refused]:
    return [Refused()] * len(bodies)


@asynccontextmanager
async def served(commit: Callable[[Sequence[Any]], list[Refused]] = accept) -> AsyncGenerator[str]:
    """A receiver that stores nothing; gives its address."""
    ingest = Ingest(*(Inserter(name, commit, 0) for name in ("traces", "logs")), 2**20)
    address = f"127.0.0.1:{free_ports(1)[0]}"
    server = GRPCReceiver(ingest, Guardian("write-secret")).server(address)
    await server.start()
    yield address
    await server.stop(0)
    await asyncio.to_thread(ingest.close)


def sender(address: str) -> grpc.aio.Channel:
    """A connection of its own."""
    return grpc.aio.insecure_channel(address, [("grpc.use_local_subchannel_pool", 1)])


async def nothing() -> AsyncIterator[bytes]:
    """The messages of a sender that sends none, and does not say so."""
    await asyncio.get_running_loop().create_future()
    yield b""


def begin(channel: grpc.aio.Channel) -> Any:
    """A call whose message does not come."""
    return channel.stream_unary(EXPORT)(nothing(), metadata=WRITER)


async def refusal(call: Any) -> tuple[grpc.StatusCode, int]:
    """Status of a refused call, and after how many seconds to come again; 0 for never."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await asyncio.wait_for(call, 30)
    detail = RetryInfo()
    for key, value in caught.value.trailing_metadata() or ():
        if key == "grpc-status-details-bin":
            assert isinstance(value, bytes)
            Status.FromString(value).details[0].Unpack(detail)
    return caught.value.code(), detail.retry_delay.seconds


@pytest.mark.parametrize("metadata", [(), (("authorization", "Bearer wrong"),)])
async def test_grpc_call_without_right_token_is_refused_before_message_is_read(metadata: Any) -> None:
    async with served() as address, sender(address) as channel:
        assert await refusal(channel.stream_unary(EXPORT)(nothing(), metadata=metadata)) == (grpc.StatusCode.UNAUTHENTICATED, 0)
        assert await refusal(channel.unary_unary(EXPORT)(BODY, metadata=metadata)) == (grpc.StatusCode.UNAUTHENTICATED, 0)


async def test_grpc_call_beyond_max_reading_is_asked_to_retry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receiver_grpc, "MAX_READING", 2)
    async with served() as address, sender(address) as slow, sender(address) as other:
        calls = list[Any]()
        async with asyncio.timeout(60):
            while await answered(other) != RETRY:
                # A slow call that arrived beside the other one was refused itself.
                calls = [call for call in calls if not call.done()]
                calls += [begin(slow) for _ in range(2 - len(calls))]
                await asyncio.sleep(0.01)
            for call in calls:
                call.cancel()
            while await answered(other) == RETRY:  # noqa: ASYNC110 - there is no event
                await asyncio.sleep(0.01)
        assert await answered(other) == ExportTraceServiceResponse().SerializeToString()


async def answered(channel: grpc.aio.Channel) -> Any:
    """The answer to a whole call, or how it was refused."""
    call = channel.unary_unary(EXPORT)(BODY, metadata=WRITER)
    return await call if await call.code() is grpc.StatusCode.OK else await refusal(call)


async def test_grpc_many_concurrent_calls_are_answered() -> None:
    async with served() as address:
        channels = [sender(address) for _ in range(receiver_grpc.MAX_READING)]
        assert await asyncio.gather(*(answered(channel) for channel in channels for _ in range(4))) == [b""] * 4 * len(channels)
        for channel in channels:
            await channel.close()


async def test_grpc_message_that_does_not_arrive_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receiver_grpc, "_READ_SECONDS", 0.05)
    async with served() as address, sender(address) as channel:
        assert await refusal(begin(channel)) == (grpc.StatusCode.UNAVAILABLE, 1)


async def test_grpc_call_without_message_answers_invalid_argument() -> None:
    async def none() -> AsyncIterator[bytes]:
        for message in ():
            yield message

    async with served() as address, sender(address) as channel:
        assert await refusal(channel.stream_unary(EXPORT)(none(), metadata=WRITER)) == (grpc.StatusCode.INVALID_ARGUMENT, 0)


@pytest.mark.parametrize(("code", "refused"), [(241, (grpc.StatusCode.UNAVAILABLE, 1)), (27, (grpc.StatusCode.INVALID_ARGUMENT, 0))])
async def test_grpc_error_that_quotes_a_long_value_keeps_status(code: int, refused: tuple[grpc.StatusCode, int]) -> None:
    def fail(_: Sequence[Any]) -> list[Refused]:
        raise EngineRefusedError(f"Code: {code}. DB::Exception: cannot parse {'é' * 100_000}", code)

    async with served(fail) as address, sender(address) as channel:
        assert await answered(channel) == refused
