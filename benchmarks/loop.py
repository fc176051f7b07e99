"""Benchmark of the online loop: idle shares of trainer and engine, and steps a second, overlapped against batch by batch.

In: durations of rollouts and steps. Out: a table, and as the last line one JSON object; exit code 1 when a check fails. Invariant: store,
queue, gateway, worker, builder and the trainer's loop with its ledger are the real ones, each a process of its own; only the engine's and
the optimizer's work takes a time that is set, so that what is measured is the orchestration.

A step takes as long as the engine needs on average for the rollouts of a batch, those of groups that are filtered included: at best neither
waits for the other. Durations of rollouts are lognormal, and half of the groups have equal rewards, so that DAPO's filter replaces them.
Ours trains calls that are up to `--max-staleness` versions old. The peer is the same loop at max_staleness 0: it makes a batch with the
newest version, and trains it.

The goals are checks: shares and ratios of this run as they are, milliseconds times `slowness`, the factor by which the machine computes
longer than on a fast day.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from benchmarks.measure import ROOT
from benchmarks.meter import calibration, machine_cpu, slowness
from commands.demo.settings import store_and_gateway, write_settings
from spangrad.processes import free_ports
from spangrad.settings import Settings
from spangrad.settings.sources import explain_settings, load_settings
from spangrad.store.clickhouse import connect
from spangrad.supervisor.launcher import launch_without_settings
from spangrad.supervisor.run_directory import fresh_directory
from spangrad.supervisor.supervisor import Supervisor
from spangrad.supervisor.training_services import training_services

TASKS = 64
"""Tasks; every other one is informative."""
MOST_IDLE, MOST_READY_TO_LEASED_MS, LEAST_RATIO = 0.10, 150.0, 1.8
"""Goals: idle shares of trainer and engine, the wait on a fast day, steps a second against batch by batch."""
_CALIBRATION_SECONDS = 2.0
_LEASED = """
SELECT toUInt32(root.SpanAttributes['spangrad.trainer.version']), min(toUnixTimestamp64Nano(child.Timestamp) + child.Duration) / 1e9
FROM otel.otel_traces AS root
INNER JOIN otel.otel_traces AS child ON child.TraceId = root.TraceId AND child.ParentSpanId = root.SpanId
WHERE root.ServiceName = 'spangrad-trainer' AND root.SpanName = 'train step' AND child.SpanName = 'lease'
GROUP BY 1
"""
"""Query of the time at which each version's batch was leased."""
_READY = """
SELECT b.Version, max(toUnixTimestamp64Micro(r.IngestedAt)) / 1e6
FROM spangrad.batches AS b INNER JOIN spangrad.rollout_spans AS r ON r.RolloutId = b.RolloutId
GROUP BY b.Version
"""
"""Query of the time at which the last span of each version's batch was in the store."""
_DOUBLE = "SELECT count() - uniqExact(RolloutId, Attempt) FROM spangrad.batches WHERE Policy = 'policy'"
_STALENESS = "SELECT max(Staleness), avg(Staleness), countIf(Staleness > {bound:UInt32}) FROM spangrad.trained_calls"
_UNCOUNTED = """
SELECT uniqExact(CallId) FROM spangrad.calls
WHERE RolloutKey IN (SELECT RolloutId FROM spangrad.builds) AND CallId NOT IN (SELECT CallId FROM spangrad.transitions)
    AND CallId NOT IN (SELECT CallId FROM spangrad.drops)
"""


@dataclass(frozen=True, slots=True)
class Load:
    """Sizes and durations of a run."""

    groups: int
    size: int
    slots: int
    mean_seconds: float
    steps: int
    warm_up: int
    """Steps before the measurement, which fill the pipeline."""
    seed: int

    @property
    def step_seconds(self) -> float:
        """Return the time that the engine needs for a batch's rollouts and as many filtered ones, all slots busy."""
        return 2 * self.groups * self.size * self.mean_seconds / self.slots


@dataclass(frozen=True, slots=True)
class Measured:
    """Figures and checks of a run."""

    figures: dict[str, float]
    checked: dict[str, int]


