"""Bodies that are not what they say: small ones that unpack to a gigabyte, cut ones, ones packed otherwise than their headers tell.

In: the name of an encoding. Out: bytes. Invariant: a bomb is made in pieces, so that nobody here holds what it unpacks to.
"""

from __future__ import annotations

import struct
import zlib
from functools import cache

import brotli
import clickhouse_cityhash.cityhash as cityhash
import lz4.block
import lz4.frame
import zstandard

ENCODINGS = ("gzip", "deflate", "zstd", "br", "lz4")
BOMB_BYTES = 1 << 30
_PIECE = bytes(1 << 20)
_PIECES = BOMB_BYTES // len(_PIECE)
LZ4, ZSTD, PLAIN = 0x82, 0x90, 0x02
"""Methods of ClickHouse's frames."""


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
            stream = zstandard.ZstdCompressor(level=3).compressobj(size=BOMB_BYTES)
            return b"".join(stream.compress(_PIECE) for _ in range(_PIECES)) + stream.flush()
        case "br":
            brotli_stream = brotli.Compressor(quality=3)
            return b"".join(brotli_stream.process(_PIECE) for _ in range(_PIECES)) + brotli_stream.finish()
        case "lz4":
            frame = lz4.frame.LZ4FrameCompressor()
            return frame.begin() + b"".join(frame.compress(_PIECE) for _ in range(_PIECES)) + frame.flush()
        case _:
            raise ValueError(encoding)


def packed(encoding: str, body: bytes) -> bytes:
    """A body, packed as it should be; with a checksum where the encoding knows one."""
    match encoding:
        case "gzip":
            packer = zlib.compressobj(6, wbits=16 + zlib.MAX_WBITS)
            return packer.compress(body) + packer.flush()
        case "deflate":
            return zlib.compress(body)
        case "zstd":
            return zstandard.ZstdCompressor(write_checksum=True).compress(body)
        case "br":
            return brotli.compress(body, quality=3)
        case "lz4":
            return lz4.frame.compress(body, content_checksum=True)
        case _:
            raise ValueError(encoding)


def frame(method: int, payload: bytes, *, size: int, packed_size: int | None = None) -> bytes:
    """A frame of ClickHouse's with a right checksum, whatever its sizes say: `size` unpacked, `packed_size` of it all if not its own."""
    framed = struct.pack("<BII", method, len(payload) + 9 if packed_size is None else packed_size, size) + payload
    number: int = cityhash.CityHash128(framed)
    return struct.pack("<QQ", number >> 64, number & (2**64 - 1)) + framed


def frame_bomb(method: int) -> bytes:
    """Honest frames that unpack to BOMB_BYTES of zeros."""
    payload = lz4.block.compress(_PIECE, store_size=False) if method == LZ4 else zstandard.ZstdCompressor().compress(_PIECE)
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
