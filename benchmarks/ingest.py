"""Benchmark of ingestion: CPU, memory and time to acknowledgement per span; our store, on disk, against a peer.

In: how many spans, which, the collector, the peer. Out: a table, a plot, and as the last line one JSON object; exit code 1 when a check
fails. Invariant: client and receivers are processes of their own; ours and the peer get the same calls, and every span id is looked for
where it is read. Token ids are written as each one's own tracer writes them (`peer`); the peer is measured a second time with the very
bytes that ours gets (`peer_same_bytes`), which it keeps as text without reading them. Both ratios are reported.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from benchmarks.measure import CONNECTIONS, Measured, measure
from benchmarks.peers import agent_lightning
from benchmarks.plots import draw
from benchmarks.receivers import Receiver, embedded, through_otelcol
from benchmarks.rollout_spans import Ids, Mix
from benchmarks.scratch import exit_code, scratch
from benchmarks.workload import Workload

Open = Callable[[Path], AbstractContextManager[Receiver]]
PATHS: Mapping[str, Open] = {"embedded": embedded, "otelcol": through_otelcol}
PEERS: Mapping[str, Open] = {"agent_lightning": agent_lightning.running}

ROWS = {
    "spans": "spans",
    "bytes_a_span": "bytes a span",
    "spans_per_s": "spans/s acknowledged",
    "cpu_us": "CPU us a span, at the last acknowledgement",
    "cpu_us_settled": "CPU us a span, merges included",
    "p50_ms": f"ms to acknowledgement, {CONNECTIONS} in flight, p50",
    "p99_ms": "  p99",
    "p50_ms_8": "ms to acknowledgement, 8 in flight, p50",
    "p99_ms_8": "  p99",
    "p50_ms_1": "ms to acknowledgement, alone, p50",
    "p99_ms_1": "  p99",
    "rss_mb_before": "MB resident before",
    "rss_mb_fifth": "MB resident after a fifth",
    "rss_mb": "MB resident after all",
    "anonymous_mb_fifth": "MB of it in no file, after a fifth",
    "anonymous_mb": "MB of it in no file, after all",
    "other_cores": "cores that others used meanwhile",
}


def main() -> int:
    """Measure, compare, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--spans", type=int, default=500_000, help="that ours takes in")
    parser.add_argument(
        "--mix",
        type=Mix,
        choices=list(Mix),
        default=Mix.LLM,
        help="LLM calls as any tracer writes them, as our gateway does, or whole rollouts",
    )
    parser.add_argument("--collector", choices=PATHS, default="embedded", help="to the store itself, or through the real Collector")
    parser.add_argument("--peer", choices=PEERS, help="measured in the same run")
    parser.add_argument("--peer-spans", type=int, default=10_000, help="that the peer takes in; it keeps 2 GB of 100000 in memory")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plot", type=Path, default=Path("runs/ingest.png"))
    arguments = parser.parse_args()

    same = Workload(arguments.seed, arguments.mix)
    ours = _measured(PATHS[arguments.collector], same, arguments.spans)
    peers: dict[str, Measured] = {}
    if arguments.peer:
        peer_workload = Workload(arguments.seed, arguments.mix, Ids.ARRAYS)
        workloads = {"peer": peer_workload, "peer_same_bytes": same}
        peers = {name: _measured(PEERS[arguments.peer], workload, arguments.peer_spans) for name, workload in workloads.items()}
    result = report(ours, peers)
    _print_table({f"spangrad, {arguments.collector}": ours, **peers})
    draw(arguments.plot, {f"spangrad, {arguments.collector}": ours.samples} | {name: peer.samples for name, peer in peers.items()})
    print(f"plot: {arguments.plot}")
    print(json.dumps({"benchmark": "ingest", "collector": arguments.collector, "mix": arguments.mix, **result}))
    return exit_code(result["checked"])


def report(ours: Measured, peers: Mapping[str, Measured]) -> dict[str, Any]:
    """Return all figures, the ratios of each peer's to ours, and the counts that must be 0."""
    ratio: dict[str, float] = {}
    checked = dict(ours.checked)
    for name, peer in peers.items():
        suffix = name.removeprefix("peer")
        for measure_name, (numerator, denominator) in {
            "cpu": (peer.figures["cpu_us_settled"], ours.figures["cpu_us_settled"]),
            "throughput": (ours.figures["spans_per_s"], peer.figures["spans_per_s"]),
            "p50": (peer.figures["p50_ms"], ours.figures["p50_ms"]),
            "p99": (peer.figures["p99_ms"], ours.figures["p99_ms"]),
        }.items():
            ratio[measure_name + suffix] = round(numerator / denominator, 2)
        checked |= {f"{name}_{what}": count for what, count in peer.checked.items()}
    return {"ours": ours.figures, **{name: peer.figures for name, peer in peers.items()}, "ratio": ratio, "checked": checked}


def _measured(receiver: Open, workload: Workload, spans: int) -> Measured:
    with scratch("ingest") as directory, receiver(directory) as running:
        return measure(running, directory, workload, spans)


def _print_table(measured: Mapping[str, Measured]) -> None:
    print(f"{'':46}" + "".join(f"{name:>20}" for name in measured))
    for key, label in ROWS.items():
        print(f"{label:46}" + "".join(f"{one.figures[key]:>20,}" for one in measured.values()))


if __name__ == "__main__":
    sys.exit(main())
