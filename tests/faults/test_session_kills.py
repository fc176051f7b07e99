"""Kills of the processes of served environments, and of their server, while many clients play: no step twice, no state of another's."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
import pytest

from spangrad.episode.adapters.openenv_server import OpenEnvServer
from spangrad.errors import EnvironmentsError
from spangrad.processes import Child, answers, free_ports, own_command, wait_until

AGENTS = Path(__file__).resolve().parent.parent / "agents"
CLIENTS, STEPS = 8, 6


class Player:
    """A client that plays episodes, one after the other, each with a secret of its own."""

    def __init__(self, number: int, url: str, log: Path) -> None:
        self.number, self.url, self.log = number, url, log
        self.answered: set[str] = set()
        """Steps that were answered: secret and action."""
        self.lost = self.finished = 0
        self.wrong: list[str] = []
        self.random = random.Random(number)

    def play(self, until: float) -> None:
        episode = 0
        while time.monotonic() < until:
            episode += 1
            try:
                self._episode(self.number * 100_000 + episode * 100)
                self.finished += 1
            except EnvironmentsError:
                self.lost += 1

    def _episode(self, secret: int) -> None:
        environment = OpenEnvServer([self.url], wait_seconds=30)
        try:
            environment.reset({"secret": secret, "log": str(self.log)})
            actions = [secret + number + 1 for number in range(STEPS)]
            for number, action in enumerate(actions):
                if self.random.random() < 0.2:
                    environment._connection._connection.close()  # the network fails as well
                result = environment.step(str(action))
                self.answered.add(f"{secret} {action}")
                if result.observation != {"played": actions[: number + 1]}:
                    self.wrong.append(f"{actions[: number + 1]} was answered by {result.observation}")
        finally:
            environment.close()


async def test_sessions_kills_play_no_step_twice_and_mix_no_states(tmp_path: Path) -> None:
    await killed(tmp_path, kills=6, seconds=6)


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_sessions_fifty_kills_play_no_step_twice_and_mix_no_states(tmp_path: Path) -> None:
    await killed(tmp_path, kills=50, seconds=75)


async def killed(directory: Path, kills: int, seconds: float) -> None:
    """Play for a time, and kill a process now and then: each fifth time the server, else one of its processes."""
    (port,) = free_ports(1)
    url, log = f"http://127.0.0.1:{port}", directory / "steps"

    def start() -> Child:
        words = ("env", "serve", "guess_game:Guess", "--directory", str(AGENTS), "--port", str(port), "--shards", "2")
        child = Child("environments", own_command(*words), directory / "env.log", inherit_settings=False)
        wait_until(lambda: answers(f"{url}/health"), 60, "environments", [child])
        return child

    child = await asyncio.to_thread(start)
    players = [Player(number, url, log) for number in range(CLIENTS)]
    end = time.monotonic() + seconds
    playing = [asyncio.create_task(asyncio.to_thread(player.play, end)) for player in players]
    descendants: list[psutil.Process] = []
    try:
        for number in range(1, kills + 1):
            await asyncio.sleep(seconds / (kills + 1))
            processes = await asyncio.to_thread(_shards, child)
            descendants += processes
            if number % 5 == 0:
                os.kill(child.process.pid, signal.SIGKILL)
                await asyncio.to_thread(child.process.wait)
                child = await asyncio.to_thread(start)
            elif processes:
                _kill(random.choice(processes))
        await asyncio.gather(*playing)
    finally:
        await asyncio.to_thread(child.stop)
    assert [wrong for player in players for wrong in player.wrong] == []
    played = Counter(line for line in log.read_text().splitlines() if not line.endswith("closed"))
    assert {line: times for line, times in played.items() if times > 1} == {}
    assert set[str]().union(*(player.answered for player in players)) <= played.keys()
    assert sum(player.finished for player in players) > CLIENTS
    assert sum(player.lost for player in players) > 0
    await asyncio.to_thread(wait_until, lambda: not any(map(_runs, descendants)), 10, "the end of all processes")


def _shards(child: Child) -> list[psutil.Process]:
    return [process for process in psutil.Process(child.process.pid).children() if "runner.sessions.shard" in _words(process)]


def _words(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def _kill(process: psutil.Process) -> None:
    try:
        process.kill()
    except psutil.NoSuchProcess:
        pass


def _runs(process: psutil.Process) -> Any:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
