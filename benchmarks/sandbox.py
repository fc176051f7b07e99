"""Sandboxes: seconds to start a program in a new one and in one that runs, 64 at once, and what killed workers leave.

A program is `true`. Cold: in a new sandbox, up to its exit, by an engine's prefix as agents are started. Supervised: a sandbox that stays,
up to its first answer. Warm: in a sandbox that stays. Plain: without any. An action is a command of the shell tool; tmux gets the same
keys, and waits for its own signal; `new_shell` starts a bash for each, outside. Each kill ends a worker by SIGKILL at a random moment
while its programs run, some without a parent or session; then processes, mounts, sockets and control groups are counted, and private
directories, after the sweep with which the next worker begins.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.meter import machine_cpu
from benchmarks.sandbox_worker import LIMITS
from benchmarks.scratch import exit_code, scratch
from runner.sandboxes.engines import SandboxEngine, choose, scratch_directory, with_supervisor
from runner.sandboxes.landlock import remove_left_behind
from runner.sandboxes.policy import SandboxPolicy
from runner.sandboxes.sandbox import start
from runner.tools.toolbox import open_toolbox
from spangrad.errors import SandboxError
from spangrad.types import SandboxRung

ROOT = Path(__file__).parents[1]
AT_ONCE = 64
_GONE_SECONDS = 10.0
"""Time that what a killed worker leaves has to end, in seconds."""
_KINDS = ("processes", "mounts", "sockets", "cgroups", "directories")


def percentiles(seconds: Sequence[float]) -> dict[str, float]:
    """Return the median and the 95th percentile, in milliseconds."""
    p50, p95 = np.percentile(seconds, [50, 95]) * 1e3
    return {"p50_ms": round(float(p50), 2), "p95_ms": round(float(p95), 2)}


async def timed_program(command: Sequence[str]) -> tuple[float, int]:
    """Return the seconds of a program from its start to its end, and 1 if it failed."""
    began = time.perf_counter()
    process = await asyncio.create_subprocess_exec(*command, stdin=subprocess.DEVNULL, start_new_session=True)
    failed = await process.wait() != 0
    return time.perf_counter() - began, int(failed)


async def measure_starts(prefix: Sequence[str], count: int) -> tuple[dict[str, Any], int]:
    """Return seconds of `true` behind a prefix, one after another and 64 at once, and the number of failures."""
    command = [*prefix, "true"]
    await timed_program(command)
    before = machine_cpu(), os.times()
    alone = [await timed_program(command) for _ in range(count)]
    own = sum(os.times()[:4]) - sum(before[1][:4])
    others = machine_cpu() - before[0] - own
    began = time.perf_counter()
    together = await asyncio.gather(*(timed_program(command) for _ in range(AT_ONCE)))
    seconds = time.perf_counter() - began
    figures = {
        **percentiles([one for one, _ in alone]),
        "cpu_ms": round(own / count * 1e3, 2),
        "other_cores": round(others / sum(one for one, _ in alone), 2),
        "at_once_p95_ms": percentiles([one for one, _ in together])["p95_ms"],
        "at_once_per_s": round(AT_ONCE / seconds),
    }
    return figures, sum(failed for _, failed in (*alone, *together))


async def measure_staying(engine: SandboxEngine, count: int) -> tuple[dict[str, Any], int]:
    """Return seconds until a sandbox answers, and of `true` in one that does, and the number of failures."""
    starts: list[float] = []
    runs: list[float] = []
    failed = 0
    for _ in range(max(5, count // 10)):
        began = time.perf_counter()
        sandbox = await start(engine)
        starts.append(time.perf_counter() - began)
        try:
            for _ in range(10):
                began = time.perf_counter()
                failed += (await sandbox.run(["true"])).exit_code != 0
                runs.append(time.perf_counter() - began)
        finally:
            await sandbox.stop()
    return {"supervised": percentiles(starts), "warm": percentiles(runs)}, failed


async def measure_actions(directory: Path, policy: SandboxPolicy, count: int) -> tuple[dict[str, Any], dict[str, Any], int]:
    """Return seconds of an action of ours and of the peers, in turns, and the number of wrong outputs."""
    seconds: dict[str, list[float]] = {"ours": [], "tmux": [], "new_shell": []}
    wrong = 0
    tmux = _Tmux(directory / "tmux") if shutil.which("tmux") else None
    try:
        async with open_toolbox(policy) as toolbox:
            for number in range(count):
                command = f"x=$(({number} * 3)); echo action $x"
                actions = {"ours": toolbox.shell(command), "new_shell": _new_shell(command)}
                actions |= {"tmux": asyncio.to_thread(tmux.act, command)} if tmux else {}
                for name, action in actions.items():
                    began = time.perf_counter()
                    output = await action
                    seconds[name].append(time.perf_counter() - began)
                    wrong += output.split() != ["action", str(number * 3)]
    finally:
        if tmux is not None:
            tmux.end()
    figures = {name: percentiles(values) for name, values in seconds.items() if values}
    return figures.pop("ours"), figures, wrong


async def _new_shell(command: str) -> str:
    process = await asyncio.create_subprocess_exec("bash", "-c", command, stdout=subprocess.PIPE)
    return (await process.communicate())[0].decode()


class _Tmux:
    """A shell in a tmux of its own."""

    def __init__(self, server: Path) -> None:
        self._tmux = ["tmux", "-S", str(server)]
        shell = ["env", "PS1=", "bash", "--norc", "--noprofile"]
        subprocess.run([*self._tmux, "-f", "/dev/null", "new-session", "-d", "-x", "200", "-y", "50", *shell], check=True)
        self.act("stty -echo")

    def act(self, command: str) -> str:
        """Send the keys, wait for the end, and return what the pane shows."""
        keys = f"clear; {command}; tmux wait-for -S done"
        subprocess.run([*self._tmux, "send-keys", keys, "Enter"], check=True)
        subprocess.run([*self._tmux, "wait-for", "done"], check=True)
        pane = subprocess.run([*self._tmux, "capture-pane", "-p"], check=True, capture_output=True, text=True).stdout
        return "\n".join(line for line in pane.splitlines() if line and keys not in line)

    def end(self) -> None:
        """End the server and its shell."""
        subprocess.run([*self._tmux, "kill-server"], check=True)


def left(mark: str) -> dict[str, int]:
    """Count what carries a worker's mark, or belongs to sandboxes of this user."""
    commands = [_read(path) for path in Path("/proc").glob("[0-9]*/cmdline")]
    mounts = [_read(path) for path in Path("/proc").glob("[0-9]*/mountinfo")]
    remove_left_behind(scratch_directory())
    private = [path for path in scratch_directory().iterdir() if path.is_dir()]
    return {
        "processes": sum(mark.encode() in command for command in commands),
        "mounts": sum(mark.encode() in table for table in mounts),
        "sockets": _read(Path("/proc/net/unix")).count(mark.encode()),
        "cgroups": sum(mark.encode() in _read(path) for path in Path("/proc").glob("[0-9]*/cgroup")),
        "directories": len(private),
    }


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""  # the process has ended


