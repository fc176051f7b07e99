"""The gateway in this process between a fake engine and a fake store, for its unit tests."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from tempfile import TemporaryDirectory
from typing import Any

import aiohttp
import pytest
from fake_engine import FakeEngine

from fakes import OtlpSink, SunkSpan
from gateway.recorder import exporter
from gateway.server import running
from spangrad.processes import free_ports
from spangrad.settings.sources import load_settings

MESSAGES = [{"role": "user", "content": "say rome"}]
ASKED = {"model": "policy", "messages": MESSAGES, "temperature": 0.5}


@dataclass
class Stage:
    """A gateway, its neighbours and a client of it."""

    engine: FakeEngine
    engine_stops: Callable[[], Awaitable[None]]
    store: OtlpSink
    client: aiohttp.ClientSession

    async def chat(self, path: str = "", headers: dict[str, str] | None = None, **asked: Any) -> tuple[int, bytes]:
        async with self.client.post(f"{path}/v1/chat/completions", json={**ASKED, **asked}, headers=headers) as answer:
            return answer.status, await answer.read()

    async def spans(self, count: int = 1) -> list[SunkSpan]:
        await asyncio.to_thread(self.store.wait_for, lambda: len(self.store.spans) >= count)
        return self.store.spans

    async def count(self, path: str) -> tuple[int, Any]:
        async with self.client.get(f"{path}/calls") as answer:
            return answer.status, await answer.json()

    async def readiness(self, until: str) -> None:
        """Wait until /readyz says so."""
        async with asyncio.timeout(10):
            while until not in await (await self.client.get("/readyz")).text():  # noqa: ASYNC110 - nobody tells us
                await asyncio.sleep(0.02)


class FullDisk:
    """A disk that takes no span while it is full."""

    def __init__(self, patch: pytest.MonkeyPatch, *, full: bool = True) -> None:
        self.full = full
        self.refused = asyncio.Event()
        self._writev = os.writev
        patch.setattr(os, "writev", self._write)
        patch.setattr(exporter, "DISK_PAUSE_SECONDS", 0.01)

    def _write(self, file: int, parts: tuple[bytes, bytes]) -> int:
        if self.full:
            self.refused.set()
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return self._writev(file, parts)


@asynccontextmanager
async def staged(engine: FakeEngine | None = None, **flags: object) -> AsyncGenerator[Stage]:
    """A gateway in this process between fakes; `flags` are settings of section gateway."""
    engine = engine or FakeEngine()
    (port,) = free_ports(1)
    with OtlpSink() as store, TemporaryDirectory() as spill:
        settings = load_settings(
            {
                "gateway.port": port,
                "gateway.engine_url": f"http://127.0.0.1:{engine.port}",
                "gateway.spill_path": spill,
                "store.otlp_endpoint": store.url,
                **{f"gateway.{key}": value for key, value in flags.items()},
            },
            env={},
        )
        token = {"Authorization": f"Bearer {flags['token']}"} if "token" in flags else {}
        async with AsyncExitStack() as engine_runs:
            await engine_runs.enter_async_context(engine.running())
            async with running(settings), aiohttp.ClientSession(f"http://127.0.0.1:{port}", headers=token) as client:
                yield Stage(engine, engine_runs.aclose, store, client)
