"""`python -m examples.two_gomoku`: two policies play each other and a script, and learn at once in phases."""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from itertools import islice
from pathlib import Path

from commands.demo.services import TrainingSupervisor, make_model
from commands.demo.settings import SETTINGS, write_settings
from examples.gomoku.__main__ import EXAMPLE
from examples.gomoku.game import FIRST, SECOND, Gomoku
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

NAME = "two_gomoku"
ROLES = tuple(Gomoku.roles)
"""Roles, which are the names of the policies."""
STEPS = 48
MEASURED_EVERY = 24
"""Steps between two measurements."""
HELD_OUT = 256
"""Held-out openings of a measurement."""
TARGET = 0.75
SCRIPT = {"script": "examples.gomoku.script:small"}
TOGETHER = "together"
PAIRINGS: Mapping[str, Mapping[str, object]] = {
    TOGETHER: {role: {"model": role} for role in ROLES},
    **{role: {other: {"model": role} if other == role else SCRIPT for other in ROLES} for role in ROLES},
}
"""Players by role of each pairing: both policies, and, by its role's name, each policy against the script."""
GROUPS = {TOGETHER: 6, FIRST: 4, SECOND: 14}
"""Groups of a step by pairing. A policy trains on those of two pairings; the one that moves later learns more slowly, and has more."""

Shares = Mapping[str, float]
"""Share of games won, by role."""


def main() -> None:
    """Read the command line, and run."""
    run_command(NAME, STEPS, run, description=__doc__)


def run(directory: Path, seed: int, steps: int, held_out: int = HELD_OUT) -> dict[str, object]:
    """Train both policies, and return what the last line says."""
    with fresh_directory(directory) as fresh:
        fresh.clear()
        return _run(directory, seed, steps, held_out)


def _run(directory: Path, seed: int, steps: int, held_out: int) -> dict[str, object]:
    began = time.monotonic()
    keep_to_cores()

    def on_event(text: str) -> None:
        print(f"{time.monotonic() - began:6.1f} s  {text}", flush=True)

    drawn = EXAMPLE.questions(seed, sum(GROUPS.values()) * steps)
    write_questions(directory / "train.jsonl", "train", drawn.train)
    write_questions(directory / "held_out.jsonl", "held-out", drawn.held_out[:held_out])
    (port,) = free_ports(1)
    files = policy_settings(directory, seed, steps, port)
    for policy, values in files.items():
        write_settings(directory / (SETTINGS if policy == FIRST else f"{policy}.toml"), explain_settings(values))
    settings = load_settings(files[FIRST])
    on_event("making the tiny model, with which both policies begin")
    models = [directory / f"model-{policy}" for policy in ROLES]
    make_model([sys.executable, "-m", EXAMPLE.model, str(models[0]), "--seed", str(seed)], directory)
    shutil.copytree(models[0], models[1])
    file = f"{SECOND}.toml"
    engines = {file: f"http://127.0.0.1:{port}"}
    with TrainingSupervisor(directory, settings, on_event, further_engines=engines, further_trainers=[file]) as services:
        services.start(settings.engine.start_timeout_seconds)
        games, measured = asyncio.run(_learn(settings, services, directory, steps, on_event))
        parts = seconds_by_part(settings)
    (directory / "steps.jsonl").write_text("".join(f"{json.dumps(step)}\n" for step in games))
    report: dict[str, object] = {
        "example": NAME,
        "seed": seed,
        "held_out": {role: [[step, shares[role]] for step, shares in measured] for role in ROLES},
        "target": TARGET,
        "measure": EXAMPLE.measure,
        "steps": len(games),
        "seconds": round(time.monotonic() - began, 1),
        **parts,
    }
    (directory / "report.json").write_text(f"{json.dumps(report)}\n")
    return report


def policy_settings(directory: Path, seed: int, steps: int, port: int) -> dict[str, dict[str, object]]:
    """Return the settings of each policy's engine and trainer, by dotted key: they share store, gateway, builder and ledger.

    Args:
        directory: of the run.
        seed: of sampling.
        steps: training steps.
        port: of the second policy's engine.
    """
    shared = {
        **example_settings(EXAMPLE, directory, seed, steps),
        "gateway.policy": FIRST,
        "gateway.backends": [{"url": f"http://127.0.0.1:{port}", "policy": SECOND}],
        "builder.selection": {"policies": "|".join(ROLES)},
        "trainer.run_id": NAME,
        "runner.run_id": NAME,
        "runner.workers": 1,
        "runner.episode.players": {},
        "runner.validation_sampling.temperature": 0.0,
    }

    def of(role: str) -> dict[str, object]:
        model = str(directory / f"model-{role}")
        return {
            **shared,
            "engine.model": model,
            "trainer.model": model,
            "trainer.policy": role,
            "trainer.sampling.groups_per_batch": GROUPS[TOGETHER] + GROUPS[role],
            "trainer.selection": {"agents": role},
            "trainer.phase_policies": [other for other in ROLES if other != role],
            "trainer.credit.reward_roles": [role],
        }

    return {FIRST: of(FIRST), SECOND: {**of(SECOND), "gateway.policy": SECOND, "engine.port": port}}


async def _learn(
    settings: Settings, services: TrainingSupervisor, directory: Path, steps: int, on_event: Callable[[str], None]
) -> tuple[list[dict[str, object]], list[tuple[int, Shares]]]:
    """Return what each step's games were, and the shares of games that each policy won against the script, by step."""
    agent = CallableAgent(EXAMPLE.agent, environment=EXAMPLE.environment, directory=CHECKOUT)
    openings, held_out = iter(read_tasks(directory / "train.jsonl")), read_tasks(directory / "held_out.jsonl")
    games: list[dict[str, object]] = []
    measured: list[tuple[int, Shares]] = []
    async with AsyncExitStack() as stack:
        runners: dict[str, Runner] = {}
        for name, players in PAIRINGS.items():
            runners[name] = await stack.enter_async_context(Runner(with_players(settings, name, players), agent))

        async def measure(step: int) -> None:
            played = await asyncio.gather(*(runners[role].run(held_out, mode=Mode.VALIDATE, group_size=1) for role in ROLES))
            shares = {
                role: await asyncio.to_thread(role_success, settings, outcomes, role, EXAMPLE.success)
                for role, outcomes in zip(ROLES, played, strict=True)
            }
            measured.append((step, shares))
            on_event(f"step {step:3d}  against the script, held out: {_in_words(shares)}")

        await measure(0)
        for number in range(steps):
            versions = {role: services.served(role) for role in ROLES}
            played = [
                runner.run([*islice(openings, GROUPS[name])], mode=Mode.TRAIN, group_size=GROUP_SIZE) for name, runner in runners.items()
            ]
            outcomes = dict(zip(runners, await asyncio.gather(*played), strict=True))[TOGETHER]
            for role, version in versions.items():
                await services.wait_for_version(version + 1, role)
            shares = {role: await asyncio.to_thread(role_success, settings, outcomes, role, EXAMPLE.success) for role in ROLES}
            games.append({"number": number, **shares})
            on_event(f"step {number:3d}  against each other: {_in_words(shares)}")
            if (number + 1) % MEASURED_EVERY == 0 or number + 1 == steps:
                await measure(number + 1)
    return games, measured


def _in_words(shares: Shares) -> str:
    return ", ".join(f"{role} won {share:.2f}" for role, share in shares.items())


if __name__ == "__main__":
    main()
