"""Benchmark of the queue: rollouts a second that are enqueued, leased, run by an agent that answers at once, and completed; with a peer.

In: how many, how many others wait in the queue, the peer. Out: a table, and as the last line one JSON object; exit code 1 when a check
fails. Invariant: server, enqueuer and workers are processes of their own and speak HTTP; the time runs from the first enqueue to the last
acknowledged completion, and workers begin when all are enqueued; every id that was enqueued must be handled, once, as the workers
and the server report.

Ours, twice: workers that take a hundred at once, and workers that take one at a time. SQLite, each answer after its commit is on the
disk; a hundred thousand other rollouts of the run wait behind those that are measured. The peer keeps all in memory, with an empty queue,
twice: its runner as its users run it, one at a time; and its bare store client, a hundred at once. `ratio.rollouts_per_s` compares with
the faster of these; `ratio.rollouts_per_s_singly` ours one at a time with its runner.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from benchmarks.measure import ROOT
from benchmarks.meter import machine_cpu, tree
from benchmarks.peers import agent_lightning_dispatch
from benchmarks.peers.agent_lightning import OFFLINE
from benchmarks.scratch import exit_code, scratch
from runner.queue.wire import RolloutState
from spangrad.client.queue_http import QueueHttp
from spangrad.processes import Child, answers, dying_with_parent, free_ports, own_command, wait_until

PEERS: Mapping[str, Callable[[Path], AbstractContextManager[agent_lightning_dispatch.Dispatcher]]] = {
    "agent_lightning": agent_lightning_dispatch.running
}
RUN = "dispatch"
ROWS = {
    "rollouts": "rollouts",
    "waiting": "others that wait in the queue",
    "workers": "worker processes",
    "batch": "taken at once, at most",
    "rollouts_per_s": "rollouts/s",
    "server_cpu_us": "CPU us of the server, a rollout",
    "rss_mb": "MB resident of the server, at the end",
    "other_cores": "cores that others used meanwhile",
}


@dataclass(frozen=True, slots=True)
class Measured:
    """Figures of one server with one kind of worker, and what must be 0."""

    figures: dict[str, Any]
    checked: dict[str, int]


class Process:
    """Process of an enqueuer or a worker."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
        env = {**os.environ, "PYTHONPATH": str(ROOT), **(environment or {})}
        pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self._process: Any = subprocess.Popen(dying_with_parent(command, env, ROOT), cwd=ROOT, env=env, text=True, **pipes)

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    def ready(self) -> None:
        """Wait until the process is ready."""
        self._read("ready")

    def go(self) -> None:
        """Start its work."""
        self._process.stdin.write("go\n")
        self._process.stdin.flush()

    def done(self) -> dict[str, Any]:
        """Wait for the end of its work, and return its report."""
        return self._read("handled")

    def end(self) -> None:
        """Kill the process."""
        self._process.kill()
        self._process.communicate()

    def _read(self, key: str) -> dict[str, Any]:
        for line in self._process.stdout:
            if line.startswith("{") and key in (message := json.loads(line)):
                return message
        raise RuntimeError(f"a process ended with exit code {self._process.wait()} before it reported {key!r}")


def measure(
    enqueuer: Process, workers: Sequence[Process], pids: Sequence[int], count: int
) -> tuple[dict[str, Any], list[str], list[str], int]:
    """Run the enqueuer, then the workers; return figures, ids that were enqueued, ids that were handled, and the number of refusals."""
    processes = [enqueuer, *workers]
    try:
        for process in processes:
            process.ready()
        cpu, machine = _cpu(pids), machine_cpu()
        children = _cpu([process.pid for process in processes])
        began = time.perf_counter()
        enqueuer.go()
        enqueued = enqueuer.done()["handled"]
        for worker in workers:
            worker.go()
        done = [worker.done() for worker in workers]
        seconds = time.perf_counter() - began
        server = _cpu(pids) - cpu
        others = machine_cpu() - machine - server - (_cpu([process.pid for process in processes]) - children)
    finally:
        for process in processes:
            process.end()
    figures = {
        "rollouts": count,
        "workers": len(workers),
        "rollouts_per_s": round(count / seconds, 1),
        "seconds": round(seconds, 2),
        "server_cpu_us": round(server / count * 1e6, 1),
        "rss_mb": round(sum(one.memory_info().rss for one in tree([psutil.Process(pid) for pid in pids])) / 1e6),
        "other_cores": round(max(0.0, others) / seconds, 2),
    }
    return figures, enqueued, [name for one in done for name in one["handled"]], sum(one["refused"] for one in done)


