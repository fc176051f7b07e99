"""Client of an environment service: leases environments for attempts.

In: attempts. Out: instances, each held by heartbeats until it is released. Invariant: each requested lease is released, even when no answer
arrived; an instance counts as lost before its service can lease it to another attempt: when the service reports so, or when its lease
would expire before the next heartbeat.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self
from urllib.parse import quote

import msgspec
from pydantic import SecretStr

from runner.environments.wire import ExpiredLeases, InstanceHeartbeat, InstanceRequest, Leased
from spangrad.errors import EnvironmentsError
from spangrad.http.async_http import AsyncClient
from spangrad.http.service import RemoteService, RequestError, without_userinfo
from spangrad.leases import BEATS, beat
from spangrad.types import Stage

_WAIT_SECONDS = 20.0
"""Time that one request waits in the service's line, in seconds."""
_RELEASE_SECONDS = 5.0
"""Time for which a release is retried while the service is away, in seconds; after it, the lease expires by itself."""
_REQUEST_SECONDS = 10.0
_UNUSABLE = {None, 401, 403}
"""Statuses by which a service that is asked whether it is ready cannot be used; another one may only mean that it has no instance yet."""
_EXPIRY_SHARE = 1 - 1.25 / BEATS
"""Share of a lease's time without a successful heartbeat after which the lease would expire before the next one."""
_logger = logging.getLogger(__name__)


class NoInstanceError(Exception):
    """No environment was leased to the attempt."""


@dataclass(eq=False, slots=True)
class LeasedInstance:
    """Environment that an attempt has leased."""

    lease: str
    name: str
    environment: Any
    """Value that is passed to the agent."""
    lease_seconds: float
    answered_at: float
    """Start of the last request that the service answered, in seconds of the local monotonic clock."""
    lost: asyncio.Future[str] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    """Done, with a sentence, when the lease is lost."""


class EnvironmentClient:
    """Connection to one environment service; an async context manager."""

    def __init__(self, url: str, token: SecretStr | str | None) -> None:
        self._url = without_userinfo(url.rstrip("/"))
        remedy = "Start it with `spangrad environments`, or fix --environment."
        self._client = AsyncClient(RemoteService("the environment service", url, token, EnvironmentsError, remedy))
        self._held: dict[str, LeasedInstance] = {}
        self._heartbeat_task: asyncio.Task[None]
        self._changed = asyncio.Event()
        self._releases: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        """Check that the service answers, and start the heartbeats.

        Raises:
            EnvironmentsError: the service does not answer, or refuses the token.
        """
        try:
            await self._check_ready()
        except BaseException:
            await self._client.close()
            raise
        self._heartbeat_task = asyncio.create_task(
            beat(lambda: [instance.lease_seconds for instance in self._held.values()], self._changed, self._renew),
            name="environments heartbeat",
        )
        return self

    async def _check_ready(self) -> None:
        try:
            await self._client.send("GET", "/readyz", within_seconds=_REQUEST_SECONDS, retry_seconds=0)
        except RequestError as failure:
            if failure.status in _UNUSABLE:
                raise self._client.service.error_for(failure, "GET", "/readyz") from failure

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Release all leases, in bounded time."""
        self._heartbeat_task.cancel()
        for instance in list(self._held.values()):
            self.release(instance)
        await asyncio.gather(self._heartbeat_task, *self._releases, return_exceptions=True)
        await self._client.close()

    async def lease(self, rollout_id: str, attempt: int, given: object, seconds: float) -> LeasedInstance:
        """Wait for an instance, for at most `seconds`.

        Raises:
            NoInstanceError: this attempt gets no instance.
        """
        lease = uuid.uuid4().hex
        message = InstanceRequest(
            lease=lease, rollout_id=rollout_id, attempt=attempt, input=given, wait_seconds=min(_WAIT_SECONDS, seconds / 2)
        )
        try:
            instance = await self._ask(message, seconds)
        except RequestError as failure:
            self._release(lease)
            late = f"{Stage.INIT}: no environment after {seconds:g} s; {self._url} says: {failure}"
            detail = late if failure.may_pass else f"{self._url} gives none ({failure})"
            raise NoInstanceError(detail) from None
        except BaseException:
            self._release(lease)  # it is unknown whether the service received the request
            raise
        self._held[lease] = instance
        self._changed.set()
        return instance

    def release(self, instance: LeasedInstance) -> None:
        """Release an instance, in the background; idempotent."""
        if self._held.pop(instance.lease, None) is not None:
            self._release(instance.lease)

    async def _ask(self, message: InstanceRequest, seconds: float) -> LeasedInstance:
        began = time.monotonic()
        leased = await self._client.send("POST", "/v1/leases", msgspec.json.encode(message), Leased, within_seconds=seconds)
        # The lease holds from the hand-out, at an unknown time after the request began: the first heartbeat is due at once.
        answered_at = max(began, time.monotonic() - leased.lease_seconds / BEATS)
        return LeasedInstance(message.lease, leased.instance, leased.environment, leased.lease_seconds, answered_at)

    def _release(self, lease: str) -> None:
        task = asyncio.create_task(self._send_release(lease))
        self._releases.add(task)
        task.add_done_callback(self._releases.discard)

    async def _send_release(self, lease: str) -> None:
        try:
            await self._client.send("DELETE", f"/v1/leases/{quote(lease, safe='')}", within_seconds=_RELEASE_SECONDS)
        except RequestError as failure:
            _logger.warning("an environment could not be released at %s (%s): its lease expires", self._url, failure)

    async def _renew(self) -> None:
        held, began = list(self._held.values()), time.monotonic()
        try:
            seconds = min(instance.lease_seconds for instance in held) / BEATS
            body = msgspec.json.encode(InstanceHeartbeat(leases=[instance.lease for instance in held]))
            answer = await self._client.send("POST", "/v1/leases/heartbeat", body, ExpiredLeases, retry_seconds=0, within_seconds=seconds)
        except RequestError as failure:
            _logger.warning("the environments at %s refuse heartbeats (%s)", self._url, failure)
            for instance in held:
                silence = time.monotonic() - instance.answered_at
                if silence > instance.lease_seconds * _EXPIRY_SHARE:
                    self._lose(instance, f"the environments at {self._url} have not answered for {silence:.3g} s")
            return
        for instance in held:
            if instance.lease in answer.over:
                self._lose(instance, f"instance {instance.name} of {self._url} is not leased to this attempt any more")
            else:
                instance.answered_at = began

    def _lose(self, instance: LeasedInstance, reason: str) -> None:
        """Mark an instance as lost; the lease is released all the same, though the service may not know it any more."""
        if not instance.lost.done():
            instance.lost.set_result(reason)
        self.release(instance)
