"""Seats of served games through our client: what happens before a player's first turn is not lost."""

from __future__ import annotations

import asyncio
from pathlib import Path

from runner.sessions.server import running
from runner.sessions.shards import ShardCommand
from spangrad.episode.adapters.openenv_server import OpenEnvServer
from tests.support.runners import environment_service_settings

AGENTS = Path(__file__).resolve().parent.parent / "agents"


def play(url: str, role: str, task: object, reply: str) -> tuple[float, int]:
    """Play to the end; an empty reply is the last line that was observed. Return the sum of the rewards, and the number of steps."""
    seat = OpenEnvServer([f"{url}?session_id=game&role={role}"])
    text, total, steps, done = seat.reset(task), 0.0, 0, False
    while not done:
        result = seat.step(reply or text.splitlines()[-1])
        text, total, steps, done = result.observation, total + (result.reward or 0.0), steps + 1, result.done
    seat.close()
    return total, steps


async def played(environment: str, roles: tuple[str, str], task: object, reply: str = "", **variables: str) -> list[tuple[float, int]]:
    async with running(environment_service_settings(), {"game": ShardCommand(environment, AGENTS, variables)}, 1, 8) as url:
        return list(await asyncio.gather(*(asyncio.to_thread(play, url, role, task, reply) for role in roles)))


async def test_env_seat_earns_rewards_from_before_its_first_turn(tmp_path: Path) -> None:
    assert await played("relay:Relay", ("white", "black"), {}, RELAY_LOG=str(tmp_path / "log")) == [(0.5, 3), (-0.5, 3)]


async def test_env_seat_of_a_game_ended_before_its_first_turn_is_done_at_its_first_step() -> None:
    assert await played("nim:Nim", ("first", "second"), {"sticks": 1}, "1") == [(1.0, 1), (-1.0, 1)]
