"""Asks the queue: for those who have an event loop, and for those who have none.

In: where it is, and what is wanted. Out: its answers (`wire.py`). Invariant: whatever was not answered is asked again, as long as the
client is patient; every request may be sent twice without harm, since rollouts get their ids here, and endings are told by attempt.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar
from urllib.parse import quote

import aiohttp
import msgspec

from runner.ids import ordered_ids
from runner.queue.wire import (
    Ask,
    Beat,
    Cancelled,
    Complete,
    Completion,
    Demand,
    Enqueue,
    Enqueued,
    Extend,
    Fail,
    Failure,
    Held,
    Lease,
    Leases,
    NewRollout,
    Purge,
    Purged,
    Refusal,
    Release,
    Result,
    Results,
    Retried,
    Rollout,
    Rollouts,
    Run,
    Runs,
    State,
    Wanted,
    Which,
)
from spangrad.errors import QueueError
from spangrad.leases import BEATS, beat
from spangrad.settings import RunnerSettings
from spangrad.text_sanitizer import storable

logger = logging.getLogger(__name__)

T = TypeVar("T")
PATIENCE_SECONDS = 60.0
"""That a queue may be away: long enough for it to be started again."""
_PAUSES = (0.05, 0.2, 0.5, 1.0)
"""Before a request is sent again; the last one holds on."""
_ANSWER_SECONDS = 120.0
ENQUEUE_MOST = 5000
"""Rollouts in one request."""


class QueueClient:
    """A connection to the queue; an async context manager."""

    def __init__(self, url: str, token: str | None = None, *, patience_seconds: float = PATIENCE_SECONDS) -> None:
        """Connect when something is asked first.

        Args:
            url: where it is; runner.queue_url.
            token: what it asks for; runner.queue_token. None: nothing.
            patience_seconds: how long a queue that does not answer is asked again.
        """
        self.url = url.rstrip("/")
        self._headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {token}"} if token else {})
        self._patience = patience_seconds
        self._session: aiohttp.ClientSession | None = None
        self._ids = ordered_ids()

    @classmethod
    def of(cls, settings: RunnerSettings, *, patience_seconds: float = PATIENCE_SECONDS) -> Self:
        """The queue that the settings name: at runner.queue_url, else where one that is started with these settings listens."""
        token = settings.queue_token.get_secret_value() if settings.queue_token else None
        return cls(settings.queue_url or default_url(settings), token, patience_seconds=patience_seconds)

    async def __aenter__(self) -> Self:
        """Itself."""
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Close."""
        await self.close()

    async def close(self) -> None:
        """Close its connections."""
        if self._session is not None:
            await self._session.close()

    async def enqueue(self, run_id: str, rollouts: Iterable[NewRollout]) -> list[str]:
        """Add rollouts; those without an id get one.

        Returns:
            their ids, in order, once all are durable.

        Raises:
            QueueError: the queue refuses, or stays away; rollouts of a long list may have been added by then.
        """
        named = [one if one.rollout_id else msgspec.structs.replace(one, rollout_id=next(self._ids)) for one in rollouts]
        ids: list[str] = []
        for start in range(0, len(named), ENQUEUE_MOST):
            part = Enqueue(run_id=run_id, rollouts=named[start : start + ENQUEUE_MOST])
            ids += (await self._change("/v1/rollouts", Enqueued, part)).rollout_ids
        return ids

    async def lease(
        self, run_id: str, worker: str, count: int = 1, *, wait_seconds: float = 0, lease_seconds: float | None = None
    ) -> list[Lease]:
        """Lease at most so many rollouts of a run; as few as there are. `Beating` keeps them."""
        ask = Ask(run_id=run_id, worker=worker, count=count, wait_seconds=wait_seconds, lease_seconds=lease_seconds)
        return (await self._change("/v1/leases", Leases, ask)).leases

    async def beat(self, leases: Sequence[Lease | Held]) -> list[Result]:
        """Say that these are held; answered with those that are not any more."""
        return (await self._change("/v1/leases/heartbeat", Results, Beat(leases=_held(leases)))).results

    async def extend(self, leases: Sequence[Lease | Held], seconds: float) -> list[Result]:
        """Let these hold for so long without a heartbeat; answered with those that are not held any more."""
        return (await self._change("/v1/leases/extend", Results, Extend(leases=_held(leases), seconds=seconds))).results

    async def complete(self, completions: Sequence[Completion]) -> list[Result]:
        """Tell that attempts succeeded; see each answer's `refused`."""
        return (await self._change("/v1/leases/complete", Results, Complete(completions=list(completions)))).results

    async def fail(self, failures: Sequence[Failure]) -> list[Result]:
        """Tell that attempts failed; see each answer's `refused`. A detail may hold whatever an agent has said."""
        told = [msgspec.structs.replace(one, detail=storable(one.detail)) for one in failures]
        return (await self._change("/v1/leases/fail", Results, Fail(failures=told))).results

    async def release(self, leases: Sequence[Lease | Held], detail: str = "") -> list[Result]:
        """Give leases back, as if they had not been handed out."""
        return (await self._change("/v1/leases/release", Results, Release(leases=_held(leases), detail=detail))).results

    async def cancel(self, which: Which) -> Cancelled:
        """Cancel rollouts, a group, or a run."""
        return await self._change("/v1/cancel", Cancelled, which)

    async def retry(self, which: Which) -> int:
        """Queue dead letters again; how many."""
        return (await self._change("/v1/retry", Retried, which)).queued

    async def purge(self, older_than_seconds: float, run_id: str | None = None) -> int:
        """Have rollouts forgotten that ended so long ago; how many."""
        gone, more = 0, True
        while more:
            done = await self._change("/v1/purge", Purged, Purge(older_than_seconds=older_than_seconds, run_id=run_id))
            gone, more = gone + done.rollouts, done.more
        return gone

    async def rollout(self, rollout_id: str) -> Rollout:
        """One rollout, with its attempts."""
        return await self._ask("GET", f"/v1/rollouts/{quote(rollout_id, safe='')}", Rollout)

    async def rollouts(
        self, *, run_id: str | None = None, state: State | None = None, group_id: str | None = None, after: int = 0, limit: int = 100
    ) -> Rollouts:
        """Rollouts in order of arrival."""
        asked = {"run": run_id, "state": state, "group": group_id}
        query = {name: value for name, value in asked.items() if value is not None}
        return await self._ask("GET", "/v1/rollouts", Rollouts, query={**query, "after": str(after), "limit": str(limit)})

    async def ended(self, run_id: str, *, after: int = 0, limit: int = 100, wait_seconds: float = 0) -> Rollouts:
        """A run's rollouts in the order in which they ended."""
        query = {"after": str(after), "limit": str(limit), "wait": str(wait_seconds)}
        return await self._ask("GET", f"/v1/runs/{quote(run_id, safe='')}/ended", Rollouts, query=query)

    async def runs(self) -> list[Run]:
        """How the rollouts of each run stand."""
        return (await self._ask("GET", "/v1/runs", Runs)).runs

    async def run(self, run_id: str) -> Run:
        """How the rollouts of one run stand."""
        return await self._ask("GET", f"/v1/runs/{quote(run_id, safe='')}", Run)

    async def demand(self, run_id: str) -> Demand:
        """What trainers want of a run."""
        return await self._ask("GET", f"/v1/runs/{quote(run_id, safe='')}/demand", Demand)

    async def want(self, run_id: str, wanted: Wanted) -> Demand:
        """Say what a branch wants of a run."""
        return await self._ask("PUT", f"/v1/runs/{quote(run_id, safe='')}/demand", Demand, wanted)

    async def _change(self, path: str, kind: type[T], body: msgspec.Struct) -> T:
        """What is asked for by a body alone."""
        return await self._ask("POST", path, kind, body)

    async def _ask(
        self, method: str, path: str, kind: type[T], body: msgspec.Struct | None = None, query: Mapping[str, str] | None = None
    ) -> T:
        if self._session is None:
            timeout = aiohttp.ClientTimeout(total=_ANSWER_SECONDS)
            self._session = aiohttp.ClientSession(timeout=timeout, headers=self._headers, connector=aiohttp.TCPConnector(limit=0))
        data = None if body is None else msgspec.json.encode(body)
        end = time.monotonic() + self._patience
        tries = 0
        while True:
            try:
                async with self._session.request(method, self.url + path, data=data, params=query) as answer:
                    content = await answer.read()
                    if answer.status == 200:
                        return msgspec.json.decode(content, type=kind)
                    problem = QueueError(f"the queue at {self.url} refuses {method} {path} ({answer.status}): {_reason(content)}")
                    if answer.status != 503:
                        raise problem
            except (aiohttp.ClientError, OSError, msgspec.DecodeError) as error:
                said = str(error) or type(error).__name__
                problem = QueueError(f"no queue answers at {self.url} ({said}). Start it with `spangrad queue`, or set runner.queue_url.")
            left = end - time.monotonic()
            if left < 0:
                raise problem
            if tries == len(_PAUSES):  # a moment's silence is a restart
                logger.warning("%s Trying again for %.0f s.", problem, left)
            await asyncio.sleep(_PAUSES[min(tries, len(_PAUSES) - 1)])
            tries += 1


