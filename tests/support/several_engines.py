"""The gateway in this process before several fake engines, and what its administration says of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
from fake_engine import FakeEngine
from safetensors.numpy import save_file
from unit_gateway import Stage, staged

from spangrad.weights.checksums import checksum_directory


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


def models(under: Path, count: int) -> list[Path]:
    """Model directories of so many versions, each with weights of its own."""
    directories = [under / f"v{version}" for version in range(count)]
    for version, directory in enumerate(directories):
        directory.mkdir()
        save_file({"w": np.arange(6, dtype=np.float32) + version}, directory / "model.safetensors")
    return directories


def started(weights: list[Path], count: int, kind: type[FakeEngine] = FakeEngine) -> list[FakeEngine]:
    """Engines that say which weights they were started with: the first."""
    return [kind(model=str(weights[0]), checksum=checksum_directory(weights[0])) for _ in range(count)]


def release_of(weights: list[Path], version: int, **more: object) -> dict[str, object]:
    """What is asked for to publish a version."""
    return {"version": version, "path": str(weights[version]), "checksum": checksum_directory(weights[version]), **more}
