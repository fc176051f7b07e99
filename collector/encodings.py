"""HTTP content encodings of bodies, both ways.

In: bytes and the name of an encoding. Out: bytes. Invariant: nothing unpacks beyond the caller's limit, and the caller may
stop it at every piece on the way there.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator

import brotli
import lz4.frame
import zstandard
from backports import zstd

SUPPORTED = ("br", "gzip", "deflate", "lz4", "zstd")
_BROTLI_LEVEL = 3
"""Packs better than gzip's first level, at about its cost."""
_PIECE = 1 << 20
"""Bytes that are unpacked at once, at most."""


class EncodingError(ValueError):
    """A body's encoding is unknown, or the body does not have it."""


class TooLargeError(ValueError):
    """A body is larger than its limit."""


def decompress(body: bytes, encoding: str, limit: int, hold: Callable[[int], None] = lambda _: None) -> bytes:
    """Unpack a body.

    Args:
        body: as received.
        encoding: the Content-Encoding header; empty or `identity` for none.
        limit: bytes that may come out.
        hold: told how many bytes are out as they come; what it raises ends the unpacking.

    Raises:
        EncodingError: the encoding is unknown, or the body is broken or cut.
        TooLargeError: more than `limit` bytes came out.
    """
    name = encoding.strip().lower()
    if name in {"", "identity"}:
        _allow(len(body), limit, hold)
        return body
    out = bytearray()
    try:
        for piece in _pieces(body, name):
            out += piece
            _allow(len(out), limit, hold)
    except EOFError:
        raise EncodingError(f"the body ends before its {name} stream does") from None
    except (zlib.error, brotli.error, zstd.ZstdError, RuntimeError) as error:
        raise EncodingError(f"the body is not {name}: {error}") from None
    return bytes(out)


def _allow(size: int, limit: int, hold: Callable[[int], None]) -> None:
    if size > limit:
        raise TooLargeError(f"the body has more than {limit} bytes; send smaller ones")
    hold(size)


def _pieces(body: bytes, encoding: str) -> Iterator[bytes]:
    match encoding:
        case "gzip":
            return _inflated(body, 16 + zlib.MAX_WBITS)
        case "deflate":
            # By the standard zlib's format; some senders leave its header out.
            return _inflated(body, zlib.MAX_WBITS if _has_zlib_header(body) else -zlib.MAX_WBITS)
        case "br":
            return _unbrotlied(body)
        case "lz4":
            return _unframed(body, lz4.frame.LZ4FrameDecompressor)
        case "zstd":
            return _unframed(body, zstd.ZstdDecompressor)
        case other:
            raise EncodingError(f"Content-Encoding {other!r} is not supported; use one of {', '.join(SUPPORTED)}")


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


def _inflated(body: bytes, window: int) -> Iterator[bytes]:
    while body:
        stream = zlib.decompressobj(window)
        while not stream.eof:
            piece = stream.decompress(body, _PIECE)
            body = stream.unconsumed_tail
            if not (piece or body or stream.eof):
                raise EOFError
            yield piece
        # Several streams may stand one after the other: clickhouse-connect packs an insert block by block.
        body = stream.unused_data


def _unbrotlied(body: bytes) -> Iterator[bytes]:
    stream, given = brotli.Decompressor(), body
    while not stream.is_finished():
        piece = stream.process(given, output_buffer_limit=_PIECE)
        given = b""
        if not piece and stream.can_accept_more_data() and not stream.is_finished():
            raise EOFError
        yield piece


def _unframed(body: bytes, decompressor: Callable[[], zstd.ZstdDecompressor | lz4.frame.LZ4FrameDecompressor]) -> Iterator[bytes]:
    while body:
        stream, given = decompressor(), body
        while not stream.eof:
            piece = stream.decompress(given, max_length=_PIECE)
            given = b""
            if not piece and stream.needs_input and not stream.eof:
                raise EOFError
            yield piece
        body = bytes(stream.unused_data or b"")
