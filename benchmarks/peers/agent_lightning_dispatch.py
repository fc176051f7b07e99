"""Agent Lightning 0.3.0 handing out rollouts: its store as a server (`agl store`, in memory), and processes that take from it.

In: an empty directory. Out: commands of an enqueuer and of workers, and what its store says of the rollouts afterwards. Invariant: each
process is in its own environment and does what its own users' code does.

`runner`: its LitAgentRunner, one rollout at a time, as its Trainer runs agents (each writes a reward span, which its users need).
`store`: nothing but its LightningStoreClient: takes a hundred at once (`dequeue_many_rollouts`) and marks each succeeded
(`update_attempt`; it has no call for several), all hundred at the same time. No runner, no span, no reward.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path

from benchmarks.peers import agent_lightning
from benchmarks.peers.environment import peer_environment

SCRIPT = """
import asyncio, json, logging, sys
import agentlightning as agl
from agentlightning.types import EnqueueRolloutRequest
logging.disable(logging.WARNING)
role, url, count, batch, name = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), int(sys.argv[5])

async def enqueue(store):
    await store.add_resources({"p": agl.PromptTemplate(template="x", engine="f-string")})
    handled = []
    for start in range(0, count, batch):
        asked = [EnqueueRolloutRequest(input={"question": i}) for i in range(start, min(start + batch, count))]
        handled += [one.rollout_id for one in await store.enqueue_many_rollouts(asked)]
    return handled

async def take(store):
    handled = []
    while len(handled) < count:
        found = await store.dequeue_many_rollouts(limit=min(batch, count - len(handled)), worker_id=str(name))
        if not found:
            await asyncio.sleep(0.01)
        await asyncio.gather(*[store.update_attempt(one.rollout_id, one.attempt.attempt_id, status="succeeded") for one in found])
        handled += [one.rollout_id for one in found]
    return handled

class Trivial(agl.LitAgent):
    def __init__(self):
        super().__init__()
        self.handled = []
    async def rollout_async(self, task, resources, rollout):
        self.handled.append(rollout.rollout_id)
        return 1.0

async def main():
    store = agl.LightningStoreClient(url)
    if role == "check":
        found = await store.query_rollouts(status_in=["succeeded"], limit=-1)
        print(json.dumps({"handled": [one.rollout_id for one in found], "refused": 0}), flush=True)
        return await store.close()
    if role == "runner":
        agent = Trivial()
        runner = agl.LitAgentRunner(tracer=agl.OtelTracer(), max_rollouts=count, poll_interval=0.01)
        runner.init(agent)
        runner.init_worker(name, store)
    print(json.dumps({"ready": True}), flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    if role == "runner":
        await runner.iter()
        handled = agent.handled
    else:
        handled = await {"enqueue": enqueue, "store": take}[role](store)
    print(json.dumps({"handled": handled, "refused": 0}), flush=True)
    if role == "runner":
        runner.teardown_worker(name)
        runner.teardown()
    await store.close()

asyncio.run(main())
"""
VARIANTS = {"runner": 1, "store": 100}
"""Number of rollouts that a worker takes at once."""


class Dispatcher:
    """The peer's store, and commands of processes that use it."""

    def __init__(self, store: agent_lightning.AgentLightning) -> None:
        self.pids: Sequence[int] = [child.process.pid for child in store.children]
        self._url = store.url

    def command(self, role: str, count: int, number: int = 0) -> list[str]:
        """Return the command of a process with a role: `enqueue`, a name of VARIANTS, or `check`."""
        python = peer_environment("agent_lightning") / "python"
        return [str(python), "-c", SCRIPT, role, self._url, str(count), str(VARIANTS.get(role, 100)), str(number)]


@contextmanager
def running(directory: Path) -> Generator[Dispatcher]:
    """Run a store of the peer."""
    with agent_lightning.running(directory) as store:
        yield Dispatcher(store)
