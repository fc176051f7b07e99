"""Fetching of a worker's words from the trainer's ranks: which words each rank has, in requests of a bounded size, several at once.

In: placements that a worker wants filled, and the plan of a transfer. Out: the words of each request, in the order of the requests.
Invariant: each word is asked for once, of the rank that has it; a bucket is yielded only when all of its bytes have come, and at most
`_AHEAD` buckets a thread are in memory.

Runs inside vLLM's workers, with the standard library alone. A rank is asked over HTTP, with the key of the transfer as bearer token:
`POST /words` {"version", "dtype", "base", "pieces": [[part, offset, [[size, stride], ...]], ...]} -> the words of all pieces, one after
the other; or, where the answer has the header `x-delta`, their differences from the version `base` (`spangrad.weights.deltas`).
"""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, zip_longest
from typing import Any
from urllib.parse import urlsplit

from spangrad.weights.placements import Placement, clip, split

SECONDS = 60
"""Longest time that a rank may send nothing."""
IDLE_SECONDS = 20
"""Time without a request after which a connection is made anew: a rank closes one after 60 s, and the next request on it would fail."""
BUCKET_BYTES = 4 * 2**20
"""Size of a request's answer, at most."""
_THREADS_PER_RANK = 2
_MOST_THREADS = 16
_AHEAD = 2
DELTA_HEADER = "x-delta"


@dataclass(frozen=True)
class RankParts:
    """Address of a rank of the trainer, and the parts of tensors that it has."""

    url: str
    parts: Sequence[tuple[str, int, int]]
    """Name of the tensor, number of the part's first word in it, and number of words."""

    @cached_property
    def numbers(self) -> Mapping[str, Sequence[int]]:
        """Numbers of the parts of each tensor, by its name."""
        numbers: dict[str, list[int]] = {}
        for number, (name, _, _) in enumerate(self.parts):
            numbers.setdefault(name, []).append(number)
        return numbers


@dataclass(frozen=True, slots=True)
class RemotePiece:
    """Words of one part that go to one target."""

    target: int
    """Number of the placement that was asked for."""
    part: int
    """Number of the part in the rank's list."""
    offset: int
    """Number of the piece's first word in the part."""
    placement: Placement


@dataclass(frozen=True, slots=True)
class Bucket:
    """Words that one request asks for."""

    rank: int
    pieces: Sequence[RemotePiece]
    words: int
    same: bool
    """True if the targets hold words of the dtype that is sent, so that differences can be added to them."""


def buckets_of(targets: Sequence[tuple[Placement, bool]], ranks: Sequence[RankParts], word_bytes: int) -> list[Bucket]:
    """Return the requests that fill all targets, of all ranks by turns.

    Args:
        targets: placements, and whether their memory has the dtype that is sent.
        ranks: the trainer's.
        word_bytes: size of a word that is sent, in bytes.

    Raises:
        OSError: the ranks do not have every word.
    """
    by_name: dict[str, list[int]] = {}
    for number, (placement, _) in enumerate(targets):
        by_name.setdefault(placement.name, []).append(number)
    covered = [0] * len(targets)
    by_rank = [list(_buckets_of_rank(number, rank, targets, by_name, covered, word_bytes)) for number, rank in enumerate(ranks)]
    for (placement, _), count in zip(targets, covered, strict=True):
        if count != placement.count:
            raise OSError(f"the trainer's ranks have {count} of the {placement.count} words of {placement.name} that this worker holds")
    return [bucket for bucket in chain.from_iterable(zip_longest(*by_rank)) if bucket]


def _buckets_of_rank(
    number: int,
    rank: RankParts,
    targets: Sequence[tuple[Placement, bool]],
    by_name: Mapping[str, Sequence[int]],
    covered: list[int],
    word_bytes: int,
) -> Iterator[Bucket]:
    limit = BUCKET_BYTES // word_bytes
    pending: dict[bool, tuple[list[RemotePiece], int]] = {}
    for part in sorted(part for name in by_name for part in rank.numbers.get(name, ())):
        name, first, words = rank.parts[part]
        for target in by_name[name]:
            placement, same = targets[target]
            for piece in chain.from_iterable(split(clipped, limit) for clipped in clip(placement, first, first + words)):
                covered[target] += piece.count
                pieces, held = pending.pop(same, ([], 0))
                if pieces and held + piece.count > limit:
                    yield Bucket(number, pieces, held, same)
                    pieces, held = [], 0
                pieces.append(RemotePiece(target, part, piece.source - first, piece))
                pending[same] = pieces, held + piece.count
    for same, (pieces, held) in pending.items():
        yield Bucket(number, pieces, held, same)


