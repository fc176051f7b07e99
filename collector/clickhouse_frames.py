"""ClickHouse's own wire forms, as clickhouse-go asks for them: compressed frames, and the handshake in revision 54460.

In: bytes. Out: bytes. Invariant: a frame whose checksum is wrong is refused; nothing unpacks beyond the caller's limit.
Formats: ClickHouse's CompressedReadBuffer and CityHash128 of version 1.0.2.
"""

from __future__ import annotations

import struct

import clickhouse_cityhash.cityhash as cityhash
import lz4.block
import zstandard

from collector.encodings import EncodingError, TooLargeError

HANDSHAKE = "SELECT displayName(), version(), revision(), timezone()"
"""The first statement of clickhouse-go; it reads all that follows in the revision that the answer states."""

_LZ4, _ZSTD, _NONE = 0x82, 0x90, 0x02
_HEADER = struct.Struct("<BII")
_CHECKSUM = struct.Struct("<QQ")
_BLOCK = 1 << 20


def frame(body: bytes) -> bytes:
    """Pack a body in LZ4 frames."""
    blocks = (body[start : start + _BLOCK] for start in range(0, len(body), _BLOCK))
    return b"".join(_framed(_LZ4, lz4.block.compress(block, store_size=False), len(block)) for block in blocks)


def frame_plainly(body: bytes) -> bytes:
    """Put a short body in a frame as it is: clickhouse-go looks for exceptions in what it receives, before it unpacks that."""
    return _framed(_NONE, body, len(body))


def unframe(body: bytes, limit: int) -> bytes:
    """Unpack LZ4, ZSTD or stored frames.

    Raises:
        EncodingError: a frame is cut, broken or of an unknown method.
        TooLargeError: more than `limit` bytes would come out.
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
        if total > limit:
            raise TooLargeError(f"the body has more than {limit} bytes; send smaller ones")
        out.append(_unpack(method, framed[_HEADER.size :], size))
        offset = start + packed_size
    return b"".join(out)


def handshake(version: str, timezone: str) -> bytes:
    """The answer to HANDSHAKE: one block in the layout of revision 54460, which states revision 0, so that plain Native follows."""
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
        if method == _LZ4:
            return lz4.block.decompress(packed, uncompressed_size=size)
        if method == _ZSTD:
            return zstandard.ZstdDecompressor().decompress(packed, max_output_size=size)
        if method == _NONE:
            return packed
    except (lz4.block.LZ4BlockError, zstandard.ZstdError) as error:
        raise EncodingError(f"a compressed frame does not unpack: {error}") from None
    raise EncodingError(f"compression method {method:#x} is not supported; use LZ4 or ZSTD")


def _checksum(framed: bytes) -> bytes:
    # The high half comes first.
    number: int = cityhash.CityHash128(framed)
    return _CHECKSUM.pack(number >> 64, number & (2**64 - 1))


def _text(text: str) -> bytes:
    # Shorter than 128 bytes: names, a version, a time zone.
    return bytes((len(text),)) + text.encode()
