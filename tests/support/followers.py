"""Gateways in this process that follow another one, and fake engines that pause as vLLM with our plugin does."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import aiohttp
from aiohttp import web

from gateway.server import running
from gateway.vllm_plugin.middleware import PAUSED
from spangrad.settings.sources import load_settings
from tests.support.fake_engine import FakeEngine
from tests.support.gateways import Stage

SECONDS = 0.01
"""Time that a gated engine takes for an answer."""


@dataclass
class GatedEngine(FakeEngine):
    """An engine whose calls wait in a pause, or are refused in one that aborts; the first token of an answer is its weights' number."""

    weights: int = 0
    """Number of the directory of `models` whose weights it holds."""
    answering: int = 0
    while_loading: int = 0
    """Calls that were being answered when weights were loaded, in all."""
    seconds: float = SECONDS

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        asked = await request.json()
        if asked["messages"][0]["content"] == "probe":
            return await super()._chat(request)
        if not await self._opened():
            return web.json_response(PAUSED, status=503)
        self.answering += 1
        try:
            await asyncio.sleep(self.seconds)
            await self.go_on.wait()
            if not await self._opened():
                return web.json_response(PAUSED, status=503)
            return await super()._chat(request)
        finally:
            self.answering -= 1

    async def _opened(self) -> bool:
        """Wait until the engine is paused no more; return False where it aborts calls instead."""
        while self.paused and self.pause_modes[-1] == "keep":  # noqa: ASYNC110 - nobody tells us
            await asyncio.sleep(0.002)
        return not self.paused

    async def _order(self, request: web.Request) -> web.Response:
        order = await request.json()
        if order.get("method") != "reload_weights":
            return await super()._order(request)
        self.while_loading += self.answering
        answer = await super()._order(request)
        self.weights = int(Path(order["kwargs"]["weights_path"]).name[1:])
        return answer

    def whole(self, asked: dict[str, Any]) -> dict[str, Any]:
        """The whole answer, sampled by the weights that are held now."""
        answer = super().whole(asked)
        if asked.get("return_token_ids"):
            answer["choices"][0]["token_ids"][0] = self.weights
        return answer


@asynccontextmanager
async def following(controller: Stage, **flags: object) -> AsyncGenerator[Stage]:
    """A gateway that follows a stage's, before the same store."""
    with TemporaryDirectory() as spill:
        values: dict[str, object] = {"gateway.port": 0, "gateway.spill_path": spill, "store.otlp_endpoint": controller.store.url}
        named = {"gateway.controller": str(controller.client._base_url).rstrip("/"), **{f"gateway.{key}": flags[key] for key in flags}}
        settings = load_settings({**values, **named}, env={})
        token = {"Authorization": f"Bearer {flags['token']}"} if "token" in flags else {}
        async with running(settings) as gateway, aiohttp.ClientSession(gateway.url, headers=token) as client:
            stage = replace(controller, client=client)
            await stage.readiness("serving")
            yield stage
