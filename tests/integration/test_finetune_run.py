"""A run over files: what it commits, what it goes on from, and that a crash repeats and skips nothing. The optimizer is a fake."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from commands.training import finetune as finetune_command
from spangrad.errors import GatewayError, SettingsError, TrainerError
from spangrad.settings import Settings
from spangrad.types import VersionStatus
from spangrad.weights.checksums import checksum_directory, tokenizer_hash
from tests.support.policies import trainer_settings
from tests.support.processes import left_by_crashes, survives
from tests.support.trainers import TRANSACTION, finetuned, meta, tokens, write_policy, write_rows
from tests.support.trainers import finetune_settings as settings
from trainer import step
from trainer.data.source import BatchRollout, Group
from trainer.ledger.demand import Consumption
from trainer.ledger.file_batches import BatchFile, FileBatch, file_batch_of
from trainer.ledger.ledger import Ledger
from trainer.ledger.recovery import newest_version
from trainer.publish.checkpoint import STATE, WEIGHTS
from trainer.sft import training
from trainer.sft.examples import Example
from trainer.sft.files import find_sources
from trainer.sft.training import FileTrainPlan, finetune, run_name


@dataclass
class FakeFileOptimizer:
    """Adds the first id of each trained row to its only weight: what was trained twice, or not at all, shows."""

    weight: float = 0.0
    device: str = "cpu"
    reference: NDArray[np.float32] | None = None
    steps: list[list[int]] = field(default_factory=list)
    fails_at: int | None = None

    def step(self, examples: Sequence[Example], reference: NDArray[np.float32] | None = None) -> dict[str, float]:
        self.steps.append([example.sequences[0].ids[0] for example in examples])
        if self.fails_at == len(self.steps):
            raise RuntimeError("the machine caught fire")
        self.weight += sum(self.steps[-1])
        return {"loss": 0.5, "grad_norm": 1.0, "tokens": float(len(examples))}

    def logprobs(self, examples: Sequence[Example]) -> NDArray[np.float32]:
        return np.zeros(sum(len(example.sequences) for example in examples), np.float32)

    def measure(self, examples: Sequence[Example], reference: NDArray[np.float32] | None) -> dict[str, float]:
        return {"loss": 1.0 / (1.0 + self.weight)} if examples else {}

    def collect(self, *, state: bool = True) -> None:
        self.collected = self.weight, state

    def write(self, directory: Path) -> None:
        weight, state = self.collected
        save_file({"weight": np.array([weight], np.float32)}, directory / WEIGHTS)
        if state:
            (directory / STATE).mkdir()
            (directory / STATE / "weight").write_text(str(weight))

    def close(self) -> None:
        """Nothing is open."""


def with_fakes(*, fails_at: int | None = None) -> list[FakeFileOptimizer]:
    """Have runs make fakes from here on, each with its base's weight; the list of those that were made."""
    optimizers: list[FakeFileOptimizer] = []

    def fake(_: Any, plan: FileTrainPlan) -> FakeFileOptimizer:
        directory = Path(plan.base.policy_version.path)
        weight = float(load_file(directory / "model.safetensors")["weight"][0])
        assert not plan.at or float((directory / STATE / "weight").read_text()) == weight, "a run goes on from its own state"
        optimizers.append(FakeFileOptimizer(weight, fails_at=fails_at))
        return optimizers[-1]

    training._Run._optimizer = fake  # type: ignore[assignment, method-assign]
    training._store = lambda _: nullcontext()  # a store that is away, without asking
    return optimizers


STORE = training._store
"""The store of a run, before fakes take its place."""
ROWS = [tokens(number, 2, **meta(f"r{number}", f"g{number}")) for number in (3, 5, 7, 9)]
WHOLE = 3 * (3 + 5 + 7 + 9)
"""The weight once three epochs of ROWS are trained."""


def ledger_of(chosen: Settings) -> Ledger:
    return Ledger(chosen.trainer.directory, chosen.trainer.policy, chosen.trainer.branch)


def weight_of(chosen: Settings) -> float:
    """Return the weight of the branch's head."""
    from safetensors.numpy import load_file

    head = ledger_of(chosen).frontier()
    assert head
    return float(load_file(Path(head.policy_version.path) / "model.safetensors")["weight"][0])


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return write_policy(tmp_path / "base")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write_rows(tmp_path / "rows.jsonl", ROWS)


