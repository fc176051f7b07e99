"""Client of a reward service: asks it for the reward of an attempt.

In: the agent's input and output. Out: rewards, or a failure with the service's error. Invariant: only a finite number becomes a reward;
only a service that is busy or away is asked again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from pydantic import SecretStr

from runner.workers.jobs import AttemptOutcome
from spangrad.agent.reward_values import rewards_from
from spangrad.errors import JSON_ERRORS, SpangradError
from spangrad.http.async_http import AsyncClient
from spangrad.http.service import RemoteService, RequestError, without_userinfo
from spangrad.types import AttemptFailure, Stage


class RewardClient(AsyncClient):
    """Connections to one reward service; an async context manager."""

    def __init__(self, url: str, token: SecretStr | None) -> None:
        self._url = without_userinfo(url)
        super().__init__(RemoteService("the reward service", url, token, SpangradError, "Start it with `spangrad rewards serve`."))

    async def evaluate(self, body: Mapping[str, object], seconds: float) -> AttemptOutcome:
        """Return the rewards of an attempt, or its failure; all tries together take at most `seconds`.

        `body` has the fields of `runner.rewards.server.EvaluationRequest`.
        """
        try:
            content = await self.send("POST", "", json.dumps(body).encode(), within_seconds=seconds)
        except RequestError as failure:
            late = f"{Stage.EVALUATE}: not done after {seconds:g} s; {self._url} says: {failure}"
            detail = late if failure.may_pass else f"{self._url} answers {failure}"
            return AttemptOutcome(None, AttemptFailure.EVALUATION, detail)
        text = content.decode(errors="replace")
        try:
            value: Any = json.loads(text)
        except JSON_ERRORS:
            return AttemptOutcome(None, AttemptFailure.EVALUATION, f"{self._url} answers what is not JSON: {text[:200]!r}")
        try:
            rewards = rewards_from(value)
        except ValueError as error:
            return AttemptOutcome(None, AttemptFailure.EVALUATION, f"{self._url}: {error}")
        if rewards is None:
            return AttemptOutcome(None, AttemptFailure.NO_REWARD, f"{self._url} gave no reward")
        return AttemptOutcome(rewards, None)
