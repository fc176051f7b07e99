"""`spangrad backends` against a gateway in this process: what it prints, what it changes, what it says when it cannot."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from spangrad.processes import free_ports
from tests.support.fake_engine import FakeEngine
from tests.support.gateways import Stage, staged
from tests.support.processes import address_of_forks, run_spangrad

CLEAN = {key: value for key, value in os.environ.items() if not key.startswith("SPANGRAD_")}


@pytest.fixture(scope="module", autouse=True)
def forks() -> None:
    """Start the server that forks in this thread: Linux ends a child with the thread that started it."""
    address_of_forks("services")


def gateway_url(stage: Stage) -> str:
    return str(stage.client._base_url)


async def run(url: str, *arguments: str, cwd: Path, **env: str) -> tuple[int, str, str]:
    """Exit code and both outputs of `spangrad backends`."""
    words = ("backends", *arguments, "--set", f"gateway.url={url}")
    done = await asyncio.to_thread(run_spangrad, *words, directory=cwd, env={**CLEAN, **env}, timeout=60)
    return done.returncode, done.stdout, done.stderr


def tables(out: str) -> list[list[str]]:
    """The words of each line; columns are two or more spaces apart."""
    return [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in out.splitlines() if line.strip()]


async def backends_of(stage: Stage) -> list[dict[str, Any]]:
    async with stage.client.get("/admin/backends") as answer:
        return (await answer.json())["backends"]


async def test_backends_add_list_and_remove_change_pool(tmp_path: Path) -> None:
    (nobody,) = free_ports(1)
    async with staged(FakeEngine(topology={"tensor": 2, "api_servers": 4}, scope="sampled")) as stage:
        await stage.readiness("serving")
        url = gateway_url(stage)
        engine_url = f"http://127.0.0.1:{stage.engine.port}"
        sampled = "engine.checksum = sampled: about 4,096 words of each parameter are compared"
        added = ["add", f"http://127.0.0.1:{nobody}/v1", "--policy", "judge", "--kind", "openai", "--limit", "4", "--key-variable", "KEY"]
        assert await run(url, *added, cwd=tmp_path, KEY="sesame") == (
            0,
            f"judge-0: openai of policy 'judge' at http://127.0.0.1:{nobody}, serving\n",
            "",
        )
        (_, judge) = await backends_of(stage)
        assert (judge["has_key"], judge["limit"]) == (True, 4)
        code, out, _ = await run(url, "list", cwd=tmp_path)
        assert (code, tables(out)) == (
            0,
            [
                ["policy", "status", "version", "before", "canary", "waiting", "reason"],
                ["policy", "serving", "0", "-", "-", "0"],
                ["judge", "serving", "-", "-", "-", "0"],
                ["backend", "policy", "kind", "topology", "status", "version", "in flight", "limit", "calls", "url", "reason"],
                ["policy-0", "policy", "engine", "tp2 api4", "serving", "0", "0", "-", "0", engine_url, sampled],
                ["judge-0", "judge", "openai", "-", "serving", "-", "0", "4", "0", f"http://127.0.0.1:{nobody}"],
            ],
        )
        assert await run(url, "remove", "judge-0", cwd=tmp_path) == (0, "judge-0 has left\n", "")
        assert [one["name"] for one in await backends_of(stage)] == ["policy-0"]


async def test_backends_drain_waits_for_calls_in_flight(tmp_path: Path) -> None:
    async with staged() as stage:
        await stage.readiness("serving")
        stage.engine.go_on.clear()
        stage.engine.arrived.clear()
        call = asyncio.create_task(stage.chat())
        await stage.engine.arrived.wait()
        draining = asyncio.create_task(run(gateway_url(stage), "drain", "policy-0", cwd=tmp_path))
        async with asyncio.timeout(60):
            while (await backends_of(stage))[0]["status"] != "draining":  # noqa: ASYNC110 - there is no event
                await asyncio.sleep(0.05)
        assert not draining.done()
        stage.engine.go_on.set()
        assert (await call)[0] == 200
        assert await draining == (0, "policy-0 has left\n", "")
        assert await backends_of(stage) == []


async def test_backends_list_watch_follows_state(tmp_path: Path) -> None:
    async with staged(FakeEngine(warm=False)) as stage:
        command = [sys.executable, "-m", "spangrad", "backends", "list", "--watch", "--interval", "0.05"]
        where, env = f"gateway.url={gateway_url(stage)}", {**CLEAN, "FORCE_COLOR": "1"}
        watching = await asyncio.create_subprocess_exec(
            *command, "--set", where, cwd=tmp_path, env=env, stdout=subprocess.PIPE, limit=2**24
        )
        assert watching.stdout
        try:
            async with asyncio.timeout(60):
                await watching.stdout.readuntil(b"warming up")
                stage.engine.warm = True
                await watching.stdout.readuntil(b"serving")
        finally:
            watching.send_signal(signal.SIGINT)
            await watching.stdout.read()
            code = await watching.wait()
    assert code == 130


async def test_backends_errors_are_one_sentence(tmp_path: Path) -> None:
    (nobody,) = free_ports(1)
    url = f"http://127.0.0.1:{nobody}"
    async with staged(token="root") as stage:
        at = gateway_url(stage)
        with_token = ["--set", "gateway.token=root"]
        for code, sentence, arguments in (
            (1, f"spangrad: the gateway at {url} does not answer (", [url, "list"]),
            (1, f"spangrad: the gateway at {at} refuses GET /admin/policies (401): this gateway asks for a token.", [at, "list"]),
            (
                1,
                f"spangrad: the gateway at {at} refuses DELETE /admin/backends/x?now=false (404): there is no backend 'x'. There are: ",
                [at, "drain", "x", *with_token],
            ),
            (
                1,
                f"spangrad: the gateway at {at} refuses POST /admin/backends (400): the backend's url cannot be right",
                [at, "add", "nonsense", *with_token],
            ),
            (2, "spangrad: --key-variable NO_KEY: the environment has no such variable", [at, "add", url, "--key-variable", "NO_KEY"]),
        ):
            got, out, err = await run(*arguments, cwd=tmp_path)
            assert (got, out, err.startswith(sentence), err.count("\n")) == (code, "", True, 1), err
