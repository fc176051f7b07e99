"""Kills of served environments' processes, of their server and of players: no step twice, none out of turn, no state of another's."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from spangrad.episode.adapters.openenv_server import OpenEnvServer
from spangrad.errors import EnvironmentsError
from spangrad.processes import Child, answers, free_ports, own_command, wait_until
from tests.agents.relay import lines_by_game
from tests.support.worker_kills import lives

AGENTS = Path(__file__).resolve().parent.parent / "agents"
CLIENTS, STEPS = 8, 6
GAMES = 4
SOON = {"lease_seconds": 2, "idle_seconds": 5}
"""Times after which players of served games have left, or wait for others no longer."""


class Player:
    """A client that plays episodes, one after the other, each with a secret of its own."""

    def __init__(self, number: int, url: str, log: Path) -> None:
        self.number, self.url, self.log = number, url, log
        self.answered: set[str] = set()
        """Steps that were answered: secret and action."""
        self.lost = self.finished = 0
        self.wrong: list[str] = []
        self.random = random.Random(number)

    def play(self, over: threading.Event) -> None:
        episode = 0
        while not over.is_set() or self.finished < 2:
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


class Game:
    """Two players of a served game, one game after the other; each replies with the token that it observed last."""

    def __init__(self, number: int, url: str) -> None:
        self.number, self.url = number, url
        self.kinds = Counter[str]()
        """Games by how many players saw the end: whole, part, lost."""
        self.returns: list[float] = []
        """Sums of both returns of the games that both players saw the end of."""
        self.killed = 0
        """Number of players that are to be killed."""
        self.random = random.Random(number)

    async def play(self, over: threading.Event) -> None:
        number = 0
        while not over.is_set() or self.killed or self.kinds["whole"] < 2:
            number += 1
            name = f"{self.number}-{number}"
            returns = await asyncio.gather(*(asyncio.to_thread(self._play, name, role) for role in ("white", "black")))
            seen = [value for value in returns if value is not None]
            self.kinds["whole" if len(seen) == 2 else "part" if seen else "lost"] += 1
            if len(seen) == 2:
                self.returns.append(sum(seen))

    def _play(self, name: str, role: str) -> float | None:
        """Play to the end; return the sum of rewards. None: the game was lost, or the player killed."""
        try:
            seat = OpenEnvServer([f"{self.url}?session_id={name}&role={role}"], wait_seconds=30)
        except EnvironmentsError:
            return None
        try:
            text, total, done = seat.reset({}), 0.0, False
            while not done:
                if self.killed:
                    self.killed -= 1
                    seat._connection._connection.close()
                    return None
                if self.random.random() < 0.1:
                    seat._connection._connection.close()  # the network fails as well
                time.sleep(self.random.random() * 0.02)
                result = seat.step(text.splitlines()[-1])
                text, total, done = result.observation, total + (result.reward or 0.0), result.done
        except EnvironmentsError:
            return None
        seat.close()
        return total


async def test_sessions_kills_play_no_step_twice_and_mix_no_states(tmp_path: Path) -> None:
    await killed_sessions(tmp_path, kills=6, seconds=6)


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_sessions_fifty_kills_play_no_step_twice_and_mix_no_states(tmp_path: Path) -> None:
    await killed_sessions(tmp_path, kills=50, seconds=75)


async def test_served_games_kills_play_each_turn_once_in_order(tmp_path: Path, report: Callable[[str], None]) -> None:
    await killed_games(tmp_path, report, kills=6, seconds=9)


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_served_games_fifty_kills_play_each_turn_once_in_order(tmp_path: Path, report: Callable[[str], None]) -> None:
    await killed_games(tmp_path, report, kills=50, seconds=100)


async def killed_sessions(directory: Path, kills: int, seconds: float) -> None:
    """Kill a process now and then while clients play: each fifth time the server, else one of its processes."""
    service, log = Service("guess_game:Guess", directory), directory / "steps"
    players = [Player(number, service.url, log) for number in range(CLIENTS)]

    def kill(number: int) -> Coroutine[Any, Any, None]:
        return service.kill_server() if number % 5 == 0 else service.kill_shard()

    await service.disturb([partial(asyncio.to_thread, player.play) for player in players], kill, kills, seconds)
    assert [wrong for player in players for wrong in player.wrong] == []
    played = Counter(line for line in log.read_text().splitlines() if not line.endswith("closed"))
    assert {line: times for line, times in played.items() if times > 1} == {}
    assert set[str]().union(*(player.answered for player in players)) <= played.keys()
    assert sum(player.finished for player in players) > CLIENTS
    assert sum(player.lost for player in players) > 0
    await service.require_end()


async def killed_games(directory: Path, report: Callable[[str], None], kills: int, seconds: float) -> None:
    """Kill a player, a process or the server now and then while games of two are played."""
    log = directory / "relay.log"
    service = Service("relay:Relay", directory, {"RELAY_LOG": str(log)}, SOON)
    games = [Game(number, service.url) for number in range(GAMES)]

    async def kill(number: int) -> None:
        if number % 3 == 0:
            games[number % GAMES].killed += 1
        elif number % 5 == 0:
            await service.kill_server()
        else:
            await service.kill_shard()

    await service.disturb([game.play for game in games], kill, kills, seconds)
    kinds = sum((game.kinds for game in games), Counter[str]())
    forfeits = sum("forfeit" in line for lines in lines_by_game(log).values() for line in lines)
    report(f"games of {GAMES} pairs beside {kills} kills: {dict(kinds)}; {forfeits} forfeits")
    assert kinds["whole"] > GAMES
    assert kinds["part"] + kinds["lost"] > 0
    assert {total for game in games for total in game.returns} == {0.0}
    assert forfeits > 0 or kills < 50, "a player that is killed in a game that is lost forfeits nothing"
    await service.require_end()


class Service:
    """A server of one environment with two processes, which is started again after each kill."""

    def __init__(
        self, environment: str, directory: Path, variables: Mapping[str, str] | None = None, times: Mapping[str, int] | None = None
    ) -> None:
        (port,) = free_ports(1)
        self.url = f"http://127.0.0.1:{port}"
        words = ("env", "serve", environment, "--directory", str(AGENTS), "--port", str(port), "--shards", "2")
        set_times = [word for name, value in (times or {}).items() for word in ("--set", f"environments.{name}={value}")]
        self._command = own_command(*words, *set_times)
        self._log = directory / "env.log"
        self._variables = variables
        self._child: Child
        self._descendants: list[psutil.Process] = []

    async def disturb(
        self,
        plays: list[Callable[[threading.Event], Coroutine[Any, Any, None]]],
        kill: Callable[[int], Coroutine[Any, Any, None]],
        kills: int,
        seconds: float,
    ) -> None:
        """Serve players that play until the kills, which come at even intervals, are over: a machine that is busy starts servers late."""
        # Threads for all players and the kills: a loop's own are few on a machine of few cores.
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(4 * CLIENTS))
        await asyncio.to_thread(self._start)
        over = threading.Event()
        tasks = [asyncio.create_task(play(over)) for play in plays]
        try:
            for number in range(1, kills + 1):
                await asyncio.sleep(seconds / (kills + 1))
                await kill(number)
            await asyncio.sleep(seconds / (kills + 1))
            over.set()
            await asyncio.gather(*tasks)
        finally:
            over.set()
            await asyncio.to_thread(self._child.stop)

    async def kill_server(self) -> None:
        """Kill the server, and start it again."""
        self._descendants += await asyncio.to_thread(_shards, self._child)
        os.kill(self._child.process.pid, signal.SIGKILL)
        await asyncio.to_thread(self._child.process.wait)
        await asyncio.to_thread(self._start)

    async def kill_shard(self) -> None:
        """Kill a process of the environment."""
        processes = await asyncio.to_thread(_shards, self._child)
        self._descendants += processes
        if processes:
            _kill(random.choice(processes))

    async def require_end(self) -> None:
        """Require that no process is left."""
        await asyncio.to_thread(wait_until, lambda: not any(map(lives, self._descendants)), 60, "the end of all processes")

    def _start(self) -> None:
        self._child = Child("environments", self._command, self._log, self._variables, inherit_settings=False)
        wait_until(lambda: answers(f"{self.url}/health"), 60, "environments", [self._child])


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
