"""Trainers whose store, optimizer and gateway are fakes: on rollouts and on files; everything between the fakes is real."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from examples.two_tools.model import WORDS, word_tokenizer
from spangrad.settings import BuilderSettings, FinetuneSettings, Settings, StoreSettings, TrainerSettings
from spangrad.types import PolicyVersion, VersionStatus
from spangrad.weights.shards import TensorSums
from tests.support.policies import trainer_settings, transition_row
from tests.support.receivers import sums_of_arrays
from trainer.credit.assignment import Units
from trainer.data.batch import Batch, TokenValues
from trainer.data.source import BatchRollout, Group, Loaded
from trainer.ledger.ledger import BatchLease, Ledger
from trainer.ledger.mirror import Mirror
from trainer.ledger.recovery import newest_version, open_ledger, prepare, running_trainer
from trainer.ledger.tables import LedgerVersion
from trainer.loop import Trainer
from trainer.publish import checkpoint
from trainer.publish.lora import adapter_of
from trainer.publish.publisher import GatewayRefusedError, Publisher
from trainer.publish.rank_sender import RankAddress
from trainer.restoring import restore
from trainer.sft.examples import Example
from trainer.sft.files import ExampleFile
from trainer.sft.rendering import TokenSequence
from trainer.sft.training import FileRun, finetune
from trainer.shutdown import Shutdown

if TYPE_CHECKING:
    from trainer.optim.optimizer import VerlOptimizer
    from trainer.sft.optimizer import FileOptimizer

# A trainer whose store, optimizer and gateway are fakes: everything between them is real.

SPEC = BuilderSettings().spec
TRANSACTION = {"undone_on_error", "begin", "write", "commit"}
"""Functions of `trainer.step` at whose every line a process may die."""


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

    def load_batch(self, rollouts: Sequence[BatchRollout]) -> Loaded:
        """It has one revision of each rollout."""
        return self.load(list(dict.fromkeys(rollout.group for rollout in rollouts)))

    def load(self, groups: Sequence[Group]) -> Loaded:
        version = self.version if isinstance(self.version, int) else self.version()
        rollouts = [(group, f"{group.group_id}-{i}", self.rewards[i]) for group in groups for i in range(2)]
        rows = [
            transition_row(
                rollout,
                rewards=(reward,),
                **{"GroupId": group.group_id, "BuildSpec": SPEC, "Version": version, **self.changes.get(group.group_id, {})},  # type: ignore[arg-type]
            )
            for group, rollout, reward in rollouts
        ]
        return Loaded([BatchRollout(group, rollout, 0, 0) for group, rollout, _ in rollouts], pl.DataFrame(rows))


@dataclass
class FakeOptimizer:
    """Adds 1 to its only weight at each step."""

    weight: float = 0.0
    fails: BaseException | None = None
    interrupted: bool = False
    batches: list[Batch] = field(default_factory=list)
    data_parallel_size: int = 1
    versions_to_hold: int = 0
    rank_senders: Sequence[RankAddress] = ()
    pass_seconds: dict[str, float] = field(default_factory=dict)

    def step(self, batch: Batch, before_update: Callable[[], None] = lambda: None) -> dict[str, float]:
        self.batches.append(batch)
        self.token_values = TokenValues(batch.advantages, batch.logprobs, -batch.logprobs)
        if self.fails:
            raise self.fails
        if self.interrupted:
            os.kill(os.getpid(), signal.SIGTERM)
        before_update()
        self.weight += batch.trainable
        return {"loss": 0.5, "grad_norm": 1.0, "logprob_gap_max": 2e-6, "updated": float(batch.trainable)}

    def weights(self) -> Iterator[tuple[str, np.ndarray]]:
        yield "weight", np.array([self.weight], np.float32)

    def weight_sums(self) -> dict[str, TensorSums]:
        return sums_of_arrays(dict(self.weights()), "float32")

    def collect(self, *, state: bool = True) -> None:
        self.collected, self.with_state = self.weight, state

    def write(self, directory: Path) -> None:
        save_file({"weight": np.array([self.collected], np.float32)}, directory / "model.safetensors")
        if self.with_state:
            (directory / checkpoint.STATE).mkdir()
            (directory / checkpoint.STATE / "weight").write_text(str(self.collected))

    def offload(self) -> None:
        """It has no device."""

    def load_back(self) -> None:
        """It has no device."""

    def load_state(self, directory: Path) -> None:
        self.weight = float((directory / checkpoint.STATE / "weight").read_text())

    def load_weights(self, directory: Path) -> None:
        self.weight = float(load_file(directory / "model.safetensors")["weight"][0])

    def hold(self, checkpoints: Sequence[Path]) -> None:
        """It compares no calls with earlier weights."""

    def close(self) -> None:
        pass


class Cutting(FakeOptimizer):
    """Has something happen to the world at its second step."""

    def __init__(self, cut: Callable[[], object]) -> None:
        super().__init__()
        self.cut = cut

    def step(self, batch: Batch, before_update: Callable[[], None] = lambda: None) -> dict[str, float]:
        metrics = super().step(batch, before_update)
        if self.weight == 2:
            self.cut()
        return metrics


class FakeMirror(Mirror):
    """Writes to a list what the real one writes to the store."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self.written: list[LedgerVersion] = []

    def catch_up(self, since: int = 0) -> int:
        self.written += [version for version in self._ledger.versions() if version.version >= since]
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


