"""One receiver under load: what it costs, how soon it acknowledges, whether everything is there.

In: a `Receiver`, a `Workload`, how many spans. Out: `Measured`. Invariant: every id that was sent is counted in what the receiver stored.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.meter import Meter, Sample, cpu_by_thread, machine_cpu
from benchmarks.receivers import Receiver, Stored, wait_drained
from benchmarks.workload import ROLLOUTS_A_BODY, SPANS_A_BODY, Workload, write_bodies

ROOT = Path(__file__).parents[1]
CONNECTIONS = 64
"""Bodies in flight: as many agents, or exporters, as a training run has at once."""
LATENCY_BODIES = 100
"""Sent after the load, and again, over fewer connections: latency without a queue."""
SETTLE_SECONDS = 120
START_SETTLE_SECONDS = 20


@dataclass(frozen=True, slots=True)
class Measured:
    """Figures, checks and samples of one receiver."""

    figures: dict[str, Any]
    checked: dict[str, int]
    """Counts that must be 0."""
    samples: Sequence[Sample]
    """Samples of the processes, from the first body sent until the receiver is idle."""


def measure(receiver: Receiver, directory: Path, workload: Workload, spans: int) -> Measured:
    """Send `spans` spans to a receiver, wait until it is idle, then count what it stores."""
    loaded = -(-spans // SPANS_A_BODY)
    ends = [loaded, loaded + LATENCY_BODIES, loaded + 2 * LATENCY_BODIES]
    rollouts = receiver.rollouts(workload, ends[-1] * ROLLOUTS_A_BODY)
    file = directory / "bodies"
    body_bytes = write_bodies(file, workload, rollouts)
    with _Client(file, receiver.traces_url) as client:
        meter = Meter([child.process.pid for child in receiver.children], lambda: client.acknowledged * SPANS_A_BODY)
        before = meter.settle(START_SETTLE_SECONDS)
        machine, threads = machine_cpu(), _threads(receiver)
        load = client.send(CONNECTIONS, 0, ends[0])
        acknowledged = meter.now()
        others = machine_cpu() - machine - (acknowledged.cpu - before.cpu) - load["cpu_seconds"]
        count = load["bodies"] * SPANS_A_BODY
        wait_drained(receiver, count)
        drained = meter.now().at
        settled = meter.settle(SETTLE_SECONDS)
        by_thread = _difference(_threads(receiver), threads)
        meter.close()
        quiet = {connections: client.send(connections, *part) for connections, part in ((1, ends[:2]), (8, ends[1:]))}
    file.unlink()
    wait_drained(receiver, ends[-1] * SPANS_A_BODY)
    samples = [sample for sample in meter.samples if sample.at >= before.at]
    parts = [load, *quiet.values()]
    checked = check(receiver.stored(workload, rollouts), ends[-1] * SPANS_A_BODY, parts)
    facts = receiver.facts(workload, len(rollouts))
    checked |= {name.removeprefix("bad_"): int(value) for name, value in facts.items() if name.startswith("bad_")}
    cost = {"cpu_us": acknowledged.cpu - before.cpu, "cpu_us_settled": settled.cpu - before.cpu}
    figures: dict[str, Any] = {
        "spans": count,
        "bytes_a_span": round(body_bytes / (ends[-1] * SPANS_A_BODY)),
        "spans_per_s": round(count / load["seconds"]),
        "spans_per_s_drained": round(count / (drained - acknowledged.at + load["seconds"])),
        **{name: round(seconds / max(count, 1) * 1e6, 1) for name, seconds in cost.items()},
        "settle_seconds": round(settled.at - acknowledged.at, 1),
        **{f"{name}_ms": value for name, value in percentiles(load).items()},
        **{f"{name}_ms_{connections}": value for connections, part in quiet.items() for name, value in percentiles(part).items()},
        **memory(samples, before, count),
        "waits": load["waits"],
        "client_cpu_us": round(load["cpu_seconds"] / max(count, 1) * 1e6, 1),
        "other_cores": round(max(0.0, others) / load["seconds"], 2),
        **{name: value for name, value in facts.items() if not name.startswith("bad_")},
        "cpu_us_by_thread": {name: round(seconds / max(count, 1) * 1e6, 1) for name, seconds in by_thread.items()},
    }
    return Measured(figures, checked, samples)


def check(tables: Sequence[Stored], sent: int, parts: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Return counts that must be 0 for the measurement to be valid.

    Args:
        tables: content of the receiver's tables.
        sent: number of spans to send.
        parts: the client's reports on the parts (load.Part).
    """
    return {
        "lost": sum(table.lost for table in tables),
        "double": sum(table.double for table in tables),
        "foreign": sum(table.foreign for table in tables),
        "unacknowledged": sent - sum(part["bodies"] for part in parts) * SPANS_A_BODY,
        "refused": sum(len(part["refused"]) for part in parts),
        "resends": sum(part["resends"] for part in parts),
    }


