"""The builder on a full store, in a process of its own: the cost of building and of reading, and the rows.

In: a store that holds a workload. Out: `Round`s and the last one's transitions. Invariant: it is the builder's own loop that works,
from roots that it finds itself; only its sink is another, that keeps the rows instead of writing them.
"""

from __future__ import annotations

import resource
import time
from dataclasses import asdict, dataclass
from typing import Any

import polars as pl

from benchmarks.meter import machine_cpu
from spangrad.settings import BuilderSettings, Settings, StoreSettings
from transition_builder import builder as builders
from transition_builder.frames import Built, Frames, concat
from transition_builder.schemas import DROPS, TRANSITIONS
from transition_builder.source.sink import Written

ROUNDS = 3
_UNTOUCHED = 10**6
"""No call is as long, so that a round's specification is its own and decides as any other's."""


@dataclass(slots=True)
class Round:
    """Seconds of one round over all rollouts."""

    build: float = 0.0
    """CPU of the builder in `build`, from frames to rows."""
    read: float = 0.0
    """CPU of the builder in all the rest: finding roots, reading, judging what is complete."""
    store: float = 0.0
    """CPU of the store meanwhile."""
    wall: float = 0.0
    others: float = 0.0
    """CPU of the machine's other processes."""


class _Keep:
    """Sink that keeps the rows, or drops them, instead of writing them."""

    def __init__(self, *, keeps: bool) -> None:
        self._keeps = keeps
        self.built: list[Built] = []

    def write(self, built: Built, rollouts: pl.DataFrame) -> Written:
        """Keep the rows if asked to; write nothing."""
        if self._keeps:
            self.built.append(built)
        return Written(built, rollouts.clear().with_columns(Revision=pl.lit(0)), spec="", builder="")


def measure(store: StoreSettings, store_process: int) -> tuple[dict[str, Any], pl.DataFrame, pl.DataFrame]:
    """Build everything in the store, ROUNDS times, and once more to keep the rows, which is not measured.

    Returns:
        `rounds`, `rss_mb_before` and `rss_mb_peak`; transitions and drops.
    """
    before = _peak()
    rounds = [asdict(_round(store, number, store_process, _Keep(keeps=False))) for number in range(ROUNDS)]
    figures = {"rounds": rounds, "rss_mb_before": before, "rss_mb_peak": _peak()}
    kept = _Keep(keeps=True)
    _round(store, ROUNDS, store_process, kept)
    return figures, concat((one.transitions for one in kept.built), TRANSITIONS), concat((one.drops for one in kept.built), DROPS)


def _round(store: StoreSettings, number: int, store_process: int, sink: _Keep) -> Round:
    settings = Settings(store=store, builder=BuilderSettings(max_tokens=_UNTOUCHED + number))
    # The clock of another process's CPU time, in nanoseconds (clock_getcpuclockid).
    clock = (~store_process << 3) | 2
    cost = Round()
    original = builders.build

    def timed(frames: Frames, spec: BuilderSettings) -> Built:
        began = time.process_time()
        built = original(frames, spec)
        cost.build += time.process_time() - began
        return built

    builders.build = timed
    try:
        builder = builders.Builder(settings)
        builder._sink = sink  # type: ignore[assignment]  # the loop as it is, but for what it writes
        machine, wall, store_cpu, own_cpu = machine_cpu(), time.perf_counter(), time.clock_gettime(clock), time.process_time()
        builder.build_ready()
        own_cpu, store_cpu = time.process_time() - own_cpu, time.clock_gettime(clock) - store_cpu
        cost.wall, cost.read, cost.store = time.perf_counter() - wall, own_cpu - cost.build, store_cpu
        cost.others = max(0.0, machine_cpu() - machine - own_cpu - store_cpu)
    finally:
        builders.build = original
    return cost


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
