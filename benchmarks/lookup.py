"""One training step's rollouts out of a million spans: what reading them costs, store and reader together.

In: how many rollouts, how their ids are made. Out: a table, and as the last line one JSON object; exit code 1 when a check fails.
Measured is all that the builder reads: spans, evaluations and calls with their token ids, by rollout, and by trace where spans do not
name their rollout. The peer is the same question asked of the stock exporter's layout, in the same store.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.lookup_data import CALLS_A_ROLLOUT, FOREIGN_RUN, RUNS, SPANS_A_ROLLOUT, STEP, Workload
from benchmarks.scratch import exit_code, scratch
from spangrad.processes import Child, answers, free_ports, own_command, wait_until
from spangrad.settings import StoreSettings
from spangrad.store.clickhouse import connect
from spangrad.store.names import stored

STOCK_BATCHES = 3
_TYPED = ("rollout_spans", "calls", "trace_keys")


def main() -> int:
    """Fill a store, then read from it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rollouts", type=int, default=51_200, help=f"of {SPANS_A_ROLLOUT} spans each")
    parser.add_argument("--batches", type=int, default=20, help=f"of {STEP} rollouts each")
    parser.add_argument("--ids", choices=("ordered", "random"), default="ordered", help="whether rollout ids begin with their time")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--read", metavar="STORE_PROCESS", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--url", help=argparse.SUPPRESS)
    parser.add_argument("--reader", choices=("ours", "unsettled", "peer"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    workload = Workload(arguments.rollouts, seed=arguments.seed, ordered=arguments.ids == "ordered")
    if arguments.read:
        print(json.dumps(_READERS[arguments.reader](workload, arguments.url, arguments.read, arguments.batches)))
        return 0
    with scratch("lookup") as directory:
        result = _run(directory, workload, arguments)
    for name, figures in (("ours", result["ours"]), ("peer", result["peer"])):
        print(f"{name}: {', '.join(f'{key} {value}' for key, value in figures.items() if not isinstance(value, dict))}")
    print(json.dumps(result))
    return exit_code(result["checked"])


def _run(directory: Path, workload: Workload, arguments: argparse.Namespace) -> dict[str, Any]:
    ports = dict(zip(("otlp-grpc", "otlp-http", "clickhouse"), free_ports(3), strict=True))
    flags = [text for name, port in ports.items() for text in (f"--{name}-port", str(port))]
    (directory / "spangrad.toml").touch()
    command = own_command("store", "--config", str(directory / "spangrad.toml"), "--path", str(directory / "store"), *flags)
    child = Child("spangrad store", command, directory / "store.log", inherit_settings=False)
    url = f"http://127.0.0.1:{ports['clickhouse']}"

    def read(reader: str) -> dict[str, Any]:
        command = [sys.executable, "-m", "benchmarks.lookup", "--read", str(child.process.pid), "--url", url, "--reader", reader]
        same = ["--rollouts", str(workload.rollouts), "--seed", str(workload.seed), "--batches", str(arguments.batches)]
        same += ["--ids", arguments.ids]
        # As `spangrad build` runs Polars.
        environment = {**os.environ, "POLARS_MAX_THREADS": "1"}
        done = subprocess.run([*command, *same], stdout=subprocess.PIPE, text=True, check=True, env=environment)
        return json.loads(done.stdout.splitlines()[-1])

    try:
        wait_until(lambda: answers(f"{url}/ping"), 60, "the store", [child])
        client = connect(StoreSettings(url=url))
        for statement in workload.statements():
            client.command(statement)
        unsettled = read("unsettled")
        for table in (*_TYPED, "otel_traces"):
            client.command(f"OPTIMIZE TABLE {stored(table)} FINAL")
        # The first step of every run is delivered once more: a reader must see it once.
        for run in range(RUNS):
            client.command(workload.traces_sql(workload.steps(run)[0].start, STEP))
        ours, peer = read("ours"), read("peer")
        spans = client.query("SELECT uniqExact(TraceId, SpanId) FROM otel.otel_traces").result_rows[0][0]
        client.close()
    finally:
        child.stop()
    checked = {
        **ours.pop("checked"),
        **{f"peer_{name}": count for name, count in peer.pop("checked").items()},
        "lacking_in_store": workload.rollouts * SPANS_A_ROLLOUT - spans,
    }
    return {
        "benchmark": "lookup",
        "spans": spans,
        "rollouts_a_batch": STEP,
        "ids": arguments.ids,
        "ours": {**ours, "unsettled": unsettled},
        "peer": peer,
        "ratio": {"cpu": round(peer["cpu_ms"] / ours["cpu_ms"], 1)},
        "checked": checked,
    }


def _read_ours(workload: Workload, url: str, store_process: int, batches: int) -> dict[str, Any]:
    from benchmarks.lookup_readers import Reader, differing_rows, summary

    reader = Reader(StoreSettings(url=url), store_process, workload)
    order = random.Random(workload.seed)
    named = [step for run in range(RUNS) if run != FOREIGN_RUN for step in workload.steps(run)]
    few = max(3, batches // 4)
    everywhere = range(workload.rollouts * FOREIGN_RUN // RUNS)
    steps: dict[str, list[Sequence[int]]] = {
        "": [named[0], *order.sample(named[1:], min(batches, len(named)) - 1)],
        "inherited": [*workload.steps(FOREIGN_RUN)[:few]],
        "scattered": [sorted(order.sample(everywhere, STEP)) for _ in range(few)],
    }
    figures: dict[str, Any] = {}
    checked = {"lacking_spans": 0, "lacking_calls": 0, "wrong_ids": 0, "spans_unlike_scan": 0, "calls_unlike_scan": 0}
    for kind, chosen in steps.items():
        costs = list[Any]()
        reader.ours(reader.names(chosen[0]))
        for place, step in enumerate(chosen):
            batch = reader.names(step)
            frames, cost = reader.ours(batch)
            costs.append(cost)
            evaluations = STEP + sum(rollout % 4 == 0 for rollout in step)
            checked["lacking_spans"] += abs(STEP * SPANS_A_ROLLOUT + evaluations - frames.spans.height)
            checked["lacking_calls"] += abs(STEP * CALLS_A_ROLLOUT - frames.calls.height)
            checked["wrong_ids"] += abs(workload.tokens(STEP) - int(frames.calls["PromptIds"].list.len().sum()))
            if place == 0:  # delivered twice, but for the scattered ones
                spans, calls = reader.scanned(batch)
                checked["spans_unlike_scan"] += differing_rows(frames.spans, spans)
                checked["calls_unlike_scan"] += differing_rows(frames.calls, calls)
        figures |= {kind: summary(costs)} if kind else summary(costs)
    return {**figures, "checked": checked}


def _read_unsettled(workload: Workload, url: str, store_process: int, batches: int) -> dict[str, Any]:
    from benchmarks.lookup_readers import Reader, summary

    reader = Reader(StoreSettings(url=url), store_process, workload)
    return summary([reader.ours(reader.names(step))[1] for step in workload.steps(0)[: batches + 1]][1:])


def _read_peer(workload: Workload, url: str, store_process: int, batches: int) -> dict[str, Any]:
    from benchmarks.lookup_readers import Reader, summary

    reader = Reader(StoreSettings(url=url), store_process, workload)
    lacking, costs = 0, list[Any]()
    for step in workload.steps(1)[: min(batches, STOCK_BATCHES)]:
        frame, cost = reader.stock(reader.names(step))
        costs.append(cost)
        spans = frame.filter(frame["EventName"].is_null()).unique(["TraceId", "SpanId"]).height
        lacking += abs(STEP * SPANS_A_ROLLOUT - spans)
    return {**summary(costs), "checked": {"lacking_spans": lacking}}


_READERS = {"ours": _read_ours, "unsettled": _read_unsettled, "peer": _read_peer}

if __name__ == "__main__":
    sys.exit(main())
