"""Benchmark of served environments: steps a second of many sessions over WebSocket, beside OpenEnv's own server in the same run.

In: numbers of sessions, steps, processes and rounds. Out: a table, and as the last line one JSON object; exit code 1 when a check fails.
Invariant: one client for all servers, a process of its own, which begins a session's next step with the answer to the last; each answer has
the number of its step and the name of its session, so that a step that is lost, played twice or another session's is counted.

Ours: `spangrad env serve` with plain methods (a thread for each session) and with async ones. The peer: OpenEnv's server as its users run
it, in one process, and with uvicorn's workers, as many as our processes. Beside them Gymnasium's AsyncVectorEnv, in process: a process for
each environment, no server, all steps in lockstep.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp
import msgspec
import psutil
import uvloop

from benchmarks.measure import ROOT
from benchmarks.meter import machine_cpu, tree
from benchmarks.peers.environment import peer_environment
from benchmarks.scratch import exit_code, scratch
from spangrad.processes import Child, answers, free_ports, own_command, wait_until

OURS = ("ours", "ours_async")
PEERS = ("peer", "peer_workers")
VECTOR_SIZE = 64
"""Environments of the vector: each is a process."""
WARM_STEPS = 10


@dataclass(frozen=True, slots=True)
class Driven:
    """Figures of the client of one server."""

    seconds: float
    steps: int
    lost: int
    """Steps that were never played, or belong to another session."""
    double: int
    """Steps that were played again."""


async def drive(url: str, sessions: int, steps: int) -> Driven:
    """Play in sessions side by side."""
    begin = asyncio.Barrier(sessions + 1)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as client:
        tasks = [asyncio.create_task(_session(client, url, f"s{number}", steps, begin)) for number in range(sessions)]
        await begin.wait()
        began = time.perf_counter()
        counts = await asyncio.gather(*tasks)
        seconds = time.perf_counter() - began
    lost, double = (sum(column) for column in zip(*counts, strict=True))
    return Driven(seconds, sessions * steps, lost, double)


async def _session(client: aiohttp.ClientSession, url: str, name: str, steps: int, begin: asyncio.Barrier) -> tuple[int, int]:
    async with client.ws_connect(f"{url}/ws", max_msg_size=0) as connection:
        await connection.send_json({"type": "reset", "data": {"name": name}})
        assert (await connection.receive_json(timeout=120))["type"] == "observation"
        lost = double = 0
        for number in range(1, WARM_STEPS + steps + 1):
            if number == WARM_STEPS + 1:
                await begin.wait()
            message = f"{name} {number}"
            await connection.send_str(f'{{"type": "step", "data": {{"message": "{message}"}}}}')
            seen = msgspec.json.decode((await connection.receive()).data)["data"]["observation"]
            lost += seen["name"] != name or seen["message"] != message or seen["count"] < number
            double += seen["count"] > number
    return lost, double


def command_of(kind: str, port: int, shards: int, sessions: int) -> list[str]:
    """Return the command line of a server."""
    if kind in OURS:
        world = "CountingWorld" if kind == "ours" else "AsyncCountingWorld"
        sizes = ("--shards", str(shards), "--sessions", str(sessions))
        return own_command("env", "serve", f"benchmarks.environments_worlds:{world}", "--port", str(port), "--directory", str(ROOT), *sizes)
    workers = str(shards if kind == "peer_workers" else 1)
    uvicorn = ["-m", "uvicorn", "openenv_world:app", "--app-dir", str(ROOT / "benchmarks" / "peers"), "--log-level", "warning"]
    return [str(peer_environment("openenv") / "python"), *uvicorn, "--port", str(port), "--workers", workers]


def measure(kind: str, directory: Path, shards: int, sessions: int, steps: int) -> tuple[dict[str, float], dict[str, int]]:
    """Start a server, drive it from a process of its own, and return figures and counts that must be 0."""
    (port,) = free_ports(1)
    url = f"http://127.0.0.1:{port}"
    child = Child(kind, command_of(kind, port, shards, sessions), directory / f"{kind}.log", inherit_settings=False)
    try:
        wait_until(lambda: answers(f"{url}/health"), 300, kind, [child])
        time.sleep(3 if kind == "peer_workers" else 0)  # its other workers have no health of their own
        server, machine, own = _cpu(child), machine_cpu(), _children_cpu()
        began = time.perf_counter()
        client = [sys.executable, "-m", "benchmarks.environments", "--drive", url, "--sessions", str(sessions), "--steps", str(steps)]
        done = subprocess.run(client, cwd=ROOT, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"the client of {kind} failed: {done.stderr[-2000:]}")
        server = _cpu(child) - server
        driver = _children_cpu() - own
        others = (machine_cpu() - machine - server - driver) / (time.perf_counter() - began)
    finally:
        child.stop()
    seen = Driven(**json.loads(done.stdout))
    played = seen.steps + sessions * WARM_STEPS
    figures = {
        "steps_per_s": round(seen.steps / seen.seconds),
        "server_cpu_us": round(server / played * 1e6, 1),
        "client_cpu_us": round(driver / played * 1e6, 1),
        "other_cores": round(max(0.0, others), 2),
    }
    return figures, {"lost": seen.lost, "double": seen.double}


def vector(steps: int) -> dict[str, float]:
    """Return the figures of Gymnasium's vector."""
    python = str(peer_environment("openenv") / "python")
    command = [python, str(ROOT / "benchmarks" / "peers" / "openenv_world.py"), str(VECTOR_SIZE), str(steps)]
    return {"steps_per_s": round(json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)["steps_per_s"])}


