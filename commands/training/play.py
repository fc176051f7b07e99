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

    What the model plays is a rollout of the run `play` in mode production, where the store answers; its id is printed as well.

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
    from uuid import uuid4

    from opentelemetry import context

    from commands.playing.episode import Cast, context_of, factory_named, in_words, play_episode, record_spans, total
    from spangrad.episode.agent import limits_of
    from spangrad.errors import JSON_ERRORS, AgentError
    from spangrad.http.json_http import status_of

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
    rollout, store = f"play-{uuid4().hex}", settings.store
    # A person's episode alone asks no gateway; and without a store the end would wait for it.
    is_recorded = not (person and role is None) and status_of(store.otlp_endpoint) is not None
    provider = record_spans(store.otlp_endpoint, store.token.get_secret_value() if store.token else None) if is_recorded else None
    before = context.attach(context_of(rollout))
    try:
        outcome = asyncio.run(play_episode(factory, given, limits_of(episode), cast))
    finally:
        context.detach(before)
        if provider is not None:
            provider.shutdown()
    if json:
        facts = {"messages": outcome.messages, "rewards": outcome.rewards, "return": total(outcome)[0], "end": outcome.end}
        print(dumps({**facts, **({"rollout": rollout} if is_recorded else {})}))
    else:
        print(f"\n{in_words(outcome)}" + f"\nrollout {rollout}" * is_recorded)


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
