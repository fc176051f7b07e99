"""Processes of the page's episodes, as the page uses them.

In: a request for an episode, lines for it. Out: its lines. Invariant: no secret is in a command line; `end` leaves no process.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Mapping
from typing import TYPE_CHECKING, Any

import msgspec
from pydantic import SecretStr

from spangrad.errors import AgentError
from spangrad.http.tokens import agent_token
from spangrad.processes import kill_group
from spangrad.settings import Settings

if TYPE_CHECKING:
    from page.actions.requests import PlayRequest

_LINE_BYTES = 2**20


async def start_play(settings: Settings, request: PlayRequest) -> PlayProcess:
    """Start the process of an episode with the environment of a handler.

    Raises:
        AgentError: the process cannot be started.
    """
    from commands.playing.host import PlayJob

    handler, runner = settings.runner.handlers[request.environment], settings.runner.of_handler(request.environment)
    job = PlayJob(
        rollout=request.rollout,
        environment=handler.environment or "",
        directory=str(handler.directory),
        task=json.loads(request.task),
        is_person=request.person,
        role=request.role,
        episode=episode_against(runner.episode.model_dump(), request.policy),
        url=settings.gateway.url.rstrip("/") + "/v1",
        key=_of_agents(settings.gateway.token) or "none",
        environments_token=token.get_secret_value() if (token := settings.environments.token) else None,
        otlp_endpoint=settings.store.otlp_endpoint,
        otlp_token=_of_agents(settings.store.token),
    )
    # -P keeps modules of the working directory from hiding ours.
    command = [sys.executable, "-P", "-m", "commands.playing.host"]
    try:
        process = await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE, limit=_LINE_BYTES, start_new_session=True)
    except OSError as error:
        raise AgentError(f"the process of the episode cannot be started ({error}). End other programs of this machine.") from error
    started = PlayProcess(process)
    await started.send(msgspec.json.encode(job))
    return started


def episode_against(episode: Mapping[str, Any], policy: str) -> dict[str, Any]:
    """Return settings `runner.episode` in which a policy plays whatever no script plays. Empty: the settings as they are."""
    if not policy:
        return {**episode}
    scripts = {role: player for role, player in episode["players"].items() if player["script"] is not None}
    return {**episode, "model": policy, "players": scripts}


class PlayProcess:
    """Process of one episode."""

    def __init__(self, process: Process) -> None:
        """Store the process, whose standard input and output are pipes."""
        self._process = process
        self._group: int | None = process.pid
        """Process group of the episode. None: it was killed, and its number may be that of others by now."""

    async def lines(self) -> AsyncIterator[bytes]:
        """Yield the process's lines until it ends."""
        assert self._process.stdout is not None
        async for line in self._process.stdout:
            yield line

    async def send(self, line: bytes) -> None:
        """Send a line; one that has ended reads nothing."""
        assert self._process.stdin is not None
        with contextlib.suppress(ConnectionError):
            self._process.stdin.write(line + b"\n")
            await self._process.stdin.drain()

    async def end(self) -> None:
        """End the process: its input is closed, so that it sends its spans; what is left of its group after five seconds is killed."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(5):
                await self._process.wait()
        if self._group is not None:
            kill_group(self._group)
            self._group = None
        await self._process.wait()


def _of_agents(token: SecretStr | None) -> str | None:
    return None if token is None else agent_token(token.get_secret_value())