def write_base(directory: Path, weight: float = 0.0) -> Path:
    """A model directory that holds one weight."""
    directory.mkdir()
    save_file({"weight": np.array([weight], np.float32)}, directory / "model.safetensors")
    (directory / "tokenizer.json").write_text("{}")
    (directory / "config.json").write_text("{}")
    return directory


def settings(base: Path, directory: Path, **changes: object) -> Settings:
    """Return the settings of a trainer that takes two groups a batch, with a staleness of at most 9 versions."""
    facts = {"run_id": "run", "model": base, "directory": directory, "groups_per_batch": 2, "poll_seconds": 0.001, "max_staleness": 9}
    return Settings(trainer=trainer_settings(**{**facts, **changes}))  # type: ignore[arg-type]


def wired(chosen: Settings, source: FakeSource, optimizer: FakeOptimizer | None = None) -> Trainer:
    """A trainer whose store and gateway are fakes, begun."""
    ledger = open_ledger(chosen)
    prepare(ledger, chosen)
    with running_trainer(ledger, chosen) as newest:
        tokenizer = newest.tokenizer_hash
    source.changes = {name: {"TokenizerHash": tokenizer, **source.changes.get(name, {})} for name in source.names}
    served = chosen.trainer.directory / "served.json"
    if not served.exists():
        served.write_text("[0]")
    return begun(chosen, ledger, source, FakeMirror(ledger), FakePublisher(served), optimizer)


def begun(
    chosen: Settings, ledger: Ledger, source: Any, mirror: Mirror, publisher: Publisher | None, optimizer: FakeOptimizer | None = None
) -> Trainer:
    """A trainer as `train` wires it, whose optimizer is a fake; a prepared ledger is given."""
    newest, load = newest_version(ledger), partial(restored, ledger=ledger, source=source, settings=chosen)
    trainer = Trainer(
        settings=chosen,
        ledger=ledger,
        source=source,
        optimizer=optimizer or load(newest),
        normalise=normalise,
        mirror=mirror,
        publisher=publisher,
        shutdown=Shutdown(),
        loaded=newest,
        load_optimizer=load,
    )
    trainer.start()
    return trainer


def normalise(units: Units) -> NDArray[np.float64]:
    """The winner's value is 1, the loser's -1."""
    return units.values * 2 - 1


def restored(version: LedgerVersion, ledger: Ledger, source: Any, settings: Settings) -> FakeOptimizer:
    """The optimizer of a version, as `train` restores it."""
    return restore(version, ledger, source, settings.trainer, normalise, lambda _: FakeOptimizer())  # type: ignore[arg-type, return-value]


def committed(trainer: Trainer) -> dict[int, list[str]]:
    """The rollouts of each committed version's batch."""
    versions = [version for version in trainer.ledger.versions() if version.status is VersionStatus.COMMITTED]
    return {
        version.version: [row.rollout_id for row in trainer.ledger.batch(version.policy_version.batch_id or "")] for version in versions
    }


# Settings of losses.


def mostly_slow(values: Iterable[Any], quick: Collection[Any]) -> list[Any]:
    """Return parameters of a test, of which those that are not quick are marked slow."""
    return [pytest.param(value, marks=[] if value in quick else [pytest.mark.slow]) for value in values]


LOSS_OPTIONS: dict[str, dict[str, float]] = {
    "clip_cov": {"clip_cov_ratio": 0.3, "clip_cov_lb": 0.0, "clip_cov_ub": 5.0},
    "kl_cov": {"kl_cov_ratio": 0.3, "ppo_kl_coef": 1.0},
    "dro": {"dro_beta": 0.5},
    "sapo": {"tau_pos": 1.0, "tau_neg": 1.5},
}
"""Options of losses that differ from other losses only with them, on a small batch."""


def loss_settings(name: str, **changes: Any) -> TrainerSettings:
    """Return the settings of a trainer with a loss and its options for the fixed batch."""
    return trainer_settings(loss__name=name, loss__options=LOSS_OPTIONS.get(name, {}), **changes)  # type: ignore[arg-type]


