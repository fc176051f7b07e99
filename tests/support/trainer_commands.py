"""`spangrad train` as processes, each on a branch of its own, over one real span store; and what they have trained.

In: a store, a model, settings by their fields' names. Out: processes, logs, versions and weights. Invariant: `loaded` leaves no process.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import psutil
from safetensors.numpy import load_file

from spangrad.processes import wait_until
from spangrad.settings import Settings, StoreSettings
from spangrad.types import VersionStatus
from tests.support.built_rollouts import BuiltRollouts
from tests.support.policies import trainer_key, trainer_settings
from tests.support.worker_kills import lives
from trainer.ledger.ledger import Ledger
from trainer.ledger.tables import LedgerVersion
from trainer.publish import checkpoint

STEPS = 4
LIMIT_SECONDS = 300
"""Time limit of a start, of a run and of an end; Ray alone takes a minute on a slow machine."""
LOADED = "is loaded on cpu"
"""Text of the log once the weights are loaded."""


@dataclass
class TrainerCommands:
    """A store that holds STEPS groups, and trainers of it, each on a branch of its own."""

    store: StoreSettings
    model: Path
    directory: Path
    run: str = field(default_factory=lambda: f"ray-{uuid.uuid4().hex[:8]}")

    def settings(self, branch: str) -> Settings:
        return Settings(
            store=self.store,
            trainer=trainer_settings(run_id=self.run, branch=f"{self.run}-{branch}", directory=self.directory / branch, model=self.model),
        )

    def start(self, branch: str, environment: Mapping[str, str] | None = None, **changes: object) -> subprocess.Popen[str]:
        values: dict[str, object] = {
            "store.url": self.store.url, "store.otlp_endpoint": self.store.otlp_endpoint, "trainer.weight_sync.publish": "false",
            "trainer.directory": self.directory / branch, "trainer.sampling.groups_per_batch": 1,
            "trainer.optim.learning_rate": 1e-3, "trainer.sampling.max_staleness": 99,
            "trainer.branch": f"{self.run}-{branch}", "trainer.run_id": self.run, "trainer.model": self.model,
            **{f"trainer.{trainer_key(name)}": value for name, value in changes.items()},
        }  # fmt: skip
        words = [word for name, value in values.items() for word in ("--set", f"{name}={value}")]
        command = [sys.executable, "-m", "spangrad", "train", "--once", *words]
        with self.log(branch).open("a") as log:
            return subprocess.Popen(command, stderr=log, text=True, env={**os.environ, "SPANGRAD_CONFIG": "", **(environment or {})})

    def log(self, branch: str) -> Path:
        return self.directory / f"{branch}.log"

    def run_whole(self, branch: str, environment: Mapping[str, str] | None = None, **changes: object) -> None:
        assert self.start(branch, environment, **changes).wait(LIMIT_SECONDS) == 0, self.log(branch).read_text()

    def story(self, branch: str) -> list[tuple[int, VersionStatus | None, list[str]]]:
        """Each version with its rollouts; a status of None is a step under way."""
        settings = self.settings(branch).trainer
        ledger = Ledger(settings.directory, settings.policy, settings.branch)
        try:
            return [
                (version.version, version.status, sorted(row.rollout_id for row in ledger.batch(version.policy_version.batch_id or "")))
                for version in ledger.versions()
            ]
        finally:
            ledger.close()

    def committed(self, branch: str) -> list[LedgerVersion]:
        """Committed versions, in order, without the first."""
        settings = self.settings(branch).trainer
        ledger = Ledger(settings.directory, settings.policy, settings.branch)
        try:
            return [version for version in ledger.versions() if version.status is VersionStatus.COMMITTED][1:]
        finally:
            ledger.close()

    def checksums(self, branch: str) -> list[str]:
        return [version.policy_version.checksum for version in self.committed(branch)]

    def trained(self, branch: str) -> list[list[str]]:
        """The rollouts of each committed batch, in order."""
        if not (self.settings(branch).trainer.directory / "ledger.db").exists():
            return []
        return [batch for _, status, batch in self.story(branch) if status is VersionStatus.COMMITTED and batch]

    def weights(self, branch: str, version: int) -> dict[str, np.ndarray]:
        settings = self.settings(branch).trainer
        return load_file(checkpoint.version_directory(settings, version) / checkpoint.WEIGHTS)

    def agree(self, branch: str, other: str, share: float = 1e-4) -> bool:
        """Return whether the weights after training on two branches differ by rounding alone.

        All weights are judged together: Adam moves one whose gradient is rounding noise as far as any other, and so in any direction.
        """
        begun, left, right = load_file(self.model / "model.safetensors"), self.weights(branch, STEPS), self.weights(other, STEPS)
        return distance(left, right) < share * distance(left, begun)


def with_groups(store: StoreSettings, model: Path, directory: Path) -> TrainerCommands:
    """Put STEPS groups into the store; return trainers of them."""
    trainers = TrainerCommands(store, model, directory)
    world = BuiltRollouts(trainers.settings("world"), model)
    for i in range(STEPS):
        world.group(f"g{i}", [1.0, 0.0, 0.25], calls=({}, {}))
    return trainers


@contextlib.contextmanager
def loaded(service: TrainerCommands, branch: str) -> Generator[tuple[subprocess.Popen[str], list[psutil.Process]]]:
    """A trainer with two workers that has loaded its weights, and every process that it started; at the end none may be left."""
    trainer = service.start(branch, workers__per_node=2)
    try:
        end = time.monotonic() + LIMIT_SECONDS
        while LOADED not in (service.log(branch).read_text() if service.log(branch).exists() else ""):
            assert trainer.poll() is None, service.log(branch).read_text()
            assert time.monotonic() < end, service.log(branch).read_text()
            time.sleep(0.02)
        family = psutil.Process(trainer.pid).children(recursive=True)
        yield trainer, family
        trainer.wait(LIMIT_SECONDS)
    finally:
        trainer.kill()
        trainer.wait()
    # Ray's own agents notice the death of a cluster that could not say goodbye after a minute or two.
    wait_until(lambda: not any(lives(process) for process in family), LIMIT_SECONDS, "the end of every process of the trainer's")


def distance(left: dict[str, np.ndarray], right: dict[str, np.ndarray]) -> float:
    return sum(float(np.square(left[name] - right[name], dtype=np.float64).sum()) for name in left) ** 0.5
