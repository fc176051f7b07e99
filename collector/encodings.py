"""HTTP content encodings of bodies, both ways.

In: bytes and the name of an encoding. Out: bytes. Invariant: nothing unpacks beyond the caller's limit.
"""

from __future__ import annotations

import gzip
import zlib

import lz4.frame
import zstandard

SUPPORTED = ("gzip", "deflate", "lz4", "zstd")


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
        case "lz4":
            out, whole = _unlz4(body, limit)
        case "zstd":
            out = _unzstd(body, limit)
        case other:
            raise EncodingError(f"Content-Encoding {other!r} is not supported; use one of {', '.join(SUPPORTED)}")
    if len(out) > limit:
        raise TooLargeError(f"the body has more than {limit} bytes; send smaller ones")
    if not whole:
        raise EncodingError(f"the body ends before its {encoding} stream does")
    return out


def compress(body: bytes, accepted: str) -> tuple[bytes, str | None]:
    """Pack a body in the first encoding of an Accept-Encoding header that is supported.

    Returns:
        The body and the encoding's name; the body as it is, and None, when none is.
    """
    for name in (part.split(";")[0].strip().lower() for part in accepted.split(",")):
        match name:
            case "lz4":
                return lz4.frame.compress(body), name
            case "zstd":
                return zstandard.ZstdCompressor(level=1).compress(body), name
            case "gzip":
                return gzip.compress(body, 1), name
            case "deflate":
                return zlib.compress(body, 1), name
            case _:
                continue
    return body, None


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


def _unzstd(body: bytes, limit: int) -> bytes:
    # A body that is cut reads as far as it goes; HTTP's own lengths notice that.
    with zstandard.ZstdDecompressor().stream_reader(body, read_across_frames=True) as stream:
        try:
            return stream.read(limit + 1)
        except zstandard.ZstdError as error:
            raise EncodingError(f"the body is not zstd: {error}") from None
