"""`python -m examples.league`: one policy learns both roles of gomoku, against itself and its older versions, which are rated by role."""

from __future__ import annotations

import asyncio
import json
import random
import shutil
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

from commands.demo.services import TrainingSupervisor, make_model
from commands.demo.settings import SETTINGS, write_settings
from examples.gomoku.__main__ import EXAMPLE
from examples.gomoku.game import Gomoku
from examples.league.ratings import draw, wait_for_ratings
from examples.learning.command import run_command
from examples.learning.example import CHECKOUT, GROUP_SIZE, write_questions
from examples.learning.players import with_players
from examples.learning.report import seconds_by_part
from examples.learning.run import example_settings, keep_to_cores
from examples.learning.success import role_success
from runner.runner import Runner
from runner.workers.agents import CallableAgent
from spangrad.client.task_files import read_tasks
from spangrad.processes import free_ports
from spangrad.settings import Settings
from spangrad.settings.sources import explain_settings, load_settings
from spangrad.supervisor.run_directory import fresh_directory
from spangrad.types import Mode
from trainer.ledger.ledger import Ledger
from trainer.ledger.tables import ledger_location
from trainer.publish.publisher import Publisher

NAME = "league"
"""Name of the example, and of the policy."""
PAST = "past"
"""Name under which one older version is served."""
ROLES = tuple(Gomoku.roles)
STEPS = 60
GROUPS_OF_EACH = 4
"""Groups of a step in each pairing."""
DRAWN_EVERY = 5
"""Steps after which another older version is drawn."""
MEASURED_EVERY = 10
HELD_OUT = 64
"""Held-out openings of each pairing of a measurement."""
SCRIPT = {"script": "examples.gomoku.script:small"}
OWN, OLDER = {"model": NAME}, {"model": PAST}
_FIRST, _SECOND = ROLES
TRAINED: Mapping[str, Mapping[str, object]] = {
    "self-play": {_FIRST: OWN, _SECOND: OWN},
    "first-past": {_FIRST: OWN, _SECOND: OLDER},
    "second-past": {_FIRST: OLDER, _SECOND: OWN},
}
"""Pairings that are trained: players by role."""
AGAINST_SCRIPT: Mapping[str, Mapping[str, object]] = {
    "first-script": {_FIRST: OWN, _SECOND: SCRIPT},
    "second-script": {_FIRST: SCRIPT, _SECOND: OWN},
}
"""Pairings that are measured alone. The policy's role is the name's first word."""
TARGET = 0.75


def main() -> None:
    """Read the command line, and run."""
    run_command(NAME, STEPS, run, description=__doc__)


def run(directory: Path, seed: int, steps: int, held_out: int = HELD_OUT) -> dict[str, object]:
    """Train the policy, and return what the last line says."""
    with fresh_directory(directory) as fresh:
        fresh.clear()
        return _run(directory, seed, steps, held_out)


def _run(directory: Path, seed: int, steps: int, held_out: int) -> dict[str, object]:
    began = time.monotonic()
    keep_to_cores()

    def on_event(text: str) -> None:
        print(f"{time.monotonic() - began:6.1f} s  {text}", flush=True)

    drawn = EXAMPLE.questions(seed, GROUPS_OF_EACH * len(TRAINED) * steps)
    write_questions(directory / "train.jsonl", "train", drawn.train)
    write_questions(directory / "held_out.jsonl", "held-out", drawn.held_out[:held_out])
    (port,) = free_ports(1)
    values = league_settings(directory, seed, steps, port)
    settings = load_settings(values)
    write_settings(directory / SETTINGS, explain_settings(values))
    older = {**values, "gateway.policy": PAST, "engine.port": port, "engine.model": str(directory / f"model-{PAST}")}
    write_settings(directory / f"{PAST}.toml", explain_settings(older))
    on_event("making the tiny model")
    make_model([sys.executable, "-m", EXAMPLE.model, str(directory / "model"), "--seed", str(seed)], directory)
    shutil.copytree(directory / "model", directory / f"model-{PAST}")
    with TrainingSupervisor(directory, settings, on_event, further_engines={f"{PAST}.toml": f"http://127.0.0.1:{port}"}) as services:
        services.start(settings.engine.start_timeout_seconds)
        league = League(settings, services, directory, random.Random(seed), on_event)
        measured = asyncio.run(league.learn(steps))
        rated = wait_for_ratings(settings, ROLES, [version for version, _ in measured])
        parts = seconds_by_part(settings)
    (directory / "steps.jsonl").write_text("".join(f"{json.dumps({'number': number})}\n" for number in range(steps)))
    draw(directory / "ratings.png", rated)
    report: dict[str, object] = {
        "example": NAME,
        "seed": seed,
        "held_out": {role: [[version, shares[role]] for version, shares in measured] for role in ROLES},
        "ratings": [[rating.role, rating.version, rating.points] for rating in rated],
        "target": TARGET,
        "measure": EXAMPLE.measure,
        "steps": steps,
        "seconds": round(time.monotonic() - began, 1),
        **parts,
    }
    (directory / "report.json").write_text(f"{json.dumps(report)}\n")
    return report


