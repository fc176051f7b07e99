"""Callbacks of POST /v1/process: each trajectory is posted to the request's URL as soon as it is ready, until that has taken it.

In: rollouts with URLs, kept in the queue's database. Out: POST requests in the form of Standard Webhooks. Invariant: a trajectory whose
request was answered is posted at least once, also after a restart of the server, unless its URL refuses it for `GIVE_UP_SECONDS`; one
that is refused does not hold up the others; only hosts that the settings allow are connected to, and redirections are not followed.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import logging
import time
from collections.abc import AsyncGenerator, Callable, Collection, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from enum import StrEnum
from itertools import chain
from urllib.parse import quote, urlsplit

import aiohttp
import msgspec
import sqlalchemy as sa

from runner.process.wire import ROLLOUTS_MOST, Trajectory
from runner.queue.rows import chunks, rows_among
from runner.queue.service import Service
from runner.queue.tables import CALLBACKS
from spangrad.database import insert_new
from spangrad.errors import SpangradError
from spangrad.http.service import in_url, without_userinfo
from spangrad.settings import QueueSettings

logger = logging.getLogger(__name__)

GIVE_UP_SECONDS = 3600.0
"""Time for which a URL may refuse a trajectory before it is given up, in seconds."""
_PAUSES = (1.0, 60.0)
"""First and longest pause between two tries of a trajectory, in seconds; each is twice the one before. After a refusal the URL gets nothing
for the first one."""
_POST_SECONDS = 30.0
"""Time limit of one try, in seconds."""
_REASON_CHARACTERS = 500
_LOOK_SECONDS = 600.0
"""Longest time between two looks at which callbacks of a request are open, in seconds: purged rollouts have none."""


class CallbackState(StrEnum):
    """State of the callback of a rollout."""

    OPEN = "open"
    """Its trajectory is to be posted."""
    DELIVERED = "delivered"
    """The URL has taken it."""
    GIVEN_UP = "given_up"
    """The URL has refused it for too long; the same request sent again tries it anew."""


@dataclass(slots=True)
class _Refusal:
    """Refusals of one trajectory by its URL."""

    since: float
    """Monotonic time of the first one."""
    due: float = 0.0
    """Monotonic time of the next try."""
    pause: float = 0.0
    """Pause before it, in seconds."""


class CallbackRefusedError(ValueError):
    """A URL may not be called back."""


def require_allowed(url: str, hosts: Collection[str]) -> None:
    """Check that a URL may be called back, by queue.callback_hosts.

    Raises:
        CallbackRefusedError: it is malformed, or its host is not allowed.
    """
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)
    except ValueError:
        host, port = "", 0
    if not host:
        raise CallbackRefusedError(f"callback {without_userinfo(url)!r} is no URL of a host. Give http://HOST:PORT/PATH.")
    named = in_url(host)
    if named not in hosts and f"{named}:{port}" not in hosts:
        shown = without_userinfo(url)
        raise CallbackRefusedError(f"callback {shown!r} is refused: queue.callback_hosts of the server does not list {named}:{port}.")


class Callbacks:
    """Posts trajectories; starts with those that an earlier process has left."""

    def __init__(
        self,
        service: Service,
        settings: QueueSettings,
        trajectories: Callable[[str, Sequence[str], float, Callable[[], bool]], AsyncGenerator[Trajectory]],
    ) -> None:
        """Store the arguments, of which the last is `Processing.trajectories`; `resume` begins."""
        self._service = service
        self._hosts = settings.callback_hosts
        self._token = settings.token.get_secret_value() if settings.token else None
        self._trajectories = trajectories
        self._tasks: dict[asyncio.Task[None], Sequence[str]] = {}
        """Deliveries that are under way, each with its rollouts."""
        self._session: aiohttp.ClientSession | None = None

    async def add(self, run_id: str, rollouts: Sequence[str], url: str) -> None:
        """Keep the callbacks of a request, durably; those that were delivered stay so."""
        rows: list[dict[str, object]] = [
            {"rollout_id": rollout, "run_id": run_id, "url": url, "state": CallbackState.OPEN.value} for rollout in rollouts
        ]

        def write(transaction: sa.Connection) -> tuple[list[str], list[str]]:
            known = _states(transaction, rollouts)
            again = [rollout for rollout, state in known.items() if state == CallbackState.GIVEN_UP]
            for part in chunks(again):
                values = {"url": url, "state": CallbackState.OPEN.value, "reason": None}
                transaction.execute(CALLBACKS.update().where(CALLBACKS.c.rollout_id.in_(part)).values(values))
            insert_new(transaction, CALLBACKS, rows)
            return again, [rollout for rollout in rollouts if known.get(rollout, CallbackState.OPEN) == CallbackState.OPEN]

        again, opened = await self._service.writer.do(write)
        # An earlier request may have kept them and begun nothing: its answer from the database was lost.
        under_way = set(chain.from_iterable(self._tasks.values()))
        if begun := [*again, *(rollout for rollout in opened if rollout not in under_way)]:
            self._begin(run_id, begun, url)

    async def resume(self) -> None:
        """Go on with the callbacks that are open in the database."""
        by_url: dict[tuple[str, str], list[str]] = {}
        for row in await self._service.read(lambda connection: connection.execute(_OPEN).all()):
            by_url.setdefault((row.run_id, row.url), []).append(row.rollout_id)
        for (run_id, url), rollouts in by_url.items():
            for start in range(0, len(rollouts), ROLLOUTS_MOST):
                self._begin(run_id, rollouts[start : start + ROLLOUTS_MOST], url)

    async def close(self) -> None:
        """End all tasks; what is not delivered stays open in the database."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._session is not None:
            await self._session.close()

    def _begin(self, run_id: str, rollouts: Sequence[str], url: str) -> None:
        task = asyncio.create_task(self._deliver(run_id, rollouts, url))
        self._tasks[task] = rollouts
        task.add_done_callback(self._tasks.pop)

    async def _deliver(self, run_id: str, rollouts: Sequence[str], url: str) -> None:
        """Post the trajectories of rollouts as they are ready, and those that the URL has refused when they are due again."""
        refusals: dict[str, _Refusal] = {}
        while not self._service.stopping:
            try:
                states = await self._service.read(lambda connection: _states(connection, rollouts))
                pending = [rollout for rollout in rollouts if states.get(rollout) == CallbackState.OPEN]
                if not pending:
                    return
                now = time.monotonic()
                waits = {rollout: refusals[rollout].due - now for rollout in pending if rollout in refusals and refusals[rollout].due > now}
                seconds = min(_LOOK_SECONDS, *waits.values()) if waits else _LOOK_SECONDS
                if due := [rollout for rollout in pending if rollout not in waits]:
                    await self._post_ready(run_id, due, url, seconds, refusals)
                else:
                    await asyncio.sleep(seconds)
            except Exception as error:  # the store or the database is away, or the system lacks threads: no other task delivers them
                logger.warning("callbacks to %s wait: %s", without_userinfo(url), error, exc_info=not isinstance(error, SpangradError))
                await asyncio.sleep(_PAUSES[0])

    async def _post_ready(self, run_id: str, rollouts: Sequence[str], url: str, seconds: float, refusals: dict[str, _Refusal]) -> None:
        """Post the trajectories of rollouts as they are ready, one after the other, each once; keep `refusals`, by rollout, up to date.

        Those that are not ready are waited for at most `seconds`, and no longer once one is refused.
        """
        refused: list[str] = []
        async with aclosing(self._trajectories(run_id, rollouts, seconds, lambda: bool(refused))) as trajectories:
            async for trajectory in trajectories:
                name = trajectory.rollout_id
                reason = await self._post(url, name, msgspec.json.encode(trajectory))
                if reason is not None:
                    now = time.monotonic()
                    refusal = refusals.setdefault(name, _Refusal(now))
                    if now - refusal.since < GIVE_UP_SECONDS:
                        refusal.pause = max(_PAUSES[0], min(2 * refusal.pause, _PAUSES[1]))
                        refusal.due = now + refusal.pause
                        refused.append(name)
                        await asyncio.sleep(_PAUSES[0])
                        continue
                    logger.warning("callback %s of rollout %s is given up: %s", without_userinfo(url), name, reason)
                refusals.pop(name, None)
                await self._end(name, reason)

    async def _post(self, url: str, rollout_id: str, body: bytes) -> str | None:
        """Post a trajectory once; return why it was not taken. None: it was."""
        try:
            require_allowed(url, self._hosts)  # the settings may have changed since the request
            if self._session is None:
                self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_POST_SECONDS))
            headers = signed_headers(rollout_id, int(time.time()), body, self._token)
            async with self._session.post(url, data=body, headers=headers, allow_redirects=False) as response:
                return None if response.status // 100 == 2 else f"HTTP {response.status}"
        except (aiohttp.ClientError, OSError, ValueError) as error:
            return (str(error) or type(error).__name__)[:_REASON_CHARACTERS]

    async def _end(self, rollout_id: str, reason: str | None) -> None:
        state = CallbackState.DELIVERED if reason is None else CallbackState.GIVEN_UP
        change = CALLBACKS.update().where(CALLBACKS.c.rollout_id == rollout_id).values(state=state.value, reason=reason)
        await self._service.writer.do(lambda transaction: transaction.execute(change).rowcount)