def main() -> int:
    """Measure both, compare, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=8, help="groups a batch")
    parser.add_argument("--size", type=int, default=4, help="rollouts a group")
    parser.add_argument("--slots", type=int, default=16, help="calls that the engine answers at once")
    parser.add_argument("--mean-seconds", type=float, default=1.5, help="mean duration of a rollout's call")
    parser.add_argument("--steps", type=int, default=40, help="measured steps: with 20, the idle share differs by 0.03 from seed to seed")
    parser.add_argument("--peer-steps", type=int, default=8, help="measured steps of the batch-by-batch loop")
    parser.add_argument("--max-staleness", type=int, default=2, help="trainer.sampling.max_staleness of the overlapped loop")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--directory", type=Path, default=ROOT / "runs" / "bench-loop", help="settings, data and logs of both loops")
    given = parser.parse_args()
    load = Load(given.groups, given.size, given.slots, given.mean_seconds, given.steps, given.max_staleness + 2, given.seed)
    ours = measure(given.directory / "overlapped", load, given.max_staleness)
    peer = measure(given.directory / "batch-by-batch", replace(load, steps=given.peer_steps, warm_up=1), 0)
    checked = {name: ours.checked[name] + peer.checked[name] for name in ours.checked}
    ratio = {"steps_per_s": round(ours.figures["steps_per_s"] / peer.figures["steps_per_s"], 2)}
    # Batch by batch the trainer waits for its groups; overlapped, ready groups wait for the trainer.
    figures = ours.figures | {name: peer.figures[name] for name in ("ready_to_leased_p50_ms", "slowness")}
    checked |= missed_goals(figures, ratio)
    for name, value in ours.figures.items():
        print(f"{name:28}{value:>12.3f}{peer.figures[name]:>12.3f}")
    print(json.dumps({"benchmark": "loop", "ours": figures, "peer": peer.figures, "ratio": ratio, "checked": checked}))
    if any(checked.values()):
        print(f"the logs are in {given.directory}", file=sys.stderr)
    return 1 if any(checked.values()) else 0


def missed_goals(ours: Mapping[str, float], ratio: Mapping[str, float]) -> dict[str, int]:
    """Return 1 for each goal that the figures miss."""
    missed = {
        "trainer_idles": ours["trainer_idle"] > MOST_IDLE,
        "engine_idles": ours["engine_idle"] > MOST_IDLE,
        "leased_late": ours["ready_to_leased_p50_ms"] > MOST_READY_TO_LEASED_MS * ours["slowness"],
        "overlap_gains_little": ratio["steps_per_s"] < LEAST_RATIO,
    }
    return {name: int(value) for name, value in missed.items()}


def measure(directory: Path, load: Load, max_staleness: int) -> Measured:
    """Run the loop for the load's steps."""
    with fresh_directory(directory) as fresh:
        fresh.clear()
        settings = _settings(directory, load, max_staleness)
        write_model(directory / "model")
        _write_tasks(directory / "tasks.jsonl")
        times = directory / "steps.jsonl"
        with Supervisor(
            _services(directory, settings, load, times), lambda text: print(text, file=sys.stderr), launch=launch_without_settings
        ) as services:
            services.start(120)
            whole = load.warm_up + load.steps
            machine, began, calibrations = machine_cpu(), time.monotonic(), [calibration()]
            while len(steps := _read_steps(times)) < whole + 1:
                services.check()
                time.sleep(0.2)
                if time.monotonic() - began > _CALIBRATION_SECONDS * len(calibrations):
                    calibrations.append(calibration())
            cores = (machine_cpu() - machine) / (time.monotonic() - began)
            engine = _ask_engine(settings.gateway.engine_url)
            services.stop("run")
            services.stop("train")
            time.sleep(1)  # the builder ends what has ended
            return _read(settings, load, max_staleness, steps[:whole], engine, {"cores": cores, "slowness": slowness(calibrations)})


def _ask_engine(url: str) -> Mapping[str, Any]:
    with urllib.request.urlopen(f"{url}/figures", timeout=30) as answer:
        return json.load(answer)


def _settings(directory: Path, load: Load, max_staleness: int) -> Settings:
    *ports, engine, queue = free_ports(6)
    values = {
        **store_and_gateway(directory, ports),
        "gateway.engine_url": f"http://127.0.0.1:{engine}",
        "engine.port": engine,
        "engine.model": str(directory / "model"),
        "queue.url": f"http://127.0.0.1:{queue}",
        "queue.port": queue,
        "queue.db": f"sqlite:///{directory}/queue.db",
        "builder.selection": {"policies": "policy"},
        "trainer.model": str(directory / "model"),
        "trainer.directory": str(directory / "policies"),
        "trainer.sampling.groups_per_batch": load.groups,
        "trainer.sampling.max_staleness": max_staleness,
        "trainer.sampling.skip_equal_groups": True,
        "runner.directory": str(directory / "runner"),
        "runner.group_size": load.size,
        "runner.concurrency": 4 * load.slots,
        "runner.attempts_kept": 0,
    }
    write_settings(directory / "spangrad.toml", explain_settings(values, env={}))
    return load_settings(values, env={})


