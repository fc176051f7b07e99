"""Sessions of play: one episode each, in which a person has a part, or which a person watches.

In: requests, replies, lines of the episode. Out: events, as the browser shows them. Invariant: sessions are bounded in number, time and
events; one without a listener ends; a reply counts for the turn that it names, once.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from page.actions.requests import PlayRequest
from spangrad.errors import JSON_ERRORS, AgentError
from spangrad.settings import Settings

_BEGIN_SECONDS = 30.0
"""Time in which an episode begins, in seconds."""
log = logging.getLogger(__name__)


class PlayTransport(Protocol):
    """Episode in a place of its own, which lines go to and come from."""

    def lines(self) -> AsyncIterator[bytes]:
        """Yield the episode's lines until it ends."""
        ...

    async def send(self, line: bytes) -> None:
        """Send a line."""
        ...

    async def end(self) -> None:
        """End the episode, whatever its state; once it has ended, do nothing."""
        ...


StartPlay = Callable[[Settings, PlayRequest], Awaitable[PlayTransport]]
"""Function that starts the episode of a request."""


@dataclass(frozen=True, slots=True)
class PlayBounds:
    """Bounds of sessions."""

    sessions: int = 4
    """Largest number that are under way at once."""
    kept: int = 16
    """Largest number of sessions in all; the oldest of those that have ended are forgotten."""
    seconds: float = 3600.0
    """Largest time of a session, in seconds."""
    left_seconds: float = 30.0
    """Time for which a session that is under way may have no listener, in seconds."""
    events: int = 5000
    """Largest number of events of a session."""


