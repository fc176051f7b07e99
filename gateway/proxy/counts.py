"""Counts of the policy calls of each attempt, by which the completeness of a rollout is checked.

In: the runner's announcements, beginnings and ends of calls. Out: counts, once no call is in flight. Invariant: a
call is counted when it is accepted, and ends here only after its span is queued for export.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from dataclasses import dataclass, field

from gateway.proxy.context import NOTHING_ANNOUNCED, Announcement, AttemptKey

ATTEMPTS_KEPT = 100_000
"""Number of attempts remembered; the least recently used without a call in flight are forgotten first (some 50 MB in all)."""


@dataclass(slots=True)
class _Tally:
    announced: Announcement = NOTHING_ANNOUNCED
    calls: int = 0
    in_flight: int = 0
    overflowed: bool = False
    """True if the last call that ended was refused because its prompt was longer than the model's context."""
    idle: asyncio.Event = field(default_factory=asyncio.Event)


class Counts:
    """Call counts of the attempts that were announced or seen."""

    def __init__(self) -> None:
        self._tallies: OrderedDict[AttemptKey, _Tally] = OrderedDict()

    def announce(self, attempt: AttemptKey, announcement: Announcement) -> None:
        """Keep the runner's announcement; calls by URL alone inherit it."""
        self._touch(attempt).announced = announcement

    def announced(self, attempt: AttemptKey | None) -> Announcement:
        """Return the announcement of an attempt, or an empty one."""
        tally = self._tallies.get(attempt) if attempt else None
        return tally.announced if tally else NOTHING_ANNOUNCED

    def begin(self, attempt: AttemptKey | None) -> None:
        """Count an accepted call."""
        if attempt is not None:
            tally = self._touch(attempt)
            tally.calls += 1
            tally.in_flight += 1
            tally.idle.clear()

    def end(self, attempt: AttemptKey | None, *, overflowed: bool = False) -> None:
        """Note that a call's span is queued, and whether the engine refused the call for the length of its prompt."""
        if attempt is not None:
            tally = self._tallies[attempt]
            tally.in_flight -= 1
            tally.overflowed = overflowed
            if not tally.in_flight:
                tally.idle.set()

    async def wait_idle(self, attempt: AttemptKey, wait_seconds: float) -> None:
        """Wait until no call of an attempt is in flight; one that hangs is counted all the same: its span will come when it ends."""
        tally = self._tallies.get(attempt)
        if tally is not None and tally.in_flight:
            try:
                await asyncio.wait_for(tally.idle.wait(), wait_seconds)
            except TimeoutError:
                pass  # see above

    def calls(self, attempt: AttemptKey) -> int | None:
        """Return the number of calls of an attempt; None when this process cannot know them all.

        The runner announces an attempt before its first call. A tally without an announcement was begun by a gateway
        that was started later, or that had forgotten the attempt: earlier calls are missing from it.
        """
        tally = self._tallies.get(attempt)
        return None if tally is None or tally.announced is NOTHING_ANNOUNCED else tally.calls

    def in_flight(self, attempt: AttemptKey) -> int:
        """Return the number of an attempt's calls that have not ended."""
        tally = self._tallies.get(attempt)
        return tally.in_flight if tally is not None else 0

    def overflowed(self, attempt: AttemptKey) -> bool:
        """Return whether an attempt's last call that ended was refused because its prompt was longer than the model's context."""
        tally = self._tallies.get(attempt)
        return tally is not None and tally.overflowed

    def _touch(self, attempt: AttemptKey) -> _Tally:
        tally = self._tallies.setdefault(attempt, _Tally())
        self._tallies.move_to_end(attempt)
        if len(self._tallies) > ATTEMPTS_KEPT:
            oldest = next((key for key, other in self._tallies.items() if not other.in_flight and other is not tally), None)
            if oldest is not None:
                del self._tallies[oldest]
        return tally
