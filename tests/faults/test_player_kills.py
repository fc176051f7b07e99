"""Matches while everything around them is killed: the queue, workers, the processes in which matches run, and the players' endpoint."""

from __future__ import annotations

import asyncio
import random
import shutil
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path

import pytest

from runner.queue.client import QueueClient
from spangrad import semconv
from tests.agents.relay import TURNS, lines_by_game
from tests.support.runners import new_rollouts, queue_settings, runner_services, until_ended
from tests.support.worker_kills import WORKERS, Victims, require_no_orphan, require_once

AGENTS = Path(__file__).resolve().parents[1] / "agents"
ROLLOUTS = 120
KILLS = 50
TURN_SECONDS = 1.0


class Players:
    """The endpoint of both players: each replies with its token. Killed, it breaks off what it was asked; sometimes it is late."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self.dying = 0

    def kill(self) -> None:
        self.dying += self._chance.randint(1, 4)

    def reply(self, messages: list[dict[str, str]]) -> str:
        delay = self._chance.choice([0.0] * 60 + [0.05] * 30 + [2 * TURN_SECONDS])
        time.sleep(delay)
        if self.dying > 0:
            self.dying -= 1
            raise ConnectionAbortedError("killed")
        return messages[-1]["content"].splitlines()[-1]


@pytest.mark.slow
@pytest.mark.timeout(1800)
async def test_players_killed_50_times_play_no_turn_twice_or_out_of_order(
    queue_db: str, tmp_path: Path, report: Callable[[str], None]
) -> None:
    chance, log = random.Random(26), tmp_path / "relay.log"
    players = Players(random.Random(27))
    settings = queue_settings(queue_db, queue__lease_seconds=3, max_attempts=KILLS + 2)
    episode = {"turn_seconds": TURN_SECONDS, "turn_tokens": 4}
    with runner_services(tmp_path, queue__url=settings.queue.url, concurrency=3, episode=episode) as services:
        services.gateway.reply = players.reply
        shutil.copy(AGENTS / "relay.py", tmp_path)

        def start_worker() -> None:
            services.start_worker(agent=("--environment", "relay:Relay"), env={"RELAY_LOG": str(log)}, max_attempts=KILLS + 2)

        victims = Victims(services, settings, chance, start_worker)
        try:
            async with QueueClient.of(settings.queue, retry_seconds=300) as client:
                rollouts = new_rollouts(ROLLOUTS)
                await client.enqueue("run", rollouts)
                for _ in range(WORKERS):
                    start_worker()
                for number in range(KILLS):
                    await until_ended(client, min(2 * (number + 1), ROLLOUTS))
                    await asyncio.sleep(chance.random() * 0.4)
                    if number % 4 == 0:
                        players.kill()
                        victims.killed["player"] += 1
                    else:
                        await asyncio.to_thread(victims.kill_one)
                attempts = await require_once(client, services, [str(rollout.rollout_id) for rollout in rollouts])
                await require_no_orphan(services)
        finally:
            victims.server.stop()
        returns = defaultdict[str, float](float)
        for span in services.sink.spans:
            for _, attributes in span.events:
                if semconv.REWARD_ROLE in attributes:
                    returns[span.trace_id] += float(str(attributes[semconv.EVALUATION_SCORE]))
    games = lines_by_game(log)
    whole = [name for name, lines in games.items() if len(lines) == 1 + len(TURNS)]
    assert len(whole) >= ROLLOUTS
    assert len(returns) >= ROLLOUTS
    assert set(returns.values()) == {0.0}
    reasons = Counter(str(reason or "succeeded") for reason in attempts.values())
    forfeits = sum("forfeit" in line for lines in games.values() for line in lines)
    report(f"{dict(victims.killed)} killed; attempts: {dict(reasons)}; {forfeits} forfeits")
    assert victims.killed.keys() == {"server", "worker", "host", "player"}
