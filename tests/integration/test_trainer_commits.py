"""Checkpoints that are written beside the next step, by verl itself on a CPU: they hold the weights and the state of their own version."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch
from safetensors.numpy import load_file

from tests.support.policies import NO_ALARM, group_relative, sampled_rows, state_facts, trainer_settings
from tests.support.trainers import SPEC, FakeOptimizer, FakeSource, save, settings, wired
from trainer.data.batch import Batch, layout
from trainer.data.merge import separate
from trainer.data.source import BatchRollout, Group, Loaded
from trainer.ledger.tables import LedgerVersion
from trainer.loop import Trainer
from trainer.optim.optimizer import VerlOptimizer
from trainer.optim.process import gpu_of_process, prepare_process
from trainer.optim.states import snapshots

prepare_process()  # verl reads its platform when it is first imported

RATE = 1e-2
ROWS = 8
SECONDS = 30.0
"""Longest wait for the step beside a write."""


def contents(directory: Path) -> dict[str, Any]:
    """Every tensor and number of a checkpoint."""
    named: dict[str, Any] = {}

    def look(name: str, value: Any) -> None:
        if isinstance(value, dict):
            for key, inner in value.items():
                look(f"{name}.{key}", inner)
        elif isinstance(value, torch.Tensor | int | float):
            named[name] = torch.as_tensor(value)

    look("state", state_facts(directory))
    for file in directory.glob("*.safetensors"):
        look("weights", {name: torch.from_numpy(value) for name, value in load_file(file).items()})
    return named


def differing(weights: dict[str, Any], other: dict[str, Any]) -> list[str]:
    assert weights.keys() == other.keys()
    return [name for name in weights if not torch.equal(weights[name], other[name])]


def batch(model: Path, seed: int) -> Batch:
    rows = pl.DataFrame(sampled_rows(model, ROWS, temperature=1.0, seed=seed))
    return layout(separate(rows, pl.Series([1.0, -1.0] * (ROWS // 2))), lineage=[0])


@pytest.mark.parametrize(
    "changes", [{}, {"lora__rank": 4}, {"lora__rank": 4, "weight_sync__method": "adapter"}], ids=["whole", "merged", "alone"]
)
def test_checkpoint_written_while_earlier_weights_are_loaded_is_of_its_version(tiny_model: Path, tmp_path: Path, changes: dict[str, Any]):
    engine = VerlOptimizer(tiny_model, trainer_settings(learning_rate=RATE, max_staleness=1, **changes))
    engine.step(batch(tiny_model, 1))
    save(engine, tmp_path / "version")
    (tmp_path / "beside").mkdir()
    engine.collect()
    rank = engine._workers._rank  # type: ignore[union-attr]
    with snapshots.loaded(rank._engine("policy"), rank._earlier[0]):
        engine.write(tmp_path / "beside")
        save(engine, tmp_path / "earlier")
    version, earlier = contents(tmp_path / "version"), contents(tmp_path / "earlier")
    assert differing(version, earlier), "the weights in memory were others"
    assert differing(contents(tmp_path / "beside"), version) == []


class Sampled(FakeSource):
    """Groups of two rollouts that the first weights sampled."""

    def __init__(self, model: Path, names: list[str]) -> None:
        super().__init__(names)
        self.rows = {name: sampled_rows(model, 2, temperature=1.0, seed=at) for at, name in enumerate(names)}

    def load(self, groups: Sequence[Group]) -> Loaded:
        loaded = super().load(groups)
        own = ("PromptIds", "ResponseIds", "Logprobs")
        facts = [row for group in groups for row in self.rows[group.group_id]]
        rows = [
            {**row, **{name: given[name] for name in own}} for row, given in zip(loaded.transitions.rows(named=True), facts, strict=True)
        ]
        rollouts = [
            BatchRollout(Group("run", "train", SPEC, rollout.group.group_id), rollout.rollout_id, 0, 0) for rollout in loaded.rollouts
        ]
        return Loaded(rollouts, pl.DataFrame(rows, schema=loaded.transitions.schema))


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"epochs": 2, "mini_batches": 2}, id="mini-batches"),
        pytest.param({}, marks=pytest.mark.slow, id="plain"),
        pytest.param({"kl_coef": 0.1}, marks=pytest.mark.slow, id="reference"),
    ],
)
def test_run_with_checkpoints_beside_steps_equals_run_without(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]
):
    """Three versions, bit by bit; calls of the first weights are checked against held weights of earlier versions meanwhile."""
    stored: dict[bool, list[dict[str, Any]]] = {}
    pending: list[bool] = []
    for beside in (True, False):
        monkeypatch.setattr(Trainer, "_overlaps", beside)
        chosen = settings(
            tiny_model, tmp_path / str(beside), learning_rate=RATE, max_staleness=3, alarms__logprob=NO_ALARM, publish=False, **changes
        )

        def load(version: LedgerVersion, trainer: Any = chosen.trainer) -> Any:
            return VerlOptimizer(Path(version.policy_version.path), trainer)

        torch.manual_seed(0)
        trainer = wired(chosen, Sampled(tiny_model, [*"abcdef"]), FakeOptimizer())
        trainer.optimizer, trainer.load_optimizer, trainer.normalise = load(trainer.loaded), load, group_relative
        trainer.publisher = trainer.publishing = None
        step, write, begun = trainer.optimizer.step, trainer.optimizer.write, [threading.Event() for _ in range(3)]

        def stepped(rows: Batch, before_update: Any, step: Any = step, begun: Any = begun, trainer: Trainer = trainer) -> Any:
            pending.append(trainer.branch.pending is not None)
            begun[len(pending) % 3 - 1].set()
            return step(rows, before_update)

        def written(directory: Path, beside: bool = beside, write: Any = write, begun: Any = begun) -> None:
            """Write a version once the step after it has begun, where there is one."""
            number = int(directory.name.rpartition("v")[2])
            assert not beside or number == 3 or begun[number].wait(SECONDS)
            write(directory)

        trainer.optimizer.step, trainer.optimizer.write = stepped, written  # type: ignore[method-assign]
        trainer.run(follow=False)
        stored[beside] = [contents(Path(version.policy_version.path)) for version in trainer.ledger.versions()[1:]]
        trainer.close()
    assert pending == [False, True, True, False, False, False], "a step began while the version before it was written"
    assert [differing(weights, other) for weights, other in zip(stored[True], stored[False], strict=True)] == [[], [], []]
    assert differing(stored[True][0], stored[True][1])


def test_gpu_of_process_is_used_in_thread_of_another_call(monkeypatch: pytest.MonkeyPatch):
    """Ray calls methods in another thread than the constructor, and each thread has a GPU of its own choice."""
    chosen = threading.local()
    chosen.gpu = 3
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: chosen.gpu)
    monkeypatch.setattr(torch.cuda, "set_device", lambda gpu: setattr(chosen, "gpu", gpu))
    choose, used = gpu_of_process(), list[int | None]()

    def work() -> None:
        choose()
        used.append(getattr(chosen, "gpu", None))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert used == [3]
