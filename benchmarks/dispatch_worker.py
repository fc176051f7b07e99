"""A process of the dispatch benchmark: enqueues rollouts, or leases, runs and completes them; the agent is trivial.

In: a role, and on standard input the line `go`. Out: JSON lines: {"ready"}, then {"handled": ids, "refused": how many}. Invariant: an id is
told as handled once the queue has answered that it is durable.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys

from runner.queue.client import ENQUEUE_MOST, QueueClient
from runner.queue.wire import Completion, RolloutLease
from spangrad.http.queue_messages import new_rollout

GROUP = 8


def agent(task: object) -> float:
    """Answers at once."""
    return 1.0


async def enqueue(client: QueueClient, run: str, count: int, priority: int) -> dict[str, object]:
    """Add rollouts, a few thousand a request."""
    handled: list[str] = []
    for start in range(0, count, ENQUEUE_MOST):
        numbers = range(start, min(start + ENQUEUE_MOST, count))
        new = [
            new_rollout(f"task {i // GROUP}", {"question": i}, f"{priority} {i // GROUP}", group_size=GROUP, priority=priority)
            for i in numbers
        ]
        handled += await client.enqueue(run, new)
    return {"handled": handled, "refused": 0}


async def work(client: QueueClient, run: str, name: str, count: int, batch: int, streams: int) -> dict[str, object]:
    """Lease, run and complete `count` rollouts, over several connections at once."""
    handled: list[str] = []
    refused, left = 0, count

    async def stream(number: int) -> None:
        nonlocal left, refused
        while left:
            missing = min(batch, left)
            left -= missing
            while missing:
                leases = await client.lease(run, f"{name} {number}", missing, wait_seconds=30)
                missing -= len(leases)
                for result in await client.complete([completion(one) for one in leases]):
                    if result.refused:
                        refused += 1
                    else:
                        handled.append(result.rollout_id)

    await asyncio.gather(*[stream(number) for number in range(streams)])
    return {"handled": handled, "refused": refused}


def completion(lease: RolloutLease) -> Completion:
    """Run the agent, and return the completion with its reward."""
    reward = agent(lease.task_input())
    return Completion(rollout_id=lease.rollout_id, attempt=lease.attempt, rewards={"reward": reward}, calls=0, seconds=0.0)


async def main() -> None:
    """Run the role that the command line names, after a line on standard input."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("role", choices=["enqueue", "work"])
    parser.add_argument("--url", required=True)
    parser.add_argument("--run", required=True)
    parser.add_argument("--name", default="worker")
    parser.add_argument("--count", type=int, required=True)
    parser.add_argument("--priority", type=int, default=0)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--streams", type=int, default=1)
    asked = parser.parse_args()
    async with QueueClient(asked.url) as client:
        await client.runs()  # connected
        print(json.dumps({"ready": True}), flush=True)
        await asyncio.to_thread(sys.stdin.readline)
        if asked.role == "enqueue":
            done = await enqueue(client, asked.run, asked.count, asked.priority)
        else:
            done = await work(client, asked.run, asked.name, asked.count, asked.batch, asked.streams)
    print(json.dumps(done), flush=True)


if __name__ == "__main__":
    asyncio.run(main())