def signed_headers(name: str, timestamp: int, body: bytes, token: str | None) -> dict[str, str]:
    """Return the headers of a callback, in the form of Standard Webhooks (standardwebhooks.com): HMAC-SHA256 of `name.timestamp.body`.

    Args:
        name: id of the message, the same for each try; characters that a header cannot hold are percent-encoded.
        timestamp: time of the try, in seconds since 1970.
        body: what is posted.
        token: key of the signature. None: it is not signed.
    """
    name = quote(name, safe="/:@")
    headers = {"Content-Type": "application/json", "webhook-id": name, "webhook-timestamp": str(timestamp)}
    if token is not None:
        digest = hmac.new(token.encode(), f"{name}.{timestamp}.".encode() + body, hashlib.sha256).digest()
        headers["webhook-signature"] = f"v1,{base64.b64encode(digest).decode()}"
    return headers


def _states(connection: sa.Connection, rollouts: Sequence[str]) -> dict[str, str]:
    return {row["rollout_id"]: row["state"] for row in rows_among(connection, _KNOWN, rollouts)}


_KNOWN = sa.select(CALLBACKS.c.rollout_id, CALLBACKS.c.state).where(CALLBACKS.c.rollout_id.in_(sa.bindparam("ids", expanding=True)))
_OPEN = sa.select(CALLBACKS.c.rollout_id, CALLBACKS.c.run_id, CALLBACKS.c.url).where(CALLBACKS.c.state == CallbackState.OPEN.value)
