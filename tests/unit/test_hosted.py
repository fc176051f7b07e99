"""Attempts in agent hosts, stage by stage: what was begun is ended in its host, however the attempt is stopped."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, cast

from runner.workers.agent_processes import AgentHost
from runner.workers.hosted import Hosted
from runner.workers.jobs import Job
from spangrad.types import AttemptFailure, Stage

JOB = Job("r/0", None, "t", "b", None)
CANCELLED = {"id": JOB.id, "reward": None, "failure": "timeout", "detail": "cancelled", "stuck": False, "flushed": True}


class StagingHost:
    """Host whose attempts end each stage at once, and wait for the next one until they are cancelled."""

    ended = retired = False
    attempts = 1

    def __init__(self) -> None:
        self.sent: list[Mapping[str, Any]] = []
        self.stage_callbacks: dict[str, Any] = {}
        self._answered: asyncio.Future[Mapping[str, Any]]

    def expect(self, id: str) -> asyncio.Future[Mapping[str, Any]]:
        assert id == JOB.id
        self._answered = asyncio.get_running_loop().create_future()
        return self._answered

    def send(self, message: Mapping[str, Any]) -> None:
        self.sent.append(message)
        if "cancel" in message:
            self._answered.set_result(CANCELLED)
        else:
            asyncio.get_running_loop().call_soon(self.stage_callbacks[JOB.id], Stage.EVALUATE)

    def forget(self, id: str) -> None:
        del self.stage_callbacks[id]


async def test_hosted_stopped_between_stages_is_cancelled_in_its_host() -> None:
    host, end = StagingHost(), asyncio.get_running_loop().create_future()
    async with Hosted(cast("AgentHost", host), JOB, [end]) as hosted:
        assert await hosted.go(Stage.RUN, 10)
        end.set_result("the environment is lost")
        assert not await hosted.go(Stage.EVALUATE, 10)
        outcome = await hosted.finish()
    assert outcome.failure is AttemptFailure.CANCELLED
    assert host.sent == [JOB.message(), {"cancel": JOB.id}]


async def test_hosted_stopped_before_its_first_stage_sends_nothing() -> None:
    host, end = StagingHost(), asyncio.get_running_loop().create_future()
    end.set_result(None)
    async with Hosted(cast("AgentHost", host), JOB, [end]) as hosted:
        assert not await hosted.go(Stage.RUN, 10)
        outcome = await hosted.finish()
    assert (outcome.failure, host.sent) == (AttemptFailure.CANCELLED, [])
