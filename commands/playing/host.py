"""Program in which an episode of the page runs: `python -m commands.playing.host`, a process for each.

In: a `PlayJob` in the first line of standard input, then the person's replies. Out: lines of JSON: messages, turns of the person, the end.
Invariant: what the environment prints goes to the log; where standard input ends, the process ends.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from opentelemetry import context
from opentelemetry.sdk.trace import TracerProvider
from pydantic import SecretStr

from commands.playing.episode import Cast, context_of, factory_named, in_words, play_episode, record_spans
from commands.playing.input_lines import read_beside_loop
from spangrad.agent.attempt_log import private_pipes
from spangrad.episode.agent import limits_of
from spangrad.episode.environment import as_text
from spangrad.episode.player import ModelReply, ReplyRequest
from spangrad.errors import SpangradError
from spangrad.text_sanitizer import storable

TEXT_CHARACTERS = 20_000
"""Largest number of characters of a message that are shown; the context has all of them."""
log = logging.getLogger(__name__)


class PlayJob(msgspec.Struct, frozen=True, kw_only=True):
    """Episode that is to be played."""

    rollout: str
    environment: str
    """Reference of the environment."""
    directory: str
    task: Any
    is_person: bool
    """True if a person has a part; False if the policy plays alone."""
    role: str
    """Role of the person; empty where there is one player."""
    episode: dict[str, Any]
    """Settings `runner.episode`."""
    url: str
    """Base URL of the policy, which ends in /v1."""
    key: str
    environments_token: str | None
    otlp_endpoint: str
    otlp_token: str | None


class PlayReply(msgspec.Struct, frozen=True):
    """Reply of a person."""

    turn: int
    text: str


def write_line(file: int, /, **line: object) -> None:
    """Write one line of JSON to a file, by its descriptor."""
    rest = storable(json.dumps(line, ensure_ascii=False)).encode() + b"\n"
    while rest:
        rest = rest[os.write(file, rest) :]


class RemotePerson:
    """Model whose replies come by lines of standard input."""

    def __init__(self, write: Callable[..., None]) -> None:
        self.replies: asyncio.Queue[PlayReply] = asyncio.Queue()
        self._write = write
        self._turn = 0

    async def reply(self, request: ReplyRequest) -> ModelReply:
        """Say that it is the person's turn, and wait for the reply to it."""
        self._turn += 1
        self._write(turn=self._turn)
        while (reply := await self.replies.get()).turn != self._turn:
            pass  # it came after the turn's time limit
        return ModelReply({"role": "assistant", "content": reply.text}, "stop")


def main() -> None:
    """Play the episode that standard input names."""
    logging.basicConfig(level=logging.INFO)
    replies, answers = private_pipes()
    source, write = os.fdopen(replies, "rb"), partial(write_line, answers)
    job = msgspec.json.decode(source.readline(), type=PlayJob)
    provider = record_spans(job.otlp_endpoint, job.otlp_token)
    context.attach(context_of(job.rollout))
    end = asyncio.run(_played(job, source, write, provider))
    provider.shutdown()  # before the end is told, so that the store has the spans by then
    write(**end)
    os._exit(0)  # an ordinary exit would wait for an environment's thread


async def _played(job: PlayJob, source: Any, write: Callable[..., None], provider: TracerProvider) -> dict[str, object]:
    """Play; return the last line."""
    person = RemotePerson(write)

    def lines_of_person() -> Iterator[bytes]:
        yield from source
        provider.shutdown()
        os._exit(0)

    def show(role: str, message: Mapping[str, Any]) -> None:
        if not job.is_person or role in {"", job.role}:  # who plays reads no other player's context
            write(role=role, by=message["role"], text=_text(message))

    read_beside_loop(lines_of_person(), lambda line: person.replies.put_nowait(msgspec.json.decode(line, type=PlayReply)))
    cast = Cast(job.episode, job.url, job.key, person if job.is_person else None, job.role, show, "Choose one.")
    try:
        token = None if job.environments_token is None else SecretStr(job.environments_token)
        factory = factory_named(job.environment, Path(job.directory), token)
        outcome = await play_episode(factory, job.task, limits_of(job.episode), cast)
    except SpangradError as error:
        return {"error": str(error)}
    except Exception as error:  # the environment's own
        log.exception("the environment failed")
        return {"error": f"the environment failed: {type(error).__name__}: {error}"[:TEXT_CHARACTERS]}
    return {"end": f"{in_words(outcome)}."}


def _text(message: Mapping[str, Any]) -> str:
    """Return what is shown of a message."""
    calls = message.get("tool_calls")
    texts = [as_text(message.get("content") or ""), as_text(calls) if calls else ""]
    text = "\n".join(filter(None, texts))
    missing = len(text) - TEXT_CHARACTERS
    return text if missing <= 0 else f"{text[:TEXT_CHARACTERS]} … {missing} more characters"


if __name__ == "__main__":
    main()
