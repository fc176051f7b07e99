"""Agent Lightning 0.3.0's own store, in memory, as its users run it: `agl store`.

In: an empty directory for its log. Out: a `Receiver`. Invariant: its rollouts are made, and its spans counted, through its own API.
"""

from __future__ import annotations

import http.client
import json
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.peers.environment import peer_environment
from benchmarks.receivers import Stored
from benchmarks.rollout_spans import SPANS_A_ROLLOUT, RolloutName
from benchmarks.workload import Workload
from spangrad.processes import Child, answers, free_ports, wait_until

START_SECONDS = 120
# What it imports would otherwise ask the network.
OFFLINE = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "AGENTOPS_LOG_LEVEL": "ERROR"}


class AgentLightning:
    """Its store, with its data in memory."""

    def __init__(self, child: Child, port: int) -> None:
        self.children: Sequence[Child] = [child]
        self.url = f"http://127.0.0.1:{port}"
        self.traces_url = f"{self.url}/v1/traces"
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)

    def rollouts(self, workload: Workload, count: int) -> list[RolloutName]:
        """Started through its API."""
        return self.start_rollouts(count)

    def start_rollouts(self, count: int) -> list[RolloutName]:
        """Start rollouts, since the peer refuses spans of rollouts that it does not know; return their names."""
        started = [self._ask("POST", "/rollouts", {"input": {"task": number}}) for number in range(count)]
        return [RolloutName(one["rollout_id"], one["attempt"]["attempt_id"]) for one in started]

    def drained(self, spans: int) -> bool:
        """Return whether the store counts at least `spans` spans."""
        return self._ask("GET", "/statistics")["total_spans"] >= spans

    def stored(self, workload: Workload, rollouts: Sequence[RolloutName]) -> list[Stored]:
        """Return the spans of all rollouts, as the peer's own readers get them."""
        span_ids: list[int] = []
        for name in rollouts:
            page = self._ask("GET", f"/spans?rollout_id={name.rollout}&attempt_id={name.attempt}&limit={10 * SPANS_A_ROLLOUT}")
            span_ids += [int(span["span_id"], 16) for span in page["items"]]
        return [Stored("spans", np.array(span_ids, np.uint64), workload.span_ids(len(rollouts)))]

    def count_spans(self, rollout: RolloutName, name: str) -> int:
        """Return the number of a rollout's spans of this name."""
        return self._ask("GET", f"/spans?rollout_id={rollout.rollout}&attempt_id={rollout.attempt}&name={name}&limit=1")["total"]

    def facts(self, workload: Workload, rollouts: int) -> Mapping[str, int | float]:
        """Return no further figures."""
        return {}

    def _ask(self, method: str, path: str, body: object = None) -> Any:
        content = None if body is None else json.dumps(body)
        self._connection.request(method, f"/v1/agl{path}", content, {"Content-Type": "application/json"})
        response = self._connection.getresponse()
        answer = response.read()
        self._connection.close()  # the server closes idle connections within seconds, without notice
        if response.status >= 400:
            raise RuntimeError(f"{method} {path}: {response.status} {answer[:500]!r}")
        return json.loads(answer)


@contextmanager
def running(directory: Path) -> Generator[AgentLightning]:
    """Its store, as a process."""
    (port,) = free_ports(1)
    program = peer_environment("agent_lightning") / "agl"
    command = [str(program), "store", "--host", "127.0.0.1", "--port", str(port), "--log-level", "WARNING"]
    child = Child("agl store", command, directory / "agent_lightning.log", OFFLINE, inherit_settings=False)
    try:
        wait_until(lambda: answers(f"http://127.0.0.1:{port}/v1/agl/health"), START_SECONDS, "agl store", [child])
        yield AgentLightning(child, port)
    finally:
        child.stop()