def check(enqueued: Sequence[str], handled: Sequence[str], succeeded: Sequence[str], refused: int) -> dict[str, int]:
    """Return counts that must be 0 for the measurement to be valid.

    Args:
        enqueued: ids that the server acknowledged to the enqueuer.
        handled: ids that the server acknowledged to the workers.
        succeeded: ids of rollouts in state succeeded on the server.
        refused: number of completions that the server refused.
    """
    times = Counter(handled)
    return {
        "lost": len(set(enqueued) - set(handled)) + len(set(enqueued) - set(succeeded)),
        "double": sum(times.values()) - len(times) + len(succeeded) - len(set(succeeded)),
        "foreign": len(set(handled) - set(enqueued)),
        "refused": refused,
    }


def ours(directory: Path, count: int, waiting: int, workers: int, *, batch: int, streams: int) -> Measured:
    """Measure our server on SQLite in the directory, with `waiting` other rollouts in the queue."""
    (port,) = free_ports(1)
    url = f"http://127.0.0.1:{port}"
    words = [f"queue.port={port}", f"queue.url={url}", f"queue.db=sqlite:///{directory}/queue.db"]
    command = own_command("queue", *[word for one in words for word in ("--set", one)])
    child = Child("spangrad queue", command, directory / "queue.log", inherit_settings=False)

    def process(role: str, *arguments: object) -> Process:
        start = [sys.executable, "-m", "benchmarks.dispatch_worker", role, "--url", url, "--run", RUN]
        return Process([*start, *map(str, arguments)])

    try:
        wait_until(lambda: answers(f"{url}/readyz"), 60, "the queue", [child])
        if waiting:
            filler = process("enqueue", "--count", waiting, "--priority", -1)
            filler.ready()
            filler.go()
            filler.done()
            filler.end()
        quotas = [len(range(number, count, workers)) for number in range(workers)]
        many = ("--batch", batch, "--streams", streams)
        starting = [process("work", "--count", quota, "--name", f"worker {i}", *many) for i, quota in enumerate(quotas)]
        figures, enqueued, handled, refused = measure(process("enqueue", "--count", count), starting, [child.process.pid], count)
        queue = QueueHttp(url, None, RUN)
        succeeded: list[str] = []
        rollouts, cursor = queue.ended(0, 0)
        while rollouts:
            succeeded += [rollout["rollout_id"] for rollout in rollouts if rollout["state"] == RolloutState.SUCCEEDED]
            rollouts, cursor = queue.ended(cursor, 0)
        states = queue.states()
    finally:
        child.stop()
    checked = check(enqueued, handled, succeeded, refused)
    checked["waiting"] = abs(states.get(RolloutState.QUEUED, 0) - waiting)
    size = sum(file.stat().st_size for file in directory.glob("queue.db*"))
    return Measured({**figures, "waiting": waiting, "batch": batch, "streams": streams, "database_mb": round(size / 1e6, 1)}, checked)


