"""Benchmark of cancellation: from a request to the queue until the engine holds no sequence of the attempt, under load.

In: how many rollouts, how many at once. Out: a table, and as the last line one JSON object; exit code 1 when a check fails. Invariant:
queue, worker, agents, gateway and store are the real ones, each a process of its own; the engine writes down when each call was in flight,
and only attempts with a call in flight at the time of the request are counted.

Agents call without a pause, so that an attempt would go on if nothing stopped it. Each cancelled attempt is then called once more, as an
agent does that was not stopped: the gateway must refuse it. Before that, neither the gateway has a call of a cancelled attempt in flight,
nor the queue one that runs.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import numpy as np

from benchmarks.cancel_engine import Sequence as EngineSequence
from benchmarks.loop import write_model
from benchmarks.meter import calibration
from benchmarks.receivers import embedded
from benchmarks.rollouts import start_services
from benchmarks.scratch import exit_code, scratch
from runner.queue.client import QueueClient
from runner.queue.wire import RolloutSelector, RolloutState
from spangrad.http.queue_messages import new_rollout

RUN = "rollouts"
GONE_STATUS = 410
BEGIN_SECONDS = 60
REST_SECONDS = 3.0
"""Time after the last cancellation for what would go on, in seconds."""


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cancels", type=int, default=1000)
    parser.add_argument("--concurrency", type=int, default=64, help="attempts at once")
    parser.add_argument("--per-second", type=float, default=10.0, help="cancellations a second")
    parser.add_argument("--mean-seconds", type=float, default=1.0, help="mean duration of a call")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    with scratch("cancel") as directory:
        result = measure(directory, given.cancels, given.concurrency, given.per_second, given.mean_seconds, given.seed)
    for name, value in result["ours"].items():
        print(f"{name:24}{value:>10}")
    print(json.dumps({"benchmark": "cancel", **result}))
    return exit_code(result["checked"])


def measure(directory: Path, cancels: int, concurrency: int, per_second: float, mean_seconds: float, seed: int) -> dict[str, Any]:
    """Return figures, and counts that must be 0."""
    model = directory / "model"
    write_model(model)
    engine = ["benchmarks.cancel_engine", "--model", str(model), "--slots", str(concurrency), "--mean-seconds", str(mean_seconds)]
    with ExitStack() as stack:
        store = stack.enter_context(embedded(directory))
        services = start_services(directory, stack, store, concurrency, engine, "cancel_agent:call_forever", {"gateway.policy": "policy"})
        urls = (services.queue_url, services.gateway_url, services.engine_url)
        asked, refused, left, sequences = asyncio.run(_cancel(*urls, cancels, concurrency, per_second, random.Random(seed)))
    figures, checked = evaluate(asked, sequences)
    checked |= {"answered_later": len(asked) - refused, **left}
    return {"ours": {**figures, "calibration_ms": calibration()}, "peer": {}, "ratio": {}, "checked": checked}


def evaluate(asked: Mapping[str, float], sequences: Sequence[EngineSequence]) -> tuple[dict[str, float], dict[str, int]]:
    """Return figures and checks.

    Args:
        asked: time of the request to cancel each rollout, in seconds since 1970.
        sequences: all calls in the engine.
    """
    waits, left, begun = list[float](), 0, 0
    for rollout, at in asked.items():
        after = [sequence for sequence in sequences if sequence.rollout == rollout and (sequence.ended is None or sequence.ended > at)]
        cut = [sequence.ended for sequence in after if sequence.began <= at]
        if not cut:
            continue  # it was between two calls
        left += any(sequence.ended is None for sequence in after)
        ends = [sequence.ended for sequence in after if sequence.ended is not None]
        if ends:
            waits.append(max(ends) - at)
        first_cut = min((sequence.ended for sequence in after if sequence.ended and not sequence.answered), default=None)
        begun += sum(first_cut is not None and sequence.began > first_cut for sequence in after)
    figures = {
        "cancels": float(len(waits)),
        "p50_ms": round(1e3 * float(np.percentile(waits, 50)), 1),
        "p99_ms": round(1e3 * float(np.percentile(waits, 99)), 1),
        "most_ms": round(1e3 * max(waits), 1),
    }
    return figures, {"sequences_left": left, "begun_after_cut": begun}


async def _cancel(
    queue_url: str, gateway_url: str, engine_url: str, cancels: int, concurrency: int, per_second: float, draw: random.Random
) -> tuple[dict[str, float], int, dict[str, int], list[EngineSequence]]:
    """Return the time of each request by rollout, the number of rollouts whose later call was refused, what is left, the engine's calls."""
    names = [f"r{number}" for number in range(cancels + 2 * concurrency)]
    async with QueueClient(queue_url) as queue, aiohttp.ClientSession() as session:
        await queue.enqueue(RUN, [new_rollout(name, {"rollout": name}, name, rollout_id=name) for name in names])
        async with asyncio.timeout(BEGIN_SECONDS):
            while len(await _in_flight(session, engine_url)) < concurrency // 2:  # noqa: ASYNC110 - no event tells of it
                await asyncio.sleep(0.1)
        asked: dict[str, float] = {}
        requests: list[asyncio.Task[object]] = []
        next_at = time.monotonic()
        while len(asked) < cancels:
            running = (await queue.rollouts(run_id=RUN, state=RolloutState.RUNNING, limit=1000)).rollouts
            open_rollouts = [rollout.rollout_id for rollout in running if rollout.rollout_id not in asked]
            for name in draw.sample(open_rollouts, min(len(open_rollouts), cancels - len(asked), 8)):
                next_at = max(next_at + draw.expovariate(per_second), time.monotonic())
                await asyncio.sleep(next_at - time.monotonic())
                asked[name] = time.time()
                requests.append(asyncio.create_task(queue.cancel(RolloutSelector(rollout_ids=[name]))))
            _show(len(asked), cancels)
        await asyncio.gather(*requests)
        await asyncio.sleep(REST_SECONDS)
        sequences = await _sequences(session, engine_url)
        left = await _attempts_left(queue, session, gateway_url, asked)
        refused = 0
        for name in asked:
            url = f"{gateway_url}/rollout/{name}/attempt/0/v1/chat/completions"
            async with session.post(url, json={"model": "policy", "messages": [{"role": "user", "content": name}]}) as answer:
                refused += answer.status == GONE_STATUS
        return asked, refused, left, sequences


