"""Policy calls of each attempt: their number, by which the completeness of a rollout is checked, and their end with the attempt.

In: the runner's announcements, beginnings and ends of calls, ends of attempts. Out: counts, once no call is in flight; what is left of an
attempt's budgets for its next call. Invariant: a call is counted when it is accepted, and ends here only after its span is queued for
export; an attempt that was closed, or whose stage's time is over, has no call in flight a moment later, and none is accepted.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from gateway.proxy.context import NOTHING_ANNOUNCED
from spangrad.http.announcements import AnnouncedAttempt, AttemptKey, ClosedAttempt, CountedAttempt, StartedStage
from spangrad.types import AttemptFailure, Stage

ATTEMPTS_KEPT = 100_000
"""Number of attempts remembered; the least recently used without a call in flight are forgotten first (some 90 MB in all)."""


@dataclass(slots=True)
class _StageInProgress:
    """Stage that an attempt is in."""

    ends_at: float
    """Time of the event loop at which its time is over."""
    stage: Stage
    refused: bool = False
    """True if a call was cut or refused for that."""

    def over(self, attempt: AttemptKey) -> ClosedAttempt:
        """Return the answer to an attempt's calls once its time is over."""
        return _closed(attempt, f"{self.stage.value}_timeout")


@dataclass(slots=True)
class _Tally:
    announced: AnnouncedAttempt = NOTHING_ANNOUNCED
    calls: int = 0
    in_flight: int = 0
    overflowed: bool = False
    """True if the last call that ended was refused because its prompt was longer than the model's context."""
    idle: asyncio.Event | None = None
    """Event that is set when no call is in flight any more. None: no caller waits for that."""
    closed: ClosedAttempt | None = None
    """None: it has not ended, as far as is known."""
    limits: dict[asyncio.Timeout, float] = field(default_factory=dict[asyncio.Timeout, float])
    """Time limits of the calls in flight, with the times at which those would end that belong to no attempt."""
    stage: _StageInProgress | None = None
    """None: no stage was announced."""
    tokens_out: int = 0
    """Tokens that engines have generated for it."""

    def until(self, own: float) -> float:
        """Return when a call ends that would end at `own`, were it not for its attempt."""
        return own if self.stage is None else min(own, self.stage.ends_at)


