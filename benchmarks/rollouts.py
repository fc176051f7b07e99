"""Benchmark of the runner: CPU of a rollout whose agent does nothing, by process, from the queue to the acknowledged root span.

In: how many rollouts. Out: a table, and as the last line one JSON object; exit code 1 when a check fails. Invariant: queue, worker, agent's
process, gateway and store are processes of their own, as in a training run, and all have warmed up; every rollout that was enqueued has
one root span and one span of its agent in the store, and has succeeded in the queue.

The engine behind the gateway is the gateway benchmark's; the agent does not call it. `calibration_ms` is the CPU of a fixed loop in Python,
measured in the same run: a machine that is slow today shows there.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from benchmarks.gateway_bodies import POLICY
from benchmarks.measure import ROOT
from benchmarks.meter import calibration, machine_cpu, tree
from benchmarks.receivers import SpanStore, embedded
from benchmarks.scratch import exit_code, scratch
from runner.queue.client import QueueClient
from runner.queue.wire import RolloutState
from spangrad.http.queue_messages import new_rollout
from spangrad.processes import Child, answers, free_ports, own_command, wait_until
from spangrad.store.clickhouse import connect

RUN = "rollouts"
GROUP = 8
START_SECONDS = 60
END_SECONDS = 300
QUIET_SECONDS = 1.0
"""Time after the last ending for what the store still does, in seconds."""
_SPANS = """
SELECT uniqExactIf(SpanId, SpanName = 'rollout'), countIf(SpanName = 'rollout'), countIf(SpanName = 'agent')
FROM otel.otel_traces WHERE SpanAttributes['spangrad.run.id'] = 'rollouts' OR SpanName = 'agent'
"""


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, default=1000, help="that are measured, in each round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--concurrency", type=int, default=16, help="attempts at once in the agent's process")
    arguments = parser.parse_args()
    with scratch("rollouts") as directory:
        result = measure(directory, arguments.rollouts, arguments.rounds, arguments.concurrency)
    for name, value in result["ours"].items():
        print(f"{name:24}{value:>10}")
    print(json.dumps({"benchmark": "rollouts", **result}))
    return exit_code(result["checked"])


def measure(directory: Path, count: int, rounds: int, concurrency: int) -> dict[str, Any]:
    """Return figures, and counts that must be 0."""
    with ExitStack() as stack:
        store = stack.enter_context(embedded(directory))
        upstream = ["benchmarks.gateway_upstream", "--step-seconds", "0.005"]
        services = start_services(directory, stack, store, concurrency, upstream, "rollouts_agent:agent", {"gateway.policy": POLICY})
        url = services.queue_url
        children = {"queue": services.queue, "worker": services.worker, "gateway": services.gateway}
        queue = stack.enter_context(asyncio.Runner())
        client = QueueClient(url)
        stack.callback(lambda: queue.run(client.close()))
        cursor = queue.run(_run(client, 8 * concurrency, 0))
        pids = {name: child.process.pid for name, child in children.items()} | {"store": store.children[0].process.pid}
        spent: dict[str, float] = {}
        machine, own, began, walls = machine_cpu(), _own(), time.monotonic(), list[float]()
        for _ in range(rounds):
            before, start = _cpu(pids), time.monotonic()
            cursor = queue.run(_run(client, count, cursor))
            walls.append(time.monotonic() - start)
            time.sleep(QUIET_SECONDS)
            spent = {name: spent.get(name, 0.0) + used - before[name] for name, used in _cpu(pids).items()}
        others = max(0.0, machine_cpu() - machine - (_own() - own)) / (time.monotonic() - began)
        all_rollouts = 8 * concurrency + count * rounds
        states = queue.run(client.run(RUN)).states
        checked = _check(store, all_rollouts, states.get(RolloutState.SUCCEEDED, 0))
    each = {f"{name}_ms": round(seconds / (count * rounds) * 1e3, 3) for name, seconds in spent.items()}
    figures: dict[str, Any] = {
        "rollouts": count * rounds,
        "cpu_ms": round(sum(spent.values()) / (count * rounds) * 1e3, 3),
        **each,
        "rollouts_per_s": round(count * rounds / sum(walls), 1),
        "calibration_ms": calibration(),
        "other_cores": round(others, 2),
    }
    return {"ours": figures, "ratio": {}, "checked": checked}


async def _run(client: QueueClient, count: int, cursor: int) -> int:
    """Enqueue rollouts, and wait until all have ended; return the cursor behind them."""
    new = [
        new_rollout(f"task {number // GROUP}", {"question": number}, f"{cursor} {number // GROUP}", group_size=GROUP)
        for number in range(count)
    ]
    left = set(await client.enqueue(RUN, new))
    async with asyncio.timeout(END_SECONDS):
        while left:
            page = await client.ended(RUN, after=cursor, limit=1000, wait_seconds=10)
            left -= {rollout.rollout_id for rollout in page.rollouts}
            cursor = page.cursor
    return cursor


@dataclass(frozen=True, slots=True)
class RunningServices:
    """Processes of a run, and their addresses."""

    queue: Child
    gateway: Child
    worker: Child
    queue_url: str
    gateway_url: str
    engine_url: str
    start_worker: Callable[[str], Child]
    """Starts another worker of a name."""


def start_services(
    directory: Path,
    stack: ExitStack,
    store: SpanStore,
    concurrency: int,
    engine: Sequence[str],
    agent: str,
    more: Mapping[str, object],
) -> RunningServices:
    """Start engine, queue, gateway and one worker.

    Args:
        directory: files and logs.
        stack: stops the processes.
        store: takes the spans.
        concurrency: attempts at once in the agent's process.
        engine: module of the engine and its arguments but for the port.
        agent: MODULE:FUNCTION in the folder of benchmarks.
        more: further settings.
    """
    engine_port, queue_port, gateway_port = free_ports(3)
    engine_url, queue_url, gateway_url = (f"http://127.0.0.1:{port}" for port in (engine_port, queue_port, gateway_port))
    values = {
        "store.url": store.settings.url,
        "store.otlp_endpoint": store.settings.otlp_endpoint,
        "queue.port": queue_port,
        "queue.url": queue_url,
        "queue.db": f"sqlite:///{directory}/queue.db",
        "gateway.port": gateway_port,
        "gateway.url": gateway_url,
        "gateway.engine_url": engine_url,
        "gateway.spill_path": directory / "spill",
        "runner.run_id": RUN,
        "runner.directory": directory / "runner",
        "runner.concurrency": concurrency,
        **more,
    }
    settings = [word for key, value in values.items() for word in ("--set", f"{key}={value}")]

    def start(name: str, command: Sequence[str]) -> Child:
        child = Child(name, [*command], directory / f"{name}.log", inherit_settings=False)
        stack.callback(child.stop)
        return child

    start("engine", [sys.executable, "-m", *engine, "--port", str(engine_port)])
    queue = start("queue", own_command("queue", *settings))
    gateway = start("gateway", own_command("gateway", *settings))
    for url, child in ((queue_url, queue), (gateway_url, gateway)):
        wait_until(lambda url=url: answers(f"{url}/readyz"), START_SECONDS, child.name, [child])

    def start_worker(name: str) -> Child:
        worker = start(name, own_command("worker", "--agent", agent, "--directory", str(ROOT / "benchmarks"), *settings))
        wait_until(lambda: _host(worker) is not None, START_SECONDS, "the agent's process", [worker])
        return worker

    return RunningServices(queue, gateway, start_worker("worker"), queue_url, gateway_url, engine_url, start_worker)


def _host(worker: Child) -> psutil.Process | None:
    """Return the agent's process. None: it is not there yet."""
    return next(iter(psutil.Process(worker.process.pid).children()), None)


def _cpu(pids: Mapping[str, int]) -> dict[str, float]:
    """Return CPU seconds by process; `agent` is the worker's children."""
    spent = {name: sum(psutil.Process(pid).cpu_times()[:2]) for name, pid in pids.items()}
    spent["agent"] = sum(sum(process.cpu_times()[:4]) for process in tree(psutil.Process(pids["worker"]).children()))
    return spent


def _own() -> float:
    return sum(sum(process.cpu_times()[:4]) for process in tree([psutil.Process()]))


def _check(store: SpanStore, enqueued: int, succeeded: int) -> dict[str, int]:
    client = connect(store.settings)
    try:
        wait_until(lambda: client.query(_SPANS).result_rows[0][0] >= enqueued, 30, "the root spans", store.children)
        different, roots, agents = client.query(_SPANS).result_rows[0]
    finally:
        client.close()
    return {
        "lost": enqueued - succeeded,
        "root_spans": abs(int(different) - enqueued) + int(roots) - int(different),
        "agent_spans": abs(int(agents) - enqueued),
    }


if __name__ == "__main__":
    sys.exit(main())