@pytest.fixture(autouse=True)
def fakes(monkeypatch: pytest.MonkeyPatch) -> list[FakeFileOptimizer]:
    monkeypatch.setattr(training._Run, "_optimizer", training._Run._optimizer)
    monkeypatch.setattr(training, "_store", training._store)
    return with_fakes()


def statuses(chosen: Any) -> dict[int, str | None]:
    return {version.version: version.status and version.status.value for version in ledger_of(chosen).versions()}


def test_finetune_epoch_commits_version_with_files_and_rollouts(tmp_path: Path, base: Path, file: Path, fakes: list[FakeFileOptimizer]):
    chosen = settings(base, tmp_path / "policies")
    done = finetuned(chosen, file)
    assert [version.version for version in done.versions] == [1, 2, 3]
    ledger = ledger_of(chosen)
    assert [(version.policy_version.parent, version.status, version.run_id, version.modes) for version in ledger.versions()[1:]] == [
        (0, VersionStatus.COMMITTED, "run", "train"),
        (1, VersionStatus.COMMITTED, "run", "train"),
        (2, VersionStatus.COMMITTED, "run", "train"),
    ]
    (source,) = find_sources([file])
    stored = file_batch_of(ledger.database, ledger.version(2).policy_version.batch_id)
    files = (BatchFile("rows.jsonl", source.checksum, source.size, 4),)
    assert stored == FileBatch("sft", run_name(chosen, "sft", [source], again=False), 4, 6, done.plan.digest, files)
    batch = ledger.batch(ledger.version(3).policy_version.batch_id or "")
    assert batch == [BatchRollout(Group("run", "train", "spec", f"g{number}"), f"r{number}", 0, 0) for number in (3, 5, 7, 9)]
    assert weight_of(chosen) == WHOLE
    (optimizer,) = fakes
    assert [sorted(a + b) for a, b in zip(optimizer.steps[::2], optimizer.steps[1::2], strict=True)] == [[3, 5, 7, 9]] * 3
    assert optimizer.steps[:2] != optimizer.steps[2:4], "each epoch has an order of its own"
    known = {name: value for name, value in ledger.version(3).metrics.items() if not name.startswith("seconds_")}
    assert known == {"loss": 0.5, "grad_norm": 1.0, "tokens": 4.0, "epoch": 3.0, "finetune_step": 6.0, "rows": 4.0}
    assert not (Path(ledger.version(3).policy_version.path) / STATE).exists(), "a whole run goes on nowhere"


def test_finetune_repeated_does_nothing_without_again(tmp_path: Path, base: Path, file: Path, fakes: list[FakeFileOptimizer]):
    chosen = settings(base, tmp_path / "policies")
    finetuned(chosen, file)
    again = finetuned(chosen, file.rename(tmp_path / "renamed.jsonl"))
    assert (again.versions, len(fakes), statuses(chosen)) == ([], 1, dict.fromkeys(range(4), "committed"))
    forced = finetuned(chosen, tmp_path / "renamed.jsonl", again=True)
    assert [version.version for version in forced.versions] == [4, 5, 6]
    assert weight_of(chosen) == 2 * WHOLE
    assert [version.version for version in finetuned(chosen, tmp_path / "renamed.jsonl", again=True).versions] == [7, 8, 9]
    other = settings(base, tmp_path / "policies", epochs=1)
    with pytest.raises(TrainerError, match=r"renamed\.jsonl is left to train: of 4 rows 4 trained_before\. Give --again"):
        finetuned(other, tmp_path / "renamed.jsonl")


def test_finetune_of_completed_run_does_nothing_after_other_training(
    tmp_path: Path, base: Path, file: Path, fakes: list[FakeFileOptimizer]
):
    chosen = settings(base, tmp_path / "policies")
    finetuned(chosen, file)
    finetuned(chosen, write_rows(tmp_path / "some.jsonl", ROWS[:2]), again=True)
    assert (finetuned(chosen, file).versions, len(fakes)) == ([], 2)
    ledger = ledger_of(chosen)
    lease = ledger.begin([BatchRollout(Group("run", "train", "spec", f"g{number}"), f"r{number}", 0, 0) for number in (3, 5, 7, 9)])
    assert lease, "asked for by trainer.sampling.retrain_finetuned"
    head = newest_version(ledger)
    facts = {"checksum": head.policy_version.checksum, "path": head.policy_version.path}
    ledger.commit(lease, **facts, tokenizer_hash=head.tokenizer_hash, metrics={})
    assert (finetuned(chosen, file).versions, len(fakes)) == ([], 2)


