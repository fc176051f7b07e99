"""Attempts that workers hold, and when the lease and the time limit of each are over.

In: leases, heartbeats, ends. Out: endings of the attempts that expired. Invariant: time is counted by this process's monotonic clock alone.
At the start every running attempt gets the whole time of its lease, since its worker could not renew it meanwhile; its run time continues
from before, unless the machine was restarted.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import replace

from runner.queue.rows import Running
from runner.queue.wire import Failure, Held, LeaseKey, RolloutLease
from spangrad.leases import LeaseClock, is_dead, this_boot
from spangrad.types import AttemptFailure

SWEEP_SECONDS = 0.25
"""Pause between two checks for expired leases and time limits, in seconds."""


class RunningAttempts:
    """Running attempts of the queue, with the clocks of their leases and time limits."""

    def __init__(self) -> None:
        self._boot = this_boot()
        """Boot that clocks count from. Read at the start, for hand-outs as well: a later read may find no free descriptor."""
        self._leases = LeaseClock[LeaseKey]()
        """Time until each lease expires."""
        self._time_limits = LeaseClock[LeaseKey]()
        """Time until each attempt exceeds its time limit."""
        self._running: dict[LeaseKey, Running] = {}

    def __len__(self) -> int:
        return len(self._running)

    def __contains__(self, key: LeaseKey) -> bool:
        return key in self._running

    def sweeps(self) -> AsyncIterator[None]:
        """Yield whenever expired attempts should be looked for; a delay of this process prolongs their leases and time limits."""
        return self._leases.ticks(SWEEP_SECONDS, self._time_limits)

    def add(self, attempts: Iterable[Running]) -> None:
        """Add attempts; the time that they have run in this boot counts."""
        for attempt in attempts:
            ran = time.monotonic() - attempt.began if attempt.boot == self._boot else 0.0
            self._running[attempt.key] = attempt
            self._leases.renew(attempt.key, attempt.lease_seconds)
            # A worker has a lease's time more to end an attempt by itself: it knows better how it ended, and how long the agent ran.
            self._time_limits.renew(attempt.key, attempt.lease_seconds + max(attempt.timeout_seconds - ran, 0.0))

    def lease(self, leases: Iterable[RolloutLease], worker: str) -> None:
        """Add the attempts that a worker was just given."""
        began = self._boot, time.monotonic()
        self.add(Running(*lease.key, lease.lease_seconds, lease.timeout_seconds, worker, *began) for lease in leases)

    def replace(self, attempts: Iterable[Running]) -> None:
        """Keep exactly these attempts; those that are running already are not renewed."""
        by_key = {attempt.key: attempt for attempt in attempts}
        for key in [key for key in self._running if key not in by_key]:
            self.remove(key)
        self.add(attempt for key, attempt in by_key.items() if key not in self._running)

    def extend(self, key: LeaseKey, lease_seconds: float) -> None:
        """Set the time for which a lease holds from now on; nothing happens for an attempt that has ended."""
        if running := self._running.get(key):
            self._running[key] = replace(running, lease_seconds=lease_seconds)
            self._leases.renew(key, lease_seconds)

    def beat(self, held: Held) -> bool:
        """Renew a lease by a heartbeat; return False if the attempt is not running."""
        running = self._running.get(held.key)
        if running is None:
            return False
        self._leases.renew(held.key, running.lease_seconds)
        if held.ran is not None:
            self._time_limits.renew(held.key, running.timeout_seconds + running.lease_seconds - held.ran)
        return True

    def remove(self, key: LeaseKey) -> Running | None:
        """Remove an attempt and return it. None: it was not running."""
        self._leases.forget(key)
        self._time_limits.forget(key)
        return self._running.pop(key, None)

    def expired(self, *, check_workers: bool) -> Sequence[Failure]:
        """Return the endings of attempts whose time is over, whose lease has expired or, where asked, whose worker's process is dead."""
        details: dict[LeaseKey, str] = {}
        for key in self._time_limits.expired():
            details[key] = f"it ran for more than {self._running[key].timeout_seconds:g} s, and its worker did not end it"
        for key in self._leases.expired():
            running = self._running[key]
            details[key] = f"no heartbeat of {running.worker} for {running.lease_seconds:g} s"
        if check_workers:
            dead = {worker for worker in {attempt.worker for attempt in self._running.values()} if is_dead(worker)}
            for key, running in self._running.items():
                if running.worker in dead:
                    details[key] = f"its worker's process has ended: {running.worker}"
        return [
            Failure(rollout_id=rollout_id, attempt=attempt, reason=AttemptFailure.LOST, detail=detail)
            for (rollout_id, attempt), detail in details.items()
        ]
