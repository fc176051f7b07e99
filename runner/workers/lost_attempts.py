"""Root spans of attempts that no worker ends: their workers died, or their rollouts were cancelled between two attempts.

In: rollouts as the queue knows them. Out: root spans. Invariant: each is written once by this process, with the ids that the attempt's own
worker would give it and the queue's times, so that all processes write the same row. Until all of a rollout's exist, the builder waits.
"""

from __future__ import annotations

from dataclasses import replace

from runner.queue.client import QueueClient
from runner.queue.wire import AttemptRecord, QueuedRollout, RolloutLease, RolloutState
from runner.workers.gateway_client import GatewayClient
from runner.workers.jobs import AttemptOutcome
from runner.workers.root_spans import RootSpans
from spangrad.types import AttemptFailure, Mode, Rollout, RolloutKey, Task

LOST = frozenset({RolloutState.DEAD, RolloutState.CANCELLED})
"""States of ended rollouts of which attempts may have no worker that ends them."""
_CANCELLED_BETWEEN_ATTEMPTS = AttemptOutcome(None, AttemptFailure.CANCELLED, "the rollout was cancelled between two attempts")


class LostAttempts:
    """Writes the root spans of attempts that no worker ends."""

    def __init__(self, gateway: GatewayClient | None, roots: RootSpans, queue: QueueClient) -> None:
        self._gateway = gateway
        self._roots = roots
        self._queue = queue

    async def close(self, queued: QueuedRollout) -> None:
        """Write the missing root spans of a rollout that was cancelled, or whose last worker died."""
        if not queued.attempts or queued.state not in LOST:
            return
        last = queued.attempts[-1]
        between = queued.state is RolloutState.CANCELLED and last.reason is not AttemptFailure.CANCELLED
        if not between and not _ended_by_queue(last):
            return
        full_rollout = await self._queue.rollout(queued.rollout_id) if last.attempt else queued
        await self._write_all(full_rollout, None if between else last.attempt)
        if between:
            # No attempt was running, and no root span has the final mark: another one must mark the end of the rollout.
            _, ended = _times(last)
            self.write(_rollout(queued, last.attempt + 1), _CANCELLED_BETWEEN_ATTEMPTS, 0, (ended, ended), final=True)

    async def close_before(self, lease: RolloutLease) -> None:
        """Write the missing root spans of the attempts before a lease's."""
        if lease.attempt:
            await self._write_all(await self._queue.rollout(lease.rollout_id), None)

    def end_cancelled(self, rollout: Rollout) -> None:
        """Write the final root span of a rollout that was cancelled before the queue learned of an attempt that is not final."""
        after = replace(rollout, key=replace(rollout.key, attempt=rollout.key.attempt + 1))
        self.write(after, _CANCELLED_BETWEEN_ATTEMPTS, 0, final=True)

    def write(
        self, rollout: Rollout, answer: AttemptOutcome, calls: int | None, times: tuple[int, int] | None = None, *, final: bool
    ) -> None:
        """Write the root span of an attempt with these times (ns since 1970; None: now), unless this process has written it."""
        if self._roots.claim(rollout.key.rollout_id, rollout.key.attempt):
            began, ended = times or (None, None)
            self._roots.close(self._roots.open(rollout, began=began), answer, calls, final=final, ended=ended)

    async def _write_all(self, full_rollout: QueuedRollout, final: int | None) -> None:
        for attempt in full_rollout.attempts:
            if _ended_by_queue(attempt):
                key = RolloutKey(full_rollout.run_id, full_rollout.rollout_id, attempt.attempt)
                counted = await self._gateway.calls(key) if self._gateway is not None else None
                answer = AttemptOutcome(None, attempt.reason, attempt.detail)
                calls, is_final = counted and counted.calls, attempt.attempt == final
                self.write(_rollout(full_rollout, attempt.attempt), answer, calls, _times(attempt), final=is_final)


def rollout_of(lease: RolloutLease) -> Rollout:
    """Return the rollout of a lease."""
    key = RolloutKey(lease.run_id, lease.rollout_id, lease.attempt)
    task = Task(lease.task_id, lease.task_input(), lease.prompt, lease.least_sandbox, lease.data_source)
    return Rollout(key, task, lease.mode, lease.group_id, lease.group_size)


def _rollout(queued: QueuedRollout, attempt: int) -> Rollout:
    key = RolloutKey(queued.run_id, queued.rollout_id, attempt)
    task = Task(queued.task_id, None, queued.prompt, data_source=queued.data_source)
    return Rollout(key, task, Mode(queued.mode), queued.group_id, queued.group_size)


def _times(attempt: AttemptRecord) -> tuple[int, int]:
    """Return when an attempt began and ended, in nanoseconds since 1970, by the clock of the queue's server."""
    return round(attempt.began_at * 1e9), round((attempt.ended_at or attempt.began_at) * 1e9)


def _ended_by_queue(attempt: AttemptRecord) -> bool:
    """Return whether the queue itself ended the attempt: workers report the seconds, and release only attempts with a root span."""
    return attempt.ended_at is not None and attempt.reason not in {None, AttemptFailure.RELEASED} and attempt.seconds is None
