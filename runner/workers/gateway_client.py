"""Client of the gateway's API for the runner: announces attempts, and asks for their number of calls.

Invariant: a gateway that is away for a moment is waited for; one that stays away ends the run with its URL and a remedy.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

import aiohttp

from spangrad.errors import GatewayError
from spangrad.http.bearer import bearer
from spangrad.http.retries import RETRIED_STATUSES
from spangrad.types import Mode, RolloutKey

_READY_SECONDS = 30.0
_RETRY_SECONDS = 10.0
_PAUSE_SECONDS = 0.2
_REQUEST_SECONDS = 20.0
"""The gateway may wait 10 s for calls in flight before it counts them."""

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CallCount:
    """Policy calls of an attempt, as the gateway counted them."""

    calls: int
    """Number of accepted calls."""
    overflowed: bool
    """True if the engine refused the last completed call because its prompt was longer than the model's context."""


class GatewayClient:
    """Connection to one gateway."""

    def __init__(self, url: str, token: str | None) -> None:
        self._url = url.rstrip("/")
        self._session = aiohttp.ClientSession(
            headers=bearer(token),
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=_REQUEST_SECONDS),
        )

    async def close(self) -> None:
        """Close the connections."""
        await self._session.close()

    async def require_ready(self) -> None:
        """Wait, for a bounded time, until the gateway's engine is admitted.

        Raises:
            GatewayError: the gateway does not answer, refuses the token, or has no engine.
        """
        end = asyncio.get_running_loop().time() + _READY_SECONDS
        while True:
            try:
                async with self._session.get(f"{self._url}/readyz") as answer:
                    status, text = answer.status, (await answer.text())[:300]
            except (aiohttp.ClientError, OSError) as error:
                raise self._away(error) from None
            if status == 200:
                return
            if status != 503:
                raise GatewayError(
                    f"the gateway at {self._url} answers HTTP {status} to /readyz: {text}. Check gateway.url and gateway.token."
                )
            if asyncio.get_running_loop().time() > end:
                raise GatewayError(
                    f"the gateway at {self._url} has no engine after {_READY_SECONDS:g} s: {text}. Start it with `spangrad engine`."
                )
            await asyncio.sleep(_PAUSE_SECONDS)

    def endpoint(self, key: RolloutKey) -> str:
        """Return the OpenAI-compatible base URL of an attempt."""
        return f"{self._attempt(key)}/v1"

    async def announce(self, key: RolloutKey, mode: Mode, traceparent: str) -> None:
        """Announce that an attempt begins.

        Raises:
            GatewayError: the gateway refuses, or does not answer.
        """
        await self._request("PUT", self._attempt(key), {"run_id": key.run_id, "mode": mode, "traceparent": traceparent})

    async def calls(self, key: RolloutKey) -> CallCount | None:
        """Count an attempt's policy calls, waiting for those in flight. None: the gateway does not know the attempt any more.

        Raises:
            GatewayError: the gateway refuses, or does not answer.
        """
        counted = await self._request("GET", f"{self._attempt(key)}/calls", None)
        if counted is None:
            _logger.warning("the gateway at %s does not know attempt %d of rollout %s any more", self._url, key.attempt, key.rollout_id)
            return None
        return CallCount(int(counted["calls"]), bool(counted["overflowed"]))

    async def served(self, policy: str) -> int | None:
        """Return the version of a policy that is served. None: its engine is not admitted, or the gateway does not know the policy.

        Raises:
            GatewayError: the gateway refuses, or does not answer.
        """
        state = await self._request("GET", f"{self._url}/admin/policies/{quote(policy, safe='')}", None)
        return None if state is None or state["version"] is None else int(state["version"])

    def _attempt(self, key: RolloutKey) -> str:
        return f"{self._url}/rollout/{quote(key.rollout_id, safe='')}/attempt/{key.attempt}"

    async def _request(self, method: str, url: str, body: Mapping[str, object] | None) -> dict[str, Any] | None:
        """Send a request, and return its JSON body. None: HTTP 404, or a response without a body."""
        end = asyncio.get_running_loop().time() + _RETRY_SECONDS
        while True:
            try:
                async with self._session.request(method, url, json=body) as answer:
                    if answer.status == 404:
                        return None
                    if answer.status < 300:
                        return await answer.json() if answer.content_type == "application/json" else None
                    problem = GatewayError(f"the gateway refuses {method} {url}: HTTP {answer.status} {(await answer.text())[:300]}")
                    if answer.status not in RETRIED_STATUSES:
                        raise problem
            except (aiohttp.ClientError, OSError) as error:
                problem = self._away(error)
            if asyncio.get_running_loop().time() > end:
                raise problem
            await asyncio.sleep(_PAUSE_SECONDS)

    def _away(self, error: BaseException) -> GatewayError:
        reason = str(error) or type(error).__name__
        return GatewayError(f"the gateway at {self._url} does not answer ({reason}). Start it with `spangrad gateway`, or set gateway.url.")
