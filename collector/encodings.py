"""HTTP content encodings of bodies, both ways.

In: bytes and the name of an encoding. Out: bytes. Invariant: nothing unpacks beyond the caller's limit, and the caller may
stop it at every piece; a body of any number of streams is unpacked in linear time.
"""

from __future__ import annotations

import io
import zlib
from collections.abc import Callable, Iterator

import lz4.frame
from backports import zstd

SUPPORTED = ("gzip", "deflate", "lz4", "zstd")
_PIECE = 1 << 20
"""Most bytes that are taken from a stream at once."""
_SLICE = 1 << 13
"""Bytes that are passed to a stream at once: it copies the rest of them that is behind its end, however short it was itself."""


class EncodingError(ValueError):
    """A body's encoding is unknown, or the body is not so encoded."""


class TooLargeError(ValueError):
    """A body is larger than its limit."""


def decompress(body: bytes, encoding: str, limit: int, hold: Callable[[int], None] = lambda _: None) -> bytes:
    """Unpack a body.

    Args:
        body: as received.
        encoding: the Content-Encoding header; empty or `identity` for none.
        limit: most bytes that may come out.
        hold: called with the number of bytes unpacked so far; an error that it raises ends the unpacking.

    Raises:
        EncodingError: the encoding is unknown, or the body is broken or cut.
        TooLargeError: more than `limit` bytes came out.
    """
    name = encoding.strip().lower()
    if name in {"", "identity"}:
        allow(len(body), limit, hold)
        return body
    out = io.BytesIO()
    try:
        for piece in _pieces(body, name):
            out.write(piece)
            allow(out.tell(), limit, hold)
    except EOFError:
        raise EncodingError(f"the body ends before its {name} stream does") from None
    except (zlib.error, zstd.ZstdError, RuntimeError) as error:
        raise EncodingError(f"the body is not {name}: {error}") from None
    return out.getvalue()


def allow(size: int, limit: int, hold: Callable[[int], None]) -> None:
    """Call `hold` with the number of bytes of a body so far, unless they are too many; pass its errors on.

    Raises:
        TooLargeError: they are more than the limit.
    """
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
        case "lz4":
            return _unframed(body, lz4.frame.LZ4FrameDecompressor)
        case "zstd":
            return _unframed(body, zstd.ZstdDecompressor)
        case other:
            raise EncodingError(f"Content-Encoding {other!r} is not supported; use one of {', '.join(SUPPORTED)}")


def accepted_encoding(accepted: str) -> str | None:
    """Return the first encoding of an Accept-Encoding header that is supported; None when none is."""
    for part in accepted.lower().split(","):
        name, _, weight = part.partition(";")
        if name.strip() in SUPPORTED and weight.replace(" ", "") not in {"q=0", "q=0.0", "q=0.00", "q=0.000"}:
            return name.strip()
    return None


class Packer:
    """Packs a body piece by piece; the output for a piece may be empty."""

    def __init__(self, encoding: str) -> None:
        """Pack in an encoding of SUPPORTED."""
        self.encoding = encoding
        self._begin = b""
        match encoding:
            case "lz4":
                packer = lz4.frame.LZ4FrameCompressor()
                self._begin = packer.begin()
            case "zstd":
                packer = zstd.ZstdCompressor(level=1)
            case _:
                packer = zlib.compressobj(1, wbits=(16 if encoding == "gzip" else 0) + zlib.MAX_WBITS)
        self._pack, self._finish = packer.compress, packer.flush

    def pack(self, piece: bytes) -> bytes:
        """Return the packed output for the next piece."""
        begin, self._begin = self._begin, b""
        return begin + self._pack(piece)

    def finish(self) -> bytes:
        """Return the remaining output, and the end of the stream."""
        begin, self._begin = self._begin, b""
        return begin + self._finish()

    def fail(self, block: bytes) -> bytes:
        """Return the output for a block on a failure, and the end of the stream."""
        return self.pack(block) + self.finish()


def _has_zlib_header(body: bytes) -> bool:
    return len(body) >= 2 and body[0] & 0x0F == 8 and int.from_bytes(body[:2]) % 31 == 0


def _inflated(body: bytes, window: int) -> Iterator[bytes]:
    source, given = io.BytesIO(body), b""
    # A body may hold several streams, one after the other: clickhouse-connect packs an insert block by block.
    while given := given or source.read(_SLICE):
        stream = zlib.decompressobj(window)
        while not stream.eof:
            given = given or source.read(_SLICE)
            piece = stream.decompress(given, _PIECE)
            if not (given or piece or stream.eof):
                raise EOFError
            given = stream.unconsumed_tail or stream.unused_data
            yield piece


def _unframed(body: bytes, decompressor: Callable[[], zstd.ZstdDecompressor | lz4.frame.LZ4FrameDecompressor]) -> Iterator[bytes]:
    # The libraries' readers of files would do, but they go through any number of empty streams before they yield.
    source, given = io.BytesIO(body), b""
    while given := given or source.read(_SLICE):
        stream = decompressor()
        while not stream.eof:
            if stream.needs_input and not (given := given or source.read(_SLICE)):
                raise EOFError
            piece = stream.decompress(given, max_length=_PIECE)
            given = stream.unused_data or b""
            yield piece
