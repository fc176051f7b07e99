"""Benchmark of the builder: the cost of a transition, from the spans of ended rollouts in a store to rows that can be trained on.

In: how many calls, the peer. Out: a table, and as the last line one JSON object; exit code 1 when a check fails. Measured twice, at 8
and at 32 calls a rollout: the builder's own loop over a real store on disk, in a process of its own, but for its sink, which only takes
the rows. The rows of 32 calls are merged as the trainer merges them.

`cpu_us` is CPU of the builder from frames in memory to transitions, drops and rewards; `cpu_us_read` is its CPU for finding, reading
and judging the rollouts, `cpu_us_store` the store's meanwhile, and `cpu_us_all` the three. The peer begins with its own span objects in
memory. Both `ratio.cpu` (building) and `ratio.cpu_all` (all of ours against the peer's building) are reported.

Invariant: of every call, prompt ids, response ids, logprobs, reward and agent are compared with what the rollouts hold, and ours with
the peer's.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from benchmarks.build_data import COLUMNS, GROUP_SIZE, OTHER_SPANS, SPANS_A_TURN, Rollout, Workload
from benchmarks.peers import agent_lightning_triplets
from benchmarks.scratch import exit_code, scratch
from spangrad.processes import Child, answers, free_ports, own_command, wait_until
from spangrad.settings import StoreSettings
from spangrad.store.clickhouse import connect
from spangrad.types import call_id
from trainer.data.merge import Sequences, merge

CALLS_A_ROLLOUT = (8, 32)
PEERS = {"agent_lightning": agent_lightning_triplets.adapt}
_ROWS_AN_INSERT = 5000
_TEXT = ("gen_ai.prompt", "gen_ai.completion", "logprobs.content")
"""Attributes of the peer's spans that hold messages and logprobs: `peer_lean` goes without."""

Row = list[Any]
"""One call: hashes of its prompt ids, its response ids and its logprobs, its reward, its agent."""

ROWS = {
    "calls": "calls",
    "cpu_us": "CPU us a transition, spans in memory to rows",
    "cpu_us_read": "  to find, read and judge them",
    "cpu_us_store": "  the store's meanwhile",
    "cpu_us_all": "CPU us a transition, all of it",
    "per_s": "transitions/s, one process, reading included",
    "rss_mb_before": "MB resident before",
    "rss_mb_peak": "MB resident at most",
    "other_cores": "cores that others used meanwhile",
}


