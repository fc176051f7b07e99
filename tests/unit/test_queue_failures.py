"""Failures in the queue, with rewards and without."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from runner.queue.wire import Fail, RolloutSelector, RolloutState
from spangrad.types import POLICY_FAILURES, AttemptFailure
from tests.support.runners import failed, new_rollouts, queue_settings, serving


async def test_fail_with_rewards_ends_rollout_without_retry(tmp_path: Path) -> None:
    async with serving(queue_settings(f"sqlite:///{tmp_path}/q.db", max_attempts=3)) as (client, _):
        await client.enqueue("run", new_rollouts(2))
        first, second = await client.lease("run", "worker", 2)
        counted = failed(first, AttemptFailure.TIMEOUT, rewards={"reward": -1.0})
        results = await client.fail([counted, failed(second, AttemptFailure.TIMEOUT)])
        assert [one.state for one in results] == [RolloutState.FAILED, RolloutState.QUEUED]
        assert [one.state for one in await client.fail([counted])] == [RolloutState.FAILED], "told twice, answered alike"
        (attempt,) = (await client.rollout(first.rollout_id)).attempts
        assert (attempt.reason, attempt.rewards) == (AttemptFailure.TIMEOUT, {"reward": -1.0})
        ended = (await client.ended("run")).rollouts
        assert [(one.rollout_id, one.state) for one in ended] == [(first.rollout_id, RolloutState.FAILED)]
        assert await client.retry(RolloutSelector(run_id="run")) == 0, "no dead letter"
        assert (await client.run("run")).states == {RolloutState.QUEUED: 1, RolloutState.FAILED: 1}


@pytest.mark.parametrize("reason", list(AttemptFailure))
def test_fail_with_rewards_for_infrastructure_failure_is_refused(reason: AttemptFailure) -> None:
    body = {"failures": [{"rollout_id": "r", "attempt": 0, "reason": reason.value, "rewards": {"reward": 0.0}}]}
    if reason in POLICY_FAILURES:
        assert msgspec.convert(body, Fail).failures[0].rewards == {"reward": 0.0}
    else:
        with pytest.raises(msgspec.ValidationError, match=f"the policy did not cause '{reason.value}': leave out its rewards"):
            msgspec.convert(body, Fail)
