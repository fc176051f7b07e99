"""Sessions of a server: leases of environments, each held by one user.

In: requests of connections. Out: responses of the environments. Invariant: a session has an environment of its own, created for it and
closed with it, so that no user sees another's state; there are never more than the capacity; a session that is not used, or whose user is
away, ends by the monotonic clock of this process.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import deque
from collections.abc import Callable

import msgspec

from runner.sessions.frames import Frame, FrameEvents, FrameKind
from runner.sessions.game import Game
from runner.sessions.messages import ErrorCode, SessionError, SessionOpening
from runner.sessions.shards import ShardProcess, Shards
from spangrad.leases import LeaseClock
from spangrad.settings import EnvironmentServiceSettings

_SWEEP_SECONDS = 0.2
"""Pause between two checks for expired sessions, in seconds."""


class EnvironmentSession:
    """One user's environment."""

    def __init__(self, number: int, name: str | None, shard: ShardProcess, table: SessionTable) -> None:
        self.number = number
        self.name = name
        """Name by which its user finds it again. None: it ends with its connection."""
        self.shard = shard
        self.error: SessionError | None = None
        """Reason of its end. None: it lives, or its user has ended it."""
        self.over = False
        self.on_end: Callable[[SessionError], None] | None = None
        """Called when it ends by itself while no request is under way."""
        self.game: Game | None = None
        """Game of several players, which may wait though no request is under way. None: it has one user."""
        self.opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.openings = 0
        """Requests that wait until its environment is created."""
        self._table = table
        self._waiting: deque[tuple[asyncio.Future[Frame], asyncio.TimerHandle]] = deque()
        """Requests under way, each with the time limit of its answer, which holds also when the client has left."""
        self._connections = 0
        self._episode: tuple[int, float] | None = None
        """Steps and return of the current episode. None: there is none."""

    @property
    def busy(self) -> bool:
        """True if a request is under way."""
        return bool(self._waiting)

    async def ask(self, payload: bytes) -> Frame:
        """Apply a request; return the frame of its response.

        Raises:
            SessionError: the session has ended, or ends meanwhile.
        """
        if self.over:
            raise _over(self.error)
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Frame] = loop.create_future()
        self._waiting.append((future, loop.call_later(self._table.operation_seconds, self._exceed)))
        self.shard.send(Frame(FrameKind.MESSAGE, self.number, payload))
        try:
            return await future
        finally:
            self._table.renew(self)

    def attach(self, on_end: Callable[[SessionError], None] | None) -> None:
        """Note a new connection, which displaces an earlier one."""
        if self.on_end is not None:
            self.on_end(SessionError(ErrorCode.SESSION_ERROR, "another connection has taken this session over"))
        self.on_end = on_end
        self._connections += 1
        self._table.renew(self)

    def detach(self, on_end: Callable[[SessionError], None]) -> None:
        """Note the end of a connection: without a name the session ends; with one its user may return for a while."""
        self._connections -= 1
        if self.on_end is on_end:
            self.on_end = None
        if self.over or self._connections:
            return
        if self.name is None:
            self._table.end(self, "closed")
        else:
            self._table.renew(self, away=True)

    def receive(self, frame: Frame) -> None:
        """Take a frame of its environment."""
        if frame.kind is FrameKind.OPEN:
            if not self.opened.done():
                self.opened.set_result(None)
            if frame.payload:
                error = msgspec.json.decode(frame.payload)["data"]
                self._table.end(self, "failed", SessionError(ErrorCode(error.pop("code")), error.pop("message"), **error))
            return
        if frame.kind is not FrameKind.MESSAGE or not self._waiting:
            return
        self._count(frame)
        future, timer = self._waiting.popleft()
        timer.cancel()
        if not future.done():
            future.set_result(frame)
        if frame.events & FrameEvents.CLOSED:
            self._table.end(self, "closed")

    def lose(self, sentence: str) -> None:
        """End with its process."""
        self._table.end(self, "lost", SessionError(ErrorCode.SESSION_ERROR, sentence))

    def finish(self, error: SessionError | None) -> None:
        """Answer what is under way, once the table has removed the session."""
        self.over, self.error = True, error
        if self._episode is not None:
            self._table.counts.end_episode("abandoned", *self._episode)
        if not self.opened.done():
            self.opened.set_result(None)
        for _, timer in self._waiting:
            timer.cancel()
        waiting = [future for future, _ in self._waiting if not future.done()]
        self._waiting.clear()
        for future in waiting:
            future.set_exception(_over(error))
        if error is not None and not waiting and self.on_end is not None:
            self.on_end(error)

    def _count(self, frame: Frame) -> None:
        counts, events = self._table.counts, frame.events
        if events & FrameEvents.RESET:
            if self._episode is not None:
                counts.end_episode("abandoned", *self._episode)
            self._episode = (0, 0.0)
            counts.reset(frame.seconds)
        elif events & FrameEvents.STEP:
            counts.step(frame.seconds)
            if self._episode is not None:
                steps, total = self._episode
                self._episode = (steps + 1, total + (frame.reward if events & FrameEvents.REWARD else 0.0))
                if events & FrameEvents.DONE:
                    counts.end_episode("done", *self._episode)
                    self._episode = None
        if events & FrameEvents.ERROR:
            counts.errors.inc()

    def _exceed(self) -> None:
        sentence = f"the environment has not answered for {self._table.operation_seconds:g} s, and is discarded. Open a new session"
        self._table.end(self, "lost", SessionError(ErrorCode.EXECUTION_ERROR, sentence))