def main() -> int:
    """Measure, compare, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=8000, help="at each length of rollouts")
    parser.add_argument("--peer", choices=PEERS, help="measured in the same run")
    parser.add_argument("--peer-calls", type=int, default=1600, help="that the peer builds, of the same rollouts")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--small", action="store_true", help="short rollouts, from a running store to rows in it (build_small.py)")
    parser.add_argument("--rounds", type=int, default=7, help="of --small")
    parser.add_argument("--measure", metavar="STORE_PROCESS", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--url", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        from benchmarks.build_reader import measure

        figures, transitions, drops = measure(StoreSettings(url=arguments.url), arguments.measure)
        transitions.write_ipc(arguments.out / "transitions")
        drops.write_ipc(arguments.out / "drops")
        print(json.dumps(figures))
        return 0
    if arguments.small:
        from benchmarks.build_small import measure as measure_small

        small = measure_small(rounds=arguments.rounds)
        for name, value in small["ours"].items():
            print(f"{name:24}{value:>12,}")
        print(json.dumps(small))
        return exit_code(small["checked"])
    result: dict[str, Any] = {"benchmark": "build", "ours": {}, "ratio": {}, "checked": {}}
    for calls in CALLS_A_ROLLOUT:
        workload = Workload(arguments.seed, _rollouts(arguments.calls, calls), calls)
        with scratch("build") as directory:
            ours, checked, rows = _ours(directory, workload)
            peers = _peers(directory, workload, arguments.peer, arguments.peer_calls) if arguments.peer else {}
        _add(result, calls, ours, checked, {name: compare(rows, peer) for name, peer in peers.items()})
    for name in ("ours", *(name for name in result if name.startswith("peer"))):
        _print_table(name, result[name])
    print(json.dumps(result))
    return exit_code(result["checked"])


def _rollouts(calls: int, length: int) -> int:
    return max(1, round(calls / length / GROUP_SIZE)) * GROUP_SIZE


def _ours(directory: Path, workload: Workload) -> tuple[dict[str, Any], dict[str, int], dict[str, list[Row]]]:
    """Measure our builder; return its figures, its checks, and the rows that were built, by rollout."""
    grpc, http, sql = free_ports(3)
    ports = ["--otlp-grpc-port", str(grpc), "--otlp-http-port", str(http), "--clickhouse-port", str(sql)]
    (directory / "spangrad.toml").touch()
    command = own_command("store", "--config", str(directory / "spangrad.toml"), "--path", str(directory / "store"), *ports)
    child = Child("spangrad store", command, directory / "store.log", inherit_settings=False)
    url = f"http://127.0.0.1:{sql}"
    try:
        wait_until(lambda: answers(f"{url}/ping"), 60, "the store", [child])
        spans = _fill(url, workload)
        command = [sys.executable, "-m", "benchmarks.build", "--measure", str(child.process.pid), "--url", url, "--out", str(directory)]
        # As `spangrad build` runs.
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=os.environ | {"POLARS_MAX_THREADS": "1"})
    finally:
        child.stop()
    report = json.loads(done.stdout.splitlines()[-1])
    transitions = pl.read_ipc(directory / "transitions")
    dropped = pl.read_ipc(directory / "drops").height
    rows = rows_of(transitions)
    checked = check(transitions, rows, workload) | {"drops": dropped}
    merged, truth = merge_figures(merge(transitions, pl.Series(np.ones(transitions.height))), workload)
    figures = {"calls": workload.total, "spans": spans, **_figures(report, workload.total), **merged}
    return figures, checked | truth, rows


def _fill(url: str, workload: Workload) -> int:
    """Insert the rollouts into the store; return the number of their spans."""
    client = connect(StoreSettings(url=url))
    rows = list[list[Any]]()
    for rollout in workload:
        rows += rollout.rows()
        if len(rows) >= _ROWS_AN_INSERT or rollout.number == workload.rollouts - 1:
            client.insert("otel.otel_traces", rows, column_names=list(COLUMNS))
            rows = []
    client.close()
    return workload.rollouts * (OTHER_SPANS + workload.calls * SPANS_A_TURN)


def _figures(report: Mapping[str, Any], calls: int) -> dict[str, float]:
    """Return medians over the rounds, per call; CPU in microseconds."""
    rounds: Sequence[Mapping[str, float]] = report["rounds"]
    cost = {name: median(item[name] for item in rounds) / calls * 1e6 for name in ("build", "read", "store", "wall")}
    return {
        "cpu_us": round(cost["build"], 1),
        "cpu_us_read": round(cost["read"], 1),
        "cpu_us_store": round(cost["store"], 1),
        "cpu_us_all": round(median(item["build"] + item["read"] + item["store"] for item in rounds) / calls * 1e6, 1),
        "per_s": round(1e6 / cost["wall"]),
        "rss_mb_before": report["rss_mb_before"],
        "rss_mb_peak": report["rss_mb_peak"],
        "other_cores": round(median(item["others"] / item["wall"] for item in rounds), 2),
    }


def rows_of(transitions: pl.DataFrame) -> dict[str, list[Row]]:
    """Return the rows that were built, by rollout, in the order of turns; the reward of a call without rewards is None."""
    columns = ("RolloutId", "Turn", "PromptIds", "ResponseIds", "Logprobs", "Rewards.Value", "AgentName")
    rows: dict[str, list[Row]] = {}
    for rollout, _, prompt, response, logprobs, rewards, agent in transitions.sort("RolloutId", "Turn").select(columns).iter_rows():
        reward = round(sum(rewards), 6) if rewards else None
        rows.setdefault(rollout, []).append([*hashes(prompt, response, logprobs), reward, agent])
    return rows


def truth_of(rollout: Rollout) -> list[Row]:
    """Return the rows that must be built of a rollout."""
    rewards = [None if one is None else round(one, 6) for one in rollout.rewards()]
    return [
        [*hashes(turn.prompt, turn.reply, turn.logprobs), reward, "researcher"] for turn, reward in zip(rollout.turns, rewards, strict=True)
    ]


def hashes(prompt: Iterable[int], response: Iterable[int], logprobs: Iterable[float]) -> list[str]:
    """Return hashes of a call's prompt ids, response ids and logprobs, as little-endian numbers of four bytes."""
    arrays = (np.asarray(prompt, "<u4"), np.asarray(response, "<u4"), np.asarray(logprobs, "<f4"))
    return [hashlib.sha256(one.tobytes()).hexdigest()[:16] for one in arrays]


