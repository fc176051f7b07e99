"""A player of an episode: its context, its model, and the limits of both.

In: observations. Out: replies. Invariant: messages are appended and never changed, so that each call's context begins with the whole of the
one before.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol

from opentelemetry.trace import Span

from spangrad import semconv
from spangrad.agent.attempt import note_reward
from spangrad.agent.failures import names_context_overflow
from spangrad.episode.environment import Content
from spangrad.errors import EngineError


class EpisodeEnd(StrEnum):
    """Reason for which an episode ended."""

    DONE = "done"
    """The environment ended it."""
    TURNS = "turns"
    """The limit of turns was reached."""
    TOKENS = "tokens"
    """The limit of generated tokens was reached."""
    CONTEXT = "context"
    """The context outgrew the model's."""
    TIME = "time"
    """The time limit was reached."""
    FORFEIT = "forfeit"
    """A player gave no reply in time, and the environment has no rule for that."""


@dataclass(frozen=True, slots=True)
class EpisodeLimits:
    """Limits of an episode. None: there is no limit."""

    turns: int | None = None
    """Largest number of replies."""
    tokens: int | None = None
    """Largest number of generated tokens, summed over replies."""
    turn_tokens: int | None = None
    """Largest number of tokens of a reply."""
    turn_seconds: float | None = None
    """Time limit of a reply, in seconds. A player of several forfeits by it; alone it ends the episode."""
    seconds: float | None = None
    """Time limit, in seconds; checked between turns."""


@dataclass(frozen=True, slots=True)
class ModelReply:
    """Reply of a model."""

    message: Mapping[str, Any]
    """Message as the API returned it: role, content, and tool_calls where it calls tools."""
    finish_reason: str = ""
    response_id: str = ""
    tokens: int = 0
    """Number of generated tokens."""

    @property
    def text(self) -> str:
        """Text of the reply; empty where it has none."""
        return self.message.get("content") or ""


@dataclass(frozen=True, slots=True)
class ReplyRequest:
    """Request for a reply."""

    messages: Sequence[Mapping[str, Any]]
    """All messages of the episode so far."""
    tools: Sequence[Mapping[str, Any]] = ()
    """Tools that the model may call."""
    max_tokens: int | None = None
    """Largest number of the reply's tokens. None: the endpoint's own."""
    previous: ModelReply | None = None
    """Last reply, after which messages were appended. None: this is the first."""
    seconds: float | None = None
    """Time limit, in seconds, after which the reply counts no more and must not be asked for again. None: there is none."""


class ReplyModel(Protocol):
    """Model that replies to messages: an endpoint, a person, or a script."""

    async def reply(self, request: ReplyRequest) -> ModelReply:
        """Return the reply."""
        ...


class PlayerEndError(Exception):
    """A player cannot reply any more."""

    def __init__(self, end: EpisodeEnd) -> None:
        super().__init__(end)
        self.end = end


class Player:
    """Context of one player, and the replies that it gave."""

    def __init__(self, model: ReplyModel, limits: EpisodeLimits, role: str = "") -> None:
        """Begin with an empty context; the limit `seconds` counts from now, and an empty role stands for every role."""
        self.role = role
        self.messages: list[Mapping[str, Any]] = []
        self.replies: list[ModelReply] = []
        self._model, self._limits = model, limits
        self._deadline = None if limits.seconds is None else time.monotonic() + limits.seconds
        self._unread: list[Content] = []
        """Observations since its last reply."""

    def instruct(self, prompt: str | None) -> None:
        """Append a system message, where there is one."""
        if prompt:
            self.messages.append({"role": "system", "content": prompt})

    def observe(self, content: Content) -> None:
        """Take what the player observes; its next message holds all since its last reply."""
        self._unread.append(content)

    def read(self) -> None:
        """Append what was observed since the last reply."""
        if self._unread:
            unread, self._unread = self._unread, []
            self.messages.append({"role": "user", "content": joined(unread)})

    @property
    def limit_reached(self) -> EpisodeEnd | None:
        """The limit that the player has reached. None: it may reply."""
        limits = self._limits
        if limits.turns is not None and len(self.replies) >= limits.turns:
            return EpisodeEnd.TURNS
        if limits.tokens is not None and self._tokens >= limits.tokens:
            return EpisodeEnd.TOKENS
        return EpisodeEnd.TIME if self._deadline is not None and time.monotonic() >= self._deadline else None

    async def reply(self, tools: Sequence[Mapping[str, Any]] = ()) -> ModelReply:
        """Return the model's reply to what was observed, and append both.

        Raises:
            PlayerEndError: the context outgrew the model's, or the reply took longer than `turn_seconds`.
            EngineError: the model's endpoint refused or failed otherwise.
            Exception: any of a script.
        """
        self.read()
        previous = self.replies[-1] if self.replies else None
        limit = asyncio.timeout(self._limits.turn_seconds)
        try:
            async with limit:
                request = ReplyRequest(tuple(self.messages), tools, self._tokens_left, previous, self._limits.turn_seconds)
                reply = await self._model.reply(request)
        except TimeoutError as error:
            if not limit.expired():  # it is the model's own, such as that of a script's socket
                raise
            raise PlayerEndError(EpisodeEnd.TIME) from error
        except EngineError as error:
            if not names_context_overflow(str(error)):
                raise
            raise PlayerEndError(EpisodeEnd.CONTEXT) from error
        self.replies.append(reply)
        self.messages.append(reply.message)
        return reply

    def reward(self, span: Span, value: float) -> None:
        """Record a reward on a span, as an evaluation of the player's last reply; of the rollout, where that is none or has no id."""
        attributes: dict[str, str | float] = {semconv.EVALUATION_NAME: semconv.REWARD_NAME, semconv.EVALUATION_SCORE: float(value)}
        if self.replies and self.replies[-1].response_id:
            attributes[semconv.GEN_AI_RESPONSE_ID] = self.replies[-1].response_id
        if self.role:
            attributes[semconv.REWARD_ROLE] = self.role
        span.add_event(semconv.EVALUATION_EVENT, attributes)
        if span.is_recording():
            note_reward()

    @property
    def _tokens(self) -> int:
        return sum(reply.tokens for reply in self.replies)

    @property
    def _tokens_left(self) -> int | None:
        left = None if self._limits.tokens is None else self._limits.tokens - self._tokens
        return min((limit for limit in (left, self._limits.turn_tokens) if limit is not None), default=None)


def joined(contents: list[Content]) -> Content:
    """Return several contents as one: texts as lines, else content parts."""
    if len(contents) == 1:
        return contents[0]
    if all(isinstance(content, str) for content in contents):
        return "\n".join(str(content) for content in contents)
    return [part for content in contents for part in ([{"type": "text", "text": content}] if isinstance(content, str) else content)]