def memory(samples: Sequence[Sample], before: Sample, spans: int) -> dict[str, float]:
    """Resident memory, and as much of it as is in no file: before, at most, and its growth from a fifth of the load to all of it.

    Both ends are medians, over a tenth of the load: a merge or a collection comes and goes.
    """
    fifth = [sample for sample in samples if 0.15 * spans <= sample.spans <= 0.25 * spans] or [samples[-1]]
    end = [sample for sample in samples if 0.9 * spans <= sample.spans < spans] or [samples[-1]]
    figures: dict[str, float] = {}
    kinds: Mapping[str, Callable[[Sample], int]] = {"rss": lambda sample: sample.rss, "anonymous": lambda sample: sample.anonymous}
    for name, kind in kinds.items():
        first, last = median(map(kind, fifth)), median(map(kind, end))
        figures |= {
            f"{name}_mb_before": round(kind(before) / 1e6),
            f"{name}_mb_fifth": round(first / 1e6),
            f"{name}_mb": round(last / 1e6),
            f"{name}_mb_peak": round(max(map(kind, samples)) / 1e6),
            f"{name}_growth": round((last - first) / first, 3),
        }
    return figures


def percentiles(part: Mapping[str, Any]) -> dict[str, float]:
    """Milliseconds from a body's first byte to its acknowledgement."""
    times = part["milliseconds"] or [0.0]
    return {"p50": round(float(np.percentile(times, 50)), 1), "p99": round(float(np.percentile(times, 99)), 1)}


class _Client:
    """The client's process (benchmarks.load)."""

    def __init__(self, file: Path, url: str) -> None:
        command = [sys.executable, "-m", "benchmarks.load", "--bodies", str(file), "--url", url]
        self._process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.acknowledged = 0
        """Bodies of the part that is being sent."""

    def __enter__(self) -> _Client:
        self._read("ready")
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()

    def send(self, connections: int, first: int, end: int) -> dict[str, Any]:
        """Send the bodies [first, end), and return the client's report."""
        assert self._process.stdin
        self.acknowledged = 0
        print(connections, first, end, file=self._process.stdin, flush=True)
        part = self._read("milliseconds")
        self.acknowledged = part["bodies"]
        return part

    def _read(self, key: str) -> dict[str, Any]:
        assert self._process.stdout
        for line in self._process.stdout:
            message = json.loads(line)
            if key in message:
                return message
            self.acknowledged = message["acknowledged"]
        raise RuntimeError(f"the client ended with exit code {self._process.wait()} before it reported {key!r}")


def _threads(receiver: Receiver) -> dict[str, float]:
    return {f"{child.name}: {name}": cpu for child in receiver.children for name, cpu in cpu_by_thread(child.process.pid).items()}


def _difference(after: Mapping[str, float], before: Mapping[str, float]) -> dict[str, float]:
    spent = {name: cpu - before.get(name, 0.0) for name, cpu in after.items()}
    return dict(sorted(((name, cpu) for name, cpu in spent.items() if cpu > 0), key=lambda item: -item[1])[:12])