def check(transitions: pl.DataFrame, rows: Mapping[str, list[Row]], workload: Workload) -> dict[str, int]:
    """Return counts that must be 0: calls without a transition or with several, transitions of unknown calls, and wrong rows."""
    expected, wrong = set[str](), 0
    for rollout in workload:
        places = range(OTHER_SPANS + 3, OTHER_SPANS + workload.calls * SPANS_A_TURN, SPANS_A_TURN)
        expected |= {call_id(rollout.trace, rollout.span(place), 0) for place in places}
        wrong += differing(rows.get(rollout.name, []), truth_of(rollout))
    built = set(transitions["CallId"])
    return {
        "lost": len(expected - built),
        "double": transitions.height - transitions.select("RolloutId", "Turn").n_unique() + transitions.height - len(built),
        "foreign": len(built - expected),
        "wrong": wrong,
    }


def differing(left_rows: Sequence[Row], right_rows: Sequence[Row]) -> int:
    """Return the number of positions at which two lists of rows differ."""
    return sum(left != right for left, right in zip(left_rows, right_rows, strict=False)) + abs(len(left_rows) - len(right_rows))


def merge_figures(sequences: Sequences, workload: Workload) -> tuple[dict[str, float], dict[str, int]]:
    """Return figures of merging, and counts that must be 0: differences from what the breaks in the rollouts imply.

    `trained_tokens` counts sampled tokens that are trained less or more than once, or with another id or logprob than they were sampled
    with.
    """
    tokens, count, replies, logprobs = 0, 0, list[NDArray[np.uint32]](), list[NDArray[np.float32]]()
    for rollout in workload:
        ends = [*(turn.breaks for turn in rollout.turns[1:]), True]
        tokens += sum(len(turn.prompt) + len(turn.reply) for turn, last in zip(rollout.turns, ends, strict=True) if last)
        count += sum(ends)
        replies += [turn.reply for turn in rollout.turns]
        logprobs += [turn.logprobs for turn in rollout.turns]
    sampled = _pairs(np.concatenate(replies), np.concatenate(logprobs))
    trained = _pairs(sequences.ids[sequences.mask], sequences.logprobs[sequences.mask])
    same = len(sampled) == len(trained)
    figures = {
        "tokens": sequences.separate_tokens,
        "merged_tokens": sequences.tokens,
        "merge_ratio": round(sequences.merge_ratio, 2),
        "sequences": len(sequences),
        "trained_tokens": sequences.trained_tokens,
    }
    return figures, {
        "trained_tokens": int((sampled != trained).sum()) if same else abs(len(sampled) - len(trained)),
        "merged_tokens": abs(tokens - sequences.tokens),
        "sequences": abs(count - len(sequences)),
    }


def _pairs(ids: NDArray[np.uint32], logprobs: NDArray[np.float32]) -> NDArray[np.uint64]:
    """Return each token's id and the bits of its logprob as one number, sorted."""
    return np.sort((ids.astype(np.uint64) << np.uint64(32)) | logprobs.view(np.uint32))


