"""One episode of several players: the state machine in which they act by the environment's order of turns.

In: an environment with `roles`, a player for each. Out: every player's context, steps by role, and the reason of the end. Invariant: a
player is asked for a reply only where the environment names its role, and the environment gets the actions of exactly the roles that it
named; a player observes only what is given to its role; each reward of a role that no script plays is recorded, so that the recorded
returns of a zero-sum game between models add to 0; when the match has ended, by an error as well, no player is running.

Players that act at once are asked at once. Each reply is within an agent's span of the role's name; a joint step is a tool's span.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from opentelemetry import trace

from spangrad import semconv
from spangrad.episode.environment import EnvironmentCalls, StepResult, as_text, checked_observations
from spangrad.episode.player import EpisodeEnd, EpisodeLimits, ModelReply, Player, PlayerEndError, ReplyModel
from spangrad.episode.script import ScriptModel
from spangrad.errors import EnvironmentsError


class PlayerState(StrEnum):
    """State of a player in a match."""

    PENDING = "pending"
    """It waits for its turn."""
    RUNNING = "running"
    """It is asked for a reply."""
    DONE = "done"
    """The episode has ended for it."""


@dataclass(frozen=True, slots=True)
class MatchStep:
    """Actions of one turn, and their results."""

    actions: Mapping[str, Any]
    """Actions by role; None for a role that forfeits."""
    results: Mapping[str, StepResult]


@dataclass(frozen=True, slots=True)
class MatchOutcome:
    """Everything that happened in an episode of several players."""

    end: EpisodeEnd
    messages: Mapping[str, tuple[Mapping[str, Any], ...]]
    """Whole context of each role."""
    replies: Mapping[str, tuple[ModelReply, ...]]
    steps: tuple[MatchStep, ...]

    @property
    def rewards(self) -> list[dict[str, float | None]]:
        """Rewards of each step by role. None: the role had none."""
        return [{role: result.reward for role, result in step.results.items()} for step in self.steps]

    @property
    def returns(self) -> dict[str, float]:
        """Sums of the rewards by role; roles without any are left out."""
        sums: dict[str, float] = {}
        for rewards in self.rewards:
            for role, reward in rewards.items():
                if reward is not None:
                    sums[role] = sums.get(role, 0.0) + reward
        return sums


class Match:
    """Episode of one environment and a player for each of its roles."""

    def __init__(self, environment: EnvironmentCalls, models: Mapping[str, ReplyModel], limits: EpisodeLimits) -> None:
        """Begin nothing yet.

        Raises:
            EnvironmentsError: a role lacks a player, or a player a role; or the environment has tools, which belong to one player.
        """
        if set(models) != set(environment.roles):
            raise EnvironmentsError(
                f"the environment has the roles {', '.join(environment.roles)}, and there are players for {', '.join(models)}."
            )
        if environment.tools:
            raise EnvironmentsError("the environment has roles and tools. Let the actions of several players be text: write parse(text).")
        self.states = dict.fromkeys(models, PlayerState.PENDING)
        self._environment = environment
        self._players = {role: Player(model, limits, role) for role, model in models.items()}
        self._rewarded = frozenset(role for role, model in models.items() if not isinstance(model, ScriptModel))
        """Roles whose rewards are recorded, those before a role's first reply included."""
        self._steps: list[MatchStep] = []
        self._tracer = trace.get_tracer(semconv.EPISODE_SCOPE)

    async def run(self, task: object) -> MatchOutcome:
        """Play until the environment or a limit ends the episode.

        Raises:
            EngineError: a model's endpoint refused or failed, other than for its context; the players that act at once are asked no longer.
            EnvironmentsError: the environment names no role that may act.
            Exception: any of the environment, or of a script.
        """
        with self._tracer.start_as_current_span("episode") as span:
            await self._begin(task)
            end = None
            while end is None:
                end = await self._turn()
            for player in self._players.values():
                player.read()
            turns = sum(len(player.replies) for player in self._players.values())
            span.set_attributes({semconv.EPISODE_END: end.value, semconv.EPISODE_TURNS: turns})
        return MatchOutcome(
            end,
            {role: tuple(player.messages) for role, player in self._players.items()},
            {role: tuple(player.replies) for role, player in self._players.items()},
            tuple(self._steps),
        )

    async def _begin(self, task: object) -> None:
        with self._tracer.start_as_current_span("reset") as span:
            roles = self._environment.roles
            observations = checked_observations(self._environment.name, await self._environment.reset(task), roles)
            for role, player in self._players.items():
                player.instruct(await self._environment.system_prompt_of(role))
            span.set_attribute(semconv.EPISODE_OBSERVATION, await self._observe(observations))

    async def _observe(self, observations: Mapping[str, object]) -> str:
        """Give each role what it observes; return all as text."""
        shown: dict[str, str] = {}
        for role, observation in observations.items():
            if observation is not None:
                content = await self._environment.render(observation)
                self._players[role].observe(content)
                shown[role] = as_text(content)
        return json.dumps(shown, ensure_ascii=False)

    async def _turn(self) -> EpisodeEnd | None:
        """Play one turn; return the reason of the end, if it is the last."""
        roles = await self._environment.acting()
        if finished := [role for role in roles if self.states[role] is PlayerState.DONE]:
            raise EnvironmentsError(f"the environment names {finished[0]}, for whom the episode has ended. Leave it out of acting().")
        for role in roles:
            if end := self._players[role].limit_reached:
                return end
        replies = await self._replies(roles)
        if EpisodeEnd.CONTEXT in replies.values():
            return EpisodeEnd.CONTEXT
        texts = {role: reply.text for role, reply in replies.items() if isinstance(reply, ModelReply)}
        return await self._step(texts, next((role for role in roles if role not in texts), None))

    async def _replies(self, roles: Sequence[str]) -> dict[str, ModelReply | EpisodeEnd]:
        """Return each role's reply, or the reason for which it gave none; where one fails, none of the others goes on."""
        self.states |= dict.fromkeys(roles, PlayerState.RUNNING)
        try:
            async with asyncio.TaskGroup() as together:
                replies = {role: together.create_task(self._reply(role)) for role in roles}
        except ExceptionGroup as failures:
            failure = failures.exceptions[0]
            raise failure from failure.__cause__  # the attempt fails by what happened first, as with a single player
        finally:
            self.states |= dict.fromkeys(roles, PlayerState.PENDING)
        return {role: task.result() for role, task in replies.items()}

    async def _reply(self, role: str) -> ModelReply | EpisodeEnd:
        """Return a role's reply, or the reason for which it gave none."""
        attributes = {semconv.GEN_AI_OPERATION: "invoke_agent", semconv.GEN_AI_AGENT_NAME: role}
        with self._tracer.start_as_current_span(f"invoke_agent {role}", attributes=attributes):
            try:
                return await self._players[role].reply()
            except PlayerEndError as error:
                return error.end

    async def _step(self, texts: Mapping[str, str], forfeiting: str | None) -> EpisodeEnd | None:
        arguments = json.dumps(texts if forfeiting is None else {forfeiting: None}, ensure_ascii=False)
        name = "step" if forfeiting is None else "forfeit"
        attributes = {
            semconv.GEN_AI_OPERATION: "execute_tool",
            semconv.GEN_AI_TOOL_NAME: name,
            semconv.GEN_AI_TOOL_ARGUMENTS: arguments,
            semconv.EPISODE_TURN: len(self._steps),
        }
        with self._tracer.start_as_current_span(f"execute_tool {name}", attributes=attributes) as span:
            if forfeiting is None:
                actions = {role: await self._environment.parse(text) for role, text in texts.items()}
                results = await self._environment.step_together(actions)
            else:
                actions, results = {forfeiting: None}, await self._environment.forfeit(forfeiting)
                if results is None:
                    return EpisodeEnd.FORFEIT
            shown = await self._observe({role: result.observation for role, result in results.items()})
            for role, result in results.items():
                if result.reward is not None and role in self._rewarded:
                    self._players[role].reward(span, result.reward)
                if result.done:
                    self.states[role] = PlayerState.DONE
            is_over = all(state is PlayerState.DONE for state in self.states.values())
            span.set_attributes({semconv.GEN_AI_TOOL_RESULT: shown, semconv.EPISODE_DONE: is_over})
        self._steps.append(MatchStep(actions, results))
        return EpisodeEnd.DONE if is_over else None
