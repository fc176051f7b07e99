"""`spangrad play`: one episode of an environment in the terminal, by a person or by the model."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping
from io import TextIOWrapper
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from commands.options import ConfigFile, Overrides, require_directory, resolve

if TYPE_CHECKING:
    from spangrad.episode.player import ModelReply, ReplyRequest

Reference = Annotated[str, Parameter(name="ENVIRONMENT")]


def play(
    environment: Reference,
    /,
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
    require_directory("--directory", directory, "the directory of the environment's module")
    settings = resolve(config, set_)
    from json import dumps, loads

    from commands.playing.episode import Cast, factory_named, in_words, play_episode, total
    from spangrad.episode.agent import limits_of
    from spangrad.errors import JSON_ERRORS, AgentError

    try:
        given = loads(task)
    except JSON_ERRORS as error:
        raise AgentError(f"--task {task!r:.200} is no JSON ({error}). Give the task's input as JSON: text in double quotes.") from None
    factory = factory_named(environment, directory, settings.environments.token)
    episode, token = settings.runner.episode.model_dump(), settings.gateway.token
    if greedy:
        for model in (episode, *episode["players"].values()):
            model["temperature"] = 0.0
    url, key = settings.gateway.url.rstrip("/") + "/v1", token.get_secret_value() if token else "none"
    cast = Cast(episode, url, key, Person() if person else None, role, None if json else _print)
    outcome = asyncio.run(play_episode(factory, given, limits_of(episode), cast))
    if json:
        print(dumps({"messages": outcome.messages, "rewards": outcome.rewards, "return": total(outcome)[0], "end": outcome.end}))
    else:
        print(f"\n{in_words(outcome)}")


def _print(role: str, message: Mapping[str, Any]) -> None:
    """Print a message; its player's role, where there are several, begins the line."""
    begin = f"[{role}] " if role else ""
    print(f"{begin}{message['role']}: {message.get('content') or message.get('tool_calls')}", flush=True)


class Person:
    """Model whose replies a person writes, a line each."""

    def __init__(self) -> None:
        """Read nothing before the first turn."""
        self._lines: asyncio.Queue[str] | None = None

    async def reply(self, request: ReplyRequest) -> ModelReply:
        """Read a line.

        Raises:
            AgentError: standard input has ended.
        """
        from commands.playing.input_lines import read_beside_loop
        from spangrad.episode.player import ModelReply
        from spangrad.errors import AgentError

        print("> ", end="", file=sys.stderr, flush=True)
        if self._lines is None:
            if isinstance(sys.stdin, TextIOWrapper):
                sys.stdin.reconfigure(errors="replace")
            self._lines = asyncio.Queue()
            read_beside_loop(chain(sys.stdin, ("",)), self._lines.put_nowait)
        line = await self._lines.get()
        if not line:
            raise AgentError("standard input ended before the episode. Write a line for each reply.")
        return ModelReply({"role": "assistant", "content": line.rstrip("\n")}, "stop")
