"""Client of the gateway's API for the runner: announces attempts and their stages, and asks for their number of calls.

Invariant: a gateway that is away for a moment is waited for; one that stays away ends the run with its URL and a remedy.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from urllib.parse import quote

import msgspec
from pydantic import SecretStr

from spangrad.errors import GatewayError
from spangrad.http.announcements import (
    AnnouncedAttempt,
    AnnouncementRequest,
    AttemptKey,
    CountedAttempt,
    CountedAttempts,
    CountRequest,
    StageRequest,
    StartedStage,
)
from spangrad.http.async_http import AsyncClient
from spangrad.http.batches import Batches
from spangrad.http.service import RequestError, gateway_service
from spangrad.types import RolloutKey

_READY_SECONDS = 30.0
_RETRY_SECONDS = 10.0
_NO_ENGINE = 503
_REQUEST_SECONDS = 20.0
"""The gateway may wait 10 s for calls in flight before it counts them."""

_logger = logging.getLogger(__name__)


class _PolicyState(msgspec.Struct, frozen=True):
    version: int | None


class GatewayClient(AsyncClient):
    """Connection to one gateway. Announcements, and requests for counts, that come while one is on its way share the next."""

    def __init__(self, url: str, token: SecretStr | None) -> None:
        self._url = url.rstrip("/")
        super().__init__(gateway_service(self._url, token, _RETRY_SECONDS), seconds=_REQUEST_SECONDS)
        self._announcing = Batches[AnnouncedAttempt, None](partial(self._post, "/attempts", AnnouncementRequest))
        self._starting = Batches[StartedStage, None](partial(self._post, "/attempts/stages", StageRequest))
        self._counting = Batches(self._count)

    async def require_ready(self) -> None:
        """Wait, for a bounded time, until the gateway's engine is admitted.

        Raises:
            GatewayError: the gateway does not answer, refuses the token, or has no engine.
        """
        try:
            try:
                await self.send("GET", "/readyz", retry_seconds=0)
            except RequestError as failure:
                if failure.status != _NO_ENGINE:
                    raise
                await self.send("GET", "/readyz", retry_seconds=_READY_SECONDS)
        except RequestError as failure:
            if failure.status == _NO_ENGINE:
                raise GatewayError(
                    f"the gateway at {self._url} has no engine after {_READY_SECONDS:g} s: {failure.reason}. "
                    "Start it with `spangrad engine`."
                ) from failure
            raise self.service.error_for(failure, "GET", "/readyz") from failure

    def endpoint(self, key: RolloutKey) -> str:
        """Return the OpenAI-compatible base URL of an attempt."""
        return f"{self._url}/rollout/{quote(key.rollout_id, safe='')}/attempt/{key.attempt}/v1"

    async def announce(self, attempt: AnnouncedAttempt) -> None:
        """Announce that an attempt begins.

        Raises:
            GatewayError: the gateway refuses, or does not answer.
        """
        await self._announcing.ask(attempt)

    async def start_stage(self, stage: StartedStage) -> None:
        """Announce that a stage of an attempt begins.

        Raises:
            GatewayError: the gateway refuses, or does not answer.
        """
        await self._starting.ask(stage)

    async def calls(self, key: RolloutKey) -> CountedAttempt | None:
        """Count an attempt's policy calls, waiting for those in flight. None: the gateway does not know the attempt any more.

        Raises:
            GatewayError: the gateway refuses, or does not answer.
        """
        counted = await self._counting.ask(key)
        if counted.in_flight:
            (counted,) = await self._count([key], wait=True)  # alone, since it may take as long as the calls
        if counted.calls is None:
            _logger.warning("the gateway at %s does not know attempt %d of rollout %s any more", self._url, key.attempt, key.rollout_id)
            return None
        return counted

    async def _post(self, path: str, kind: Callable[..., msgspec.Struct], attempts: Sequence[Any]) -> Sequence[None]:
        await self.ask("POST", path, bytes, kind(attempts=list(attempts)))
        return [None] * len(attempts)

    async def _count(self, keys: Sequence[RolloutKey], *, wait: bool = False) -> Sequence[CountedAttempt]:
        request = CountRequest(attempts=[AttemptKey(key.rollout_id, key.attempt) for key in keys], wait=wait)
        return (await self.ask("POST", "/attempts/calls", CountedAttempts, request)).attempts

    async def served(self, policy: str) -> int | None:
        """Return the version of a policy that is served. None: its engine is not admitted, or the gateway does not know the policy.

        Raises:
            GatewayError: the gateway refuses, or does not answer.
        """
        try:
            return (await self.ask("GET", f"/admin/policies/{quote(policy, safe='')}", _PolicyState)).version
        except GatewayError as error:
            if error.http_status == 404:
                return None
            raise
