"""A trainer whose store, optimizer and gateway are fakes: everything between them is real."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import polars as pl
from crash import crashes, survives
from safetensors.numpy import save_file
from sections import trainer_settings

from fakes import transition_row
from spangrad.settings import BuilderSettings, Settings
from spangrad.types import PolicyVersion, VersionStatus
from trainer import loop
from trainer.data.batch import Batch
from trainer.data.source import BatchRollout, Group, Loaded
from trainer.ledger.ledger import Ledger
from trainer.ledger.mirror import Mirror
from trainer.ledger.tables import LedgerVersion
from trainer.loop import Trainer
from trainer.publish.publisher import GatewayRefusedError, Publisher
from trainer.shutdown import Shutdown

SPEC = BuilderSettings().spec


def group(name: str) -> Group:
    return Group("run", "train", SPEC, name)


@dataclass
class FakeSource:
    """Groups of two rollouts, one that won and one that lost, all sampled by `version`."""

    names: list[str]
    version: int | Callable[[], int] = 0
    rewards: tuple[float, float] = (1.0, 0.0)
    changes: dict[str, dict[str, object]] = field(default_factory=dict)
    build_spec: str = SPEC

    def ready(self) -> list[Group]:
        return [group(name) for name in self.names]

    def release(self, groups: Iterable[Group]) -> None:
        """It names all groups each time."""

    def rescan(self) -> None:
        """It names all groups each time."""

    def load(self, groups: Sequence[Group]) -> Loaded:
        version = self.version if isinstance(self.version, int) else self.version()
        rollouts = [(one, f"{one.group_id}-{i}", self.rewards[i]) for one in groups for i in range(2)]
        rows = [
            transition_row(
                rollout,
                rewards=(reward,),
                **{"GroupId": one.group_id, "BuildSpec": SPEC, "Version": version, **self.changes.get(one.group_id, {})},  # type: ignore[arg-type]
            )
            for one, rollout, reward in rollouts
        ]
        return Loaded([BatchRollout(one, rollout, 0, 0) for one, rollout, _ in rollouts], pl.DataFrame(rows))


@dataclass
class FakeOptimizer:
    """Adds 1 to its only weight at each step."""

    weight: float = 0.0
    fails: BaseException | None = None
    interrupted: bool = False
    batches: list[Batch] = field(default_factory=list)
    data_parallel_size: int = 1

    def step(self, batch: Batch) -> dict[str, float]:
        self.batches.append(batch)
        if self.fails:
            raise self.fails
        if self.interrupted:
            os.kill(os.getpid(), signal.SIGTERM)
        self.weight += batch.trainable
        return {"loss": 0.5, "grad_norm": 1.0, "logprob_gap_max": 2e-6, "updated": float(batch.trainable)}

    def weights(self) -> Iterator[tuple[str, np.ndarray]]:
        yield "weight", np.array([self.weight], np.float32)

    def save_weights(self, directory: Path) -> None:
        save_file(dict(self.weights()), directory / "model.safetensors")

    def close(self) -> None:
        pass

    def save_state(self, directory: Path) -> None:
        (directory / "optimizer.pt").write_text(str(self.weight))


class Cutting(FakeOptimizer):
    """Has something happen to the world at its second step."""

    def __init__(self, cut: Callable[[], object]) -> None:
        super().__init__()
        self.cut = cut

    def step(self, batch: Batch) -> dict[str, float]:
        metrics = super().step(batch)
        if self.weight == 2:
            self.cut()
        return metrics


class FakeMirror(Mirror):
    """Writes to a list what the real one writes to the store."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self.written: list[LedgerVersion] = []

    def catch_up(self) -> int:
        self.written += self._ledger.versions()
        return len(self.written)

    def write(self, version: LedgerVersion) -> None:
        self.written.append(version)


