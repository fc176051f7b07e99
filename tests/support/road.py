"""A store and the real Collector before it, for tests that kill either.

In: a directory. Out: a `Road`, whose parts can be killed and started again on the same ports. Invariant: neither outlives the test run.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from law_one import Verdict, judge, lacking
from load import Load, Tally
from load_spans import Rollouts
from running_collector import collector_values, otelcol, start_collector
from running_store import answers, start_store, store_settings

from spangrad.processes import Child, wait_until
from spangrad.processes import answers as responds

DRAIN_SECONDS = 90


class Road:
    """A store and a Collector before it, each of which can be killed and started again."""

    def __init__(self, directory: Path, **changes: object) -> None:
        """Keep everything in `directory`; `changes` are settings of the Collector."""
        self.store = store_settings(directory / "data")
        self._values = collector_values(directory, **changes)
        self._directory = directory
        self.run = uuid.uuid4().hex[:8]
        self._children: dict[str, Child] = {}

    def start_store(self) -> None:
        """Start the store, and wait until it answers."""
        child = self._children["store"] = start_store(self.store, self._directory / "store.log")
        wait_until(lambda: answers(self.store), 60, "the store", [child], poll_seconds=0.02)

    def start_collector(self) -> None:
        """Start the Collector, and wait until it takes bodies."""
        child = self._children["collector"] = start_collector(self.store, self._values, self._directory / "collector.log")
        wait_until(lambda: responds(f"http://127.0.0.1:{self._values['health_port']}"), 60, "the collector", [child], poll_seconds=0.02)

    def kill(self, name: str) -> None:
        """End a part as a power cut would."""
        self._children[name].process.kill()
        self._children[name].process.wait()

    def close(self) -> None:
        """Stop both."""
        for child in reversed(self._children.values()):
            child.stop(grace_seconds=10)

    def load(self, seed: int) -> Load:
        """Bodies for the Collector."""
        return Load(*self._ports(), Rollouts(seed, self.run).bodies)

    def judge(self, tally: Tally, *, build: bool = True) -> Verdict:
        """Wait until all that was acknowledged has come through the Collector's queue, or long enough, then compare."""
        held, end = tally.held, time.monotonic() + DRAIN_SECONDS
        while lacking(self.store, self.run, held) and time.monotonic() < end:
            time.sleep(0.5)
        return judge(self.store, self.run, held, build=build)

    def _ports(self) -> tuple[int, int]:
        return int(str(self._values["otlp_http_port"])), int(str(self._values["otlp_grpc_port"]))


@contextmanager
def running_road(directory: Path, **changes: object) -> Generator[Road]:
    """Both parts, started; stopped at the end. Skips the test where there is no Collector."""
    otelcol()
    road = Road(directory, **changes)
    try:
        road.start_store()
        road.start_collector()
        yield road
    finally:
        road.close()
