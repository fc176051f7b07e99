"""A worker: leases rollouts from the queue, runs their attempts concurrently, and reports how they ended.

Invariant: an ending is reported to the queue after the store has acknowledged the attempt's root span; each lease is reported, released,
or expires; the worker leases no more than can begin at once, so that the wait before an attempt does not count as its time.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Coroutine, Sequence
from types import TracebackType
from typing import Any, Self

from runner.queue.client import LeaseHeartbeats
from runner.queue.wire import AttemptReceipt, Completion, Ending, Failure, LeaseKey, RolloutLease, RolloutState
from runner.workers.attempts import LeasedAttempt, StopReason
from runner.workers.handlers import Handlers
from runner.workers.lost_attempts import rollout_of
from runner.workers.root_spans import by_name
from runner.workers.slots import Slot
from spangrad.leases import this_process
from spangrad.types import AttemptFailure

_logger = logging.getLogger(__name__)

_ASK_SECONDS = 2.0
"""Longest time that the queue may hold a request for leases, in seconds: a drain waits for its response."""
_GATHER_SECONDS = 0.01
"""Time for which free slots, and ended attempts, wait for others, in seconds: one request then serves all of them."""
_RELEASED = StopReason(AttemptFailure.RELEASED, "its worker was stopped", final=False, reported=False)
_PAUSING = StopReason(AttemptFailure.RELEASED, "its worker could set up no sandbox just before", final=False, reported=False)
_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 1.0, 60.0


class Worker:
    """Runs attempts of one run's rollouts; an async context manager."""

    def __init__(self, run_id: str, handlers: Handlers, *, store_retry_seconds: float) -> None:
        self._queue = handlers.services.queue
        self._services = handlers.services
        self._run_id = run_id
        self._handlers = handlers
        self._free = handlers.entry
        self._retry_seconds = store_retry_seconds
        self._room = asyncio.Event()
        self._held: dict[LeaseKey, LeasedAttempt] = {}
        self._attempt_tasks: set[asyncio.Task[None]] = set()
        self._ended: asyncio.Queue[LeasedAttempt] = asyncio.Queue()
        self._changes = asyncio.Condition()
        self._tasks: list[asyncio.Task[None]] = []
        self._draining = False
        self._reporting = True
        """False once no ending is reported any more, which those who wait see before that task has ended."""
        self._unsandboxed = False
        """True from an attempt that had no sandbox until the pause after it: other workers may have one for its rollout."""
        self._pause = _PAUSE_SECONDS
        """Length of the next such pause, in seconds."""
        self.name = this_process()
        self._beating = LeaseHeartbeats(self._queue, self.name, self._lost, self._ran)
        self.failed: asyncio.Future[Exception] = asyncio.get_running_loop().create_future()
        """Done when the worker cannot go on: the gateway, the store or the queue stays away, or the agent cannot be loaded any more."""

    async def __aenter__(self) -> Self:
        await self._beating.__aenter__()
        self._tasks = [asyncio.create_task(self._guard(work)) for work in (self._lease, self._report_endings)]
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Stop at once: leases of attempts that are not reported expire."""
        for task in [*self._tasks, *self._attempt_tasks]:
            task.cancel()
        await asyncio.gather(*self._tasks, *self._attempt_tasks, return_exceptions=True)
        await self._beating.__aexit__(kind, error, trace)

    async def drain(self, seconds: float) -> None:
        """Lease nothing more; let attempts go on for so many seconds, then release the rest, and report all endings.

        Raises:
            SpangradError: they cannot be reported.
        """
        self._draining = True
        self._room.set()
        await asyncio.wait([self._tasks[0]], timeout=2 * _ASK_SECONDS)
        self._tasks[0].cancel()  # the queue is away, and has handed out nothing
        try:
            async with asyncio.timeout(seconds):
                await self._until(lambda: not self._held)
        except TimeoutError:
            self.stop(None, _RELEASED)
            await self._until(lambda: not self._held)

    def stop(self, rollouts: Collection[str] | None, reason: StopReason) -> None:
        """Stop attempts of these rollouts, or all; they end soon after."""
        for (rollout_id, _), attempt in self._held.items():
            if rollouts is None or rollout_id in rollouts:
                attempt.stop.now(reason)

    async def without(self, rollouts: Collection[str]) -> None:
        """Wait until the worker holds none of these rollouts."""
        await self._until(lambda: not any(rollout_id in rollouts for rollout_id, _ in self._held))

    async def _until(self, state: Callable[[], bool]) -> None:
        async with self._changes:
            await self._changes.wait_for(lambda: state() or not self._reporting)
        if not state():
            raise self.failed.result()

    async def _changed(self) -> None:
        async with self._changes:
            self._changes.notify_all()

    async def _guard(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        try:
            await work()
        except Exception as error:
            self._fail(error)
        finally:
            await asyncio.shield(self._changed())

    def _fail(self, error: Exception) -> None:
        if not self.failed.done():
            self.failed.set_result(error)

    async def _lease(self) -> None:
        while not self._draining and not self.failed.done():
            if self._unsandboxed:
                _logger.warning("an attempt had no sandbox: nothing is leased for %g s, so that other workers take it", self._pause)
                await asyncio.sleep(self._pause)
                self._pause, self._unsandboxed = min(2 * self._pause, _LONGEST_PAUSE_SECONDS), False
                continue
            room = min(self._free, self._handlers.most - len(self._held))
            if room < 1:
                self._room.clear()
                await self._room.wait()
                await asyncio.sleep(_GATHER_SECONDS)  # many attempts end at the same time: lease for all free slots at once
                continue
            for lease in await self._queue.lease(self._run_id, self.name, room, wait_seconds=_ASK_SECONDS):
                self._begin(lease)

    def _begin(self, lease: RolloutLease) -> None:
        attempt = self._held[lease.key] = LeasedAttempt(lease, rollout_of(lease), Slot(self._freed))
        if self._draining or self._unsandboxed:
            attempt.stop.now(_RELEASED if self._draining else _PAUSING)
        self._free -= 1
        self._beating.keep([lease])
        task = asyncio.create_task(self._make(attempt))
        self._attempt_tasks.add(task)
        task.add_done_callback(self._attempt_tasks.discard)

    async def _make(self, attempt: LeasedAttempt) -> None:
        try:
            await self._handlers.make(attempt, self._fail)
            if attempt.answer.failure is AttemptFailure.SANDBOX:
                self._unsandboxed = True
            elif attempt.seconds:
                self._pause = _PAUSE_SECONDS
            self._ended.put_nowait(attempt)
        except Exception as error:
            self._fail(error)
            self._drop(attempt.lease)  # it is never reported: its lease expires, and its rollout is tried again
            await self._changed()
            raise

    def _drop(self, lease: RolloutLease) -> None:
        self._beating.drop(lease)
        self._held.pop(lease.key, None)

    def _ran(self, lease: RolloutLease) -> float | None:
        attempt = self._held.get(lease.key)
        return attempt and attempt.seconds

    def _freed(self) -> None:
        self._free += 1
        self._room.set()

    def _lost(self, lease: RolloutLease, result: AttemptReceipt) -> None:
        """Stop an attempt whose lease the queue has ended."""
        _logger.info("stopping it, as the queue says: %s", result.refused or f"attempt {lease.attempt} of rollout {lease.rollout_id}")
        attempt = self._held.get(lease.key)
        if attempt is not None:
            reason = result.ended or AttemptFailure.LOST
            final = result.state in {RolloutState.CANCELLED, RolloutState.DEAD}
            attempt.stop.now(StopReason(reason, result.refused or "the queue ended it", final=final, reported=True))

    async def _report_endings(self) -> None:
        try:
            while True:
                await self._report_next()
        finally:
            self._reporting = False

    async def _report_next(self) -> None:
        """Report a batch of endings: those that arrived while the previous batch was reported, or soon after the first."""
        ended = [await self._ended.get()]
        await asyncio.sleep(_GATHER_SECONDS)
        while not self._ended.empty():
            ended.append(self._ended.get_nowait())
        await self._services.roots.acknowledged(self._retry_seconds)
        await asyncio.to_thread(self._services.files.ended, len(ended))
        await self._report([attempt for attempt in ended if not attempt.reported])
        for attempt in ended:
            self._drop(attempt.lease)
        self._room.set()
        await self._changed()

    async def _report(self, ended: Sequence[LeasedAttempt]) -> None:
        released: dict[str, list[RolloutLease]] = {}
        for attempt in ended:
            if attempt.answer.failure is AttemptFailure.RELEASED:
                released.setdefault(attempt.answer.detail, []).append(attempt.lease)
        endings = [_ending(attempt) for attempt in ended if attempt.answer.failure is not AttemptFailure.RELEASED]
        results: list[AttemptReceipt] = []
        if completions := [ending for ending in endings if isinstance(ending, Completion)]:
            results += await self._queue.complete(completions)
        if failures := [ending for ending in endings if isinstance(ending, Failure)]:
            results += await self._queue.fail(failures)
        for detail, leases_back in released.items():
            results += await self._queue.release(leases_back, detail)
        rollouts = {attempt.lease.key: attempt.rollout for attempt in ended if not attempt.final}
        refused = [result for result in results if result.refused is not None]
        for result in refused:
            _logger.warning("%s", result.refused)
            rollout = rollouts.get(result.key)
            if rollout is not None and result.state is RolloutState.CANCELLED:
                self._services.lost.end_cancelled(rollout)
        if refused:
            await self._services.roots.acknowledged(self._retry_seconds)


def _ending(ended: LeasedAttempt) -> Ending:
    lease, answer, rewards = ended.lease, ended.answer, by_name(ended.answer.rewards)
    facts: dict[str, Any] = {"rollout_id": lease.rollout_id, "attempt": lease.attempt, "calls": ended.calls, "seconds": ended.seconds}
    if answer.failure is None:
        return Completion(**facts, rewards=rewards or None)
    retry = answer.failure is not AttemptFailure.NO_HANDLER
    return Failure(**facts, rewards=rewards, reason=answer.failure, detail=answer.detail, retry=retry)
