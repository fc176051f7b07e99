"""Makes one attempt of a rollout: root span, announcement, agent, count of calls.

In: a lease, and a word when it is not wanted any more. Out: how the attempt ended, its root span closed but not sent yet. Invariant: every
lease ends in one `Ended` and one root span, whatever happens to the agent; a failed attempt carries a reason and no reward.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from opentelemetry.trace import Span

from runner.attempt_files import AttemptFiles
from runner.gateway_client import GatewayClient
from runner.hosts import Answer, HostPool, Job
from runner.queue.client import QueueClient
from runner.queue.wire import Attempt, Lease, State
from runner.queue.wire import Rollout as Standing
from runner.roots import Roots, carrier
from spangrad.errors import SpangradError
from spangrad.types import AttemptFailure, Mode, Rollout, RolloutKey, Task

T = TypeVar("T")
_BETWEEN = Answer(None, AttemptFailure.CANCELLED, "the rollout was cancelled between two attempts")


@dataclass(frozen=True, slots=True)
class Why:
    """Why an attempt is stopped, and what that means for its rollout."""

    failure: AttemptFailure
    detail: str
    final: bool
    """Whether no other attempt will come."""
    told: bool
    """Whether the queue knows already."""


class StoppedError(Exception):
    """An attempt is not wanted any more."""


class Stop:
    """A word to one attempt; the first one counts."""

    def __init__(self) -> None:
        self.asked: asyncio.Future[Why] = asyncio.get_running_loop().create_future()

    def now(self, why: Why) -> None:
        """Say it."""
        if not self.asked.done():
            self.asked.set_result(why)

    async def first(self, work: Coroutine[Any, Any, T]) -> T:
        """Wait for work, or for the word.

        Raises:
            StoppedError: the word came first; the work was cancelled.
        """
        task = asyncio.create_task(work)
        try:
            await asyncio.wait([task, self.asked], return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not task.done():
                task.cancel()
                await asyncio.wait([task])
        if task.cancelled():
            raise StoppedError
        return task.result()


@dataclass(frozen=True, slots=True)
class Ended:
    """How an attempt ended."""

    lease: Lease
    answer: Answer
    calls: int | None
    """Policy calls. None: nobody counted."""
    seconds: float
    """That the agent ran."""
    final: bool
    """Whether its root has the final mark."""
    told: bool
    """Whether the queue knows already."""


class Attempts:
    """What attempts are made with."""

    def __init__(
        self, pool: HostPool, gateway: GatewayClient | None, roots: Roots, queue: QueueClient, files: AttemptFiles, timeout_seconds: float
    ) -> None:
        self._pool = pool
        self.gateway = gateway
        self.roots = roots
        self.files = files
        self.queue = queue
        self._timeout = timeout_seconds

    async def make(self, lease: Lease, stop: Stop, ran: Callable[[], None], broken: Callable[[SpangradError], None]) -> Ended:
        """Make an attempt.

        Args:
            lease: of what.
            stop: ends it early.
            ran: called once, when it holds no place among those that run any more: its evaluator may still be at work.
            broken: called when it cannot go on for a reason that is not its own; it then waits to be stopped.
        """
        rollout = rollout_of(lease)
        self.roots.claim(lease.rollout_id, lease.attempt)
        span: Span | None = None
        began: float | None = None
        answer = Answer(None, AttemptFailure.CANCELLED, "it had not begun")
        calls: int | None = 0
        seconds = 0.0
        freed = False
        try:
            try:
                host = await stop.first(self._pool.take())

                def free() -> None:
                    nonlocal freed
                    freed = True
                    self._pool.free(host)
                    ran()

                try:
                    began, calls = time.monotonic(), None
                    span = self.roots.open(rollout)
                    carried = carrier(rollout, span)
                    if self.gateway is not None:
                        await self.gateway.announce(rollout.key, rollout.mode, carried["traceparent"])
                    timeout = min(lease.timeout_seconds, self._timeout)
                    answer = await host.run(self._job(rollout, carried), timeout, stop.asked, free)
                finally:
                    self._pool.give(host, freed=freed)
            finally:
                if began is not None:
                    seconds = time.monotonic() - began
                if not freed:
                    ran()
            if self.gateway is not None and not stop.asked.done():
                calls = await self.gateway.calls(rollout.key)
                if calls is None and answer.failure is None:
                    answer = Answer(None, AttemptFailure.UNCOUNTED, "the gateway does not know this attempt any more")
            if lease.attempt:
                await self._write_lost(await self.queue.rollout(lease.rollout_id), None)
        except StoppedError:
            pass
        except SpangradError as error:
            broken(error)
            await asyncio.wait([stop.asked])
        why = stop.asked.result() if stop.asked.done() else None
        if why is not None:
            answer = Answer(None, why.failure, why.detail)
        final = why.final if why is not None else answer.failure is None or lease.last
        self.roots.close(span or self.roots.open(rollout), answer, calls, final=final)
        return Ended(lease, answer, calls, seconds, final=final, told=why is not None and why.told)

    async def mourn(self, standing: Standing) -> None:
        """Write the roots that nobody else will of a rollout that has ended: of an attempt whose worker is gone, or of a cancellation."""
        if not standing.attempts or standing.state not in {State.DEAD, State.CANCELLED}:
            return
        last = standing.attempts[-1]
        between = standing.state is State.CANCELLED and last.reason is not AttemptFailure.CANCELLED
        if not between and not _ended_by_queue(last):
            return
        whole = await self.queue.rollout(standing.rollout_id) if last.attempt else standing
        await self._write_lost(whole, None if between else last.attempt)
        if between:
            # No attempt was under way, and those before were not the last: somebody must say that no other comes.
            self._write(_rollout(standing, last.attempt + 1), _BETWEEN, 0, final=True)

    def end_cancelled(self, lease: Lease) -> None:
        """End a rollout that was cancelled before the queue heard of an attempt, whose root says that others come."""
        rollout = rollout_of(lease)
        self._write(replace(rollout, key=replace(rollout.key, attempt=lease.attempt + 1)), _BETWEEN, 0, final=True)

    async def _write_lost(self, whole: Standing, final: int | None) -> None:
        """Write the roots of attempts whose workers are gone: until they are there, the builder waits for them."""
        for one in whole.attempts:
            if _ended_by_queue(one):
                key = RolloutKey(whole.run_id, whole.rollout_id, one.attempt)
                calls = await self.gateway.calls(key) if self.gateway is not None else None
                self._write(_rollout(whole, one.attempt), Answer(None, one.reason, one.detail), calls, final=one.attempt == final)

    def _write(self, rollout: Rollout, answer: Answer, calls: int | None, *, final: bool) -> None:
        if self.roots.claim(rollout.key.rollout_id, rollout.key.attempt):
            self.roots.close(self.roots.open(rollout), answer, calls, final=final)

    def _job(self, rollout: Rollout, carried: Mapping[str, str]) -> Job:
        return Job(
            id=f"{rollout.key.rollout_id}/{rollout.key.attempt}",
            input=rollout.task.input,
            traceparent=carried["traceparent"],
            baggage=carried["baggage"],
            endpoint=self.gateway.endpoint(rollout.key) if self.gateway is not None else None,
            log=self.files.directory(rollout.key.rollout_id, rollout.key.attempt),
        )


def rollout_of(lease: Lease) -> Rollout:
    """What a lease is of."""
    key = RolloutKey(lease.run_id, lease.rollout_id, lease.attempt)
    return Rollout(key, Task(lease.task_id, lease.task_input(), lease.prompt), lease.mode, lease.group_id, lease.group_size)


def _rollout(standing: Standing, attempt: int) -> Rollout:
    key = RolloutKey(standing.run_id, standing.rollout_id, attempt)
    return Rollout(key, Task(standing.task_id, None, standing.prompt), Mode(standing.mode), standing.group_id, standing.group_size)


def _ended_by_queue(attempt: Attempt) -> bool:
    """Whether the queue ended it itself: workers say how long their agents ran, and give back only what they have written a root of."""
    return attempt.ended_at is not None and attempt.reason not in {None, AttemptFailure.RELEASED} and attempt.seconds is None