def test_finetune_failed_run_resumes_at_last_version(tmp_path: Path, base: Path, file: Path):
    chosen = settings(base, tmp_path / "policies")
    with_fakes(fails_at=4)
    with pytest.raises(RuntimeError, match="caught fire"):
        finetuned(chosen, file)
    assert statuses(chosen) == {0: "committed", 1: "committed", 2: "orphaned"}
    assert ledger_of(chosen).batch(ledger_of(chosen).version(2).policy_version.batch_id or "") == [], "its rollouts are named no more"
    resumed = with_fakes()
    assert [version.version for version in finetuned(chosen, file).versions] == [3, 4]
    assert len(resumed[0].steps) == 4
    assert weight_of(chosen) == WHOLE


def test_finetune_error_without_store_has_no_context(tmp_path: Path, base: Path, file: Path, monkeypatch: pytest.MonkeyPatch):
    with_fakes(fails_at=1)
    monkeypatch.setattr(training, "_store", STORE)
    with pytest.raises(RuntimeError, match="caught fire") as failure:
        finetuned(settings(base, tmp_path / "policies"), file)
    assert failure.value.__context__ is None, "the store that did not answer is not its cause"


def test_finetune_signal_ends_between_steps(tmp_path: Path, base: Path, file: Path):
    chosen = settings(base, tmp_path / "policies")

    class Impatient:
        def planned(self, plan: Any) -> None: ...

        def stepped(self, step: int, metrics: dict[str, float]) -> None:
            if step == 3:
                os.kill(os.getpid(), signal.SIGTERM)

        def committed(self, version: Any) -> None: ...

    assert finetune(chosen, "sft", [file], observer=Impatient()) is None
    assert statuses(chosen) == {0: "committed", 1: "committed", 2: "orphaned"}
    finetuned(chosen, file)
    assert weight_of(chosen) == WHOLE


def test_finetune_steps_per_version_commits_within_epoch(tmp_path: Path, base: Path, file: Path):
    chosen = settings(base, tmp_path / "policies", steps_per_version=4)
    done = finetuned(chosen, file)
    assert [version.metrics["finetune_step"] for version in done.versions] == [4.0, 6.0]
    every_step = settings(base, tmp_path / "one", steps_per_version=1, epochs=1)
    finetuned(every_step, file)
    ledger = ledger_of(every_step)
    named = [{row.rollout_id for row in ledger.batch(version.policy_version.batch_id or "")} for version in ledger.versions()[1:]]
    assert [len(rollouts) for rollouts in named] == [2, 2]
    assert named[0] | named[1] == {"r3", "r5", "r7", "r9"}, "a version names what its own steps trained"


def test_finetune_held_out_rows_are_measured_before_and_after(tmp_path: Path, base: Path, file: Path, fakes: list[FakeFileOptimizer]):
    chosen = settings(base, tmp_path / "policies", held_out=0.25, epochs=1)
    done = finetuned(chosen, file)
    (held,) = done.plan.examples.held_out
    assert held.sequences[0].ids[0] not in {number for step in fakes[0].steps for number in step}
    metrics = done.versions[0].metrics
    assert metrics["held_out_loss_before"] == 1.0
    assert metrics["held_out_loss"] == 1.0 / (1.0 + weight_of(chosen))


