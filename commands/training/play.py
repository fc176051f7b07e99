"""`spangrad play`: one episode of an environment in the terminal, by a person or by the model."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from commands.options import ConfigFile, Overrides, resolve

if TYPE_CHECKING:
    from spangrad.episode.environment import Environment
    from spangrad.episode.episode import EpisodeOutcome
    from spangrad.episode.player import EpisodeLimits, ModelReply, ReplyModel

Reference = Annotated[str, Parameter(name="ENVIRONMENT")]


def play(
    environment: Reference,
    *,
    task: str = "null",
    person: bool = False,
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
        greedy: the model takes the most likely token each time, as in greedy rollouts.
        json: print one JSON object in place of text: messages, rewards, return and end.
        directory: directory of the environment's module.
    """
    settings = resolve(config, set_)
    from json import dumps, loads

    from commands.training.agents import located
    from spangrad.callables import load
    from spangrad.episode.adapters.references import TOKEN_VARIABLE, by_openenv, factory_of, is_factory, names_environment
    from spangrad.episode.agent import limits_of, policy_of
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
    model = Person() if person else policy_of(episode, url, key)
    shown = Shown(model)
    outcome = asyncio.run(_play(factory, model if json else shown, limits_of(episode), given))
    if json:
        rewards = [step.result.reward for step in outcome.steps]
        print(dumps({"messages": outcome.messages, "rewards": rewards, "return": outcome.episode_return, "end": outcome.end}))
    else:
        shown.show(outcome.messages)
        total = "no reward" if outcome.episode_return is None else f"return {outcome.episode_return:+g}"
        print(f"\n{len(outcome.replies)} turns, {total}, ended by: {outcome.end}")


async def _play(factory: Callable[[], Environment], model: ReplyModel, limits: EpisodeLimits, task: object) -> EpisodeOutcome:
    from spangrad.episode.environment import EnvironmentCalls
    from spangrad.episode.episode import Episode

    environment = await EnvironmentCalls.create(factory)
    try:
        return await Episode(environment, model, limits).run(task)
    finally:
        await environment.aclose()


class Person:
    """Model whose replies a person writes, a line each."""

    async def reply(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        max_tokens: int | None,
        previous: ModelReply | None,
    ) -> ModelReply:
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

    def __init__(self, model: ReplyModel) -> None:
        self._model = model
        self._printed = 0

    async def reply(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        max_tokens: int | None,
        previous: ModelReply | None,
    ) -> ModelReply:
        """Print the messages that are new, and pass the request on."""
        self.show(messages)
        return await self._model.reply(messages, tools, max_tokens, previous)

    def show(self, messages: Sequence[Mapping[str, Any]]) -> None:
        """Print those of an episode's messages that were not printed yet."""
        for message in messages[self._printed :]:
            print(f"{message['role']}: {message.get('content') or message.get('tool_calls')}", flush=True)
        self._printed = len(messages)
