"""Trajectories of built rollouts, from the store.

In: ids of rollouts of a run. Out: what their newest build holds. Invariants: a rollout without a build has no entry; all rows of one belong
to the build that was its newest when they were asked for; only these rollouts' rows are read, however many the store has.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from runner.process.wire import TrajectoryDrop, TrajectoryReward, TrajectoryTurn
from spangrad.store.clickhouse import store_errors
from spangrad.store.datasets import builds_sql, rows_of_builds_sql

if TYPE_CHECKING:
    from clickhouse_connect.driver.client import Client

_KEY = "RunId = {run:String} AND BuildSpec = {spec:String} AND RolloutId IN {ids:Array(String)}"
_FACTS = ("BuildId", "Attempt", "Seconds", "`StageSeconds.Name`", "`StageSeconds.Value`")
_BUILT = f"""
SELECT RolloutId, BuildId, Attempt, Seconds, mapFromArrays(`StageSeconds.Name`, `StageSeconds.Value`)
FROM {builds_sql(where=_KEY, facts=_FACTS)}
"""
# What follows the rollout are the fields of TrajectoryTurn, TrajectoryDrop and TrajectoryReward, in their order.
_TURNS = f"""
SELECT RolloutId, CallId, Turn, AgentName, Policy, PromptIds, ResponseIds, Logprobs, arrayWithConstant(length(ResponseIds), 1),
    arrayZip(`Versions.Start`, `Versions.Version`), Temperature, FinishReason, TokenizerHash, TraceId, SpanId
FROM {rows_of_builds_sql("transitions", _KEY)} ORDER BY RolloutId, Turn, ChoiceIndex, CallId
"""
_DROPS = f"""
SELECT RolloutId, CallId, Reason, Detail FROM {rows_of_builds_sql("drops", _KEY)} ORDER BY RolloutId, Timestamp, CallId, ChoiceIndex
"""
_REWARDS = f"""
SELECT RolloutId, Name, Role, Value, Source, CallId FROM {rows_of_builds_sql("rewards", _KEY)}
ORDER BY RolloutId, Name, Role, CallId, Source
"""


@dataclass(slots=True)
class BuiltTrajectory:
    """Newest build of a rollout."""

    attempt: int
    """Number of the attempt that counts."""
    seconds: float | None
    stage_seconds: Mapping[str, float]
    turns: list[TrajectoryTurn] = field(default_factory=list[TrajectoryTurn])
    drops: list[TrajectoryDrop] = field(default_factory=list[TrajectoryDrop])
    rewards: list[TrajectoryReward] = field(default_factory=list[TrajectoryReward])


def read_trajectories(client: Client, run_id: str, spec: str, rollouts: Sequence[str]) -> dict[str, BuiltTrajectory]:
    """Return the newest build, by a build specification, of each rollout of a run that has one.

    Raises:
        StoreError: the store does not answer, or fails.
    """
    parameters: dict[str, Any] = {"run": run_id, "spec": spec, "ids": list(rollouts)}

    def rows(sql: str) -> Sequence[Sequence[Any]]:
        with store_errors(client):
            return client.query(sql, parameters=parameters).result_rows

    of_builds = rows(_BUILT)
    built = {
        rollout: BuiltTrajectory(attempt, seconds if math.isfinite(seconds) else None, stages)
        for rollout, _, attempt, seconds, stages in of_builds
    }
    if not built:
        return built
    parameters |= {"ids": list(built), "builds": [build for _, build, *_ in of_builds]}
    for rollout, *fields in rows(_TURNS):
        built[rollout].turns.append(TrajectoryTurn(*fields))
    for rollout, *fields in rows(_DROPS):
        built[rollout].drops.append(TrajectoryDrop(*fields))
    for rollout, *fields in rows(_REWARDS):
        built[rollout].rewards.append(TrajectoryReward(*fields))
    return built
