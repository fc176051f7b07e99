"""Encoder of lengths (varints) for protobuf and RowBinary: seven bits a byte, the lowest first.

In: a number, not negative. Out: its bytes. Invariant: the shortest form.
"""

from __future__ import annotations


def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 127:
        out.append(number & 127 | 128)
        number >>= 7
    out.append(number)
    return bytes(out)


_SHORT = tuple(_varint(number) for number in range(1 << 14))


def varint(number: int) -> bytes:
    """Return the bytes of a number."""
    return _SHORT[number] if number < 1 << 14 else _varint(number)
