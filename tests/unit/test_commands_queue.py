"""`spangrad queue`: what its commands print of a queue in this process, what they change, what they say when they cannot."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from inline_snapshot import snapshot

from commands.services import queue as command
from runner.queue.wire import Completion, Failure, RolloutState
from spangrad.errors import QueueError, SettingsError
from spangrad.processes import free_ports
from spangrad.types import AttemptFailure
from tests.support.runners import new_rollouts, queue_settings, serving


def words(out: str) -> list[list[str]]:
    """The words of each line; columns are two or more spaces apart."""
    return [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in out.splitlines() if line.strip()]


async def test_queue_commands_list_cancel_and_retry_rollouts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = queue_settings(f"sqlite:///{tmp_path}/queue.db", max_attempts=1)
    where = [f"queue.url={settings.queue.url}"]

    async def printed(function: Any, *arguments: Any, **options: Any) -> str:
        await asyncio.to_thread(function, *arguments, **options, set_=where)
        return capsys.readouterr().out

    async with serving(settings) as (client, _):
        await client.enqueue("run", new_rollouts(5, group_size=2))
        good, bad, _ = await client.lease("run", "a worker", 3)
        await client.complete([Completion(rollout_id=good.rollout_id, attempt=0, rewards={"reward": 0.5}, calls=3, seconds=1.25)])
        await client.fail([Failure(rollout_id=bad.rollout_id, attempt=0, reason=AttemptFailure.EXIT_CODE, detail="exit code 3")])
        assert words(await printed(command._list)) == snapshot(
            [["run", "queued", "running", "succeeded", "failed", "dead", "cancelled"], ["run", "2", "1", "1", "0", "1", "0"]]
        )
        assert words(await printed(command._list, run="run", group="r group 0")) == snapshot(
            [
                ["rollout", "run", "group", "task", "mode", "state", "attempts", "last attempt"],
                ["r0", "run", "r group 0", "task 0", "train", "succeeded", "1", "succeeded"],
                ["r1", "run", "r group 0", "task 1", "train", "dead", "1", "exit_code exit code 3"],
            ]
        )
        assert words(await printed(command._dead)) == snapshot(
            [
                ["rollout", "run", "group", "task", "mode", "state", "attempts", "last attempt"],
                ["r1", "run", "r group 0", "task 1", "train", "dead", "1", "exit_code exit code 3"],
            ]
        )
        shown = (await printed(command._show, "r0")).splitlines()
        assert [*shown[:3], shown[-1].split("  ")[0], shown[-1].split("UTC")[1].split()] == snapshot(
            [
                "rollout   r0 of run run (train)",
                "task      task 0, group r group 0 of 2, priority 0",
                "state     succeeded, 0 attempts left, 300 s each",
                "0",
                ["1.2", "succeeded", "3", "reward=0.5"],
            ]
        )
        assert await printed(command._cancel, run="run", group="r group 1") == snapshot(
            "cancelled: 1 that were queued, 1 that were running\n"
        )
        assert await printed(command._retry, "r1") == snapshot("queued again: 1\n")
        assert "\nstate     queued, 1 attempt left, 300 s each\n" in await printed(command._show, "r1")
        assert await printed(command._purge, older_than_days=1.0) == snapshot("deleted: 0\n")
        assert await printed(command._purge, older_than_days=0.0, run="run") == snapshot("deleted: 2\n")
        with pytest.raises(SettingsError, match=r"^--older-than-days -1 is no age\. Name how many days ago rollouts must have ended"):
            await printed(command._purge, older_than_days=-1.0)
        with pytest.raises(SettingsError, match=r"^name --older-than-days DAYS: queue\.keep_days is not set\.$"):
            await asyncio.to_thread(command._purge, set_=[*where, "queue.keep_days=null"])
        with pytest.raises(QueueError, match=r"refuses GET /v1/rollouts/nobody \(404\): the queue has no rollout nobody\."):
            await printed(command._show, "nobody")
        with pytest.raises(
            SettingsError, match=r"--state 'odd' is none\. A rollout is queued, running, succeeded, failed, dead, cancelled\."
        ):
            await printed(command._list, state="odd")


async def test_queue_list_pages_to_its_limit(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runner.queue.server.LIST_MOST", 3)
    settings = queue_settings(f"sqlite:///{tmp_path}/queue.db")
    async with serving(settings) as (client, _):
        await client.enqueue("run", new_rollouts(10))
        for limit, notice in ((7, "there are more than 7: raise --limit to list more\n"), (10, ""), (5000, "")):
            await asyncio.to_thread(command._list, run="run", limit=limit, set_=[f"queue.url={settings.queue.url}"])
            printed = capsys.readouterr()
            assert [line[0] for line in words(printed.out)[1:]] == [f"r{number}" for number in range(min(limit, 10))]
            assert printed.err == notice


async def test_queue_cancel_and_retry_of_unknown_rollouts_raise(tmp_path: Path) -> None:
    settings = queue_settings(f"sqlite:///{tmp_path}/queue.db")
    where = [f"queue.url={settings.queue.url}"]
    async with serving(settings) as (client, _):
        await client.enqueue("run", new_rollouts(2))
        for function in (command._cancel, command._retry):
            with pytest.raises(QueueError, match=r"the queue has no rollout nobody\."):
                await asyncio.to_thread(function, "r0", "nobody", set_=where)
            with pytest.raises(QueueError, match=r"has no rollout of run none\. `spangrad queue list` shows what it has\."):
                await asyncio.to_thread(function, run="none", set_=where)
            with pytest.raises(QueueError, match=r"has no rollout of group none of run run\. `spangrad queue list` shows what it has\."):
                await asyncio.to_thread(function, run="run", group="none", set_=where)
        assert (await client.run("run")).states == {RolloutState.QUEUED: 2}


async def test_queue_commands_print_agent_text_without_markup(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = queue_settings(f"sqlite:///{tmp_path}/queue.db", max_attempts=1)
    where = [f"queue.url={settings.queue.url}"]
    text = "[INST] :key: list[int] [/INST]"
    async with serving(settings) as (client, _):
        await client.enqueue(text, new_rollouts(1))
        (lease,) = await client.lease(text, text, 1)
        await client.fail([Failure(rollout_id=lease.rollout_id, attempt=0, reason=AttemptFailure.EXCEPTION, detail=text)])
        for show, names, places in ((command._list, [], 1), (command._dead, [], 2), (command._show, [lease.rollout_id], 3)):
            await asyncio.to_thread(show, *names, set_=where)
            assert capsys.readouterr().out.count(text) == places


def test_queue_commands_without_server_raise_with_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "_CONNECT_SECONDS", 0)
    (port,) = free_ports(1)
    with pytest.raises(QueueError, match=rf"the queue at http://127.0.0.1:{port} does not answer .* Start it with `spangrad queue`"):
        command._list(set_=[f"queue.port={port}"])
