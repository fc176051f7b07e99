"""A worker that tests of the queue kill: leases, waits a moment, completes, and writes down what was acknowledged; poison it fails."""

from __future__ import annotations

import asyncio
import random
import sys
from pathlib import Path

from runner.queue.client import QueueClient
from runner.queue.wire import Completion, Failure, RolloutLease
from spangrad.leases import this_process
from spangrad.types import AttemptFailure


async def attempt(client: QueueClient, lease: RolloutLease, file: Path) -> None:
    await asyncio.sleep(random.random() * 0.02)
    if lease.task_input() == "poison":
        await client.fail([Failure(rollout_id=lease.rollout_id, attempt=lease.attempt, reason=AttemptFailure.CRASH, detail="poison")])
        return
    completion = Completion(rollout_id=lease.rollout_id, attempt=lease.attempt, rewards={"reward": 1.0}, calls=1, seconds=0.01)
    (result,) = await client.complete([completion])
    if result.refused is None:
        with file.open("a") as out:
            out.write(f"{lease.rollout_id} {lease.attempt}\n")


async def main(url: str, file: Path) -> None:
    async with QueueClient(url) as client:
        while True:
            leases = await client.lease("run", this_process(), 8, wait_seconds=1)
            await asyncio.gather(*[attempt(client, lease, file) for lease in leases])


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], Path(sys.argv[2])))
