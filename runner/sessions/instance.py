"""One session's environment: applies requests, one after the other.

In: requests as bytes. Out: responses, with what the server counts. Invariant: a reset or a step that was played is never played again: a
request with its number, or its name, gets the response of before, also where it failed; no request is applied before a reset has succeeded.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from runner.sessions.frames import Frame, FrameEvents, FrameKind
from runner.sessions.messages import (
    ErrorCode,
    LastReset,
    SessionError,
    SessionOpening,
    SessionRequest,
    decoded,
    encode,
    observation_message,
)
from runner.sessions.step_spans import PlayedSpan, PlayedSpans
from spangrad import semconv
from spangrad.episode.environment import Content, Environment, StepResult, checked_result, member, rendered
from spangrad.episode.openenv_fields import CONTENT, EPISODE_ID, TEXT, action_of, is_text
from spangrad.episode.user_calls import USER_ERRORS
from spangrad.text_sanitizer import storable, storable_trace

Call = Callable[[Callable[[], Any]], Awaitable[Any]]
"""Calls a method; the result is waited for where it is awaitable."""
_ERROR_LENGTH = 2000
"""Largest number of characters of an exception in a response."""
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Played:
    """Result of a reset or a step, and how it is shown."""

    result: StepResult
    content: Content
    """Content that shows the observation, for the span; empty where there is none."""
    metadata: Mapping[str, Any]


class SessionInstance:
    """Environment of a session; all calls come from one thread, one after the other."""

    def __init__(self, environment: Environment, opening: SessionOpening, spans: PlayedSpans, call: Call, number: int) -> None:
        """Begin without an episode; `number` is that of the session, `call` calls the environment's methods."""
        self._environment = environment
        self._opening = opening
        self._spans = spans
        self._call = call
        self._name = type(environment).__name__
        self._episode = ""
        """Id of the episode; empty: none has begun."""
        self._count = 0
        """Steps that were played in the episode."""
        self._frame = partial(Frame, FrameKind.MESSAGE, number)
        self._last_reset = LastReset[Frame]()
        self._last: tuple[str | None, Frame] = (None, self._frame())
        """Name and answer of the last step."""

    async def answer(self, payload: bytes) -> Frame:
        """Apply a request; return its response, with what the server counts."""
        try:
            request = decoded(payload)
            match request.type:
                case "step":
                    return await self._step(request)
                case "reset":
                    return await self._reset(request)
                case "state":
                    return self._frame(await self._state())
                case "close":
                    return self._frame(b"", FrameEvents.CLOSED)
                case _:
                    raise SessionError(ErrorCode.UNKNOWN_TYPE, f"Unknown message type: {request.type}")
        except SessionError as error:
            return self._frame(error.encode(), FrameEvents.ERROR)

    async def close(self) -> None:
        """Release the environment."""
        if (close := getattr(self._environment, "close", None)) is not None:
            await self._call(close)

    async def _reset(self, request: SessionRequest) -> Frame:
        if (before := self._last_reset.response_to(request)) is not None:
            return self._frame(before.payload, before.events & FrameEvents.ERROR)
        data = request.data or {}
        task = data["task"] if "task" in data else {name: value for name, value in data.items() if name != EPISODE_ID} or None
        episode = data.get(EPISODE_ID) or uuid.uuid4().hex
        if not isinstance(episode, str):
            raise SessionError(ErrorCode.VALIDATION_ERROR, f"Invalid message: {EPISODE_ID} {episode!r} is no text")
        self._episode, self._count, self._last = "", 0, (None, self._frame())
        answer = await self._play(request, episode, lambda traced: self._played_reset(task, traced=traced))
        if answer.events & FrameEvents.RESET:
            self._episode = episode
        self._last_reset.note(request, answer)
        return answer

    async def _step(self, request: SessionRequest) -> Frame:
        if request.data is None:
            raise SessionError(ErrorCode.VALIDATION_ERROR, "Invalid message: a step needs data, the action")
        if not self._episode:
            raise SessionError(ErrorCode.SESSION_ERROR, "no episode has begun in this session. Send reset first")
        name, last = self._last
        if self._count and (request.step == self._count or (request.request_id is not None and request.request_id == name)):
            return self._frame(last.payload, last.events & FrameEvents.ERROR)
        if request.step is not None and request.step != self._count + 1:
            sentence = f"step {request.step} does not follow step {self._count} of episode {self._episode}"
            raise SessionError(ErrorCode.VALIDATION_ERROR, sentence)
        action = await self._action(request.data)
        self._count += 1
        answer = await self._play(request, self._episode, lambda traced: self._played_step(action, traced=traced))
        self._last = (request.request_id, answer)
        return answer

    async def _action(self, data: Mapping[str, Any]) -> Any:
        try:
            if is_text(data):
                parse = getattr(self._environment, "parse", None)
                if parse is not None:
                    return await self._call(lambda: parse(data[TEXT]))
                if not hasattr(self._environment, "decode"):
                    return data[TEXT]
            return action_of(self._environment, data)
        except USER_ERRORS as error:
            raise SessionError(ErrorCode.VALIDATION_ERROR, f"Invalid action: {failure_text(error)}") from error

    async def _play(self, request: SessionRequest, episode: str, play: Callable[[bool], Awaitable[Played]]) -> Frame:
        """Play a reset or a step, in a span; return the answer, an error too where the environment raised."""
        is_step = request.type == "step"
        number = {semconv.EPISODE_STEP: self._count} if is_step else {}
        span = self._spans.begin(request, self._opening, {semconv.EPISODE_ID: episode, **number})
        began = time.perf_counter()
        try:
            played = await play(span is not None)
            result = played.result
            named = {} if is_step else {EPISODE_ID: episode}
            info = {name: value for name, value in result.info.items() if name != CONTENT}  # clients show that to the model
            payload = observation_message(result, {**named, **info, **played.metadata})
        except USER_ERRORS as error:
            events = FrameEvents.STEP | FrameEvents.ERROR if is_step else FrameEvents.ERROR
            return self._frame(_failure(error, span).encode(), events)
        if span is not None:
            span.end(result if is_step else None, played.content)
        events = FrameEvents.STEP if is_step else FrameEvents.RESET
        events |= FrameEvents.DONE if result.done else FrameEvents.NONE
        seconds = time.perf_counter() - began
        if result.reward is None:
            return self._frame(payload, events, seconds)
        return self._frame(payload, events | FrameEvents.REWARD, seconds, float(result.reward))

    async def _played_reset(self, task: Any, *, traced: bool) -> Played:
        result = StepResult(await self._call(lambda: self._environment.reset(task)))
        return Played(result, *await self._shown(result.observation, traced=traced))

    async def _played_step(self, action: Any, *, traced: bool) -> Played:
        result = checked_result(f"{self._name}.step", await self._call(lambda: self._environment.step(action)))
        return Played(result, *await self._shown(result.observation, traced=traced))

    async def _shown(self, observation: Any, *, traced: bool) -> tuple[Content, dict[str, Any]]:
        """Return the content that shows an observation, and the metadata that say it where the environment renders its own."""
        render = getattr(self._environment, "render", None)
        if render is None:
            return (rendered(observation) if traced else ""), {}
        content = await self._call(lambda: render(observation))
        return content, {CONTENT: content}

    async def _state(self) -> bytes:
        try:
            state = await self._call(lambda: member(self._environment, "state"))
            own = state.model_dump() if hasattr(state, "model_dump") else dict(state or {})
            return encode("state", {**own, EPISODE_ID: self._episode or None, "step_count": self._count})
        except USER_ERRORS as error:
            raise _failure(error, None) from error


def _failure(error: BaseException, span: PlayedSpan | None) -> SessionError:
    """Return what the client is told of an exception of the environment, log where it was raised, and end its span."""
    sentence = failure_text(error)
    log.warning("the environment failed: %s\n%s", sentence, storable_trace(error))
    if span is not None:
        span.end(None, "", sentence)
    return SessionError(ErrorCode.EXECUTION_ERROR, sentence)


def failure_text(error: BaseException) -> str:
    """Return what is shown of an exception of the environment, as text that JSON and spans take."""
    return storable(f"{type(error).__name__}: {error}".rstrip(": ")[:_ERROR_LENGTH])
