"""The queue's server as the keeper of prompts: `/v1/prompts`.

In: texts, and requests for them. Out: JSON (`prompt_rows.py`), or the bare text. Invariant: what was put is durable before it is answered;
who sends the baggage of an attempt that is pinned to a version of the prompt gets that version, whatever is published meanwhile.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

import msgspec
import sqlalchemy as sa
from aiohttp import web

from runner.queue import prompt_rows
from runner.queue.prompt_rows import Prompt, PromptName, Put
from runner.queue.service import Service
from runner.small_server import answer, body, refusal
from spangrad import semconv
from spangrad.agent.propagation import baggage_of

T = TypeVar("T")


class PromptAnswers:
    """Answers what is asked of prompts."""

    def __init__(self, service: Service) -> None:
        """Keep them in the service's database."""
        self._service = service

    def routes(self) -> list[web.RouteDef]:
        """What is answered."""
        return [
            web.get("/v1/prompts", self.listed),
            web.get("/v1/prompts/{name}", self.get),
            web.put("/v1/prompts/{name}", self.put),
            web.get("/v1/prompts/{name}/text", self.text),
            web.get("/v1/prompts/{name}/versions", self.versions),
            web.get("/v1/prompts/{name}/edits", self.edits),
        ]

    async def listed(self, request: web.Request) -> web.Response:
        """Of each prompt the version that is published, else its newest."""
        return answer(await self._read(prompt_rows.newest))

    async def get(self, request: web.Request) -> web.Response:
        """One version of a prompt."""
        found = await self._find(request)
        return answer(found) if isinstance(found, Prompt) else found

    async def text(self, request: web.Request) -> web.Response:
        """The same, its text alone."""
        found = await self._find(request)
        if not isinstance(found, Prompt):
            return found
        return web.Response(text=found.text, headers={"Spangrad-Prompt-Version": str(found.version)})

    async def versions(self, request: web.Request) -> web.Response:
        """Every version of a prompt."""
        name = request.match_info["name"]
        return answer(await self._read(lambda connection: prompt_rows.versions(connection, name)))

    async def edits(self, request: web.Request) -> web.Response:
        """Edits that searches have made of a prompt."""
        name, search = request.match_info["name"], request.query.get("search")
        return answer(await self._read(lambda connection: prompt_rows.edits(connection, name, search)))

    async def put(self, request: web.Request) -> web.Response:
        """Keep a text as a version."""
        name = msgspec.convert(request.match_info["name"], PromptName)
        asked = msgspec.json.decode(await body(request), type=Put)
        database = self._service.database
        return answer(await self._service.writer.do(lambda transaction: prompt_rows.put(transaction, database, name, asked)))

    async def _find(self, request: web.Request) -> Prompt | web.Response:
        name = request.match_info["name"]
        version = _version(request, name)
        found = await self._read(lambda connection: prompt_rows.get(connection, name, version))
        if found is not None:
            return found
        which = "is published" if version is None else f"has version {version}"
        sentence = f"no prompt {name} {which}. `spangrad prompt list` shows what there is, `spangrad prompt put {name} FILE` makes it."
        return refusal(404, sentence)

    async def _read(self, work: Callable[[sa.Connection], T]) -> T:
        def read() -> T:
            with self._service.database.reading() as connection:
                return work(connection)

        return await asyncio.to_thread(read)


def _version(request: web.Request, name: str) -> int | None:
    """The version that is asked for: by the query, else by the attempt's baggage. None: whichever is published.

    Raises:
        ValueError: it is no whole number.
    """
    text = request.query.get("version")
    if text is None:
        carried = baggage_of(request.headers.get("baggage", ""))
        text = carried.get(semconv.PROMPT_VERSION) if carried.get(semconv.PROMPT_NAME) == name else None
    if text is not None and not (text.isascii() and text.isdigit() and len(text) < 10):
        raise ValueError(f"version={text!r} is no whole number.")
    return int(text) if text is not None else None
