"""Prompts in the queue's server: `/v1/prompts`.

In: texts, and requests for them. Out: JSON (`rows.py`), or the bare text. Invariant: a text is durable before its PUT is answered; a
request with the baggage of an attempt that is pinned to a version of the prompt gets that version, whatever is published meanwhile.
"""

from __future__ import annotations

import msgspec
from aiohttp import web

from runner.queue.prompts import rows
from runner.queue.prompts.rows import PromptName, PromptRow, Put
from runner.queue.service import Service
from spangrad import semconv
from spangrad.agent.propagation import baggage_of
from spangrad.http.server import body, json_response, refusal

PROMPT_PATHS = frozenset({"/v1/prompts/{name}", "/v1/prompts/{name}/text"})
"""Paths at which an agent reads a prompt."""


class PromptAnswers:
    """HTTP handlers for prompts."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def routes(self) -> list[web.RouteDef]:
        """Return the routes of these handlers."""
        return [
            web.get("/v1/prompts", self.listed),
            web.get("/v1/prompts/{name}", self.get),
            web.put("/v1/prompts/{name}", self.put),
            web.get("/v1/prompts/{name}/text", self.text),
            web.get("/v1/prompts/{name}/versions", self.versions),
            web.get("/v1/prompts/{name}/edits", self.edits),
        ]

    async def listed(self, request: web.Request) -> web.Response:
        """List each prompt in its published version, or in its newest if none is published."""
        return json_response(await self._service.read(rows.newest))

    async def get(self, request: web.Request) -> web.Response:
        """Return one version of a prompt."""
        prompt = await self._find(request)
        return json_response(prompt) if isinstance(prompt, PromptRow) else prompt

    async def text(self, request: web.Request) -> web.Response:
        """Return the text of one version of a prompt."""
        prompt = await self._find(request)
        if not isinstance(prompt, PromptRow):
            return prompt
        return web.Response(text=prompt.text, headers={"Spangrad-Prompt-Version": str(prompt.version)})

    async def versions(self, request: web.Request) -> web.Response:
        """Return every version of a prompt."""
        name = request.match_info["name"]
        return json_response(await self._service.read(lambda connection: rows.versions(connection, name)))

    async def edits(self, request: web.Request) -> web.Response:
        """Return the edits that searches have made of a prompt."""
        name, search = request.match_info["name"], request.query.get("search")
        return json_response(await self._service.read(lambda connection: rows.edits(connection, name, search)))

    async def put(self, request: web.Request) -> web.Response:
        """Store a text as a version."""
        name = msgspec.convert(request.match_info["name"], PromptName)
        request_body = msgspec.json.decode(await body(request), type=Put)
        return json_response(await self._service.writer.do(lambda transaction: rows.put(transaction, name, request_body)))

    async def _find(self, request: web.Request) -> PromptRow | web.Response:
        name = request.match_info["name"]
        version = _version(request, name)
        prompt = await self._service.read(lambda connection: rows.get(connection, name, version))
        if prompt is not None:
            return prompt
        which = "is published" if version is None else f"has version {version}"
        sentence = f"no prompt {name} {which}. `spangrad prompt list` shows what there is, `spangrad prompt put {name} FILE` makes it."
        return refusal(404, sentence)


def _version(request: web.Request, name: str) -> int | None:
    """Return the requested version: from the query, else from the attempt's baggage. None: the published one.

    Raises:
        ValueError: it is not a whole number.
    """
    text = request.query.get("version")
    if text is None:
        carried = baggage_of(request.headers.get("baggage", ""))
        text = carried.get(semconv.PROMPT_VERSION) if carried.get(semconv.PROMPT_NAME) == name else None
    if text is not None and not (text.isascii() and text.isdigit() and len(text) < 10):
        raise ValueError(f"version={text!r} is no whole number.")
    return int(text) if text is not None else None
