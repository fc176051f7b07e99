"""Bodies that are not what they say: refused in words, in bounded memory, while others are served."""

from __future__ import annotations

import threading
import time
import urllib.error
import urllib.request
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import grpc
import lz4.block
import lz4.frame
import pytest
from backports import zstd
from google.rpc.status_pb2 import Status

from spangrad.settings import StoreSettings
from tests.support.load_spans import PROTOBUF, Rollouts
from tests.support.otlp import LZ4, PLAIN, ZSTD, frame, packed
from tests.support.processes import height_mib, resident_mib
from tests.support.servers import running_store, store_settings

GROWTH_MIB = 1536
"""Memory that bodies may cost at once: the store's budget is 256 MiB, a single body may have 512, and both exist packed and unpacked."""
AT_ONCE = 12
SLOWEST_SECONDS = 10
TOO_MUCH = {(413, b"Code: 307. DB::Exception: "), (503, b"Code: 202. DB::Exception: ")}
"""More than any body may have, or more than the budget has left while others hold some of it."""


# Bodies that are not what they say: small ones that unpack to a gigabyte, cut ones, ones packed otherwise than their headers tell.

ENCODINGS = ("gzip", "deflate", "zstd", "lz4")
BOMB_BYTES = 1 << 30
_PIECE = bytes(1 << 20)
_PIECES = BOMB_BYTES // len(_PIECE)


@cache
def bomb(encoding: str) -> bytes:
    """A body that unpacks to BOMB_BYTES of zeros."""
    match encoding:
        case "gzip" | "deflate":
            packer = zlib.compressobj(9, wbits=(16 if encoding == "gzip" else 0) + zlib.MAX_WBITS)
            return b"".join(packer.compress(_PIECE) for _ in range(_PIECES)) + packer.flush()
        case "gzip members":
            return packed("gzip", _PIECE) * _PIECES
        case "zstd":
            stream = zstd.ZstdCompressor(level=3)
            return b"".join(stream.compress(_PIECE) for _ in range(_PIECES)) + stream.flush()
        case "lz4":
            frame = lz4.frame.LZ4FrameCompressor()
            return frame.begin() + b"".join(frame.compress(_PIECE) for _ in range(_PIECES)) + frame.flush()
        case _:
            raise ValueError(encoding)


def frame_bomb(method: int) -> bytes:
    """Honest frames that unpack to BOMB_BYTES of zeros."""
    payload = lz4.block.compress(_PIECE, store_size=False) if method == LZ4 else zstd.compress(_PIECE)
    return frame(method, payload, size=len(_PIECE)) * _PIECES


def lying_frames() -> dict[str, bytes]:
    """Frames whose sizes are not their own."""
    small = lz4.block.compress(b"SELECT 1", store_size=False)
    return {
        "lz4 says more": frame(LZ4, small, size=500 * 2**20),
        "lz4 says all": frame(LZ4, small, size=2**32 - 1),
        "lz4 says less": frame(LZ4, small, size=1),
        "lz4 says nothing": frame(LZ4, small, size=0),
        "zstd says more": frame(ZSTD, packed("zstd", b"SELECT 1"), size=500 * 2**20),
        "zstd says less": frame(ZSTD, packed("zstd", _PIECE), size=8),
        "stored says more": frame(PLAIN, b"SELECT 1", size=100),
        "packed says more": frame(LZ4, small, size=8, packed_size=2**31),
        "packed says nothing": frame(LZ4, small, size=8, packed_size=0),
        "packed says less": frame(LZ4, small, size=8, packed_size=10),
        "unknown method": frame(0x55, small, size=8),
        "cut in its header": frame(LZ4, small, size=8)[:20],
        "cut in its body": frame(LZ4, small, size=8)[:-3],
        "wrong checksum": b"\0" * 16 + frame(LZ4, small, size=8)[16:],
    }


@pytest.fixture
def settings(tmp_path: Path, report: Callable[[str], None]) -> Iterator[StoreSettings]:
    """A store of its own, which must live through a test, and may not grow much in it."""
    settings = store_settings(tmp_path / "data")
    with running_store(settings, tmp_path / "log") as child:
        pid = child.process.pid
        before = resident_mib(pid)
        yield settings
        child.check()
        height = height_mib(pid)
    report(f"resident {before} -> {height} MiB at most")
    assert height - before < GROWTH_MIB


def answer(url: str, body: bytes, **headers: str) -> tuple[int, bytes]:
    """Status and body of the answer; two underscores in a header's name stand for a dash."""
    request = urllib.request.Request(url, body, {name.replace("__", "-"): value for name, value in headers.items()}, method="POST")
    try:
        with urllib.request.urlopen(request, timeout=60) as got:
            return got.status, got.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


def otlp(settings: StoreSettings, body: bytes, encoding: str) -> tuple[int, bool]:
    """Status, and whether the answer is an OTLP one that says why."""
    status, response = answer(f"{settings.otlp_endpoint}/v1/traces", body, Content__Type=PROTOBUF, Content__Encoding=encoding)
    return status, bool(Status.FromString(response).message) if status != 200 else True


def clickhouse(settings: StoreSettings, body: bytes, encoding: str = "", parameters: str = "") -> tuple[int, bytes]:
    """Status, and how the answer begins."""
    status, response = answer(f"{settings.url}/?{parameters}", body, **({"Content__Encoding": encoding} if encoding else {}))
    return status, response[: len(b"Code: 117. DB::Exception: ")]


