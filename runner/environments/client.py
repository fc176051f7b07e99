"""Leases environments of a service for attempts.

In: attempts. Out: instances, each held by heartbeats until it is given back. Invariant: what was asked for is given back, whatever was
heard of it; an instance counts as lost before its service can hand it to somebody else: when the service says so, or when its lease would
run out before the next heartbeat.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Coroutine
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self
from urllib.parse import quote

import aiohttp
import msgspec

from runner.environments.wire import Ask, Beat, Leased, Over
from runner.http_retry import AgainError, TimeUpError, again, away, checked
from spangrad.agent.telemetry import bearer
from spangrad.errors import EnvironmentsError
from spangrad.leases import BEATS, beat
from spangrad.types import AttemptFailure, Stage

_LINE_SECONDS = 20.0
"""That one request stays in line."""
_RELEASE_SECONDS = 5.0
"""That a service which is away is told again: leases run out by themselves."""
_REQUEST_SECONDS = 10.0
_SILENT_MOST = 1 - 1.25 / BEATS
"""Of a lease's time: after the next heartbeat that fails it would be over."""
_logger = logging.getLogger(__name__)


class NoInstanceError(Exception):
    """The attempt got no environment."""

    def __init__(self, failure: AttemptFailure, said: str) -> None:
        """Say why, as the attempt's failure."""
        super().__init__(said)
        self.failure = failure


@dataclass(eq=False, slots=True)
class Instance:
    """An environment that an attempt has."""

    lease: str
    name: str
    environment: Any
    """What the agent is handed."""
    lease_seconds: float
    heard: float
    """When a request began that the service has answered, by our monotonic clock."""
    lost: asyncio.Future[str] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    """Done, with a sentence, when it is not ours any more."""


