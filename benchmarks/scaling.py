"""Benchmark of scaling: rollouts a second with 1, 2, 4 and 8 workers, beside an engine of set latency.

In: durations and sizes. Out: a table, and as the last line one JSON object; exit code 1 when a check fails. Invariant: queue, gateway,
store, workers and their agents' processes are the real ones, each a process of its own, on one queue and one gateway for all workers; the
engine's answers take a time that is set, so that what is measured is what the services add.

An agent makes one call. With so many slots a worker and a mean duration, n workers can end n * slots / seconds rollouts a second; the ratio
is the share of n times the rate of one worker. It cannot say anything once the machine has no idle core, which is a figure as well.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.loop import write_model
from benchmarks.meter import calibration, machine_cpu
from benchmarks.receivers import embedded
from benchmarks.rollouts import RUN, RunningServices, start_services
from benchmarks.scratch import exit_code, scratch
from runner.queue.client import QueueClient
from runner.queue.wire import RolloutState
from spangrad.http.queue_messages import new_rollout

WORKERS = (1, 2, 4, 8)
LATENCIES = 4
"""Mean durations of a call for which a number of workers runs before it is measured."""
END_SECONDS = 120


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slots", type=int, default=8, help="rollouts at once in each worker")
    parser.add_argument("--mean-seconds", type=float, default=2.0, help="mean duration of a call")
    parser.add_argument("--seconds", type=float, default=30.0, help="measured time of each number of workers")
    given = parser.parse_args()
    with scratch("scaling") as directory:
        result = measure(directory, given.slots, given.mean_seconds, given.seconds)
    for name, value in result["ours"].items():
        print(f"{name:28}{value:>10}")
    print(json.dumps({"benchmark": "scaling", **result}))
    return exit_code(result["checked"])


def measure(directory: Path, slots: int, mean_seconds: float, seconds: float) -> dict[str, Any]:
    """Return figures, and counts that must be 0."""
    model = directory / "model"
    write_model(model)
    engine = ["benchmarks.loop_engine", "--model", str(model), "--slots", "4096", "--mean-seconds", str(mean_seconds), "--sigma", "0.3"]
    with ExitStack() as stack:
        store = stack.enter_context(embedded(directory))
        services = start_services(directory, stack, store, slots, engine, "loop_agent:answer", {"gateway.policy": "policy"})
        rates, cores, states = asyncio.run(_rates(services, slots, mean_seconds, seconds))
    most = slots / mean_seconds
    figures: dict[str, float] = {f"rollouts_per_s_{workers}": round(rate, 2) for workers, rate in rates.items()}
    figures |= {f"cores_{workers}": round(used, 2) for workers, used in cores.items()}
    figures |= {"of_slots": round(rates[1] / most, 3), "calibration_ms": calibration()}
    ratio = {f"linear_{workers}": round(rates[workers] / (workers * rates[1]), 3) for workers in WORKERS[1:] if rates[1]}
    lost = sum(count for state, count in states.items() if state is not RolloutState.SUCCEEDED)
    checked = {"not_succeeded": lost, "none_measured": sum(rate == 0 for rate in rates.values())}
    return {"ours": figures, "peer": {}, "ratio": ratio, "checked": checked}


async def _rates(
    services: RunningServices, slots: int, mean_seconds: float, seconds: float
) -> tuple[dict[int, float], dict[int, float], dict[RolloutState, int]]:
    """Return rollouts a second and busy cores by number of workers, and the rollouts by state at the end."""
    rates, cores = dict[int, float](), dict[int, float]()
    started = 1
    async with QueueClient(services.queue_url) as queue:
        for workers in WORKERS:
            for number in range(started, workers):
                services.start_worker(f"worker-{number}")
            started = workers
            whole = LATENCIES * mean_seconds + seconds
            count = int((whole + LATENCIES * mean_seconds) * workers * slots / mean_seconds)
            task = {"question": "", "informative": False}
            await queue.enqueue(RUN, [new_rollout(f"{workers} {number}", task, f"{workers} {number}") for number in range(count)])
            await asyncio.sleep(LATENCIES * mean_seconds)
            before, machine, began = await _succeeded(queue), machine_cpu(), time.monotonic()
            await asyncio.sleep(seconds)
            passed = time.monotonic() - began
            rates[workers], cores[workers] = (await _succeeded(queue) - before) / passed, (machine_cpu() - machine) / passed
            async with asyncio.timeout(END_SECONDS):
                while _open((await queue.run(RUN)).states):  # noqa: ASYNC110 - the next number begins with an empty queue
                    await asyncio.sleep(0.1)
        return rates, cores, (await queue.run(RUN)).states


async def _succeeded(queue: QueueClient) -> int:
    return (await queue.run(RUN)).states.get(RolloutState.SUCCEEDED, 0)


def _open(states: dict[RolloutState, int]) -> int:
    return states.get(RolloutState.QUEUED, 0) + states.get(RolloutState.RUNNING, 0)


if __name__ == "__main__":
    sys.exit(main())