class SessionTable:
    """All sessions; the caller must run `watch`."""

    def __init__(
        self, shards: Shards, capacity: int, settings: EnvironmentServiceSettings, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Begin without a session; they expire by `clock`, which is monotonic."""
        self.capacity = capacity
        self.operation_seconds = settings.operation_seconds
        self.counts = shards.counts
        self.counts.open.set_function(self.__len__)
        self.counts.capacity.set(capacity)
        self._shards = shards
        self._settings = settings
        self._sessions: dict[int, EnvironmentSession] = {}
        self._names: dict[str, EnvironmentSession] = {}
        self._clock = LeaseClock[int](clock)
        self._numbers = itertools.count(1)

    def __len__(self) -> int:
        return len(self._sessions)

    def find(self, name: str) -> EnvironmentSession:
        """Return the session of a name.

        Raises:
            SessionError: there is none.
        """
        if (session := self._names.get(name)) is None:
            raise SessionError(ErrorCode.SESSION_ERROR, f"there is no session {name!r}. Send reset first")
        return session

    async def open(self, name: str | None, opening: SessionOpening) -> EnvironmentSession:
        """Return the session of a name, or a new one.

        Raises:
            SessionError: no further one fits, or no environment can be created.
        """
        session = self._names.get(name) if name is not None else None
        if session is None:
            session = self._create(name, opening)
        self.renew(session)
        session.openings += 1
        try:
            async with asyncio.timeout(self.operation_seconds):
                await asyncio.shield(session.opened)
        except TimeoutError:
            sentence = f"no environment was created within {self.operation_seconds:g} s"
            self.end(session, "failed", SessionError(ErrorCode.FACTORY_ERROR, sentence))
        except asyncio.CancelledError:
            if name is None:
                self.end(session, "closed")
            elif session.openings == 1:
                self.renew(session, away=True)
            raise
        finally:
            session.openings -= 1
        if session.over:
            raise _over(session.error)
        return session

    def renew(self, session: EnvironmentSession, *, away: bool = False) -> None:
        """Restart a session's time: shorter while its user is away."""
        if not session.over:
            self._clock.renew(session.number, self._settings.lease_seconds if away else self._settings.idle_seconds)

    def end(self, session: EnvironmentSession, how: str, error: SessionError | None = None) -> None:
        """End a session and close its environment; idempotent."""
        if self._sessions.pop(session.number, None) is None:
            return
        if session.name is not None:
            self._names.pop(session.name, None)
        self._clock.forget(session.number)
        session.shard.users.pop(session.number, None)
        session.shard.send(Frame(FrameKind.CLOSE, session.number))
        self.counts.ended.labels(how).inc()
        session.finish(error)

    async def watch(self) -> None:
        """End expired sessions, until cancelled."""
        async for _ in self._clock.ticks(_SWEEP_SECONDS):
            self.sweep()

    def sweep(self) -> None:
        """End the sessions whose time is over, other than those that are at work."""
        for number in self._clock.expired():
            session = self._sessions[number]
            if session.busy or (session.game is not None and session.game.is_waiting):
                self.renew(session)
                continue
            sentence = "the session was not used in time, and has ended (environments.idle_seconds). Open a new one"
            self.end(session, "expired", SessionError(ErrorCode.SESSION_ERROR, sentence))

    def _create(self, name: str | None, opening: SessionOpening) -> EnvironmentSession:
        shard = self._shards.least_loaded()
        if len(self._sessions) >= self.capacity or shard is None:
            self.counts.ended.labels("refused").inc()
            why = "its processes are being started" if shard is None else f"all {self.capacity} sessions are in use"
            facts = {"active_sessions": len(self._sessions), "max_sessions": self.capacity}
            raise SessionError(ErrorCode.CAPACITY_REACHED, f"{why}. Try again in a moment", **facts)
        session = EnvironmentSession(next(self._numbers), name, shard, self)
        self._sessions[session.number] = session
        if name is not None:
            self._names[name] = session
        shard.users[session.number] = session
        shard.send(Frame(FrameKind.OPEN, session.number, msgspec.json.encode(opening)))
        return session


def _over(reason: SessionError | None) -> SessionError:
    """Return the error of a request to a session that has ended, which is the reason of its end where there is one."""
    return reason or SessionError(ErrorCode.SESSION_ERROR, "the session has ended. Open a new one")