class EnvironmentClient:
    """A connection to one service; an async context manager."""

    def __init__(self, url: str, token: str | None) -> None:
        """Connect when something is asked first.

        Args:
            url: where it is.
            token: what it asks for. None: nothing.
        """
        self._url = url.rstrip("/")
        self._headers = {"Content-Type": "application/json", **bearer(token)}
        self._session: aiohttp.ClientSession
        self._held: dict[str, Instance] = {}
        self._beating: asyncio.Task[None]
        self._changed = asyncio.Event()
        self._releases: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        """See that it is there.

        Raises:
            EnvironmentsError: it does not answer, or refuses us.
        """
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=_REQUEST_SECONDS)
        self._session = aiohttp.ClientSession(headers=self._headers, timeout=timeout, connector=aiohttp.TCPConnector(limit=0))
        try:
            async with asyncio.timeout(_REQUEST_SECONDS), self._session.get(f"{self._url}/readyz") as answer:
                if answer.status in {401, 403}:
                    raise EnvironmentsError(f"the environments at {self._url} want another token. Check runner.environments_token.")
        except (aiohttp.ClientError, OSError) as error:
            await self._session.close()
            said = str(error) or type(error).__name__
            raise EnvironmentsError(
                f"no environments are served at {self._url} ({said}). Start them with `spangrad environments`, or mend --environment."
            ) from None
        except EnvironmentsError:
            await self._session.close()
            raise
        self._beating = asyncio.create_task(
            beat(lambda: [one.lease_seconds for one in self._held.values()], self._changed, self._renew), name="environments heartbeat"
        )
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Give back what is held, in bounded time."""
        self._beating.cancel()
        for instance in list(self._held.values()):
            self.release(instance)
        await asyncio.gather(self._beating, *self._releases, return_exceptions=True)
        await self._session.close()

    async def lease(self, rollout_id: str, attempt: int, given: object, seconds: float) -> Instance:
        """Wait for an instance, for at most so long.

        Raises:
            NoInstanceError: there is none for this attempt.
        """
        lease = uuid.uuid4().hex
        ask = Ask(lease=lease, rollout_id=rollout_id, attempt=attempt, input=given, wait_seconds=min(_LINE_SECONDS, seconds / 2))
        try:
            instance = await again(lambda: self._ask(ask), seconds)
        except TimeUpError as error:
            self._release(lease)
            raise NoInstanceError(
                AttemptFailure.ENVIRONMENT, f"{Stage.INIT}: no environment after {seconds:g} s; {self._url} says: {error}"
            ) from None
        except BaseException:
            self._release(lease)  # whether the service has heard of it, nobody knows
            raise
        self._held[lease] = instance
        self._changed.set()
        return instance

    def release(self, instance: Instance) -> None:
        """Give it back, soon; idempotent."""
        if self._held.pop(instance.lease, None) is not None:
            self._release(instance.lease)

    async def _ask(self, ask: Ask) -> Instance:
        began = time.monotonic()
        try:
            async with self._session.post(f"{self._url}/v1/leases", data=msgspec.json.encode(ask)) as answer:
                content = await checked(answer)
                if answer.status != 200:
                    said = content.decode(errors="replace")[:500]
                    raise NoInstanceError(AttemptFailure.ENVIRONMENT, f"{self._url} gives none (HTTP {answer.status}): {said}")
            leased = msgspec.json.decode(content, type=Leased)
        except (aiohttp.ClientError, OSError) as error:
            raise away(error) from None
        except msgspec.DecodeError as error:
            raise NoInstanceError(AttemptFailure.ENVIRONMENT, f"{self._url} answers what is no lease: {error}") from None
        # It holds from when it was given, which was after the request began only where it did not wait in line: beaten at once.
        heard = max(began, time.monotonic() - leased.lease_seconds / BEATS)
        return Instance(ask.lease, leased.instance, leased.environment, leased.lease_seconds, heard)

    def _release(self, lease: str) -> None:
        task = asyncio.create_task(self._tell(lease))
        self._releases.add(task)
        task.add_done_callback(self._releases.discard)

    async def _tell(self, lease: str) -> None:
        async def tell() -> None:
            try:
                async with self._session.delete(f"{self._url}/v1/leases/{quote(lease, safe='')}") as answer:
                    await checked(answer)
            except (aiohttp.ClientError, OSError) as error:
                raise away(error) from None

        try:
            await again(tell, _RELEASE_SECONDS)
        except TimeUpError as error:
            _logger.warning("an environment could not be given back to %s (%s): its lease runs out by itself", self._url, error)

    async def _renew(self) -> None:
        held, began = list(self._held.values()), time.monotonic()
        try:
            seconds = min(one.lease_seconds for one in held) / BEATS
            over = await asyncio.wait_for(self._say(Beat(leases=[one.lease for one in held])), seconds)
        except (AgainError, TimeoutError) as error:
            _logger.warning("the environments at %s do not take heartbeats (%s)", self._url, str(error) or type(error).__name__)
            for one in held:
                silent = time.monotonic() - one.heard
                if silent > one.lease_seconds * _SILENT_MOST:
                    self._lose(one, f"the environments at {self._url} were not heard of for {silent:.3g} s")
            return
        for one in held:
            if one.lease in over:
                self._lose(one, f"instance {one.name} of {self._url} is not leased to this attempt any more")
            else:
                one.heard = began

    def _say(self, told: Beat) -> Coroutine[Any, Any, set[str]]:
        async def say() -> set[str]:
            try:
                async with self._session.post(f"{self._url}/v1/leases/heartbeat", data=msgspec.json.encode(told)) as answer:
                    content = await checked(answer)
                    if answer.status != 200:
                        raise AgainError(f"HTTP {answer.status}: {content.decode(errors='replace')[:300]}")
                    return set(msgspec.json.decode(content, type=Over).over)
            except (aiohttp.ClientError, OSError, msgspec.DecodeError) as error:
                raise away(error) from None

        return say()

    def _lose(self, instance: Instance, said: str) -> None:
        """Say that it is not ours any more; it is told to the service all the same, which may know nothing of it."""
        if not instance.lost.done():
            instance.lost.set_result(said)
        self.release(instance)