class Beating:
    """Keeps leases while their attempts run, from a task of its own; an async context manager."""

    def __init__(
        self, client: QueueClient, ended: Callable[[Lease, Result], None], ran: Callable[[Lease], float | None] = lambda lease: None
    ) -> None:
        """Keep none so far.

        Args:
            client: where to say it.
            ended: called once for a lease that is not held any more, with the reason: its attempt is to be stopped.
            ran: how long the agent of an attempt has run. None: nobody says, and it counts from the hand-out.
        """
        self._client = client
        self._ended = ended
        self._ran = ran
        self._leases: dict[tuple[str, int], Lease] = {}
        self._task: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()

    async def __aenter__(self) -> Self:
        """Begin."""
        self._task = asyncio.create_task(
            beat(lambda: [one.lease_seconds for one in self._leases.values()], self._changed, self._renew), name="queue heartbeat"
        )
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """End; leases that are still kept run out."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def keep(self, leases: Iterable[Lease]) -> None:
        """Keep these, too."""
        self._leases.update(((one.rollout_id, one.attempt), one) for one in leases)
        self._changed.set()

    def drop(self, lease: Lease) -> None:
        """It is handed in, or given back."""
        self._leases.pop((lease.rollout_id, lease.attempt), None)

    async def _renew(self) -> None:
        held = list(self._leases.values())
        seconds = min(one.lease_seconds for one in held) / BEATS
        try:
            told = [Held(rollout_id=one.rollout_id, attempt=one.attempt, ran=self._ran(one)) for one in held]
            async with asyncio.timeout(seconds):  # a connection that fell silent is left: the next heartbeat takes another one
                results = await self._client.beat(told)
        except TimeoutError:
            logger.warning("the queue at %s has not answered a heartbeat for %.3g s", self._client.url, seconds)
            return
        except QueueError as error:
            logger.warning("%s", error)  # the leases run on, and are asked for again
            return
        for result in results:
            lease = self._leases.pop((result.rollout_id, result.attempt), None)
            if lease is not None:
                self._ended(lease, result)


class PlainQueue:
    """The queue for code without an event loop; a context manager."""

    def __init__(self, client: QueueClient) -> None:
        """Run the client's loop in a thread of its own.

        Args:
            client: that nobody else uses.
        """
        self.client = client
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="queue client", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        """Itself."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Close."""
        self.wait(self.client.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def wait(self, asked: Coroutine[Any, Any, T]) -> T:
        """Wait for what the client answers: `queue.wait(queue.client.lease("run", "me", 4))`."""
        return asyncio.run_coroutine_threadsafe(asked, self._loop).result()


def default_url(settings: RunnerSettings) -> str:
    """Where `spangrad queue` listens with these settings."""
    host = settings.queue_host
    return f"http://{f'[{host}]' if ':' in host else host}:{settings.queue_port}"


def new_rollout(task_id: str, task_input: object, group_id: str, **facts: Any) -> NewRollout:
    """A rollout to enqueue, its input any JSON value; `facts` as NewRollout has them."""
    return NewRollout(task_id=task_id, input=msgspec.Raw(msgspec.json.encode(task_input)), group_id=group_id, **facts)


def _held(leases: Sequence[Lease | Held]) -> list[Held]:
    return [one if isinstance(one, Held) else Held(rollout_id=one.rollout_id, attempt=one.attempt) for one in leases]


def _reason(content: bytes) -> str:
    try:
        return msgspec.json.decode(content, type=Refusal).error
    except msgspec.DecodeError:
        return content.decode(errors="replace")[:300]