@dataclass
class Others:
    """Clients with honest requests, and how long the slowest of them waited."""

    settings: StoreSettings
    """A store that holds as much as it may tells them to come again, which counts as an answer."""
    slowest: dict[str, float] = field(default_factory=dict)
    served: int = 0
    _done: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> Others:
        spans = Rollouts(0, "others")
        body = spans.traces(spans.rollout()[0]).plain
        asked = {
            "spans": lambda: otlp(self.settings, body, "") in {(200, True), (429, True)},
            "questions": lambda: answer(self.settings.url, b"SELECT 1")[0] in {200, 503},
        }
        self._threads = [threading.Thread(target=self._ask, args=item) for item in asked.items()]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        for thread in self._threads:
            thread.join()
        assert self.served > 0
        assert max(self.slowest.values()) < SLOWEST_SECONDS, self.slowest

    def _ask(self, what: str, ask: Callable[[], bool]) -> None:
        while not self._done.is_set():
            began = time.monotonic()
            assert ask()
            self.served += 1
            self.slowest[what] = max(self.slowest.get(what, 0.0), time.monotonic() - began)
            time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.parametrize("encoding", [*ENCODINGS, "gzip members"])
def test_compression_bombs_are_refused_as_too_large(settings: StoreSettings, report: Callable[[str], None], encoding: str) -> None:
    name, body = encoding.split()[0], bomb(encoding)
    with Others(settings) as others, ThreadPoolExecutor(2 * AT_ONCE) as pool:
        began = time.monotonic()
        by_otlp = [pool.submit(otlp, settings, body, name) for _ in range(AT_ONCE)]
        by_clickhouse = [pool.submit(clickhouse, settings, body, name) for _ in range(AT_ONCE)]
        answers = {future.result() for future in by_otlp}, {future.result() for future in by_clickhouse}
    report(f"{AT_ONCE} of {len(body) // 1024} KiB to each port in {time.monotonic() - began:.1f} s, others waited {others.slowest}")

    assert answers[0] <= {(413, True), (429, True)}
    assert answers[1] <= TOO_MUCH


@pytest.mark.slow
@pytest.mark.parametrize("method", [LZ4, ZSTD])
def test_native_frames_that_decompress_to_a_gigabyte_are_refused(settings: StoreSettings, method: int) -> None:
    body = frame_bomb(method)
    with Others(settings):
        assert clickhouse(settings, body, parameters="decompress=1") in TOO_MUCH
        assert clickhouse(settings, packed("gzip", body), "gzip", "decompress=1") in TOO_MUCH


@pytest.mark.slow
@pytest.mark.parametrize("compression", [grpc.Compression.Gzip, grpc.Compression.Deflate, None], ids=["gzip", "deflate", "plain"])
def test_grpc_messages_that_decompress_too_large_answer_resource_exhausted(
    settings: StoreSettings, compression: grpc.Compression | None
) -> None:
    options = [("grpc.max_send_message_length", -1)]
    address = f"127.0.0.1:{settings.otlp_grpc_port}"
    with Others(settings), grpc.insecure_channel(address, options, compression) as channel, pytest.raises(grpc.RpcError) as caught:
        channel.unary_unary("/opentelemetry.proto.collector.trace.v1.TraceService/Export")(bytes(300 * 2**20), timeout=60)

    assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED  # type: ignore[attr-defined]


@pytest.mark.slow
def test_native_frame_with_nested_zstd_bomb_answers_400(settings: StoreSettings) -> None:
    with Others(settings):
        assert clickhouse(settings, frame(ZSTD, bomb("zstd"), size=8), parameters="decompress=1")[0] == 400


@pytest.mark.slow
def test_statement_of_half_a_gigabyte_is_answered(settings: StoreSettings) -> None:
    with Others(settings):
        assert clickhouse(settings, packed("zstd", bytes(500 * 2**20)), "zstd")[0] in {200, 400, 413, 503}


@pytest.mark.parametrize("what", lying_frames())
def test_native_frames_with_wrong_sizes_answer_an_error(store: StoreSettings, what: str) -> None:
    status, message = clickhouse(store, lying_frames()[what], parameters="decompress=1")

    assert (status, message[:7]) in {(400, b"Code: 1"), (413, b"Code: 3")}


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_compressed_bodies_cut_or_broken_answer_400(store: StoreSettings, encoding: str) -> None:
    rollouts = Rollouts(1, "hostile-cut")
    whole = packed(encoding, rollouts.traces(rollouts.rollout()[0]).plain)
    broken = bytearray(whole)
    broken[len(broken) // 2] ^= 0xFF
    others = [name for name in (*ENCODINGS, "gzip, gzip", "compress", "x") if name != encoding]

    assert otlp(store, whole, encoding) == (200, True)
    cut = {at: otlp(store, whole[:at], encoding) for at in (1, 3, len(whole) // 2, len(whole) - 1)}
    assert cut == dict.fromkeys(cut, (400, True))
    assert otlp(store, bytes(broken), encoding) == (400, True)
    misnamed = {name: otlp(store, whole, name) for name in others}
    assert misnamed == dict.fromkeys(misnamed, (400, True))
    # Not packed, packed twice, and nothing at all.
    assert otlp(store, whole, "") == (400, True)
    assert otlp(store, packed(encoding, whole), encoding) == (400, True)
    assert otlp(store, b"", "") == (200, True)


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_compressed_statements_cut_answer_400(store: StoreSettings, encoding: str) -> None:
    whole = packed(encoding, b"SELECT 1 -- " + bytes(range(65, 91)) * 20)

    assert answer(f"{store.url}/", whole, Content__Encoding=encoding) == (200, b"1\n")
    cut = {at: clickhouse(store, whole[:at], encoding)[0] for at in (1, len(whole) // 2, len(whole) - 1)}
    assert cut == dict.fromkeys(cut, 400)
