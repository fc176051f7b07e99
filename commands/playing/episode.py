"""One episode for people: its environment by a reference, its players, and the messages as they come.

In: a reference, a task, who plays what. Out: messages, and the outcome. Invariant: the contexts are those of training, shown or not.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.trace import TracerProvider
from pydantic import SecretStr

from commands.training.agents import located
from span_processors.export import tracer_provider
from spangrad import semconv
from spangrad.agent.propagation import with_baggage
from spangrad.callables import load
from spangrad.episode.adapters.references import TOKEN_VARIABLE, by_openenv, factory_of, is_factory, names_environment
from spangrad.episode.agent import models_of, policy_of
from spangrad.episode.environment import Environment, EnvironmentCalls
from spangrad.episode.episode import Episode, EpisodeOutcome
from spangrad.episode.match import Match, MatchOutcome
from spangrad.episode.player import EpisodeLimits, ModelReply, ReplyModel, ReplyRequest
from spangrad.errors import AgentError
from spangrad.http.service import bearer
from spangrad.store.rollout.record import counted
from spangrad.types import Mode

RUN = "play"
"""Run of the rollouts."""
Show = Callable[[str, Mapping[str, Any]], None]
"""Function that is given a role (empty: the only player) and a message of its context."""


def factory_named(reference: str, directory: Path, token: SecretStr | None) -> Callable[[], Environment]:
    """Return the function that creates an environment, by a reference as a command line has it.

    Modules are looked up first in the directory, which becomes part of the path. The token is that of servers of environments, if they
    ask for one.

    Raises:
        AgentError: the reference names no environment.
    """
    sys.path.insert(0, str(directory.resolve()))
    reference = by_openenv(reference)
    if token is not None:
        os.environ[TOKEN_VARIABLE] = token.get_secret_value()
    factory = factory_of(reference if names_environment(reference) else located(reference, directory), load)
    if not is_factory(factory):
        raise AgentError(f"{reference} is no class with reset(task) and step(action). Name one, as MODULE:CLASS.")
    return factory


def context_of(rollout: str) -> Context:
    """Return a context in which all calls and spans are of one rollout, in mode production."""
    identity = {semconv.RUN_ID: RUN, semconv.ROLLOUT_ID: rollout, semconv.ROLLOUT_MODE: Mode.PRODUCTION.value}
    return with_baggage(Context(), {**identity, semconv.ROLLOUT_ATTEMPT: "0"})


def record_spans(otlp_endpoint: str, token: str | None) -> TracerProvider:
    """Send the process's spans to the store from now on; the provider's `shutdown` sends the last ones."""
    provider = tracer_provider("spangrad-play", otlp_endpoint, bearer(token))
    trace.set_tracer_provider(provider)
    return provider


@dataclass(frozen=True)
class Cast:
    """Players of an episode."""

    episode: Mapping[str, Any]
    """Settings `runner.episode`."""
    url: str
    """Base URL of the policy, which ends in /v1."""
    key: str
    person: ReplyModel | None
    """Model whose replies a person writes. None: the policy plays."""
    role: str | None
    """Role of the person, where there are several."""
    show: Show | None
    """Function that is given each message. None: messages are not shown."""
    remedy: str = "Name yours with --role."
    """Sentence for a person without a role of the environment."""

    def single(self) -> ReplyModel:
        """Return the model of the only player."""
        return self._shown(self.person or policy_of(self.episode, self.url, self.key), "")

    def of(self, roles: Sequence[str]) -> dict[str, ReplyModel]:
        """Return the model of each role's player.

        Raises:
            AgentError: the person has none of the roles.
        """
        models = models_of(roles, self.episode, self.url, self.key)
        if self.person is not None:
            if self.role is None or self.role not in roles:
                raise AgentError(f"the environment has the roles {', '.join(roles)}. {self.remedy}")
            models[self.role] = self.person
        return {role: self._shown(model, role) for role, model in models.items()}

    def _shown(self, model: ReplyModel, role: str) -> ReplyModel:
        return model if self.show is None else ShownModel(model, role, self.show)


async def play_episode(
    factory: Callable[[], Environment], task: object, limits: EpisodeLimits, cast: Cast
) -> EpisodeOutcome | MatchOutcome:
    """Play one episode.

    Raises:
        AgentError: the person has none of the environment's roles.
        EngineError: the policy's endpoint failed.
        Exception: any of the environment.
    """
    environment = await EnvironmentCalls.create(factory)
    try:
        if environment.roles:
            models = cast.of(environment.roles)
            outcome = await Match(environment, models, limits).run(task)
            ends = [(models[role], messages) for role, messages in outcome.messages.items()]
        else:
            model = cast.single()
            outcome = await Episode(environment, model, limits).run(task)
            ends = [(model, outcome.messages)]
    finally:
        await environment.aclose()
    for shown, messages in ends:
        if isinstance(shown, ShownModel):
            shown.show(messages)
    return outcome


def total(outcome: EpisodeOutcome | MatchOutcome) -> tuple[float | dict[str, float] | None, int]:
    """Return the return, by role where there are several, and the number of turns."""
    if isinstance(outcome, MatchOutcome):
        return outcome.returns, len(outcome.steps)
    return outcome.episode_return, len(outcome.replies)


def in_words(outcome: EpisodeOutcome | MatchOutcome) -> str:
    """Return a line on an outcome: turns, return, and the reason of the end."""
    value, turns = total(outcome)
    if isinstance(value, dict):
        words = ", ".join(f"return of {role} {number:+g}" for role, number in value.items()) or "no reward"
    else:
        words = "no reward" if value is None else f"return {value:+g}"
    return f"{counted(turns, 'turn')}, {words}, ended by: {outcome.end}"


class ShownModel:
    """Model whose context and replies are shown as they come."""

    def __init__(self, model: ReplyModel, role: str, show: Show) -> None:
        self._model = model
        self._role = role
        self._show = show
        self._count = 0

    async def reply(self, request: ReplyRequest) -> ModelReply:
        """Show the messages that are new, and pass the request on."""
        self.show(request.messages)
        return await self._model.reply(request)

    def show(self, messages: Sequence[Mapping[str, Any]]) -> None:
        """Show those of an episode's messages that were not shown yet."""
        for message in messages[self._count :]:
            self._show(self._role, message)
        self._count = len(messages)
