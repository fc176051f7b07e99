"""HTTP content encodings of bodies, both ways.

In: bytes and the name of an encoding. Out: bytes. Invariant: nothing unpacks beyond the caller's limit.
"""

from __future__ import annotations

import zlib

import brotli
import lz4.frame
import zstandard
from backports import zstd

SUPPORTED = ("br", "gzip", "deflate", "lz4", "zstd")
_BROTLI_LEVEL = 3
"""Packs better than gzip's first level, at about its cost."""


class EncodingError(ValueError):
    """A body's encoding is unknown, or the body does not have it."""


class TooLargeError(ValueError):
    """A body is larger than its limit."""


def decompress(body: bytes, encoding: str, limit: int) -> bytes:
    """Unpack a body.

    Args:
        body: as received.
        encoding: the Content-Encoding header; empty or `identity` for none.
        limit: bytes that may come out.

    Raises:
        EncodingError: the encoding is unknown, or the body is broken or cut.
        TooLargeError: more than `limit` bytes came out.
    """
    whole = True
    match encoding.strip().lower():
        case "" | "identity":
            out = body
        case "gzip":
            out, whole = _inflate(body, 16 + zlib.MAX_WBITS, limit)
        case "deflate":
            # By the standard zlib's format; some senders leave its header out.
            out, whole = _inflate(body, zlib.MAX_WBITS if _has_zlib_header(body) else -zlib.MAX_WBITS, limit)
        case "br":
            out, whole = _unbrotli(body, limit)
        case "lz4":
            out, whole = _unlz4(body, limit)
        case "zstd":
            out, whole = _unzstd(body, limit)
        case other:
            raise EncodingError(f"Content-Encoding {other!r} is not supported; use one of {', '.join(SUPPORTED)}")
    if len(out) > limit:
        raise TooLargeError(f"the body has more than {limit} bytes; send smaller ones")
    if not whole:
        raise EncodingError(f"the body ends before its {encoding} stream does")
    return out


def accepted_encoding(accepted: str) -> str | None:
    """The first encoding of an Accept-Encoding header that is supported; None when none is."""
    for part in accepted.lower().split(","):
        name, _, weight = part.partition(";")
        if name.strip() in SUPPORTED and weight.replace(" ", "") not in {"q=0", "q=0.0", "q=0.00", "q=0.000"}:
            return name.strip()
    return None


class Packer:
    """Packs a body piece by piece; what comes out of a piece may be empty."""

    def __init__(self, encoding: str) -> None:
        """Pack in one of SUPPORTED."""
        self.encoding = encoding
        self._begin = b""
        match encoding:
            case "br":
                packer = brotli.Compressor(quality=_BROTLI_LEVEL)
                self._pack, self._finish = packer.process, packer.finish
            case "lz4":
                packer = lz4.frame.LZ4FrameCompressor()
                self._begin = packer.begin()
                self._pack, self._finish = packer.compress, packer.flush
            case "zstd":
                packer = zstandard.ZstdCompressor(level=1).compressobj()
                self._pack, self._finish = packer.compress, packer.flush
            case _:
                packer = zlib.compressobj(1, wbits=(16 if encoding == "gzip" else 0) + zlib.MAX_WBITS)
                self._pack, self._finish = packer.compress, packer.flush

    def pack(self, piece: bytes) -> bytes:
        """The next piece, packed."""
        begin, self._begin = self._begin, b""
        return begin + self._pack(piece)

    def finish(self) -> bytes:
        """What is left, and the end of the stream."""
        begin, self._begin = self._begin, b""
        return begin + self._finish()


def _has_zlib_header(body: bytes) -> bool:
    return len(body) >= 2 and body[0] & 0x0F == 8 and int.from_bytes(body[:2]) % 31 == 0


def _inflate(body: bytes, window: int, limit: int) -> tuple[bytes, bool]:
    out = bytearray()
    while body:
        stream = zlib.decompressobj(window)
        try:
            out += stream.decompress(body, max(1, limit + 1 - len(out)))
        except zlib.error as error:
            raise EncodingError(f"the body is not gzip or deflate: {error}") from None
        if not stream.eof:
            return bytes(out), False
        # Several streams may stand one after the other: clickhouse-connect packs an insert block by block.
        body = stream.unused_data
    return bytes(out), True


def _unbrotli(body: bytes, limit: int) -> tuple[bytes, bool]:
    stream, out = brotli.Decompressor(), bytearray()
    given = body
    try:
        while not stream.is_finished() and len(out) <= limit:
            more = stream.process(given, output_buffer_limit=max(1, limit + 1 - len(out)))
            given = b""
            out += more
            if not more and stream.can_accept_more_data():
                break
    except brotli.error:
        raise EncodingError("the body is not brotli") from None
    return bytes(out), stream.is_finished()


def _unlz4(body: bytes, limit: int) -> tuple[bytes, bool]:
    out = bytearray()
    while body:
        stream = lz4.frame.LZ4FrameDecompressor()
        try:
            out += stream.decompress(body, max_length=max(1, limit + 1 - len(out)))
        except RuntimeError as error:
            raise EncodingError(f"the body is not lz4: {error}") from None
        if not stream.eof:
            return bytes(out), False
        body = bytes(stream.unused_data or b"")
    return bytes(out), True


def _unzstd(body: bytes, limit: int) -> tuple[bytes, bool]:
    out = bytearray()
    while body:
        stream = zstd.ZstdDecompressor()
        try:
            out += stream.decompress(body, max_length=max(1, limit + 1 - len(out)))
        except zstd.ZstdError as error:
            raise EncodingError(f"the body is not zstd: {error}") from None
        if not stream.eof:
            return bytes(out), False
        body = stream.unused_data
    return bytes(out), True
