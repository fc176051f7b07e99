"""Success of rollouts: by the runner's final rewards, or by the rewards of a role that the store has.

In: outcomes of rollouts that have ended. Out: a share. Invariant: a failed rollout did not succeed.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from examples.learning.example import Example
from runner.runner import Outcome
from spangrad import semconv
from spangrad.errors import SpangradError
from spangrad.settings import Settings
from spangrad.store.clickhouse import connect, store_errors

BUILD_SECONDS = 120.0
"""Longest wait for the builds of rollouts, in seconds."""
_POLL_SECONDS = 0.2
_OF_RUN = "RunId = {run:String} AND RolloutId IN {rollouts:Array(String)}"
_BUILT = f"SELECT uniqExact(RolloutId) FROM spangrad.builds WHERE {_OF_RUN}"
_SUCCESSES = f"""
SELECT count() FROM (
    SELECT RolloutId FROM spangrad.rewards WHERE {_OF_RUN} AND Role IN ('', {{role:String}})
    GROUP BY RolloutId HAVING max(Value) >= {{least:Float64}})"""


async def success_rate(example: Example, settings: Settings, outcomes: Sequence[Outcome]) -> float:
    """Return the share of rollouts that succeeded.

    Raises:
        SpangradError: the store has no builds of them after BUILD_SECONDS.
    """
    if example.role is None:
        return final_success(example, outcomes)
    return await asyncio.to_thread(role_success, settings, outcomes, example.role, example.success)


def final_success(example: Example, outcomes: Sequence[Outcome]) -> float:
    """Return the share of rollouts whose final reward is that of success."""
    rewards = [(outcome.reward or {}).get(semconv.REWARD_NAME, 0.0) for outcome in outcomes]
    return sum(isinstance(reward, float) and reward >= example.success for reward in rewards) / len(rewards)


def role_success(settings: Settings, outcomes: Sequence[Outcome], role: str, least: float) -> float:
    """Return the share of rollouts in which a reward of a role is at least `least`, once they are built.

    Raises:
        SpangradError: the store has no builds of them after BUILD_SECONDS.
    """
    rollouts = [outcome.key.rollout_id for outcome in outcomes]
    names = {"run": settings.runner.run_id, "rollouts": rollouts}
    client, end = connect(settings.store), time.monotonic() + BUILD_SECONDS
    try:
        with store_errors(client):
            while client.query(_BUILT, parameters=names).result_rows[0][0] < len(rollouts):
                if time.monotonic() > end:
                    raise SpangradError(f"rollouts of run {settings.runner.run_id} are not built after {BUILD_SECONDS:g} s: see build.log.")
                time.sleep(_POLL_SECONDS)
            ((successes,),) = client.query(_SUCCESSES, parameters={**names, "role": role, "least": least}).result_rows
    finally:
        client.close()
    return successes / len(rollouts)
