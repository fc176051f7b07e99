"""ClickHouse's own wire formats, as clickhouse-go uses them: compressed frames, and the handshake in revision 54460.

In: bytes. Out: bytes. Invariant: a frame whose checksum is wrong is refused; nothing unpacks beyond the caller's limit.
Formats: ClickHouse's CompressedReadBuffer and CityHash128 of version 1.0.2.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from enum import IntEnum

import clickhouse_cityhash.cityhash as cityhash
import lz4.block
from backports import zstd

from collector.encodings import EncodingError, allow

HANDSHAKE = "SELECT displayName(), version(), revision(), timezone()"
"""First statement of clickhouse-go; it reads all later answers in the revision that the answer states."""


class _Method(IntEnum):
    """Compression method of a frame."""

    LZ4 = 0x82
    ZSTD = 0x90
    NONE = 0x02


_HEADER = struct.Struct("<BII")
_CHECKSUM = struct.Struct("<QQ")
_BLOCK = 1 << 20


def frame(body: bytes) -> bytes:
    """Pack a body in LZ4 frames."""
    blocks = (body[start : start + _BLOCK] for start in range(0, len(body), _BLOCK))
    return b"".join(_framed(_Method.LZ4, lz4.block.compress(block, store_size=False), len(block)) for block in blocks)


def frame_plainly(body: bytes) -> bytes:
    """Put a short body into a frame uncompressed: clickhouse-go searches received bytes for exceptions before it unpacks them."""
    return _framed(_Method.NONE, body, len(body))


def unframe(body: bytes, limit: int, hold: Callable[[int], None] = lambda _: None) -> bytes:
    """Unpack LZ4, ZSTD or stored frames, before each of which `hold` is called with the number of bytes unpacked after it.

    Raises:
        EncodingError: a frame is cut, broken or of an unknown method.
        TooLargeError: more than `limit` bytes would come out.
        Exception: any of `hold`.
    """
    out: list[bytes] = []
    offset, total = 0, 0
    while offset < len(body):
        start = offset + _CHECKSUM.size
        if start + _HEADER.size > len(body):
            raise EncodingError("the body ends inside a compressed frame's header")
        method, packed_size, size = _HEADER.unpack_from(body, start)
        framed = body[start : start + packed_size]
        if len(framed) != packed_size or packed_size < _HEADER.size or _checksum(framed) != body[offset:start]:
            raise EncodingError("a compressed frame's checksum does not match")
        total += size
        allow(total, limit, hold)
        out.append(_unpack(method, framed[_HEADER.size :], size))
        offset = start + packed_size
    return b"".join(out)


def handshake(version: str, timezone: str) -> bytes:
    """Return the answer to HANDSHAKE: one block in the layout of revision 54460; it states revision 0, so that plain Native follows."""
    columns = (
        ("displayName()", "String", _text("spangrad")),
        ("version()", "String", _text(version)),
        ("revision()", "UInt32", struct.pack("<I", 0)),
        ("timezone()", "String", _text(timezone)),
    )
    # BlockInfo, the counts of columns and rows; a 0 after each type says that the column has no custom serialization.
    head = b"\x01\x00\x02\xff\xff\xff\xff\x00" + bytes((len(columns), 1))
    return head + b"".join(_text(name) + _text(kind) + b"\x00" + value for name, kind, value in columns)


def _framed(method: int, packed: bytes, size: int) -> bytes:
    framed = _HEADER.pack(method, len(packed) + _HEADER.size, size) + packed
    return _checksum(framed) + framed


def _unpack(method: int, packed: bytes, size: int) -> bytes:
    try:
        match method:
            case _Method.LZ4:
                out = lz4.block.decompress(packed, uncompressed_size=size)
            case _Method.ZSTD:
                out = zstd.ZstdDecompressor().decompress(packed, max_length=size + 1)
            case _Method.NONE:
                out = packed
            case _:
                raise EncodingError(f"compression method {method:#x} is not supported; use LZ4 or ZSTD")
    except (lz4.block.LZ4BlockError, zstd.ZstdError) as error:
        raise EncodingError(f"a compressed frame does not unpack: {error}") from None
    if len(out) != size:
        raise EncodingError(f"a compressed frame says that it holds {size} bytes, and does not")
    return out


def _checksum(framed: bytes) -> bytes:
    # The high half comes first.
    number: int = cityhash.CityHash128(framed)
    return _CHECKSUM.pack(number >> 64, number & (2**64 - 1))


def _text(text: str) -> bytes:
    # Shorter than 128 bytes: names, a version, a time zone.
    return bytes((len(text),)) + text.encode()