def peer(name: str, directory: Path, role: str, count: int, workers: int) -> Measured:
    """The peer's server, with one kind of its workers."""
    with PEERS[name](directory) as dispatcher:
        quotas = [len(range(number, count, workers)) for number in range(workers)]
        starting = [Process(dispatcher.command(role, quota, i), OFFLINE) for i, quota in enumerate(quotas)]
        enqueuer = Process(dispatcher.command("enqueue", count), OFFLINE)
        figures, enqueued, handled, refused = measure(enqueuer, starting, dispatcher.pids, count)
        checker = Process(dispatcher.command("check", 0), OFFLINE)
        succeeded = checker.done()["handled"]
        checker.end()
    return Measured(
        {**figures, "waiting": 0, "batch": agent_lightning_dispatch.VARIANTS[role]}, check(enqueued, handled, succeeded, refused)
    )


def report(measured: Mapping[str, Measured]) -> dict[str, Any]:
    """Figures of all, how many times ours is better, and what must be 0."""
    per_s = {name: one.figures["rollouts_per_s"] for name, one in measured.items()}
    cpu = {name: one.figures["server_cpu_us"] for name, one in measured.items()}
    ratio = {}
    if "peer_runner" in measured:
        ratio["rollouts_per_s"] = round(per_s["ours"] / max(per_s["peer_runner"], per_s["peer_store"]), 2)
        ratio["rollouts_per_s_singly"] = round(per_s["ours_singly"] / per_s["peer_runner"], 2)
        ratio["server_cpu"] = round(min(cpu["peer_runner"], cpu["peer_store"]) / cpu["ours"], 2)
        ratio["server_cpu_singly"] = round(cpu["peer_runner"] / cpu["ours_singly"], 2)
    prefixes = {"ours": "", "ours_singly": "singly_"}
    checked = {f"{prefixes.get(name, f'{name}_')}{what}": count for name, one in measured.items() for what, count in one.checked.items()}
    return {**{name: one.figures for name, one in measured.items()}, "ratio": ratio, "checked": checked}


def main() -> int:
    """Measure, compare, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, default=20_000, help="that ours hands out")
    parser.add_argument("--waiting", type=int, default=100_000, help="others of the run in our queue, of a lower priority")
    parser.add_argument("--workers", type=int, default=2, help="worker processes, of ours and of the peer's bare client")
    parser.add_argument("--peer", choices=PEERS, help="measured in the same run")
    parser.add_argument("--peer-rollouts", type=int, default=1000, help="that the peer hands out")
    parser.add_argument("--peer-workers", type=int, default=4, help="processes of the peer's runner")
    asked = parser.parse_args()
    measured: dict[str, Measured] = {}

    def add(name: str, work: Callable[[Path], Measured]) -> None:
        with scratch("dispatch") as directory:
            measured[name] = work(directory)
        print(f"{name}: {measured[name].figures['rollouts_per_s']:,} rollouts/s", file=sys.stderr, flush=True)

    add("ours", lambda directory: ours(directory, asked.rollouts, asked.waiting, asked.workers, batch=100, streams=2))
    add("ours_singly", lambda directory: ours(directory, asked.rollouts // 4, asked.waiting, asked.workers, batch=1, streams=16))
    if asked.peer:
        add("peer_runner", lambda directory: peer(asked.peer, directory, "runner", asked.peer_rollouts, asked.peer_workers))
        add("peer_store", lambda directory: peer(asked.peer, directory, "store", asked.peer_rollouts, asked.workers))
    result = report(measured)
    print(f"{'':40}" + "".join(f"{name:>16}" for name in measured))
    for key, label in ROWS.items():
        print(f"{label:40}" + "".join(f"{one.figures[key]:>16,}" for one in measured.values()))
    print(json.dumps({"benchmark": "dispatch", **result}))
    return exit_code(result["checked"])


def _cpu(pids: Sequence[int]) -> float:
    """Seconds that process trees have used, user and system."""
    return sum(sum(one.cpu_times()[:2]) for one in tree([psutil.Process(pid) for pid in pids]))


if __name__ == "__main__":
    sys.exit(main())