def report(rounds: Mapping[str, Sequence[tuple[Mapping[str, float], Mapping[str, int]]]]) -> dict[str, Any]:
    """Return medians over rounds, the ratios, and the sums of what must be 0."""
    figures = {kind: {name: median(one[name] for one, _ in done) for name in done[0][0]} for kind, done in rounds.items()}
    checked = {name: sum(counts[name] for kind in OURS for _, counts in rounds.get(kind, ())) for name in ("lost", "double")}
    for kind in PEERS:
        checked[f"{kind}_lost"] = sum(sum(counts.values()) for _, counts in rounds.get(kind, ()))

    def ratio(name: str, ours: str, peer: str) -> float:
        first, second = figures[ours][name], figures[peer][name]
        return round(first / second if name == "steps_per_s" else second / first, 2)

    ratios = {
        "steps_per_s": ratio("steps_per_s", "ours", "peer"),
        "steps_per_s_async": ratio("steps_per_s", "ours_async", "peer"),
        "steps_per_s_workers": ratio("steps_per_s", "ours", "peer_workers"),
        "steps_per_s_async_workers": ratio("steps_per_s", "ours_async", "peer_workers"),
        "server_cpu": ratio("server_cpu_us", "ours", "peer"),
        "server_cpu_async": ratio("server_cpu_us", "ours_async", "peer"),
    }
    return {"benchmark": "environments", **figures, "ratio": ratios, "checked": checked}


def main() -> int:
    """Measure, and print the report."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sessions", type=int, default=256)
    parser.add_argument("--steps", type=int, default=100, help="steps of each session")
    parser.add_argument("--shards", type=int, default=4, help="processes of our server, and workers of the peer's")
    parser.add_argument("--rounds", type=int, default=3, help="each server is measured so often, in turn")
    parser.add_argument("--drive", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.drive:
        driven = uvloop.run(drive(args.drive, args.sessions, args.steps))
        print(json.dumps({name: getattr(driven, name) for name in ("seconds", "steps", "lost", "double")}))
        return 0
    rounds: dict[str, list[tuple[dict[str, float], dict[str, int]]]] = {kind: [] for kind in (*OURS, *PEERS)}
    with scratch("environments") as directory:
        for _ in range(args.rounds):
            for kind, done in rounds.items():
                done.append(measure(kind, directory, args.shards, args.sessions, args.steps))
                print(f"{kind:14} {done[-1][0]}", flush=True)
    result = report(rounds)
    result["vector"] = {"environments": VECTOR_SIZE, **vector(args.steps)}
    print(json.dumps(result))
    return exit_code(result["checked"])


def _children_cpu() -> float:
    """Return the CPU seconds of the clients that have ended."""
    times = os.times()
    return times.children_user + times.children_system


def _cpu(child: Child) -> float:
    """Return the CPU seconds of a server's processes."""
    return sum(sum(process.cpu_times()[:2]) for process in tree([psutil.Process(child.process.pid)]))


if __name__ == "__main__":
    sys.exit(main())
