"""The gateway in this process before several fake engines, and what its administration says of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from fake_engine import FakeEngine
from unit_gateway import Stage, staged


@asynccontextmanager
async def several(*engines: FakeEngine, **flags: Any) -> AsyncGenerator[Stage]:
    """A gateway before several engines, all admitted; the first is `stage.engine`."""
    async with AsyncExitStack() as stack:
        for engine in engines[1:]:
            await stack.enter_async_context(engine.running())
        listed = [{"url": f"http://127.0.0.1:{engine.port}"} for engine in engines[1:]]
        settings: dict[str, Any] = {"backends": listed, **flags}
        stage = await stack.enter_async_context(staged(engines[0], **settings))
        await all_serve(stage, 1 + len(settings["backends"]))
        yield stage


async def backends(stage: Stage) -> list[dict[str, Any]]:
    async with stage.client.get("/admin/backends") as answer:
        return (await answer.json())["backends"]


async def all_serve(stage: Stage, count: int) -> None:
    async with asyncio.timeout(10):
        while [one["status"] for one in await backends(stage)] != ["serving"] * count:  # noqa: ASYNC110 - nobody tells us
            await asyncio.sleep(0.02)


async def ask(stage: Stage, method: str, path: str, body: object = None) -> tuple[int, Any]:
    async with stage.client.request(method, path, json=body) as answer:
        return answer.status, await answer.json()