def kill_workers(directory: Path, engine: SandboxRung, kills: int, randomness: random.Random) -> dict[str, int]:
    """Kill workers, and return what they left in all."""
    leftovers: dict[str, int] = dict.fromkeys(_KINDS, 0)
    for _ in range(kills):
        mark = str(randomness.randrange(10**15, 10**16))
        base = directory / f"sandbox-{mark}"
        base.mkdir(mode=0o755)
        command = [sys.executable, "-m", "benchmarks.sandbox_worker", engine, str(base), mark]
        worker = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE)
        assert worker.stdout is not None
        if worker.stdout.readline() != b"ready\n":
            raise RuntimeError(f"the worker with sandboxes of {engine} did not start")
        assert left(mark)["processes"] > 0
        time.sleep(randomness.uniform(0, 0.2))
        worker.send_signal(signal.SIGKILL)
        worker.wait()
        worker.stdout.close()
        end = time.monotonic() + _GONE_SECONDS
        while any((counts := left(mark)).values()) and time.monotonic() < end:
            time.sleep(0.05)
        leftovers = {kind: leftovers[kind] + counts[kind] for kind in _KINDS}
    return leftovers


async def measure(directory: Path, count: int, kills: int, seed: int) -> dict[str, Any]:
    """Return the report: figures of each engine at hand, and counts that must be 0."""
    randomness = random.Random(seed)
    plain, failed = await measure_starts([], count)
    ours: dict[str, Any] = {}
    ratios: dict[str, float] = {}
    checked = {"failed": failed}
    peers: dict[str, Any] = {}
    policy = with_supervisor(SandboxPolicy(directory / "files", (), {}, False, LIMITS))
    for rung in (SandboxRung.BUBBLEWRAP, SandboxRung.LANDLOCK):
        try:
            engine = await asyncio.to_thread(choose, replace(policy, engine=rung))
        except SandboxError as error:
            print(f"{rung}: {error}")
            continue
        cold, failed_cold = await measure_starts(engine.prefix, count)
        staying, failed_staying = await measure_staying(engine, count)
        ours[rung] = {"cold": cold, **staying}
        ratios[f"warm_{rung}"] = round(cold["p50_ms"] / staying["warm"]["p50_ms"], 2)
        checked["failed"] += failed_cold + failed_staying
        leftovers = await asyncio.to_thread(kill_workers, directory, rung, kills, randomness)
        checked |= {f"{rung}_{kind}": number for kind, number in leftovers.items()}
    try:
        ours["action"], peers, checked["wrong_outputs"] = await measure_actions(directory, policy, count)
    except SandboxError as error:
        print(f"shell: {error}")
    else:
        ratios |= {f"action_{name}": round(peer["p50_ms"] / ours["action"]["p50_ms"], 2) for name, peer in peers.items()}
    return {"benchmark": "sandbox", "ours": ours, "peer": {"plain": plain, "action": peers}, "ratio": ratios, "checked": checked}


def main() -> None:
    """Measure, and print the report."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sandbox", description=__doc__)
    parser.add_argument("--count", type=int, default=100, help="programs that are started one after another")
    parser.add_argument("--kills", type=int, default=50, help="workers of each engine that are killed")
    parser.add_argument("--seed", type=int, default=0, help="determines the moments of the kills")
    args = parser.parse_args()
    with scratch("sandbox") as directory:
        directory.chmod(0o755)  # sandboxes that root starts have a user of their own
        (directory / "files").mkdir(mode=0o755)
        report = asyncio.run(measure(directory, args.count, args.kills, args.seed))
    print(json.dumps(report))
    sys.exit(exit_code(report["checked"]))


if __name__ == "__main__":
    main()