def _peers(directory: Path, workload: Workload, peer: str, calls: int) -> dict[str, dict[str, Any]]:
    """Measure the peer twice; return figures and results: with spans as its tracer writes them, and without messages and logprobs."""
    subset = Workload(workload.seed, min(workload.rollouts, _rollouts(calls, workload.calls)), workload.calls)
    results: dict[str, dict[str, Any]] = {}
    for name, without in (("peer", ()), ("peer_lean", _TEXT)):
        file = directory / name
        with file.open("w") as out:
            for rollout in subset:
                spans = rollout.peer_spans()
                for span in spans:
                    span["attributes"] = {key: value for key, value in span["attributes"].items() if not key.startswith(tuple(without))}
                print(json.dumps({"rollout": rollout.name, "spans": spans}), file=out)
        report = PEERS[peer](file)
        cpu, wall = (median(item[place] for item in report["rounds"]) for place in range(2))
        results[name] = {
            "calls": subset.total,
            "cpu_us": round(cpu / subset.total * 1e6, 1),
            "per_s": round(subset.total / wall),
            "rss_mb_before": report["rss_mb_before"],
            "rss_mb_peak": report["rss_mb_peak"],
            "results": report["results"],
        }
    return results


def compare(ours: Mapping[str, list[Row]], peer: dict[str, Any]) -> dict[str, Any]:
    """Return the peer's figures, and `different`: the number of calls for which our rows and the peer's differ.

    Where the peer gives no logprobs, those are not compared.
    """
    nothing = hashes([], [], [])[2]
    different = 0
    for rollout, triplets in peer.pop("results").items():
        own = ours.get(rollout, [])
        peer_rows = [
            [prompt, response, logprobs, reward and round(reward, 6), agent] for prompt, response, logprobs, reward, _, agent in triplets
        ]
        if all(row[2] == nothing for row in peer_rows):
            own, peer_rows = ([[*row[:2], *row[3:]] for row in rows] for rows in (own, peer_rows))
        different += differing(own, peer_rows)
    return {**peer, "different": different}


def _add(result: dict[str, Any], calls: int, ours: dict[str, Any], checked: dict[str, int], peers: dict[str, dict[str, Any]]) -> None:
    """Add the figures of one rollout length; those of the first length are at the top level, the names of the others end in it."""
    first = calls == CALLS_A_ROLLOUT[0]
    suffix = "" if first else f"_{calls}"
    checks: dict[str, int] = dict.fromkeys(("different", "trained_tokens"), 0) | result["checked"]
    for name, count in checked.items():
        checks[name] = checks.get(name, 0) + count
    for name, peer in peers.items():
        checks["different"] += peer.pop("different")
        kind = name.removeprefix("peer")
        result["ratio"][f"cpu{kind}{suffix}"] = round(peer["cpu_us"] / ours["cpu_us"], 1)
        result["ratio"][f"cpu_all{kind}{suffix}"] = round(peer["cpu_us"] / ours["cpu_us_all"], 1)
    for name, figures in {"ours": ours, **peers}.items():
        if first:
            result[name] = figures
        else:
            result[name][f"calls_{calls}"] = figures
    # The merge ratio at the top level is that of the longest rollouts.
    result["ours"] |= {f"merge_ratio_{calls}": ours["merge_ratio"], "merge_ratio": ours["merge_ratio"]}
    result["checked"] = checks


def _print_table(name: str, figures: Mapping[str, Any]) -> None:
    longer = [figures[f"calls_{calls}"] for calls in CALLS_A_ROLLOUT[1:] if f"calls_{calls}" in figures]
    print(f"{name:50}" + "".join(f"{f'{calls} calls a rollout':>20}" for calls in CALLS_A_ROLLOUT))
    for key, label in ROWS.items():
        if key in figures:
            print(f"{label:50}" + "".join(f"{one[key]:>20,}" for one in (figures, *longer)))
    if "merge_ratio" in figures:
        print(f"{'times fewer tokens when merged':50}" + "".join(f"{figures[f'merge_ratio_{calls}']:>20,}" for calls in CALLS_A_ROLLOUT))


if __name__ == "__main__":
    sys.exit(main())
