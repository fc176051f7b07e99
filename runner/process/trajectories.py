"""Trajectories of built rollouts, from the store's public tables.

In: ids of rollouts of a run. Out: what their newest build holds. Invariant: a rollout without a build has no entry; the rows of one query
belong to one revision, since a build's own row becomes visible after all others.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from runner.process.wire import TrajectoryDrop, TrajectoryReward, TrajectoryTurn
from spangrad.store.clickhouse import store_errors

if TYPE_CHECKING:
    from clickhouse_connect.driver.client import Client

_WHERE = "WHERE RunId = {run:String} AND BuildSpec = {spec:String} AND RolloutId IN {ids:Array(String)}"
_BUILT = f"SELECT RolloutId, Seconds, StageSeconds FROM spangrad.rollouts {_WHERE}"
_TURNS = f"""
SELECT RolloutId, CallId, Turn, AgentName, Policy, PromptIds, ResponseIds, Logprobs, Versions.Start, Versions.Version, Temperature,
    FinishReason, TokenizerHash, TraceId, SpanId
FROM spangrad.transitions {_WHERE} ORDER BY RolloutId, Turn, ChoiceIndex, CallId
"""
_DROPS = f"SELECT RolloutId, CallId, Reason, Detail FROM spangrad.drops {_WHERE} ORDER BY RolloutId, Timestamp, CallId, ChoiceIndex"
_REWARDS = f"""
SELECT RolloutId, Name, Role, Value, Source, CallId FROM spangrad.rewards {_WHERE} ORDER BY RolloutId, Name, Role, CallId, Source
"""


@dataclass(slots=True)
class BuiltTrajectory:
    """Newest build of a rollout."""

    seconds: float | None
    stage_seconds: Mapping[str, float]
    turns: list[TrajectoryTurn] = field(default_factory=list[TrajectoryTurn])
    drops: list[TrajectoryDrop] = field(default_factory=list[TrajectoryDrop])
    rewards: list[TrajectoryReward] = field(default_factory=list[TrajectoryReward])


def read_trajectories(client: Client, url: str, run_id: str, spec: str, rollouts: Sequence[str]) -> dict[str, BuiltTrajectory]:
    """Return the newest build of each rollout that has one.

    Args:
        client: client of the store.
        url: address of the store, for errors.
        run_id: run of the rollouts.
        spec: build specification.
        rollouts: ids of rollouts.

    Raises:
        StoreError: the store does not answer, or fails.
    """
    parameters = {"run": run_id, "spec": spec, "ids": list(rollouts)}

    def rows(sql: str, ids: Sequence[str]) -> Sequence[Sequence[Any]]:
        with store_errors(url):
            return client.query(sql, parameters={**parameters, "ids": list(ids)}).result_rows

    built = {
        rollout: BuiltTrajectory(seconds if math.isfinite(seconds) else None, stages) for rollout, seconds, stages in rows(_BUILT, rollouts)
    }
    if not built:
        return built
    for rollout, call, turn, agent, policy, prompt, response, logprobs, starts, versions, *rest in rows(_TURNS, list(built)):
        temperature, finish_reason, tokenizer, trace, span = rest
        built[rollout].turns.append(
            TrajectoryTurn(
                call_id=call,
                turn=turn,
                agent=agent,
                policy=policy,
                prompt_ids=list(prompt),
                response_ids=list(response),
                logprobs=list(logprobs),
                loss_mask=[1] * len(response),
                versions=list(zip(starts, versions, strict=True)),
                temperature=temperature,
                finish_reason=finish_reason,
                tokenizer_hash=tokenizer,
                trace_id=trace,
                span_id=span,
            )
        )
    for rollout, call, reason, detail in rows(_DROPS, list(built)):
        built[rollout].drops.append(TrajectoryDrop(call_id=call, reason=reason, detail=detail))
    for rollout, name, role, value, source, call in rows(_REWARDS, list(built)):
        built[rollout].rewards.append(TrajectoryReward(name=name, role=role, value=value, source=source, call_id=call))
    return built