class FakePublisher(Publisher):
    """A gateway that keeps what it serves in a file."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def served(self, policy: str) -> int:
        return json.loads(self._file.read_text())[-1]

    def publish(self, version: PolicyVersion, *, again: bool = False, weights: object = None) -> float:
        if version.version < self.served(version.policy) and not again:
            raise GatewayRefusedError(f"version {version.version} is not newer than what is served")
        own = self._file.with_suffix(f".{os.getpid()}")
        own.write_text(json.dumps([*json.loads(self._file.read_text()), version.version]))
        own.replace(self._file)
        return 0.25


def write_base(directory: Path) -> Path:
    """A model directory that holds one weight."""
    directory.mkdir()
    save_file({"weight": np.zeros(1, np.float32)}, directory / "model.safetensors")
    (directory / "tokenizer.json").write_text("{}")
    (directory / "config.json").write_text("{}")
    return directory


def settings(base: Path, directory: Path, **changes: object) -> Settings:
    """Of a trainer that takes two groups a batch, however stale."""
    facts = {"run_id": "run", "model": base, "directory": directory, "groups_per_batch": 2, "poll_seconds": 0.001, "max_staleness": 9}
    return Settings(trainer=trainer_settings(**{**facts, **changes}))  # type: ignore[arg-type]


def wired(chosen: Settings, source: FakeSource, optimizer: FakeOptimizer | None = None) -> Trainer:
    """A trainer as `train` wires it, begun."""
    ledger = loop.open_ledger(chosen)
    newest = loop.prepare(ledger, chosen)
    source.changes = {name: {"TokenizerHash": newest.tokenizer_hash, **source.changes.get(name, {})} for name in source.names}
    served = chosen.trainer.directory / "served.json"
    if not served.exists():
        served.write_text("[0]")
    trainer = Trainer(
        settings=chosen,
        ledger=ledger,
        source=source,
        optimizer=optimizer or saved(newest),
        normalise=lambda units: units.values * 2 - 1,
        mirror=FakeMirror(ledger),
        publisher=FakePublisher(served),
        shutdown=Shutdown(),
        loaded=newest,
        load_optimizer=saved,
    )
    trainer.start()
    return trainer


def saved(version: LedgerVersion) -> FakeOptimizer:
    """The optimizer that a version's directory holds."""
    state = Path(version.policy_version.path) / "optimizer.pt"
    return FakeOptimizer(float(state.read_text()) if state.exists() else 0.0)


def committed(trainer: Trainer) -> dict[int, list[str]]:
    """The rollouts of each committed version's batch."""
    versions = [one for one in trainer.ledger.versions() if one.status is VersionStatus.COMMITTED]
    return {one.version: [row.rollout_id for row in trainer.ledger.batch(one.policy_version.batch_id or "")] for one in versions}


def die_at_every_boundary(base: Path, directory: Path) -> int:
    """Train a batch, dying at one boundary of the step after the other and going on from there; return how many deaths there were.

    This process only forks: Polars starts threads, which do not survive a fork.
    """
    names = ["a", "b", "c", "d"]

    def train(boundary: int) -> None:
        wired(settings(base, directory / str(boundary)), FakeSource(names[:2])).run(follow=False)

    def go_on(boundary: int) -> None:
        own = directory / str(boundary)
        trainer = wired(settings(base, own), FakeSource(names))
        trainer.run(follow=False)
        batches = committed(trainer)
        assert list(batches.values()) == [[], ["a-0", "a-1", "b-0", "b-1"], ["c-0", "c-1", "d-0", "d-1"]]
        newest = loop.newest_version(trainer.ledger)
        assert (Path(newest.policy_version.path) / "optimizer.pt").read_text() == "2.0", "a step was repeated or skipped"
        here = {one.name for one in (own / "policy/main").iterdir()}
        assert here == {f"v{version}" for version in batches if version}, "an uncommitted version was left"
        assert json.loads((own / "served.json").read_text())[-1] == newest.version

    deaths = 0
    for boundary in crashes(train, Path(loop.__file__), {"step", "_commit"}):
        deaths += 1
        survives(go_on, boundary)
    return deaths


if __name__ == "__main__":
    print(die_at_every_boundary(Path(sys.argv[1]), Path(sys.argv[2])))