# Files of examples, and a run over files whose optimizer is a fake: everything else of it is real.

NOBODY = StoreSettings(url="http://127.0.0.1:9")
"""A store that is away: a run over files needs none."""


def write_policy(directory: Path, **config: Any) -> Path:
    """A model directory with the two-tools tokenizer, one weight and a configuration."""
    from safetensors.numpy import save_file

    directory.mkdir()
    word_tokenizer(WORDS).save_pretrained(directory)
    facts = {"vocab_size": len(WORDS), "max_position_embeddings": 24, **config}
    (directory / "config.json").write_text(json.dumps({name: value for name, value in facts.items() if value is not None}))
    save_file({"weight": np.zeros(1, np.float32)}, directory / "model.safetensors")
    return directory


def write_rows(file: Path, rows: Sequence[Any]) -> Path:
    """A JSON lines file."""
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def meta(rollout: str, group: str = "g", *, mode: str = "train", **changes: Any) -> dict[str, Any]:
    """Return the field `meta` of an exported row."""
    about = {"run": "run", "mode": mode, "group": group, "rollout": rollout, "attempt": 0, "build_spec": "spec", "revision": 0}
    return {"meta": {**about, **changes}}


def tokens(*ids: int, reply: int = 1, **more: Any) -> dict[str, Any]:
    """A row with ids, the last of which are trained."""
    return {"input_ids": list(ids), "loss_mask": [0] * (len(ids) - reply) + [1] * reply, **more}


def finetune_settings(base: Path, directory: Path, store: StoreSettings = NOBODY, **changes: Any) -> Settings:
    """Return the settings of a run over files with three epochs of two steps; `trainer` changes that section."""
    trainer = {"run_id": "run", "model": base, "directory": directory, "publish": False, "traces": False, **changes.pop("trainer", {})}
    facts = {"epochs": 3, "batch_size": 2, "held_out": 0.0, **changes}
    return Settings(store=store, trainer=trainer_settings(**trainer), finetune=FinetuneSettings(**facts))


def finetuned(chosen: Settings, *files: Path, method: Any = "sft", **options: Any) -> FileRun:
    """A run that nothing stopped."""
    done = finetune(chosen, method, files, **options)
    assert done
    return done


def example(*sequences: tuple[list[int], list[int]]) -> Example:
    return Example(tuple(TokenSequence(ids, mask) for ids, mask in sequences), "unit", ExampleFile(Path("f"), "00", 1), ())


PROMPT = [1, 4, 7, 11, 2, 1, 5]
REPLY = [0] * 7
EXAMPLES = [
    example(([*PROMPT, 9, 11, 2], [*REPLY, 1, 1, 1])),
    example(([*PROMPT, 10, 12, 2, 1, 6, 8, 2, 1, 5, 9, 2], [*REPLY, 1, 1, 1, *[0] * 6, 1, 1])),
    example(([*PROMPT, 10], [*REPLY, 1])),
]
"""Examples of different lengths; the second one has two replies, and an observation between them."""
PAIRS = [
    example(([*PROMPT, 9, 11, 2], [*REPLY, 1, 1, 1]), ([*PROMPT, 10, 11, 2, 1, 6, 8, 2, 1, 5, 9, 2], [*REPLY, 1, 1, 1, *[0] * 6, 1, 1])),
    example(([*PROMPT, 10, 12], [*REPLY, 1, 1]), ([*PROMPT, 9], [*REPLY, 1])),
    example(([*PROMPT, 14], [*REPLY, 1]), ([*PROMPT, 13, 2], [*REPLY, 1, 1])),
]
"""Replies of several lengths; the first pair's rejected one has two turns."""


# Places of ledgers, by name.

Place = Callable[..., Path | str]
"""Function of a name that returns the directory or database of a ledger: the same one at each call."""


# Checkpoints of real engines.


def save(engine: VerlOptimizer | FileOptimizer, directory: Path) -> None:
    """Write what an engine holds into a directory, which is made; a state in it is replaced."""
    directory.mkdir(exist_ok=True)
    shutil.rmtree(directory / checkpoint.STATE, ignore_errors=True)
    engine.collect()
    engine.write(directory)


def written(engine: VerlOptimizer, base: Path, directory: Path) -> checkpoint.Checkpoint:
    """Write what an engine holds as version 1 of policy `p`; `base` is the model that it began with."""
    branch = engine.settings.model_copy(update={"directory": directory, "policy": "p", "branch": "main"})
    return checkpoint.write(branch, BatchLease("b", 1, 0), base, partial(save, engine), adapter_of(base, engine.settings))
