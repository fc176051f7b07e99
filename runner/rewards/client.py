"""Client of a reward service: asks it for the reward of an attempt.

In: the agent's input and output. Out: rewards, or a failure with the service's error. Invariant: only a finite number becomes a reward;
only a service that is busy or away is asked again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

import aiohttp

from runner.workers.jobs import AttemptOutcome
from spangrad.agent.reward_values import rewards_from
from spangrad.http.async_retries import TimeUpError, again, request_once
from spangrad.http.bearer import bearer
from spangrad.types import AttemptFailure, Stage


class RewardClient:
    """Connections to one reward service; an async context manager."""

    def __init__(self, url: str, token: str | None, connections: int) -> None:
        """Store the arguments; the first request connects.

        Args:
            url: address that requests are posted to.
            token: bearer token. None: the service asks for none.
            connections: largest number of connections.
        """
        self._url = url
        self._headers = {"Content-Type": "application/json", **bearer(token)}
        self._connections = connections
        self._session: aiohttp.ClientSession

    async def __aenter__(self) -> Self:
        """Open the connection pool."""
        connector = aiohttp.TCPConnector(limit=self._connections)
        timeout = aiohttp.ClientTimeout(total=None)
        self._session = aiohttp.ClientSession(headers=self._headers, timeout=timeout, connector=connector)
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Close the connections."""
        await self._session.close()

    async def judge(self, body: Mapping[str, object], seconds: float) -> AttemptOutcome:
        """Return the rewards of an attempt, or its failure; retry for at most `seconds`.

        Args:
            body: rollout_id, attempt, task_id, input, output, environment.
            seconds: time limit of all tries together.
        """
        sent = json.dumps(body).encode()
        try:
            status, content = await again(lambda: request_once(self._session, "POST", self._url, sent), seconds)
        except TimeUpError as error:
            detail = f"{Stage.EVALUATE}: not done after {seconds:g} s; {self._url} says: {error}"
            return AttemptOutcome(None, AttemptFailure.EVALUATION, detail)
        text = content.decode(errors="replace")
        if status != 200:
            return AttemptOutcome(None, AttemptFailure.EVALUATION, f"{self._url} answers HTTP {status}: {text[:500]}")
        try:
            value: Any = json.loads(text)
        except ValueError:
            return AttemptOutcome(None, AttemptFailure.EVALUATION, f"{self._url} answers what is not JSON: {text[:200]!r}")
        try:
            rewards = rewards_from(value)
        except ValueError as error:
            return AttemptOutcome(None, AttemptFailure.EVALUATION, f"{self._url}: {error}")
        if rewards is None:
            return AttemptOutcome(None, AttemptFailure.NO_REWARD, f"{self._url} gave no reward")
        return AttemptOutcome(rewards, None)
