"""`spangrad play`: one episode of an environment in the terminal, by a person or by the model."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from commands.options import ConfigFile, Overrides, resolve

if TYPE_CHECKING:
    from spangrad.episode.environment import Environment
    from spangrad.episode.episode import EpisodeOutcome
    from spangrad.episode.match import MatchOutcome
    from spangrad.episode.player import EpisodeLimits, ModelReply, ReplyModel, ReplyRequest

Reference = Annotated[str, Parameter(name="ENVIRONMENT")]


def play(
    environment: Reference,
    *,
    task: str = "null",
    person: bool = False,
    role: str | None = None,
    greedy: bool = False,
    json: bool = False,
    directory: Path = Path(),
    config: ConfigFile = None,
    set_: Overrides = None,
) -> None:
    """Play one episode of an environment, with the contexts that training has; print the messages, the return and the reason of the end.

    Args:
        environment: MODULE:CLASS or FILE.py:CLASS with reset(task) and step(action), gymnasium:ID, or the URL of a server of environments.
        task: input of the task, as JSON.
        person: write the replies yourself, a line each; the model at gateway.url writes them otherwise.
        role: role that you play, in environments of several players; the others are those of runner.episode.players.
        greedy: the model takes the most likely token each time, as in greedy rollouts.
        json: print one JSON object in place of text: messages, rewards, return and end; by role, where there are several.
        directory: directory of the environment's module.
    """
    settings = resolve(config, set_)
    from json import dumps, loads

    from commands.training.agents import located
    from spangrad.callables import load
    from spangrad.episode.adapters.references import TOKEN_VARIABLE, by_openenv, factory_of, is_factory, names_environment
    from spangrad.episode.agent import limits_of
    from spangrad.errors import AgentError

    try:
        given = loads(task)
    except ValueError as error:
        raise AgentError(f"--task {task!r} is no JSON ({error}). Give the task's input as JSON: text in double quotes.") from None
    sys.path.insert(0, str(directory.resolve()))
    environment = by_openenv(environment)
    if settings.environments.token is not None:
        os.environ[TOKEN_VARIABLE] = settings.environments.token.get_secret_value()
    factory = factory_of(environment if names_environment(environment) else located(environment, directory), load)
    if not is_factory(factory):
        raise AgentError(f"{environment} is no class with reset(task) and step(action). Name one, as MODULE:CLASS.")
    episode, token = settings.runner.episode.model_dump(), settings.gateway.token
    if greedy:
        episode["temperature"] = 0.0
    url, key = settings.gateway.url.rstrip("/") + "/v1", token.get_secret_value() if token else "none"
    outcome = asyncio.run(_play(factory, given, limits_of(episode), _Cast(episode, url, key, person, role, not json)))
    total, turns = _total(outcome)
    if json:
        print(dumps({"messages": outcome.messages, "rewards": outcome.rewards, "return": total, "end": outcome.end}))
    else:
        print(f"\n{turns} turns, {_in_words(total)}, ended by: {outcome.end}")


@dataclass(frozen=True)
class _Cast:
    """Players of an episode."""

    episode: Mapping[str, Any]
    """Settings `runner.episode`."""
    url: str
    key: str
    person: bool
    role: str | None
    """Role of the person, where there are several."""
    is_shown: bool

    def single(self) -> ReplyModel:
        """Return the model of the only player."""
        from spangrad.episode.agent import policy_of

        return self._shown(Person() if self.person else policy_of(self.episode, self.url, self.key), "")

    def of(self, roles: Sequence[str]) -> dict[str, ReplyModel]:
        """Return the model of each role's player.

        Raises:
            AgentError: the person has none of the roles.
        """
        from spangrad.episode.agent import models_of
        from spangrad.errors import AgentError

        models = models_of(roles, self.episode, self.url, self.key)
        if self.person:
            if self.role is None or self.role not in roles:
                raise AgentError(f"the environment has the roles {', '.join(roles)}. Name yours with --role.")
            models[self.role] = Person()
        return {role: self._shown(model, role) for role, model in models.items()}

    def _shown(self, model: ReplyModel, role: str) -> ReplyModel:
        return Shown(model, role) if self.is_shown else model


async def _play(factory: Callable[[], Environment], task: object, limits: EpisodeLimits, cast: _Cast) -> EpisodeOutcome | MatchOutcome:
    from spangrad.episode.environment import EnvironmentCalls
    from spangrad.episode.episode import Episode
    from spangrad.episode.match import Match

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
        if isinstance(shown, Shown):
            shown.show(messages)
    return outcome


def _total(outcome: EpisodeOutcome | MatchOutcome) -> tuple[float | dict[str, float] | None, int]:
    """Return the return, by role where there are several, and the number of turns."""
    from spangrad.episode.match import MatchOutcome

    if isinstance(outcome, MatchOutcome):
        return outcome.returns, len(outcome.steps)
    return outcome.episode_return, len(outcome.replies)


def _in_words(total: float | dict[str, float] | None) -> str:
    if isinstance(total, dict):
        return ", ".join(f"return of {role} {value:+g}" for role, value in total.items()) or "no reward"
    return "no reward" if total is None else f"return {total:+g}"


class Person:
    """Model whose replies a person writes, a line each."""

    async def reply(self, request: ReplyRequest) -> ModelReply:
        """Read a line.

        Raises:
            AgentError: standard input has ended.
        """
        from spangrad.episode.player import ModelReply
        from spangrad.errors import AgentError

        print("> ", end="", file=sys.stderr, flush=True)
        line = await asyncio.to_thread(sys.stdin.readline)
        if not line:
            raise AgentError("standard input ended before the episode. Write a line for each reply.")
        return ModelReply({"role": "assistant", "content": line.rstrip("\n")}, "stop")


class Shown:
    """Model whose context and replies are printed as they come."""

    def __init__(self, model: ReplyModel, role: str) -> None:
        """Print nothing yet; `role` begins each line. Empty: there is one player."""
        self._model = model
        self._begin = f"[{role}] " if role else ""
        self._printed = 0

    async def reply(self, request: ReplyRequest) -> ModelReply:
        """Print the messages that are new, and pass the request on."""
        self.show(request.messages)
        return await self._model.reply(request)

    def show(self, messages: Sequence[Mapping[str, Any]]) -> None:
        """Print those of an episode's messages that were not printed yet."""
        for message in messages[self._printed :]:
            print(f"{self._begin}{message['role']}: {message.get('content') or message.get('tool_calls')}", flush=True)
        self._printed = len(messages)