def write_model(directory: Path) -> None:
    """Write a model of one weight, for engines and trainers that are stand-ins."""
    directory.mkdir()
    save_file({"weight": np.zeros(1, np.float32)}, directory / "model.safetensors", metadata={"format": "pt"})
    for name in ("config.json", "tokenizer.json"):
        (directory / name).write_text("{}")


def _write_tasks(file: Path) -> None:
    tasks = [
        {"task_id": f"t{number}", "input": {"question": f"question {number}", "informative": number % 2 == 0}} for number in range(TASKS)
    ]
    file.write_text("".join(json.dumps(task) + "\n" for task in tasks))


def _services(directory: Path, settings: Settings, load: Load, times: Path) -> list[Any]:
    options = ["--config", str(directory / "spangrad.toml")]
    agent = [
        "--agent", f"{ROOT / 'benchmarks' / 'loop_agent.py'}:answer", "--tasks", str(directory / "tasks.jsonl"), "--seed", str(load.seed),
    ]  # fmt: skip
    engine = [
        "--port", str(settings.engine.port), "--model", str(directory / "model"), "--slots", str(load.slots),
        "--mean-seconds", str(load.mean_seconds), "--seed", str(load.seed),
    ]  # fmt: skip
    own = {
        "engine": ["benchmarks.loop_engine", *engine],
        "train": ["benchmarks.loop_trainer", *options, "--step-seconds", str(load.step_seconds), "--times", str(times)],
    }
    environment = {"PYTHONPATH": str(ROOT)}
    return [
        replace(service, command=(sys.executable, "-m", *own[service.name]), env=environment) if service.name in own else service
        for service in training_services(settings, directory / "logs", options, agent)
    ]


def _read_steps(file: Path) -> list[dict[str, float]]:
    lines = file.read_text().splitlines() if file.exists() else []
    return [json.loads(line) for line in lines]


def _read(
    settings: Settings,
    load: Load,
    max_staleness: int,
    steps: Sequence[Mapping[str, float]],
    engine: Mapping[str, Any],
    machine: Mapping[str, float],
) -> Measured:
    measured = steps[load.warm_up :]
    begin, end = steps[load.warm_up - 1]["ended"], steps[-1]["ended"]
    window = end - begin
    trained = sum(step["ended"] - step["began"] for step in measured)
    busy, paused = _within(engine["busy"], begin, end), _within(engine["pauses"], begin, end)
    client = connect(settings.store)
    try:
        leased = {int(version): float(at) for version, at in client.query(_LEASED).result_rows}
        ready = {int(version): float(at) for version, at in client.query(_READY).result_rows}
        ((oldest, staleness, beyond),) = client.query(_STALENESS, parameters={"bound": max_staleness}).result_rows
        ((double,),) = client.query(_DOUBLE).result_rows
        ((uncounted,),) = client.query(_UNCOUNTED).result_rows
        metrics = [
            dict(row)
            for (row,) in client.query("SELECT Metrics FROM spangrad.policy_versions WHERE BatchId != '' ORDER BY Version").result_rows
        ]
    finally:
        client.close()
    waits = [leased[version] - ready[version] for version in sorted(leased.keys() & ready.keys())[1:]]
    skipped = metrics[-1].get("groups_skipped", 0.0)
    figures = {
        "steps_per_s": len(measured) / window,
        "trainer_idle": 1 - trained / window,
        "engine_idle": 1 - (busy - load.slots * paused) / (load.slots * window),
        "engine_paused_share": paused / window,
        "ready_to_leased_p50_ms": 1e3 * median(waits),
        "staleness_mean": float(staleness),
        "staleness_max": float(oldest),
        "skipped_groups_a_trained_one": skipped / max(len(metrics) * load.groups, 1),
        "step_seconds": load.step_seconds,
        **machine,
    }
    checked = {
        "trained_twice": int(double),
        "beyond_staleness": int(beyond),
        "calls_not_accounted_for": int(uncounted),
        "steps_without_version": max(len(steps) - len(metrics), 0),
        "empty_steps": sum(step["rows"] == 0 for step in steps),
    }
    return Measured({name: round(value, 4) for name, value in figures.items()}, checked)


def _within(intervals: Sequence[tuple[float, float]], begin: float, end: float) -> float:
    """Return the seconds of all intervals that lie between two times."""
    return sum(max(min(until, end) - max(since, begin), 0.0) for since, until in intervals)


if __name__ == "__main__":
    sys.exit(main())
