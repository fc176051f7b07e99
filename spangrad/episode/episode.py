"""One episode: the state machine in which a model and an environment take turns, for training, validation and production alike.

In: an environment, a model, a task. Out: the turns, and the reason of the end. Invariant: messages are appended and never changed, so that
each call's context begins with the whole of the one before; the model writes in GENERATING alone, and nothing else it is given is its own.

Each reset, reply and step is a span of the current trace: a step is a tool's span, and its reward an evaluation of the reply that acted.

Source of the states: OpenTinker (https://arxiv.org/abs/2601.07376), the agent's state machine.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol

from opentelemetry import trace
from opentelemetry.trace import Span

from spangrad import semconv
from spangrad.agent.attempt import note_reward
from spangrad.agent.failures import names_context_overflow
from spangrad.episode.environment import Content, EnvironmentCalls, StepResult, ToolAction
from spangrad.errors import EngineError

_CUT = "length"
"""Finish reason of a reply that reached its token limit."""


class EpisodeState(StrEnum):
    """State of an episode."""

    PENDING = "pending"
    """The context of the next reply is put together."""
    GENERATING = "generating"
    """The model writes; these tokens alone are trained."""
    INTERACTING = "interacting"
    """The environment applies the action."""
    TERMINATED = "terminated"
    """The episode has ended."""


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


@dataclass(frozen=True, slots=True)
class EpisodeLimits:
    """Limits of an episode. None: there is no limit."""

    turns: int | None = None
    """Largest number of replies."""
    tokens: int | None = None
    """Largest number of generated tokens, summed over replies."""
    turn_tokens: int | None = None
    """Largest number of tokens of a reply."""
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


class ReplyModel(Protocol):
    """Model that replies to messages: an endpoint, a person, or a script."""

    async def reply(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        max_tokens: int | None,
        previous: ModelReply | None,
    ) -> ModelReply:
        """Return the reply to messages.

        Args:
            messages: all of the episode so far.
            tools: that the model may call.
            max_tokens: largest number of the reply's tokens. None: the endpoint's own.
            previous: last reply, after which messages were appended. None: this is the first.
        """
        ...


@dataclass(frozen=True, slots=True)
class EpisodeStep:
    """One action, and its result."""

    turn: int
    """Number of the reply that acted, from 0."""
    action: Any
    result: StepResult


@dataclass(frozen=True, slots=True)
class EpisodeOutcome:
    """Everything that happened in an episode."""

    end: EpisodeEnd
    messages: tuple[Mapping[str, Any], ...]
    """Whole context, the last observation included."""
    replies: tuple[ModelReply, ...]
    steps: tuple[EpisodeStep, ...]

    @property
    def episode_return(self) -> float | None:
        """Sum of the rewards. None: no step had one."""
        rewards = [step.result.reward for step in self.steps if step.result.reward is not None]
        return sum(rewards) if rewards else None


class Episode:
    """Episode of one environment and one model."""

    def __init__(self, environment: EnvironmentCalls, model: ReplyModel, limits: EpisodeLimits, *, role: str = "") -> None:
        """Begin nothing yet.

        Args:
            environment: calls of the environment.
            model: writes the replies.
            limits: limits of the episode.
            role: role of its rewards, where a rollout has several. Empty: every role.
        """
        self.state = EpisodeState.PENDING
        self.messages: list[Mapping[str, Any]] = []
        self._environment = environment
        self._model = model
        self._limits = limits
        self._role = role
        self._replies: list[ModelReply] = []
        self._steps: list[EpisodeStep] = []
        self._tracer = trace.get_tracer(semconv.EPISODE_SCOPE)

    async def run(self, task: object) -> EpisodeOutcome:
        """Play until the environment or a limit ends the episode.

        Raises:
            EngineError: the model's endpoint refused or failed, other than for its context.
            Exception: any of the environment.
        """
        deadline = None if self._limits.seconds is None else time.monotonic() + self._limits.seconds
        with self._tracer.start_as_current_span("episode") as span:
            await self._begin(task)
            while (end := self._limit_reached(deadline)) is None:
                self.state = EpisodeState.GENERATING
                previous = self._replies[-1] if self._replies else None
                try:
                    reply = await self._model.reply(tuple(self.messages), self._environment.tools, self._tokens_left(), previous)
                except EngineError as error:
                    if not names_context_overflow(str(error)):
                        raise
                    end = EpisodeEnd.CONTEXT
                    break
                self._replies.append(reply)
                self.messages.append(reply.message)
                self.state = EpisodeState.INTERACTING
                if await self._interact(reply):
                    end = EpisodeEnd.DONE
                    break
                self.state = EpisodeState.PENDING
            self.state = EpisodeState.TERMINATED
            span.set_attributes({semconv.EPISODE_END: end.value, semconv.EPISODE_TURNS: len(self._replies)})
        return EpisodeOutcome(end, tuple(self.messages), tuple(self._replies), tuple(self._steps))

    async def _begin(self, task: object) -> None:
        with self._tracer.start_as_current_span("reset") as span:
            observation = await self._environment.reset(task)
            content = await self._environment.render(observation)
            span.set_attribute(semconv.EPISODE_OBSERVATION, _text(content))
        if prompt := self._environment.system_prompt:
            self.messages.append({"role": "system", "content": prompt})
        self.messages.append({"role": "user", "content": content})

    def _limit_reached(self, deadline: float | None) -> EpisodeEnd | None:
        limits = self._limits
        if limits.turns is not None and len(self._replies) >= limits.turns:
            return EpisodeEnd.TURNS
        if limits.tokens is not None and self._tokens >= limits.tokens:
            return EpisodeEnd.TOKENS
        return EpisodeEnd.TIME if deadline is not None and time.monotonic() >= deadline else None

    @property
    def _tokens(self) -> int:
        return sum(reply.tokens for reply in self._replies)

    def _tokens_left(self) -> int | None:
        left = None if self._limits.tokens is None else self._limits.tokens - self._tokens
        return min((limit for limit in (left, self._limits.turn_tokens) if limit is not None), default=None)

    async def _interact(self, reply: ModelReply) -> bool:
        """Apply the actions of a reply, and append what is observed; return whether the episode has ended."""
        calls = reply.message.get("tool_calls") or ()
        if not self._environment.tools or not calls:
            content, done = await self._step(reply, await self._environment.parse(reply.text), "step", reply.text, "")
            self.messages.append({"role": "user", "content": content})
            return done
        done = False
        for call in calls:
            name, arguments = call["function"]["name"], call["function"]["arguments"]
            if done:  # each call needs a response, also one that came too late
                content: Content = "The episode has ended."
            elif (action := _tool_action(name, arguments)) is None:
                content = f"The arguments of {name} are no JSON object."
            else:
                content, done = await self._step(reply, action, name, arguments, call["id"])
            self.messages.append({"role": "tool", "tool_call_id": call["id"], "content": content})
        return done

    async def _step(self, reply: ModelReply, action: object, tool: str, arguments: str, call_id: str) -> tuple[Content, bool]:
        """Apply an action; return the content that shows what is observed, and whether the episode has ended."""
        turn = len(self._replies) - 1
        attributes = {
            semconv.GEN_AI_OPERATION: "execute_tool",
            semconv.GEN_AI_TOOL_NAME: tool,
            semconv.GEN_AI_TOOL_ARGUMENTS: arguments,
            semconv.EPISODE_TURN: turn,
            **({semconv.GEN_AI_TOOL_CALL_ID: call_id} if call_id else {}),
        }
        with self._tracer.start_as_current_span(f"execute_tool {tool}", attributes=attributes) as span:
            result = await self._environment.step(action)
            content = await self._environment.render(result.observation)
            span.set_attributes({semconv.GEN_AI_TOOL_RESULT: _text(content), semconv.EPISODE_DONE: result.done})
            if result.reward is not None:
                self._reward(span, result.reward, reply.response_id)
        self._steps.append(EpisodeStep(turn, action, result))
        return content, result.done

    def _reward(self, span: Span, value: float, response_id: str) -> None:
        """Record a step's reward as an evaluation of the reply that acted."""
        attributes: dict[str, str | float] = {semconv.EVALUATION_NAME: semconv.REWARD_NAME, semconv.EVALUATION_SCORE: float(value)}
        if response_id:
            attributes[semconv.GEN_AI_RESPONSE_ID] = response_id
        if self._role:
            attributes[semconv.REWARD_ROLE] = self._role
        span.add_event(semconv.EVALUATION_EVENT, attributes)
        if span.is_recording():
            note_reward()


def _tool_action(name: str, arguments: str) -> ToolAction | None:
    """Return the action of a tool call. None: its arguments are no JSON object."""
    try:
        values = json.loads(arguments or "{}")
    except ValueError:
        return None
    return ToolAction(name, values) if isinstance(values, dict) else None


def _text(content: Content) -> str:
    return content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)