class PlayLine(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Line of an episode: a message, a turn of the person, or the end."""

    role: str = ""
    """Role of the player whose context has the message."""
    by: str = ""
    """Role of the message: system, user, assistant or tool."""
    text: str = ""
    turn: int | None = None
    """Number of the person's turn that begins, from 1."""
    end: str | None = None
    """Sentence on the outcome."""
    error: str | None = None
    """Sentence on why the episode has no outcome."""


def playable(settings: Settings) -> list[str]:
    """Return the names of the handlers whose environments can be played; a leased one is its service's."""
    handlers = settings.runner.handlers.items()
    return [name for name, handler in handlers if handler.environment and not handler.environment.startswith(("http://", "https://"))]


class PlaySession:
    """One episode, and the events that it had."""

    def __init__(self, request: PlayRequest, bounds: PlayBounds) -> None:
        self.is_over = False
        self._bounds = bounds
        facts = {name: getattr(request, name) for name in ("rollout", "environment", "person", "role", "policy")}
        self._events: list[dict[str, Any]] = [{"kind": "begin", **facts}]
        self._turn: int | None = None
        self._transport: PlayTransport | None = None
        self._changed = asyncio.Event()
        self._listeners = 0
        self._leaving: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[None] | None = None

    def start(self, transport: PlayTransport) -> None:
        """Follow an episode."""
        self._transport = transport
        self._task = asyncio.create_task(self._follow(transport))
        self._wait_for_listener()

    async def reply(self, turn: int, text: str) -> None:
        """Send the person's reply.

        Raises:
            ValueError: it is not the person's turn, or another.
        """
        if self._transport is None or self._turn is None or turn != self._turn:
            raise ValueError(f"turn {turn} does not wait for a reply: it has one, or its time is over.")
        self._turn = None
        self._add({"kind": "replied", "turn": turn})
        await self._transport.send(msgspec.json.encode({"turn": turn, "text": text}))

    async def leave(self, sentence: str) -> None:
        """End the episode; return once it is gone."""
        self._conclude("left", sentence)
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        if self._transport is not None:
            await self._transport.end()  # a task that is cancelled before it runs has not

    @contextmanager
    def listened(self) -> Generator[None]:
        """Count a listener, for as long as the block."""
        self._listeners += 1
        if self._leaving is not None:
            self._leaving.cancel()
        try:
            yield
        finally:
            self._listeners -= 1
            self._wait_for_listener()

    async def events(self, begin: int = 0) -> AsyncIterator[tuple[int, dict[str, Any]]]:
        """Yield the number and the content of each event from a number on, as they come, until the end."""
        at = begin
        while True:
            while at < len(self._events):
                yield at, self._events[at]
                at += 1
            if self.is_over:
                return
            await self._changed.wait()

    def _wait_for_listener(self) -> None:
        if not self.is_over and not self._listeners:
            self._leaving = asyncio.get_running_loop().call_later(self._bounds.left_seconds, self._unseen)

    def _unseen(self) -> None:
        self._conclude("left", "No browser showed it any more.")
        if self._task is not None:
            self._task.cancel()

    async def _follow(self, transport: PlayTransport) -> None:
        try:
            async with asyncio.timeout(self._bounds.seconds):
                async for line in transport.lines():
                    self._take(line)
                    if self.is_over:
                        return
            self._conclude("failed", "Its process ended without an outcome; the log of the page has the reason.")
        except TimeoutError:
            self._conclude("left", f"Its time limit of {self._bounds.seconds:g} seconds was reached.")
        except ValueError as error:  # of msgspec, or a line that is too long
            log.warning("an episode wrote a line that is none of ours: %s", error)
            self._conclude("failed", "Its process wrote what is no event.")
        finally:
            await asyncio.shield(transport.end())

    def _take(self, content: bytes) -> None:
        line = msgspec.json.decode(content, type=PlayLine)
        if line.end is not None:
            self._conclude("done", line.end)
        elif line.error is not None:
            self._conclude("failed", line.error)
        elif line.turn is not None:
            self._turn = line.turn
            self._add({"kind": "turn", "turn": line.turn})
        else:
            self._add({"kind": "message", "role": line.role, "by": line.by, "text": line.text})
        if len(self._events) >= self._bounds.events:
            self._conclude("left", f"It had {self._bounds.events} events, the most that are shown.")

    def _conclude(self, outcome: str, sentence: str) -> None:
        if not self.is_over:
            self.is_over, self._turn = True, None
            if self._leaving is not None:
                self._leaving.cancel()
            self._add({"kind": "end", "outcome": outcome, "text": sentence})

    def _add(self, event: dict[str, Any]) -> None:
        self._events.append(event)
        self._changed.set()
        self._changed = asyncio.Event()


class PlaySessions:
    """All sessions of a page."""

    def __init__(self, settings: Settings, start: StartPlay, bounds: PlayBounds | None = None) -> None:
        """Start nothing yet; belongs to the running loop."""
        self._settings = settings
        self._start = start
        self._bounds = bounds or PlayBounds()
        self._sessions: dict[str, PlaySession] = {}
        self._loop = asyncio.get_running_loop()

    def begin_from_thread(self, request: PlayRequest) -> str:
        """Begin a session, from a thread other than the loop's; as `begin`.

        Raises:
            AgentError: it has not begun in time, and does not any more.
        """
        begun = asyncio.run_coroutine_threadsafe(self.begin(request), self._loop)
        try:
            return begun.result(_BEGIN_SECONDS)
        except TimeoutError:
            begun.cancel()
            raise AgentError(
                f"the episode has not begun within {_BEGIN_SECONDS:g} s, and was ended. End other programs of the page's machine."
            ) from None

    async def begin(self, request: PlayRequest) -> str:
        """Begin a session; return a sentence on it.

        Raises:
            ValueError: the request names no environment of the settings, or no task; or there are as many sessions as may be.
            SpangradError: the episode cannot be started.
        """
        names = playable(self._settings)
        if request.environment not in names:
            raise ValueError(f"no handler {request.environment!r} of runner.handlers has an environment to play: {', '.join(names)}.")
        try:
            json.loads(request.task)
        except JSON_ERRORS as error:
            raise ValueError(f"the task is no JSON ({error}). Put a text into double quotes.") from None
        if request.rollout in self._sessions:
            raise ValueError(f"{request.rollout} has begun already.")
        if sum(not session.is_over for session in self._sessions.values()) >= self._bounds.sessions:
            raise ValueError(f"{self._bounds.sessions} episodes are under way, the most at once. Leave one of them first.")
        session = self._sessions[request.rollout] = PlaySession(request, self._bounds)
        try:
            session.start(await self._start(self._settings, request))
        except BaseException:
            del self._sessions[request.rollout]
            raise
        self._forget()
        policy = f"policy {request.policy}" if request.policy else "the policy"
        person = f"{request.author} plays{f' {request.role}' if request.role else ''}{f' against {policy}' if request.policy else ''}"
        player = person if request.person else f"{policy} plays"
        return f"{player} in {request.environment}: rollout {request.rollout} has begun."

    def get(self, rollout: str) -> PlaySession:
        """Return a session.

        Raises:
            ValueError: there is none.
        """
        session = self._sessions.get(rollout)
        if session is None:
            raise ValueError(f"no episode {rollout!r} is played here: it was forgotten, or the page has been restarted.")
        return session

    async def close(self) -> None:
        """End every session."""
        await asyncio.gather(*(session.leave("The page has ended.") for session in self._sessions.values()))

    def _forget(self) -> None:
        over = [rollout for rollout, session in self._sessions.items() if session.is_over]
        for rollout in over[: max(0, len(self._sessions) - self._bounds.kept)]:
            del self._sessions[rollout]