def league_settings(directory: Path, seed: int, steps: int, port: int) -> dict[str, object]:
    """Return the settings of the run, by dotted key.

    Args:
        directory: of the run.
        seed: of sampling.
        steps: training steps.
        port: of the engine that serves an older version.
    """
    return {
        **example_settings(EXAMPLE, directory, seed, steps),
        "gateway.policy": NAME,
        "gateway.backends": [{"url": f"http://127.0.0.1:{port}", "policy": PAST}],
        "builder.selection": {"policies": f"{NAME}|{PAST}"},
        "trainer.policy": NAME,
        "trainer.run_id": NAME,
        "trainer.sampling.groups_per_batch": GROUPS_OF_EACH * len(TRAINED),
        "trainer.credit.reward_roles": [],
        "trainer.credit.by_role": True,
        "trainer.checkpoint.keep": 1000,
        "trainer.evaluation.past_policy": PAST,
        "runner.run_id": NAME,
        "runner.workers": 1,
        "runner.episode.players": {},
    }


class League:
    """Games of the policy against itself, an older version and the script."""

    def __init__(
        self, settings: Settings, services: TrainingSupervisor, directory: Path, rng: random.Random, on_event: Callable[[str], None]
    ) -> None:
        """Open what the games need.

        Args:
            settings: of the run.
            services: those that run.
            directory: of the run.
            rng: draws the older versions.
            on_event: reports progress.
        """
        self._settings, self._services, self._rng, self._on_event = settings, services, rng, on_event
        self._openings = read_tasks(directory / "train.jsonl")
        self._held_out = read_tasks(directory / "held_out.jsonl")
        self._ledger = Ledger(ledger_location(settings.trainer), NAME, settings.trainer.branch)
        self._runners: dict[str, Runner] = {}

    async def learn(self, steps: int) -> list[tuple[int, dict[str, float]]]:
        """Return the shares of held-out games that each role won against the script, by version."""
        agent = CallableAgent(EXAMPLE.agent, environment=EXAMPLE.environment, directory=CHECKOUT)
        measured: list[tuple[int, dict[str, float]]] = []
        async with AsyncExitStack() as stack:
            for name, players in (*TRAINED.items(), *AGAINST_SCRIPT.items()):
                runner = Runner(with_players(self._settings, name, players), agent)
                self._runners[name] = await stack.enter_async_context(runner)
            measured.append(await self._measure())
            for number in range(steps):
                if number % DRAWN_EVERY == 0:
                    await asyncio.to_thread(self._serve_older)
                await self._step(number)
                if (number + 1) % MEASURED_EVERY == 0 or number + 1 == steps:
                    measured.append(await self._measure())
        self._ledger.close()
        return measured

    async def _step(self, number: int) -> None:
        """Play a step's games, and wait for the version that they train."""
        version, began = self._services.served(), time.monotonic()
        tasks = self._openings[number * GROUPS_OF_EACH * len(TRAINED) :]
        await asyncio.gather(
            *(
                self._runners[name].run(
                    tasks[place * GROUPS_OF_EACH : (place + 1) * GROUPS_OF_EACH], mode=Mode.TRAIN, group_size=GROUP_SIZE
                )
                for place, name in enumerate(TRAINED)
            )
        )
        await self._services.wait_for_version(version + 1)
        self._on_event(f"step {number:3d}  {time.monotonic() - began:.1f} s")

    def _serve_older(self) -> None:
        """Serve a version that is drawn from all, each as likely as another."""
        drawn = self._rng.choice([version for version in self._ledger.versions() if version.policy_version.path])
        Publisher(self._settings.gateway).publish(replace(drawn.policy_version, policy=PAST), again=True)
        self._on_event(f"version {drawn.version} is the opponent")

    async def _measure(self) -> tuple[int, dict[str, float]]:
        """Play held-out games by the newest version; return it, and the shares that it won against the script, by role."""
        version, shares = self._services.served(), dict[str, float]()
        for name, runner in self._runners.items():
            outcomes = await runner.run(self._held_out, mode=Mode.VALIDATE, group_size=1)
            if name in AGAINST_SCRIPT:
                role = name.split("-")[0]
                shares[role] = await asyncio.to_thread(role_success, self._settings, outcomes, role, EXAMPLE.success)
        won = ", ".join(f"{role} won {share:.2f}" for role, share in shares.items())
        self._on_event(f"version {version}  against the script, held out: {won}")
        return version, shares


if __name__ == "__main__":
    main()
