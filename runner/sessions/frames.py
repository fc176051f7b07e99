"""Frames between the server and a shard: a head of fixed size, then a payload.

In: bytes of a stream socket, in any portions. Out: frames, in order.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum, IntFlag
from struct import Struct

_HEAD = Struct("<IIBBdd")
"""Length of the payload, session, kind, events, seconds, reward."""


class FrameKind(IntEnum):
    """Purpose of a frame."""

    READY = 0
    """Sent by the shard, session 0: it serves. Payload: description of the environment."""
    BROKEN = 1
    """Sent by the shard, session 0: it cannot serve. Payload: a sentence."""
    OPEN = 2
    """Creation of a session's environment; payload to the shard: `SessionOpening`, from it: empty, or an error that ends the session."""
    MESSAGE = 3
    """Request of a client, and its response."""
    CLOSE = 4
    """End of a session, sent to the shard."""
    PING = 5
    """Sign of life, sent to the shard and back; session 0."""


class FrameEvents(IntFlag):
    """Events of an answer, for the server's counts."""

    NONE = 0
    RESET = 1
    STEP = 2
    """A step was played, and not only answered again."""
    REWARD = 4
    DONE = 8
    ERROR = 16
    CLOSED = 32
    """The client has ended the session."""


@dataclass(frozen=True, slots=True)
class Frame:
    """A frame that has arrived, or is to be sent."""

    kind: FrameKind
    session: int = 0
    payload: bytes = b""
    events: FrameEvents = FrameEvents.NONE
    seconds: float = 0.0
    """Time that the environment took."""
    reward: float = 0.0

    def encode(self) -> bytes:
        """Return its bytes."""
        return _HEAD.pack(len(self.payload), self.session, self.kind, self.events, self.seconds, self.reward) + self.payload


class FrameReader:
    """Reader of a stream."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[Frame]:
        """Yield the frames that are whole now."""
        buffer = self._buffer
        buffer += data
        start = 0
        while len(buffer) - start >= _HEAD.size:
            length, session, kind, events, seconds, reward = _HEAD.unpack_from(buffer, start)
            end = start + _HEAD.size + length
            if len(buffer) < end:
                break
            payload = bytes(buffer[start + _HEAD.size : end])
            yield Frame(FrameKind(kind), session, payload, FrameEvents(events), seconds, reward)
            start = end
        if start:
            del buffer[:start]
