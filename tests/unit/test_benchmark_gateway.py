"""The gateway benchmark's own honesty: realistic bodies, an upstream that answers what is asked, and checks that see what is wrong."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any

import aiohttp
import pytest

from benchmarks.gateway import Sizes, Tally, report
from benchmarks.gateway_bodies import ANSWER_TOKENS, NO_ID, PROMPT_TOKENS, Bodies, text_of
from benchmarks.gateway_client import Load, Order, Part
from benchmarks.gateway_routes import Kind
from benchmarks.gateway_upstream import CHAT_PATH, serve
from spangrad.processes import free_ports

BODIES = Bodies(3)
PLAIN = BODIES.whole(ids=False, logprobs=False).replace(NO_ID.encode(), b"ID").decode()
PLAIN_STREAM = b"".join(BODIES.events(ids=False, logprobs=False)).replace(NO_ID.encode(), b"ID").decode()


@pytest.fixture
async def upstream() -> AsyncGenerator[str]:
    """The address of a running upstream."""
    (port,) = free_ports(1)
    running = asyncio.create_task(serve(port, BODIES, 0.0001))
    async with asyncio.timeout(30):
        while True:
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", port)
            except OSError:
                await asyncio.sleep(0.01)
            else:
                writer.close()
                break
    yield f"http://127.0.0.1:{port}"
    running.cancel()


class TestBodies:
    def test_bodies_have_realistic_sizes(self) -> None:
        everything = {"ids": True, "logprobs": True}
        request, whole, stream = BODIES.request(stream=False), BODIES.whole(**everything), b"".join(BODIES.events(**everything))
        assert [round(len(body), -3) for body in (request, whole, stream)] == [8000, 44000, 114000]
        assert [len(BODIES.prompt_ids), len(BODIES.response_ids), len(BODIES.events(**everything))] == [PROMPT_TOKENS, ANSWER_TOKENS, 302]

    def test_bodies_same_seed_gives_same_bytes(self) -> None:
        assert Bodies(3).whole(ids=True, logprobs=True) == BODIES.whole(ids=True, logprobs=True)
        assert Bodies(4).whole(ids=True, logprobs=True) != BODIES.whole(ids=True, logprobs=True)
        assert Bodies(3).request(stream=True) == BODIES.request(stream=True)

    def test_bodies_whole_and_stream_have_same_text(self) -> None:
        whole = json.loads(BODIES.whole(ids=True, logprobs=True))
        assert text_of(b"".join(BODIES.events(ids=True, logprobs=True))) == whole["choices"][0]["message"]["content"] == BODIES.text


class TestUpstreamAndClient:
    @pytest.mark.parametrize("kind", Kind)
    async def test_load_reads_each_answer_whole_with_unique_id(self, upstream: str, kind: Kind) -> None:
        url = upstream + CHAT_PATH.decode()
        parts = await Load(Order([url, f"{url}?other"], kind == Kind.STREAM, 4, 20), BODIES).run()
        asked, other = parts[url], parts[f"{url}?other"]
        assert [len(part.milliseconds) for part in (asked, other)] == [10, 10]
        assert all(0 < first <= last for first, last in zip(asked.first_milliseconds, asked.milliseconds, strict=True))
        assert len({*asked.ids, *other.ids}) == 20
        assert [asked.answers, asked.refused] == [[PLAIN_STREAM if kind == Kind.STREAM else PLAIN], []]

    @pytest.mark.parametrize("ids", [False, True])
    @pytest.mark.parametrize("logprobs", [False, True])
    async def test_gateway_upstream_answers_requested_fields(self, upstream: str, ids: bool, logprobs: bool) -> None:
        question = json.loads(BODIES.request(stream=False)) | {"return_token_ids": ids, "logprobs": logprobs}
        async with aiohttp.ClientSession(upstream) as client, client.post(CHAT_PATH.decode(), json=question) as answer:
            given = await answer.json()
        assert given | {"id": NO_ID} == json.loads(BODIES.whole(ids=ids, logprobs=logprobs))

    async def test_load_counts_errors_as_refused(self) -> None:
        async def no(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 503 No\r\ncontent-length: 4\r\n\r\nnone")
            await reader.read()

        async def cut(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            head = await reader.readuntil(b"\r\n\r\n")
            # A socket that is closed before all of its request was read resets the connection, which is another error.
            await reader.readexactly(int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]))
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 4000\r\n\r\n{")
            writer.close()

        servers = [await asyncio.start_server(one, "127.0.0.1", 0) for one in (no, cut)]
        urls = [f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/" for server in servers]
        parts = await Load(Order(urls, False, 1, 2), BODIES).run()
        assert [[*part.ids, *part.milliseconds] for part in parts.values()] == [[], []]
        assert [part.refused for part in parts.values()] == [
            ["HTTP 503: b'none'"],
            ["ConnectionResetError: closed before the answer was whole"],
        ]


def tally(cpu_us: float, milliseconds: float, **answers: str) -> Tally:
    """A way of calling that took so much for each of ten calls."""
    part = Part(1.0, [milliseconds] * 10, [milliseconds / 2] * 10, [f"id-{number}" for number in range(10)])
    direct = Part(1.0, [1.0] * 10, [0.5] * 10)
    seen = Tally(cpu=dict.fromkeys(Kind, cpu_us * 1e-05), alone=[(direct, part)])
    for kind in Kind:
        seen.loaded[kind].append(part)
        seen.direct[kind].append(direct)
        seen.answers[kind] = {answers[kind]} if kind in answers else set()
    return seen


class TestReport:
    def test_gateway_report_ratio_is_peer_over_gateway(self) -> None:
        answers = {"whole": PLAIN, "stream": PLAIN_STREAM}
        result = report(
            {"ours": tally(500, 2.0, **answers), "peer": tally(20_000, 21.0, **answers)}, {"ours": {"lost": 0}, "peer": {"lost": 3}}, BODIES
        )
        assert result["ratio"] == {"cpu": 40.0, "cpu_stream": 40.0, "p50_added": 20.0, "throughput": 1.0}
        assert [result["ours"][name] for name in ("cpu_us", "p50_added_ms", "first_added_ms_stream", "per_s")] == [500.0, 1.0, 0.5, 10.0]
        assert result["checked"] == {
            "lost": 0,
            "refused": 0,
            "wrong_texts": 0,
            "wrong_answers": 0,
            "peer_lost": 3,
            "peer_refused": 0,
            "peer_wrong_texts": 0,
        }

    @pytest.mark.parametrize(
        ("answers", "wrong"),
        [
            ({"whole": BODIES.whole(ids=True, logprobs=False).decode()}, {"wrong_texts": 0, "wrong_answers": 1}),
            ({"whole": PLAIN.replace(BODIES.text, "else")}, {"wrong_texts": 1, "wrong_answers": 1}),
            ({"stream": PLAIN_STREAM.replace('"created":1', '"created":2', 1)}, {"wrong_texts": 0, "wrong_answers": 1}),
            ({"stream": PLAIN_STREAM[:2000].rpartition("data: ")[0]}, {"wrong_texts": 1, "wrong_answers": 1}),
        ],
    )
    def test_gateway_report_counts_wrong_texts_and_answers(self, answers: dict[str, str], wrong: dict[str, Any]) -> None:
        assert report({"ours": tally(500, 2.0, **answers)}, {"ours": {}}, BODIES)["checked"] == {"refused": 0, **wrong}

    def test_tally_keep_collects_ids_answers_and_refusals(self) -> None:
        seen = Tally()
        seen.keep(Kind.WHOLE, Part(ids=["a"], answers=["x"]))
        seen.keep(Kind.STREAM, Part(ids=["b"], refused=["HTTP 503"]))
        assert [seen.ids, seen.answers, seen.refused] == [["a", "b"], {Kind.WHOLE: {"x"}, Kind.STREAM: set()}, 1]


def test_sizes_share_is_at_least_connections() -> None:
    assert Sizes(1000, 96, 200).share(0.1) == Sizes(100, 16, 20)
