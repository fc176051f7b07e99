"""One episode: the state machine in which a model and an environment take turns, for training, validation and production alike.

In: an environment, a model, a task. Out: the turns, and the reason of the end. Invariant: messages are appended and never changed, so that
each call's context begins with the whole of the one before; the model writes in GENERATING alone, and nothing else it is given is its own.

Each reset, reply and step is a span of the current trace: a step is a tool's span, and its reward an evaluation of the reply that acted.

Source of the states: OpenTinker (https://arxiv.org/abs/2601.07376), the agent's state machine.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from opentelemetry import trace

from spangrad import semconv
from spangrad.episode.environment import Content, EnvironmentCalls, StepResult, ToolAction, as_text
from spangrad.episode.player import EpisodeEnd, EpisodeLimits, ModelReply, Player, PlayerEndError, ReplyModel
from spangrad.errors import JSON_ERRORS


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
    def rewards(self) -> list[float | None]:
        """Reward of each step. None: it had none."""
        return [step.result.reward for step in self.steps]

    @property
    def episode_return(self) -> float | None:
        """Sum of the rewards. None: no step had one."""
        rewards = [reward for reward in self.rewards if reward is not None]
        return sum(rewards) if rewards else None


class Episode:
    """Episode of one environment and one model."""

    def __init__(self, environment: EnvironmentCalls, model: ReplyModel, limits: EpisodeLimits) -> None:
        self.state = EpisodeState.PENDING
        self._environment = environment
        self._player = Player(model, limits)
        self._steps: list[EpisodeStep] = []
        self._tracer = trace.get_tracer(semconv.EPISODE_SCOPE)

    async def run(self, task: object) -> EpisodeOutcome:
        """Play until the environment or a limit ends the episode.

        Raises:
            EngineError: the model's endpoint refused or failed, other than for its context.
            Exception: any of the environment.
        """
        player = self._player
        with self._tracer.start_as_current_span("episode") as span:
            await self._begin(task)
            while (end := player.limit_reached) is None:
                self.state = EpisodeState.GENERATING
                try:
                    reply = await player.reply(self._environment.tools)
                except PlayerEndError as error:
                    end = error.end
                    break
                self.state = EpisodeState.INTERACTING
                if await self._interact(reply):
                    end = EpisodeEnd.DONE
                    break
                self.state = EpisodeState.PENDING
            self.state = EpisodeState.TERMINATED
            player.read()
            span.set_attributes({semconv.EPISODE_END: end.value, semconv.EPISODE_TURNS: len(player.replies)})
        return EpisodeOutcome(end, tuple(player.messages), tuple(player.replies), tuple(self._steps))

    async def _begin(self, task: object) -> None:
        with self._tracer.start_as_current_span("reset") as span:
            observation = await self._environment.reset(task)
            content = await self._environment.render(observation)
            span.set_attribute(semconv.EPISODE_OBSERVATION, as_text(content))
        self._player.instruct(self._environment.system_prompt)
        self._player.observe(content)

    async def _interact(self, reply: ModelReply) -> bool:
        """Apply the actions of a reply, and append what is observed; return whether the episode has ended."""
        calls = reply.message.get("tool_calls") or ()
        if not self._environment.tools or not calls:
            content, done = await self._step(await self._environment.parse(reply.text), "step", reply.text, "")
            self._player.observe(content)
            return done
        done = False
        for call in calls:
            name, arguments = call["function"]["name"], call["function"]["arguments"]
            if done:  # each call needs a response, also one that came too late
                content: Content = "The episode has ended."
            elif (action := _tool_action(name, arguments)) is None:
                content = f"The arguments of {name} are no JSON object."
            else:
                content, done = await self._step(action, name, arguments, call["id"])
            self._player.messages.append({"role": "tool", "tool_call_id": call["id"], "content": content})
        return done

    async def _step(self, action: object, tool: str, arguments: str, call_id: str) -> tuple[Content, bool]:
        """Apply an action; return the content that shows what is observed, and whether the episode has ended."""
        turn = len(self._player.replies) - 1
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
            span.set_attributes({semconv.GEN_AI_TOOL_RESULT: as_text(content), semconv.EPISODE_DONE: result.done})
            if result.reward is not None:
                self._player.reward(span, result.reward)
        self._steps.append(EpisodeStep(turn, action, result))
        return content, result.done


def _tool_action(name: str, arguments: str) -> ToolAction | None:
    """Return the action of a tool call. None: its arguments are no JSON object."""
    try:
        values = json.loads(arguments or "{}")
    except JSON_ERRORS:
        return None
    return ToolAction(name, values) if isinstance(values, dict) else None
