"""Seeded bodies of ExportTraceServiceRequest, and the ids that they hold.

In: a seed, a mix, how token ids are written, and the rollouts' names. Out: bodies, in a file, and the ids that must be stored.
Invariant: the same `Workload` gives the same bytes for every receiver; only the rollouts' names are the receiver's.

What is realistic: a rollout of 20 spans, 3.3 KB each on the average, between 0.5 and 7 KB (`Mix.ROLLOUTS`, benchmarks/rollout_spans.py);
prompts that grow as conversations do; text that compresses like prose; attributes of both sides on spans and resources, so that our typed
tables and the peer's rollouts are filled. What is not: agent and gateway send in one request, and the clock is set.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from benchmarks import rollout_spans as spans
from benchmarks.rollout_spans import SPANS_A_ROLLOUT, TURNS, Author, Ids, Mix, RolloutName

ROLLOUTS_A_BODY = 5
SPANS_A_BODY = ROLLOUTS_A_BODY * SPANS_A_ROLLOUT
_FRAME = struct.Struct("<I")


@dataclass(frozen=True, slots=True)
class Workload:
    """Everything that decides the bodies."""

    seed: int
    mix: Mix = Mix.ROLLOUTS
    ids: Ids = Ids.BYTES

    def names(self, count: int) -> list[RolloutName]:
        """Return names of the same length as the peer gives its rollouts."""
        return [RolloutName(f"ro-{one:016x}"[:15], f"at-{one:016x}"[:11]) for one in _numbers(self.seed, "rollout", count).tolist()]

    def span_ids(self, rollouts: int) -> NDArray[np.uint64]:
        """Return the ids of all spans of `rollouts` rollouts (big-endian on the wire)."""
        return _numbers(self.seed, "span", rollouts * SPANS_A_ROLLOUT)

    def call_ids(self, rollouts: int) -> NDArray[np.uint64]:
        """Return the ids of the gateway's spans among them."""
        every = self.span_ids(rollouts)
        return every if self.mix != Mix.ROLLOUTS else every.reshape(-1, SPANS_A_ROLLOUT)[:, 3 :: spans.SPANS_A_TURN].reshape(-1)

    def tokens(self, rollouts: int) -> tuple[int, int]:
        """Return the numbers of prompt ids and of response ids in the gateway's spans."""
        if self.mix != Mix.ROLLOUTS:
            return rollouts * SPANS_A_ROLLOUT * spans.LONE_PROMPT_TOKENS, rollouts * SPANS_A_ROLLOUT * spans.LONE_ANSWER_TOKENS
        first, more = spans.SYSTEM_TOKENS + spans.QUESTION_TOKENS, spans.ANSWER_TOKENS + spans.OBSERVATION_TOKENS
        return rollouts * sum(first + turn * more for turn in range(TURNS)), rollouts * TURNS * spans.ANSWER_TOKENS

    def bodies(self, rollouts: Sequence[RolloutName]) -> Iterator[bytes]:
        """Yield bodies of the rollouts' spans, ROLLOUTS_A_BODY rollouts in each."""
        author = Author(self.seed, self.mix, self.ids)
        ids = self.span_ids(len(rollouts)).astype(">u8").tobytes()
        traces = _numbers(self.seed, "trace", 2 * len(rollouts)).astype(">u8").tobytes()
        for first in range(0, len(rollouts), ROLLOUTS_A_BODY):
            request = ExportTraceServiceRequest()
            for index in range(first, min(first + ROLLOUTS_A_BODY, len(rollouts))):
                own = [ids[8 * at : 8 * at + 8] for at in range(index * SPANS_A_ROLLOUT, (index + 1) * SPANS_A_ROLLOUT)]
                request.resource_spans.append(author.rollout(index, rollouts[index], traces[16 * index : 16 * index + 16], own))
            yield request.SerializeToString()


def write_bodies(path: Path, workload: Workload, rollouts: Sequence[RolloutName]) -> int:
    """Write all bodies to a file, each after its length (four bytes, little-endian).

    Returns:
        Number of bytes of the bodies.
    """
    total = 0
    with path.open("wb") as file:
        for body in workload.bodies(rollouts):
            file.write(_FRAME.pack(len(body)))
            file.write(body)
            total += len(body)
    return total


def read_bodies(data: memoryview) -> list[memoryview]:
    """Return the bodies in the data of such a file, without copying them."""
    bodies: list[memoryview] = []
    start = 0
    while start < len(data):
        (size,) = _FRAME.unpack_from(data, start)
        start += _FRAME.size
        bodies.append(data[start : start + size])
        start += size
    return bodies


def _numbers(seed: int, kind: str, count: int) -> NDArray[np.uint64]:
    """Return `count` different 64-bit numbers: SplitMix64, which is a bijection."""
    start = int.from_bytes(random.Random(f"{seed} {kind}").randbytes(8), "little")
    state = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(start)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))
