"""Agent Lightning 0.3.0's own way from spans to transitions: `TracerTraceToTriplet`, over its own `Span` objects in memory.

In: a file of rollouts, each a line of JSON: its name and its spans. Out: what that cost, and of every triplet its ids, logprobs and
reward as hashes. Invariant: runs in the peer's environment, without anything of ours; spans are made before the clock starts, and
hashes after it stops.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

from benchmarks.peers.agent_lightning import OFFLINE
from benchmarks.peers.environment import peer_environment

_ADAPT = """
import gc, hashlib, json, resource, struct, sys, time

from agentlightning.adapter import TracerTraceToTriplet
from agentlightning.types import OtelResource, Span, TraceStatus

ROUNDS = 3
status, resource_ = TraceStatus(status_code="OK"), OtelResource(attributes={}, schema_url="")

def spans_of(said):
    same = {"rollout_id": said["rollout"], "attempt_id": "0", "status": status, "resource": resource_}
    return [Span.from_attributes(**same, **one) for one in said["spans"]]

def digest(layout, numbers):
    return hashlib.sha256(struct.pack(f"<{len(numbers)}{layout}", *numbers)).hexdigest()[:16]

def result(triplet):
    logprobs = [one["logprob"] for one in triplet.response.get("logprobs", [])]
    ids = [digest("I", side["token_ids"]) for side in (triplet.prompt, triplet.response)]
    return [*ids, digest("f", logprobs), triplet.reward, triplet.metadata["response_id"], triplet.metadata["agent_name"]]

with open(sys.argv[1]) as file:
    said = [json.loads(line) for line in file]
rollouts = [spans_of(one) for one in said]
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
adapter = TracerTraceToTriplet()
adapter.adapt(rollouts[0])
# Its own garbage costs it, the spans that wait here do not: its users hold those of one rollout at a time.
gc.collect()
gc.freeze()
rounds = []
for _ in range(ROUNDS):
    triplets = None
    gc.collect()
    own, wall = time.process_time(), time.perf_counter()
    triplets = [adapter.adapt(spans) for spans in rollouts]
    rounds.append([time.process_time() - own, time.perf_counter() - wall])
answer = {
    "rounds": rounds,
    "rss_mb_before": before // 1024,
    "rss_mb_peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
    "results": {one["rollout"]: [result(triplet) for triplet in made] for one, made in zip(said, triplets, strict=True)},
}
print(json.dumps(answer))
"""


def adapt(spans: Path) -> dict[str, Any]:
    """Build the rollouts of a file.

    Returns:
        `rounds`: CPU and wall seconds of each time that all of it was built; `rss_mb_before`, with the spans in memory, and `rss_mb_peak`;
        `results`: of each rollout, a row a triplet: hashes of prompt ids, response ids and logprobs, reward, response id, agent.
    """
    python = peer_environment("agent_lightning") / "python"
    done = subprocess.run(
        [str(python), "-c", _ADAPT, str(spans)], env={**os.environ, **OFFLINE}, stdout=subprocess.PIPE, text=True, check=True
    )
    return json.loads(done.stdout.splitlines()[-1])
