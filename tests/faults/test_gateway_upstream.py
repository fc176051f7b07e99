"""The gateway between an engine and clients that misbehave: each call leaves one span, with what had come by then; other calls go on."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Mapping

import pytest
from _pytest.mark.structures import ParameterSet

from benchmarks.gateway_bodies import ANSWER_TOKENS, text_of
from tests.support.gateways import (
    BODIES,
    END,
    EVENTS,
    JSON_HEAD,
    PLAIN_EVENTS,
    QUESTION,
    STREAM_HEAD,
    WHOLE,
    Answer,
    Exchange,
    Stage,
    Upstream,
    answer_whole,
    before_a_sound_call,
    between,
    chunk,
    nothing,
    of_the_first,
    recorded,
)
from tests.support.gateways import ask_raw as ask
from tests.support.otlp import FullDisk

STALLED_SECONDS = 0.5


async def unreachable(upstream_does: Answer, *, stream: bool = False) -> Upstream:
    """A call of which nothing comes back: its client is told so, and its span says it."""
    async with between(upstream_does) as (stage, upstream):
        status, body, _ = await ask(stage, stream=stream)
        (span,) = await stage.spans()
    assert (status, json.loads(body)["error"]["type"]) == (502, "engine_unreachable")
    assert recorded(span) == nothing("engine_unreachable")
    return upstream


class TestDeath:
    @pytest.mark.parametrize("stream", [False, True])
    async def test_engine_dies_before_answer_records_engine_unreachable(self, stream: bool) -> None:
        async def die(exchange: Exchange) -> None:
            exchange.die()

        assert len((await unreachable(die, stream=stream)).exchanges) == 1

    async def test_engine_dies_within_head_records_engine_unreachable(self) -> None:
        async def die(exchange: Exchange) -> None:
            await exchange.send((JSON_HEAD % len(WHOLE))[:30])
            exchange.die()

        await unreachable(die)

    async def test_engine_dies_within_whole_answer_records_engine_unreachable(self) -> None:
        async def die(exchange: Exchange) -> None:
            await exchange.send(JSON_HEAD % len(WHOLE) + WHOLE[: len(WHOLE) // 2])
            exchange.die()

        await unreachable(die)

    @pytest.mark.parametrize("cut", [0, 40], ids=["between events", "inside of one"])
    async def test_engine_dies_within_stream_records_tokens_so_far(self, cut: int) -> None:
        async def die(exchange: Exchange) -> None:
            await exchange.send(STREAM_HEAD, *map(chunk, EVENTS[:21]), *([chunk(EVENTS[21][:cut])] if cut else []))
            await asyncio.sleep(0.05)  # a reset overtakes what has not been read
            exchange.die()

        async with between(die) as (stage, _):
            status, body, whole = await ask(stage, stream=True)
            (span,) = await stage.spans()
        assert (status, body, whole) == (200, b"".join(PLAIN_EVENTS[:21]), False)
        assert recorded(span) == of_the_first(20, error="engine_unreachable")

    async def test_engine_closes_after_whole_answer_call_succeeds(self) -> None:
        async def answer_and_die(exchange: Exchange) -> None:
            await answer_whole(exchange)
            exchange.writer.close()

        async with between(answer_and_die) as (stage, _):
            answers = [await ask(stage, stream=False) for _ in range(3)]
            spans = await stage.spans(3)
        assert [(status, json.loads(body), whole) for status, body, whole in answers] == [
            (200, json.loads(BODIES.whole(ids=False, logprobs=False)), True)
        ] * 3
        assert [recorded(span) for span in spans] == [of_the_first(ANSWER_TOKENS)] * 3

    async def test_engine_dies_after_last_event_of_stream_call_succeeds(self) -> None:
        async def die(exchange: Exchange) -> None:
            await exchange.send(STREAM_HEAD, *map(chunk, EVENTS))
            await asyncio.sleep(0.05)
            exchange.die()

        async with between(die) as (stage, _):
            status, body, whole = await ask(stage, stream=True)
            (span,) = await stage.spans()
        assert (status, body, whole) == (200, b"".join(PLAIN_EVENTS), True)
        assert recorded(span) == of_the_first(ANSWER_TOKENS)


ODD_EVENTS = {
    "no JSON": b"data: {nonsense}\n\n",
    "cut JSON": b'data: {"id":"x","choices":[{"index":0\n\n',
    "no UTF-8": b'data: {"choices":[{"index":0,"delta":{"content":"\xff\xfe"}}]}\n\n',
    "choices that are none": b'data: {"choices":3}\n\n',
    "a choice that is none": b'data: {"choices":[3]}\n\n',
    "a choice without index": b'data: {"choices":[{"delta":{}}]}\n\n',
    "an index that is none": b'data: {"choices":[{"index":"x","delta":{}}]}\n\n',
    "ids that are none": b'data: {"choices":[{"index":0,"delta":{},"token_ids":"x"}]}\n\n',
    "ids out of range": b'data: {"choices":[{"index":0,"delta":{},"token_ids":[-1,4294967296]}]}\n\n',
    "logprobs out of range": b'data: {"choices":[{"index":0,"delta":{},"logprobs":{"content":[{"logprob":1e39}]},"token_ids":[1]}]}\n\n',
    "content that is no text": b'data: {"choices":[{"index":0,"delta":{"content":3}}]}\n\n',
    "a tool call that is none": b'data: {"choices":[{"index":0,"delta":{"tool_calls":[3]}}]}\n\n',
    "tool calls that are none": b'data: {"choices":[{"index":0,"delta":{"tool_calls":3}}]}\n\n',
    "a tool call far away": b'data: {"choices":[{"index":0,"delta":{"tool_calls":[{"index":100000}]}}]}\n\n',
    "an error": b'data: {"error":{"message":"broke","code":500}}\n\n',
}


def cases(odd: Mapping[str, bytes]) -> list[ParameterSet]:
    return [pytest.param(event, id=name) for name, event in odd.items()]


ODD_LINES = {
    "a comment": b": ping\n\n",
    "another field": b"retry: 10\n\n",
    "nothing": b"\n\n",
    "a list": b"data: [1]\n\n",
    "no field at all": b"nonsense\n\n",
}


ODD_ANSWERS = {
    "ids out of range": WHOLE.replace(b'"token_ids":[', b'"token_ids":[-1,4294967296,', 1),
    "prompt ids out of range": WHOLE.replace(b'"prompt_token_ids":[', b'"prompt_token_ids":[-1,4294967296,', 1),
    "a logprob out of range": WHOLE.replace(b'"logprob":-', b'"logprob":1e39,"x":-', 1),
    "versions that are none": WHOLE.replace(b'"versions":[[[0,', b'"versions":[[["x",', 1),
}


class TestMalformedAnswers:
    @pytest.mark.parametrize("odd", cases(ODD_ANSWERS))
    async def test_unrecordable_answer_passes_through_and_records_malformed_answer(self, odd: bytes) -> None:
        async def answer(exchange: Exchange) -> None:
            await exchange.send(JSON_HEAD % len(odd) + odd)

        async with between(answer) as (stage, upstream):
            given = await ask(stage, stream=False)
            spans = await before_a_sound_call(stage, upstream)
        assert given == (200, odd, True)
        assert [recorded(span) for span in spans] == [nothing("malformed_answer")]


class TestMalformedStreams:
    @pytest.mark.parametrize("odd", cases(ODD_EVENTS))
    async def test_stream_event_not_a_chunk_passes_through_and_records_engine_error(self, odd: bytes) -> None:
        async def stream(exchange: Exchange) -> None:
            await exchange.send(STREAM_HEAD, *map(chunk, [*EVENTS[:11], odd, *EVENTS[11:]]), END)

        async with between(stream) as (stage, upstream):
            given = await ask(stage, stream=True)
            spans = await before_a_sound_call(stage, upstream)
        assert given == (200, b"".join([*PLAIN_EVENTS[:11], odd, *PLAIN_EVENTS[11:]]), True)
        assert [recorded(span) for span in spans] == [of_the_first(ANSWER_TOKENS, error="engine_error")]

    @pytest.mark.parametrize("odd", ODD_LINES.values(), ids=ODD_LINES)
    async def test_stream_line_without_data_passes_through_and_call_succeeds(self, odd: bytes) -> None:
        async def stream(exchange: Exchange) -> None:
            await exchange.send(STREAM_HEAD, *map(chunk, [*EVENTS[:11], odd, *EVENTS[11:]]), END)

        async with between(stream) as (stage, _):
            status, body, whole = await ask(stage, stream=True)
            (span,) = await stage.spans()
        assert (status, body, whole) == (200, b"".join([*PLAIN_EVENTS[:11], odd, *PLAIN_EVENTS[11:]]), True)
        assert recorded(span) == of_the_first(ANSWER_TOKENS)

    async def test_stream_bytes_after_last_event_pass_through(self) -> None:
        async def stream(exchange: Exchange) -> None:
            await exchange.send(STREAM_HEAD, *map(chunk, [*EVENTS, b"data: {half"]), END)

        async with between(stream) as (stage, _):
            status, body, whole = await ask(stage, stream=True)
            (span,) = await stage.spans()
        assert (status, body, whole) == (200, b"".join(PLAIN_EVENTS) + b"data: {half", True)
        assert recorded(span)["response"] == BODIES.response_ids


class TestSlowness:
    async def test_stream_sent_byte_by_byte_is_answered_and_recorded_unchanged(self) -> None:
        async def trickle(exchange: Exchange) -> None:
            await exchange.send(STREAM_HEAD, *map(chunk, EVENTS[:-5]))
            for event in EVENTS[-5:]:
                for byte in event:
                    await exchange.send(chunk(bytes([byte])))
                    await asyncio.sleep(0)
            await exchange.send(END)

        async with between(trickle) as (stage, _):
            status, body, whole = await ask(stage, stream=True)
            (span,) = await stage.spans()
        assert (status, body, whole) == (200, b"".join(PLAIN_EVENTS), True)
        assert recorded(span) == of_the_first(ANSWER_TOKENS)

    @pytest.mark.parametrize("stream", [False, True])
    async def test_engine_that_trickles_bytes_ends_with_timeout(self, stream: bool) -> None:
        async def trickle(exchange: Exchange) -> None:
            await exchange.send(*([STREAM_HEAD, *map(chunk, EVENTS[:21])] if stream else [JSON_HEAD % len(WHOLE)]))
            for byte in EVENTS[21] if stream else WHOLE:
                await exchange.send(chunk(bytes([byte])) if stream else bytes([byte]))
                await asyncio.sleep(0.02)

        async with between(trickle, request_timeout_seconds=3) as (stage, upstream):
            status, body, whole = await ask(stage, stream=stream)
            (span,) = await stage.spans()
            async with asyncio.timeout(60), upstream.changed:
                await upstream.changed.wait_for(lambda: upstream.left)
        if stream:
            assert (status, body, whole) == (200, b"".join(PLAIN_EVENTS[:21]), False)
            assert recorded(span) == of_the_first(20, error="timeout")
        else:
            assert (status, json.loads(body)["error"]["type"]) == (504, "timeout")
            assert recorded(span) == nothing("timeout")

    async def test_slow_reading_client_applies_backpressure_to_engine_within_bounded_memory(self) -> None:
        padding = b'data: {"choices":[],"padding":"%b"}\n\n' % (b"x" * 100_000)
        events = 400

        async def flood(exchange: Exchange) -> None:
            await exchange.send(STREAM_HEAD, *map(chunk, EVENTS[:11]), *([chunk(padding)] * events), *map(chunk, EVENTS[11:]), END)

        async with between(flood) as (stage, upstream):
            slow = await asyncio.to_thread(_slow_reader, stage)
            await _stalled(upstream)
            (exchange,) = upstream.exchanges
            taken = exchange.sent
            # Others are answered meanwhile.
            upstream.answer = answer_whole
            assert (await ask(stage, stream=False))[0] == 200
            body = await asyncio.to_thread(_read_to_the_end, slow)
            spans = await stage.spans(2)
        assert taken < 16 * 2**20 < events * len(padding)
        assert body.count(b'"padding"') == events
        assert text_of(b"".join(body.split(b"\r\n")[1::2])) == BODIES.text
        assert [recorded(span) for span in spans] == [of_the_first(ANSWER_TOKENS)] * 2

    async def test_stream_whose_span_waits_for_a_full_disk_is_broken_by_its_time_limit(self, monkeypatch: pytest.MonkeyPatch) -> None:
        async def answer(exchange: Exchange) -> None:
            await exchange.send(STREAM_HEAD, *map(chunk, EVENTS[:-1]))
            await asyncio.sleep(0.05)  # the last event comes by itself
            await exchange.send(chunk(EVENTS[-1]), END)

        async with between(answer, request_timeout_seconds=1) as (stage, _):
            disk = FullDisk(monkeypatch)
            given = await ask(stage, stream=True)
            disk.full = False
            (span,) = await stage.spans()
        assert given == (200, b"".join(PLAIN_EVENTS[:-1]), False)
        assert recorded(span) == of_the_first(ANSWER_TOKENS)


class TestLeaving:
    async def test_gateway_with_1000_clients_leaving_aborts_engine_and_records_ids_so_far(self) -> None:
        clients, attempt = 1000, "/rollout/r/attempt/0"

        async def stall(exchange: Exchange) -> None:
            await exchange.send(STREAM_HEAD, *map(chunk, EVENTS[:6]))
            await exchange.wait_closed()
            raise ConnectionResetError

        async with between(stall) as (stage, upstream):
            await stage.announce(attempt)
            before = upstream.left
            leaving = [asyncio.create_task(_leave_after(stage, b"".join(PLAIN_EVENTS[:6]))) for _ in range(clients)]
            await asyncio.gather(*leaving)
            async with asyncio.timeout(60), upstream.changed:
                await upstream.changed.wait_for(lambda: upstream.left - before == clients)
            spans = await stage.spans(clients)
            counted = await stage.count(attempt)
        assert len({span.span_id for span in spans}) == len(spans) == clients
        assert [recorded(span) for span in spans] == [of_the_first(5, aborted=True)] * clients
        assert counted == (clients, False)


def _slow_reader(stage: Stage) -> socket.socket:
    """A client that has asked, and reads nothing."""
    url = stage.client._base_url  # pyright: ignore[reportPrivateUsage]
    assert url
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 * 1024)
    client.connect((url.host, url.port))
    body = BODIES.request(stream=True)
    client.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
    return client


async def _stalled(upstream: Upstream) -> None:
    """Wait until the gateway has taken nothing more from the engine for a while."""
    async with asyncio.timeout(30):
        taken = -1
        while not upstream.exchanges or upstream.exchanges[0].sent != taken:
            taken = upstream.exchanges[0].sent if upstream.exchanges else -1
            await asyncio.sleep(STALLED_SECONDS)


def _read_to_the_end(client: socket.socket) -> bytes:
    """The rest of the answer, after its head."""
    read = bytearray()
    with client:
        while not read.endswith(b"\r\n0\r\n\r\n"):
            part = client.recv(2**20)
            assert part, "the gateway closed before the answer's end"
            read += part
    return bytes(read).partition(b"\r\n\r\n")[2]


async def _leave_after(stage: Stage, expected: bytes) -> None:
    """Ask, read so much, and go."""
    async with stage.client.post("/rollout/r/attempt/0/v1/chat/completions", json=QUESTION | {"stream": True}) as answer:
        read = await answer.content.readexactly(len(expected))
        assert read == expected
        answer.close()