class Counts:
    """Call counts of the attempts that were announced or seen."""

    def __init__(self) -> None:
        self._tallies: OrderedDict[AttemptKey, _Tally] = OrderedDict()

    def announce(self, attempt: AnnouncedAttempt) -> None:
        """Keep the runner's announcement; calls by URL alone inherit it."""
        self._touch(attempt.key).announced = attempt

    def announced(self, attempt: AttemptKey | None) -> AnnouncedAttempt:
        """Return the announcement of an attempt, or an empty one."""
        return self._known(attempt).announced

    def close(self, closed: ClosedAttempt) -> None:
        """End an attempt: its calls in flight reach their time limit now, and no other is to be accepted."""
        tally = self._touch(closed.key)
        tally.closed = tally.closed or closed
        now = asyncio.get_running_loop().time()
        for limit in tally.limits:
            if not limit.expired():
                limit.reschedule(now)

    def start_stage(self, stage: StartedStage) -> None:
        """Limit the calls of an attempt, also those in flight, to the stage's seconds from now on, instead of those of the stage before."""
        tally = self._touch(stage.key)
        tally.stage = _StageInProgress(asyncio.get_running_loop().time() + stage.seconds, stage.stage)
        for limit, own in tally.limits.items():
            if not limit.expired() and not tally.closed:
                limit.reschedule(tally.until(own))

    def closed(self, attempt: AttemptKey | None) -> ClosedAttempt | None:
        """Return how an attempt ended, or that the time of its stage is over. None: it goes on."""
        tally = self._known(attempt)
        if attempt is None or tally.closed or tally.stage is None:
            return tally.closed
        return tally.stage.over(attempt) if asyncio.get_running_loop().time() >= tally.stage.ends_at else None

    @asynccontextmanager
    async def limit(self, attempt: AttemptKey | None, seconds: float) -> AsyncGenerator[None]:
        """Limit the time of a request that has begun: to so many seconds, what is left of its attempt's stage, and the attempt's end.

        Raises:
            TimeoutError: the time is over, or the attempt was closed.
        """
        if attempt is None:
            async with asyncio.timeout(seconds):
                yield
            return
        tally, clock = self._touch(attempt), asyncio.get_running_loop().time
        until = clock() + seconds
        try:
            async with asyncio.timeout_at(tally.until(until)) as limit:
                tally.limits[limit] = until
                try:
                    yield
                finally:
                    del tally.limits[limit]
                    if not tally.limits:
                        tally.limits = {}  # an emptied dict keeps its table, for as long as the attempt is remembered
        except TimeoutError:
            if tally.stage is not None and clock() >= tally.stage.ends_at:
                tally.stage.refused = True
            raise

    def tokens_left(self, attempt: AttemptKey | None) -> int | None:
        """Return the number of tokens that an attempt's next call may generate, 1 at least. None: there is no limit."""
        tally = self._known(attempt)
        most = tally.announced.limits.max_output_tokens
        return None if most is None else max(most - tally.tokens_out, 1)

    def begin(self, attempt: AttemptKey | None) -> ClosedAttempt | None:
        """Count a call; one of an attempt that has ended, or has no call left, is not counted, and how it ended is returned."""
        if attempt is not None:
            tally = self._touch(attempt)
            limits = tally.announced.limits
            if limits.max_calls is not None and tally.calls >= limits.max_calls:
                self.close(_closed(attempt, AttemptFailure.CALL_BUDGET))
            if closed := self.closed(attempt):
                if tally.stage is not None and not tally.closed:
                    tally.stage.refused = True
                return closed
            tally.calls += 1
            tally.in_flight += 1
        return None

    def end(self, attempt: AttemptKey | None, *, overflowed: bool = False, tokens_out: int = 0) -> None:
        """Note that a call's span is queued.

        `overflowed`: the engine refused the call for the length of its prompt. `tokens_out`: tokens that an engine has generated for it.
        """
        if attempt is not None:
            tally = self._tallies[attempt]
            tally.in_flight -= 1
            tally.tokens_out += tokens_out
            most = tally.announced.limits.max_output_tokens
            if most is not None and tally.tokens_out >= most:
                self.close(_closed(attempt, AttemptFailure.TOKEN_BUDGET))
            tally.overflowed = overflowed
            if not tally.in_flight and tally.idle is not None:
                tally.idle.set()
                tally.idle = None

    async def wait_idle(self, attempt: AttemptKey, wait_seconds: float) -> None:
        """Wait until no call of an attempt is in flight; one that hangs is counted all the same: its span will come when it ends."""
        tally = self._known(attempt)
        if tally.in_flight:
            tally.idle = tally.idle or asyncio.Event()
            try:
                await asyncio.wait_for(tally.idle.wait(), wait_seconds)
            except TimeoutError:
                pass  # see above

    def counted(self, attempt: AttemptKey) -> CountedAttempt:
        """Return the calls of an attempt so far, and its end.

        The runner announces an attempt before its first call. A tally without an announcement was begun by a gateway
        that was started later, or that had forgotten the attempt: earlier calls are missing from it.
        """
        tally = self._known(attempt)
        calls = None if tally.announced is NOTHING_ANNOUNCED else tally.calls
        closed = tally.closed or (tally.stage.over(attempt) if tally.stage and tally.stage.refused else None)
        return CountedAttempt(calls, tally.overflowed, tally.in_flight, closed.reason if closed else "")

    def _known(self, attempt: AttemptKey | None) -> _Tally:
        """Return the tally of an attempt, or an empty one, which is not kept."""
        return (self._tallies.get(attempt) if attempt else None) or _Tally()

    def _touch(self, attempt: AttemptKey) -> _Tally:
        tally = self._tallies.setdefault(attempt, _Tally())
        self._tallies.move_to_end(attempt)
        if len(self._tallies) > ATTEMPTS_KEPT:
            oldest = next((key for key, other in self._tallies.items() if not other.in_flight and other is not tally), None)
            if oldest is not None:
                del self._tallies[oldest]
        return tally


def _closed(attempt: AttemptKey, reason: str) -> ClosedAttempt:
    return ClosedAttempt(rollout_id=attempt.rollout_id, attempt=attempt.attempt, reason=reason)
