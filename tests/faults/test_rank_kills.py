"""Ranks under Ray, their trainer, their queue of rows and Ray itself killed while a trainer trains: nothing is trained twice or skipped.

The span store is fixed, all else real processes; the weights are those of a run that nothing disturbed, bit by bit (law 4).
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from random import Random

import psutil
import pytest

from spangrad.processes import wait_until
from spangrad.settings import StoreSettings
from tests.support.trainer_commands import LIMIT_SECONDS, LOADED, STEPS, TrainerCommands, with_groups
from tests.support.worker_kills import lives

KILLED = {
    "trainer": "-m spangrad train",
    "rank": "ray::WorkerDict",
    "queue": "ray::TransferQueueController",
    "rows": "ray::SimpleStorageUnit",
    "raylet": "/raylet/raylet ",
    "gcs": "/gcs_server ",
}
"""Words of the command line of each process that is killed."""
KILLS = int(os.environ.get("FAULTS_KILLS", "2"))
"""Number of kills; FAULTS_SEED repeats a run."""


@pytest.mark.slow
@pytest.mark.timeout(900 + 600 * KILLS)
def test_ranks_trainer_and_ray_killed_at_random_points_end_with_undisturbed_weights(
    store: StoreSettings, tiny_model: Path, tmp_path: Path, chance: Random, report: Callable[[str], None]
) -> None:
    service, fell, runs = with_groups(store, tiny_model, tmp_path), Counter[str](), 0
    expected = [[f"g{i}-{j}" for j in range(3)] for i in range(STEPS)]
    service.run_whole("undisturbed", workers__per_node=2)
    family: set[psutil.Process] = set()
    while fell.total() < KILLS:
        runs += 1
        branch, done = f"chance-{runs}", list[list[str]]()
        while len(done) < STEPS:
            trainer = service.start(branch, workers__per_node=2, lease_seconds=3)
            kind = chance.choice(list(KILLED)) if fell.total() < KILLS else ""
            killed = bool(kind) and kill_at_random(service, branch, trainer, kind, chance, family)
            code = trainer.wait(LIMIT_SECONDS)
            fell[kind] += killed
            assert code in ({0, 1, -signal.SIGKILL} if killed else {0}), (kind, service.log(branch).read_text()[-3000:])
            done = service.trained(branch)
            assert done == expected[: len(done)], (kind, "a batch was repeated or skipped")
        assert service.checksums(branch) == service.checksums("undisturbed")
    wait_until(lambda: not any(lives(process) for process in family), LIMIT_SECONDS, "the end of every process of the trainers'")
    report(f"{fell.total()} kills in {runs} runs of {STEPS} steps: {dict(sorted(fell.items()))}")


def kill_at_random(
    service: TrainerCommands, branch: str, trainer: subprocess.Popen[str], kind: str, chance: Random, family: set[psutil.Process]
) -> bool:
    """Kill a process of a trainer, at an instant of its start or of its steps; return whether there was one to kill."""
    log = service.log(branch)
    seen, in_start, patience = log.read_text().count(LOADED), chance.random() < 0.3, chance.uniform(0, 20 if chance.random() < 0.3 else 3)
    end = time.monotonic() + LIMIT_SECONDS
    while not in_start and trainer.poll() is None and log.read_text().count(LOADED) == seen and time.monotonic() < end:
        time.sleep(0.02)
    if not in_start or kind == "trainer":
        time.sleep(patience)
    while trainer.poll() is None and time.monotonic() < end:
        with contextlib.suppress(psutil.NoSuchProcess):
            whole = [psutil.Process(trainer.pid), *psutil.Process(trainer.pid).children(recursive=True)]
            family |= {*whole[1:]}
            named = [process for process in whole if KILLED[kind] in " ".join([*process.cmdline(), ""])]
            if named:
                named[-1].kill()
                return True
        time.sleep(0.05)
    return False