async def _attempts_left(queue: QueueClient, session: aiohttp.ClientSession, gateway_url: str, asked: Iterable[str]) -> dict[str, int]:
    """Count the cancelled attempts that still run as far as the queue knows, and those that the gateway has not closed, or with a call."""
    running = (await queue.rollouts(run_id=RUN, state=RolloutState.RUNNING, limit=1000)).rollouts
    cancelled = set(asked)
    body = {"attempts": [{"rollout_id": name, "attempt": 0} for name in sorted(cancelled)], "wait": False}
    async with session.post(f"{gateway_url}/attempts/calls", json=body) as answer:
        answer.raise_for_status()
        counted = (await answer.json())["attempts"]
    return {
        "left_at_queue": sum(rollout.rollout_id in cancelled for rollout in running),
        "left_at_gateway": sum(attempt["in_flight"] > 0 or not attempt["closed"] for attempt in counted) + len(cancelled) - len(counted),
    }


async def _in_flight(session: aiohttp.ClientSession, engine_url: str) -> set[str]:
    return {sequence.rollout for sequence in await _sequences(session, engine_url) if sequence.ended is None}


async def _sequences(session: aiohttp.ClientSession, engine_url: str) -> list[EngineSequence]:
    async with session.get(f"{engine_url}/sequences") as answer:
        return msgspec.json.decode(await answer.read(), type=list[EngineSequence])


def _show(done: int, count: int) -> None:
    if sys.stderr.isatty():
        print(f"\r{done} of {count} cancelled", end="\n" if done == count else "", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