def test_finetune_keeps_version_with_lowest_held_out_loss(
    tmp_path: Path, base: Path, file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    losses = iter([3.0, 1.5, 1.0, 2.0, float("nan"), 2.0])  # before the run, and after each epoch
    monkeypatch.setattr(FakeFileOptimizer, "measure", lambda *_: {"loss": next(losses)})
    chosen = settings(base, tmp_path / "policies", epochs=5, held_out=0.25, trainer={"checkpoint__keep": 1})
    done = finetuned(chosen, file)
    kept = {int(path.name[1:]) for path in (chosen.trainer.directory / "policy/main").iterdir()}
    assert (kept, done.best and done.best.version) == ({2, 5}, 2)
    finetune_command._show(done)
    assert "lowest at version 2: `spangrad policy rollback policy@2` goes back" in capsys.readouterr().out
    ledger = ledger_of(chosen)
    ledger.rollback(2)
    assert newest_version(ledger).version == 2


def test_finetune_other_rows_or_head_start_another_run(tmp_path: Path, base: Path, file: Path):
    chosen = settings(base, tmp_path / "policies")
    with_fakes(fails_at=4)
    with pytest.raises(RuntimeError):
        finetuned(chosen, file)
    ledger = ledger_of(chosen)
    ledger.rollback(0)
    with_fakes()
    with pytest.raises(TrainerError, match=r"4 trained_before"):
        finetuned(chosen, file)  # what version 1 was trained on is not trained again, though the branch went back
    ledger.rollback(1)
    lease = ledger.begin([BatchRollout(Group("run", "train", "spec", "other"), "other", 0, 0)])
    assert lease
    facts = {"checksum": ledger.version(1).policy_version.checksum, "path": ledger.version(1).policy_version.path}
    ledger.commit(lease, **facts, tokenizer_hash=ledger.version(1).tokenizer_hash, metrics={})
    with pytest.raises(TrainerError, match=r"stopped at step 2 of 6 \(version 1\), and branch main is at version 3 by now"):
        finetuned(chosen, file)
    ledger.rollback(1)
    finetuned(chosen, file)
    assert weight_of(chosen) == WHOLE


def test_finetune_after_rollback_within_run_resumes_there(tmp_path: Path, base: Path, file: Path):
    chosen = settings(base, tmp_path / "policies")
    finetuned(chosen, file)
    ledger = ledger_of(chosen)
    ledger.rollback(1)
    assert [version.version for version in finetuned(chosen, file).versions] == [4, 5]
    assert (weight_of(chosen), ledger.lineage()) == (WHOLE, [0, 1, 4, 5])


def test_finetune_restarted_after_rollback_continues_with_its_rows(tmp_path: Path, base: Path, file: Path):
    chosen = settings(base, tmp_path / "policies", batch_size=1, steps_per_version=1)
    ledger = ledger_of(chosen)
    trained: list[str] = []
    for version in (1, 3):  # 2 and 4 fail
        with_fakes(fails_at=2)
        with pytest.raises(RuntimeError, match="caught fire"):
            finetuned(chosen, file)
        (rollout,) = ledger.batch(ledger.version(version).policy_version.batch_id or "")
        trained.append(rollout.rollout_id)
        if version == 1:
            ledger.rollback(0)
    left = {3, 5, 7, 9} - {int(trained[0].removeprefix("r"))}
    with_fakes()
    done = finetuned(chosen, file)
    assert (done.plan.at, done.plan.examples.left_out, len(done.versions)) == (1, {"trained_before": 1}, 3 * len(left) - 1)
    assert weight_of(chosen) == 3 * sum(left), "what version 1 was trained on is not trained again"


def test_finetune_excludes_rollouts_trained_by_rl_and_reverse(tmp_path: Path, base: Path, file: Path):
    chosen = settings(base, tmp_path / "policies", epochs=1)
    with_fakes()
    finetuned(chosen, file)
    ledger = ledger_of(chosen)
    tuned_groups = {("train", f"g{number}") for number in (3, 5, 7, 9)}
    assert set.union(*ledger.finished_groups("run", "spec")) == tuned_groups, "whatever rollouts else they have"
    assert set.union(*ledger.finished_groups("run", "spec", finetuned=False)) == set()
    assert set.union(*ledger.finished_groups("another run", "spec")) == set()
    assert [
        Consumption(ledger, trainer_settings(run_id="run", retrain_finetuned=asked), "spec").read().trained for asked in (False, True)
    ] == [4, 0], "what is left out is asked for again"
    lease = ledger.begin([BatchRollout(Group("run", "train", "spec", "g3"), name, 0, 0) for name in ("r3", "r4")])
    assert lease, "asked for (trainer.sampling.retrain_finetuned), they are trained: files claim no rollout"
    facts = {"checksum": ledger.version(1).policy_version.checksum, "path": ledger.version(1).policy_version.path}
    ledger.commit(lease, **facts, tokenizer_hash=ledger.version(1).tokenizer_hash, metrics={})
    rows = [tokens(4, 2, **meta("r4", "g3")), tokens(6, 2, **meta("r6", "g6")), tokens(8, 2)]
    done = finetuned(chosen, write_rows(tmp_path / "more.jsonl", rows))
    assert (done.plan.examples.left_out, len(done.plan.examples.trained)) == ({"trained_before": 1}, 2)
    elsewhere = settings(base, tmp_path / "policies", epochs=1, trainer={"branch": "other"})
    assert len(finetuned(elsewhere, file).plan.examples.trained) == 4, "each branch for itself"


def test_finetune_trains_rows_of_another_step_that_is_undone(tmp_path: Path, base: Path, file: Path, monkeypatch: pytest.MonkeyPatch):
    chosen = settings(base, tmp_path / "policies")
    ledger_of(chosen).register_initial(checksum=checksum_directory(base), path=str(base), tokenizer_hash=tokenizer_hash(base), run_id="run")
    other = Ledger(chosen.trainer.directory, chosen.trainer.policy, chosen.trainer.branch, holder="another 1 1 1")
    assert other.begin([BatchRollout(Group("run", "train", "spec", "g3"), "r3", 0, 0)])
    monkeypatch.setattr(training, "time", SimpleNamespace(sleep=lambda _: other.recover()))
    finetuned(chosen, file)
    assert weight_of(chosen) == WHOLE


def test_finetune_branch_moved_meanwhile_raises(tmp_path: Path, base: Path, file: Path, monkeypatch: pytest.MonkeyPatch):
    chosen = settings(base, tmp_path / "policies")
    began = Ledger.begin

    def moved(self: Ledger, *args: Any, **kwargs: Any) -> Any:
        if kwargs["files"].step == 4:
            self.rollback(0)
        return began(self, *args, **kwargs)

    monkeypatch.setattr(Ledger, "begin", moved)
    with pytest.raises(TrainerError, match=r"branch main was moved from version 1 to 0 meanwhile: step 4 .* rollback policy@1`"):
        finetuned(chosen, file)
    monkeypatch.setattr(Ledger, "begin", began)
    ledger_of(chosen).rollback(1)
    finetuned(chosen, file)
    assert weight_of(chosen) == WHOLE


def test_finetune_with_unreachable_gateway_raises_before_training(tmp_path: Path, base: Path, file: Path, fakes: list[FakeFileOptimizer]):
    chosen = settings(base, tmp_path / "policies", trainer={"publish": True})
    chosen = chosen.model_copy(update={"gateway": chosen.gateway.model_copy(update={"url": "http://127.0.0.1:9"})})
    with pytest.raises(GatewayError, match=r"does not answer .* trainer\.weight_sync\.publish = false trains without"):
        finetuned(chosen, file)
    assert fakes == []
    with pytest.raises(SettingsError, match=r"trainer\.weight_sync\.method = adapter hands out adapters alone"):
        finetuned(settings(base, tmp_path / "policies", trainer={"weight_sync__method": "adapter", "lora__rank": 4}), file)
    with pytest.raises(SettingsError, match=r"trainer\.model is not set"):
        finetuned(settings(None, tmp_path / "nothing"), file)  # type: ignore[arg-type]


def die_at_every_boundary_of_finetuning(base: Path, directory: Path) -> list[int]:
    """Run over files, and go on from what a death at each boundary leaves; return those boundaries that left something else.

    This process only forks: Polars starts threads, which do not survive a fork.
    """
    file, own = write_rows(directory / "rows.jsonl", ROWS), directory / "trainer"

    def train() -> None:
        with_fakes()
        finetuned(settings(base, own, epochs=2), file)

    def go_on() -> None:
        chosen = settings(base, own, epochs=2)
        with_fakes()
        finetuned(chosen, file)
        ledger = ledger_of(chosen)
        committed = ledger.committed_versions()
        assert len(committed) == 3, "two epochs and what they began with"
        assert weight_of(chosen) == WHOLE * 2 / 3, "an epoch was repeated or skipped"
        names = {path.name for path in (chosen.trainer.directory / "policy/main").iterdir()}
        assert names == {f"v{version}" for version in committed[1:]}, "an uncommitted version was left"
        batches = [version.policy_version.batch_id for version in ledger.versions() if version.version in committed[1:]]
        assert [len(ledger.batch(batch or "")) for batch in batches] == [4, 4]

    boundaries = list[int]()
    for boundary in left_by_crashes(train, {training.__file__: {"_train", "_version", "_lease"}, step.__file__: TRANSACTION}, own):
        survives(go_on)
        boundaries.append(boundary)
    return boundaries


def test_finetune_killed_at_any_boundary_repeats_and_skips_nothing(base: Path, tmp_path: Path):
    directory = tmp_path / "deaths"
    directory.mkdir()
    command = [sys.executable, "-m", "tests.integration.test_finetune_run", str(base), str(directory)]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    boundaries = [int(boundary) for boundary in done.stdout.split()]
    assert boundaries[-1] > 40, "the boundaries were not found"
    assert len(boundaries) > 5, "deaths fell before, within and after each epoch's version"


if __name__ == "__main__":
    print(*die_at_every_boundary_of_finetuning(Path(sys.argv[1]), Path(sys.argv[2])))
