"""Leases: their holders, the death of a holder's process, and expiry after missing renewals.

Invariant: no time of one clock is compared with that of another, nor with the time of day, so that a clock that is moved neither frees a
lease nor freezes one.

A row holds the duration of its lease without renewal, and the number of renewals. An observer (`LeaseClock`) counts by its own monotonic
clock, from the moment when it first saw the last renewal. So no lease is revoked before its time, and a new observer waits for the whole
duration once. An observer does not wait for a process that it can see to be dead.
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable, Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Generic, TypeVar

from spangrad.processes import process_start

Name = TypeVar("Name", bound=Hashable)
BEATS = 4
"""Number of renewals in the duration of a lease: a few may fail before it expires."""


@dataclass(frozen=True, slots=True)
class _LastRenewal:
    beat: int
    until: float
    """Expiry in seconds, by the observer's clock."""


class LeaseClock(Generic[Name]):
    """Leases that one observer watches. Not thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seen: dict[Name, _LastRenewal] = {}

    def __contains__(self, lease: object) -> bool:
        return lease in self._seen

    def observe(self, lease: Name, beat: int, seconds: float) -> bool:
        """Observe a lease; its duration begins when a renewal is seen first.

        Args:
            lease: name of the lease.
            beat: number of its renewals; any other number than before is a renewal.
            seconds: duration of the lease from a renewal, in seconds.

        Returns:
            True if it has expired.
        """
        now = self._clock()
        renewal = self._seen.get(lease)
        if renewal is None or renewal.beat != beat:
            renewal = self._seen[lease] = _LastRenewal(beat, now + seconds)
        return renewal.until <= now

    def renew(self, lease: Name, seconds: float) -> None:
        """Restart a lease's duration: for an observer that receives all renewals itself."""
        renewal = self._seen.get(lease)
        self._seen[lease] = _LastRenewal(renewal.beat + 1 if renewal else 0, self._clock() + seconds)

    def prolong(self, seconds: float) -> None:
        """Prolong all leases: the observer itself was delayed, and may not have seen renewals that had arrived."""
        self._seen = {lease: _LastRenewal(seen.beat, seen.until + seconds) for lease, seen in self._seen.items()}

    async def ticks(self, seconds: float, *others: LeaseClock[Name]) -> AsyncIterator[None]:
        """Yield every so many seconds, for the observer to look for expired leases.

        Leases are prolonged by a delay of this process, which was stopped or starved: renewals that came meanwhile are still to be read.

        Args:
            seconds: time between two looks, in seconds.
            others: further clocks of the same observer, whose leases are prolonged as well.
        """
        before = time.monotonic()
        while True:
            await asyncio.sleep(seconds)
            delay, before = time.monotonic() - before - seconds, time.monotonic()
            if delay > seconds:
                for clock in (self, *others):
                    clock.prolong(delay)
            yield

    def forget(self, lease: Name) -> None:
        """Stop watching a lease that has ended."""
        self._seen.pop(lease, None)

    def expired(self) -> list[Name]:
        """Return the leases that have expired."""
        now = self._clock()
        return [lease for lease, seen in self._seen.items() if seen.until <= now]


def this_process() -> str:
    """Return this process as a holder."""
    return holder_of(os.getpid())


def holder_of(pid: int) -> str:
    """Return HOST PID START TABLE, which shows users where a process runs, and identifies it and its process table to `is_dead`."""
    return f"{socket.gethostname()} {pid} {process_start(pid)} {_process_table()}"


def is_dead(holder: str) -> bool:
    """Return whether a holder has ended; False where that is unknown: on another machine, container or boot, or for another kind of name.

    A process that /proc hides (mounted with hidepid) is probed by signal 0: it has not ended while its number is in use. Clones of a
    running virtual machine share the boot and the process table, so the host's name must be this one's, too: give clones names of their
    own. Where two share even that, a live holder may seem dead; the ledger then refuses the later commit.
    """
    if not is_here(holder):
        return False
    pid, started = pid_of(holder), holder.split(" ")[2]
    start = process_start(pid)
    return start != started if start is not None else not _in_use(pid)


def is_here(holder: str) -> bool:
    """Return whether a holder's process is in this process table, where this process sees it."""
    match holder.split(" "):
        case [host, _, _, table]:
            return (host, table) == (socket.gethostname(), _process_table())
        case _:
            return False


def pid_of(holder: str) -> int:
    """Return the process id of a holder, in its process table."""
    return int(holder.split(" ")[1])


def shown(holder: str) -> str:
    """Return a holder for users: `process PID on HOST`."""
    host, pid, *_ = holder.split(" ")
    return f"process {pid} on {host}"


@cache  # a later read may find no free descriptor
def this_boot() -> str:
    """Return the id of this machine's current boot: monotonic clocks of processes in one boot agree."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


@cache
def _process_table() -> str:
    """Return an id of the process table: of this boot of this kernel, in this container."""
    return f"{this_boot()}/{Path('/proc/self/ns/pid').readlink()}"


def _in_use(pid: int) -> bool:
    """Return whether a process has this number, even where /proc does not show it."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


async def beat(lease_seconds: Callable[[], Iterable[float]], changed: asyncio.Event, renew: Callable[[], Awaitable[None]]) -> None:
    """Renew leases when they are due, until cancelled.

    Args:
        lease_seconds: duration of each lease that is held now, without renewal, in seconds.
        changed: set when another lease is held, which may need more frequent renewals.
        renew: renews all of them. Not called while there are none.
    """
    loop = asyncio.get_running_loop()
    last = loop.time()
    while True:
        changed.clear()
        due = last + min(lease_seconds(), default=3600.0) / BEATS
        if loop.time() < due:
            try:
                async with asyncio.timeout_at(due):
                    await changed.wait()
            except TimeoutError:
                pass
            continue
        last = loop.time()
        if any(True for _ in lease_seconds()):
            await renew()