@dataclass(frozen=True, slots=True)
class Fetched:
    """Answer to a bucket's request."""

    bucket: Bucket
    is_delta: bool
    data: bytearray


def fetch(
    buckets: Iterable[Bucket], ranks: Sequence[RankParts], *, key: str, version: str, dtype: str, word_bytes: int, base: str
) -> Iterator[Fetched]:
    """Yield the words of each bucket, in order.

    Args:
        buckets: the requests.
        ranks: the trainer's.
        key: token of the transfer.
        version: name of the words.
        dtype: dtype of the words.
        word_bytes: size of a word in bytes.
        base: version that this worker holds. Empty: none that is known.

    Raises:
        OSError: a rank does not answer, refuses, or ended before all had come.
    """
    connections = _Connections(ranks)

    def answer_to(bucket: Bucket) -> Fetched:
        pieces = [[piece.part, piece.offset, [[each.size, each.source] for each in piece.placement.dimensions]] for piece in bucket.pieces]
        body = {"version": version, "dtype": dtype, "base": base if bucket.same else "", "pieces": pieces}
        return connections.ask(bucket, body, key, bucket.words * word_bytes)

    waiting: deque[Future[Fetched]] = deque()
    threads = min(_MOST_THREADS, _THREADS_PER_RANK * len(ranks))
    with ThreadPoolExecutor(threads, "weights") as pool:
        try:
            for bucket in buckets:
                waiting.append(pool.submit(answer_to, bucket))
                if len(waiting) >= _AHEAD * threads:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            connections.end(OSError("the transfer has ended"))  # before the pool, which waits for its threads
            pool.shutdown(cancel_futures=True)
            connections.close()


class _Connections:
    """A connection of each thread to each rank, which stays open between requests."""

    def __init__(self, ranks: Sequence[RankParts]) -> None:
        self._ranks = ranks
        self._local = threading.local()
        self._open: list[http.client.HTTPConnection] = []
        self._end: OSError | None = None
        """Reason why no more words are fetched, such as the error of the first rank that failed. None: they are."""

    def ask(self, bucket: Bucket, body: Mapping[str, Any], key: str, size: int) -> Fetched:
        url = self._ranks[bucket.rank].url
        try:
            connection = self._connection(bucket.rank)
            connection.request("POST", "/words", json.dumps(body), {"Authorization": f"Bearer {key}", "Content-Type": "application/json"})
            if self._end:  # it may have connected since
                raise OSError("another rank has failed")
            answer = connection.getresponse()
            is_delta = answer.headers.get(DELTA_HEADER) is not None
            length = int(answer.headers.get("content-length") or 0)
            if answer.status != 200:
                raise OSError(f"it answers {answer.status}: {answer.read(500).decode(errors='replace')}")
            if length > size or (length < size and not is_delta):
                raise OSError(f"it sends {length} bytes, and {size} were asked for")
            data = bytearray(length)
            read = 0
            while read < length:
                more = answer.readinto(memoryview(data)[read:])
                if not more:
                    raise OSError(f"it ended after {read} of {length} bytes")
                read += more
        except (OSError, http.client.HTTPException) as error:
            reason = OSError(f"the trainer's rank at {url} did not send its words: {error or type(error).__name__}")
            reason.__cause__ = error
        else:
            return Fetched(bucket, is_delta, data)
        raise self.end(reason)  # or that of the rank that failed before

    def end(self, reason: OSError) -> OSError:
        """End the answers that threads wait for, and ask for no more; return the first reason that was given."""
        self._end = self._end or reason
        for connection in list(self._open):
            if opened := connection.sock:
                with contextlib.suppress(OSError):  # its rank has closed it
                    opened.shutdown(socket.SHUT_RDWR)
        return self._end

    def close(self) -> None:
        for connection in self._open:
            connection.close()

    def _connection(self, rank: int) -> http.client.HTTPConnection:
        held: dict[int, tuple[http.client.HTTPConnection, float]] = self._local.__dict__.setdefault("connections", {})
        now = time.monotonic()
        if rank not in held:
            parts = urlsplit(self._ranks[rank].url)
            connection, used_at = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=SECONDS), now
            self._open.append(connection)
        else:
            connection, used_at = held[rank]
        if now - used_at > IDLE_SECONDS:
            connection.close()  # the next request opens it again
        held[rank] = connection, now
        return connection
