"""Leases: who holds something, whether that process is dead, and when one who is not heard of has held it for long enough.

In: /proc, this process's monotonic clock, and what a lease's row says. Out: a name that no other process has, nor will have; whether a
lease may be undone; when renewals are due. Invariant: no time of one clock is compared with that of another, nor with the time of day,
so that a clock that is moved neither frees a lease nor freezes one.

A row tells for how long its lease holds unrenewed, and how often it was renewed. An observer (`Watch`) counts by its own monotonic clock,
from when it saw the last renewal first. So nobody undoes a lease before its time, and whoever begins to look waits for all of it once.
A process that the observer can see to be dead is not waited for.
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Awaitable, Callable, Hashable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

Name = TypeVar("Name", bound=Hashable)
BEATS = 4
"""Renewals in the time that a lease holds: a few may fail before it is over."""


@dataclass(frozen=True, slots=True)
class _Sight:
    beat: int
    until: float
    """By the observer's clock."""


class Watch(Generic[Name]):
    """The leases that one observer looks at. Not for several threads at once."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Begin to look.

        Args:
            clock: seconds since any moment, never moved by anybody.
        """
        self._clock = clock
        self._seen: dict[Name, _Sight] = {}

    def __contains__(self, lease: object) -> bool:
        return lease in self._seen

    def __len__(self) -> int:
        return len(self._seen)

    def see(self, lease: Name, beat: int, seconds: float) -> bool:
        """Look at a lease; its time begins when a beat is seen first.

        Args:
            lease: which.
            beat: how often it was renewed; any other number than before is a renewal.
            seconds: how long it holds from then on.

        Returns:
            Whether its time is up.
        """
        now = self._clock()
        sight = self._seen.get(lease)
        if sight is None or sight.beat != beat:
            sight = self._seen[lease] = _Sight(beat, now + seconds)
        return sight.until <= now

    def renew(self, lease: Name, seconds: float) -> None:
        """Let a lease's time begin again: for an observer that all renewals come to."""
        sight = self._seen.get(lease)
        self._seen[lease] = _Sight(sight.beat + 1 if sight else 0, self._clock() + seconds)

    def prolong(self, seconds: float) -> None:
        """Let all leases hold for so much longer: the observer itself was held up, and may not have seen renewals that had come."""
        self._seen = {lease: _Sight(sight.beat, sight.until + seconds) for lease, sight in self._seen.items()}

    def forget(self, lease: Name) -> None:
        """It is over, or was ended."""
        self._seen.pop(lease, None)

    def over(self) -> list[Name]:
        """The leases whose time is up."""
        now = self._clock()
        return [lease for lease, sight in self._seen.items() if sight.until <= now]


def this_process() -> str:
    """HOST PID START TABLE: for people where it runs, and for `is_dead` which process of which table of processes it is."""
    pid = os.getpid()
    return f"{socket.gethostname()} {pid} {_started(pid)} {_process_table()}"


def is_dead(holder: str) -> bool:
    """Whether a holder has ended; False where that cannot be known: of another machine, container or boot, or by another kind of name.

    A process that /proc hides (mounted with hidepid) is asked for by a signal that does nothing: it has not ended while its number is in
    use. Clones of a running virtual machine share the boot and the table of processes, so the host's name must be this one's, too: give
    clones names of their own. Where two have even that in common, a live holder may look dead; the ledger then refuses the later commit.
    """
    match holder.split(" "):
        case [host, pid, started, table]:
            if host != socket.gethostname() or table != _process_table():
                return False
            found = _started(int(pid))
            return found != started if found is not None else not _in_use(int(pid))
        case _:
            return False


def shown(holder: str) -> str:
    """A holder for people: `process PID on HOST`."""
    host, pid, *_ = holder.split(" ")
    return f"process {pid} on {host}"


def this_boot() -> str:
    """Which boot of which machine this is: monotonic clocks of processes in one boot agree."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _process_table() -> str:
    """Of this boot of this kernel, in this container."""
    return f"{this_boot()}/{Path('/proc/self/ns/pid').readlink()}"


def _in_use(pid: int) -> bool:
    """Whether a process has this number, also where /proc does not show it."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _started(pid: int) -> str | None:
    """When a process started, in ticks since boot; empty: only its corpse is left. None: /proc shows no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # The name in brackets may hold anything; state is the third field, the start the 22nd.
    fields = text.rpartition(")")[2].split()
    return "" if fields[0] in {"Z", "X"} else fields[19]


async def beat(lease_seconds: Callable[[], Iterable[float]], changed: asyncio.Event, renew: Callable[[], Awaitable[None]]) -> None:
    """Have leases renewed when they are due, until cancelled.

    Args:
        lease_seconds: how long each that is held now holds unrenewed.
        changed: set when another one is held, which may need a quicker beat.
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
