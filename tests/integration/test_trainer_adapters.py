"""Adapters as versions of their own: what verl trained, PEFT loads, and a resume goes on with."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import polars as pl
import pytest
import torch

from spangrad.errors import CheckpointError
from spangrad.settings import Settings, StoreSettings, TrainerSettings
from spangrad.weights.adapters import AdapterFacts, adapter_facts
from spangrad.weights.checksums import checksum_directory
from tests.support.built_rollouts import RUN, send
from tests.support.policies import PROMPT, changed, logprobs_of, sampled_rows, trainer_settings
from tests.support.trainers import FakeSource, normalise, save, written
from trainer.data.batch import Batch, layout
from trainer.data.merge import separate
from trainer.ledger.ledger import Ledger
from trainer.ledger.recovery import open_ledger, prepare
from trainer.optim.optimizer import VerlOptimizer
from trainer.publish import checkpoint
from trainer.restoring import restore
from trainer.run import train
from transition_builder.loop import build_once

ALONE = trainer_settings(learning_rate=1e-2, lora__rank=4, lora__alpha=6, weight_sync__method="adapter")
MERGED = changed(ALONE, {"weight_sync__method": "disk"})


def sampled(model: Path, seed: int = 1) -> Batch:
    rows = pl.DataFrame(sampled_rows(model, 24, temperature=1.0, seed=seed))
    return layout(separate(rows, pl.Series(np.linspace(-1, 1, 24))), lineage=[0])


def trained(model: Path, settings: TrainerSettings) -> VerlOptimizer:
    """An engine after one step; A begins the same each time."""
    torch.manual_seed(0)
    engine = VerlOptimizer(model, settings)
    assert engine.step(sampled(model))["updated"] == 1
    return engine


def test_adapter_version_loads_in_peft_and_resumes(tiny_model: Path, tmp_path: Path):
    engine = trained(tiny_model, ALONE)
    stored = written(engine, tiny_model, tmp_path / "alone")
    whole = written(trained(tiny_model, MERGED), tiny_model, tmp_path / "merged")
    assert sorted(file.name for file in stored.path.iterdir() if "token" not in file.name and "chat" not in file.name) == [
        checkpoint.MARKER,
        "adapter_config.json",
        "adapter_model.safetensors",
        "config.json",
        "generation_config.json",
        checkpoint.STATE,
    ]
    assert adapter_facts(stored.path).base == tiny_model
    config = json.loads((stored.path / "adapter_config.json").read_text())
    linear = ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]
    assert (config["r"], config["lora_alpha"], config["target_modules"]) == (4, 6, linear)
    answer = [9, 11, 2]
    ours, merged = logprobs_of(stored.path, list(PROMPT), answer), logprobs_of(whole.path, list(PROMPT), answer)
    assert ours == pytest.approx(merged, abs=2e-5), "what PEFT computes is what the merged weights compute"
    assert ours != pytest.approx(logprobs_of(tiny_model, list(PROMPT), answer), abs=1e-3), "the step changed nothing to be seen"
    checkpoint.verify(stored.path, stored.checksum)

    later = sampled(stored.path, seed=2)
    assert engine.step(replace(later, advantages=0 * later.advantages))["logprob_gap_max"] < 1e-4, "what PEFT computes is what is trained"
    expected = engine.step(later)
    resumed = VerlOptimizer(tiny_model, ALONE)
    resumed.load_state(stored.path)
    assert resumed.step(later) == expected
    for (name, ones), (_, others) in zip(engine.weights(), resumed.weights(), strict=True):
        assert np.array_equal(ones, others), name


def test_load_state_of_other_weight_sync_method_raises(tiny_model: Path, tmp_path: Path):
    alone, merged = VerlOptimizer(tiny_model, ALONE), VerlOptimizer(tiny_model, MERGED)
    for engine in (alone, merged):
        (tmp_path / engine.settings.weight_sync.method).mkdir()
        save(engine, tmp_path / engine.settings.weight_sync.method)
    with pytest.raises(CheckpointError, match=r"with trainer\.weight_sync\.method = adapter, and now it is disk"):
        merged.load_state(tmp_path / "adapter")
    with pytest.raises(CheckpointError, match=r"with trainer\.weight_sync\.method = disk, and now it is adapter"):
        alone.load_state(tmp_path / "disk")
    with pytest.raises(CheckpointError, match=r"another shape than trainer\.lora\.rank = 2"):
        VerlOptimizer(tiny_model, changed(ALONE, {"lora__rank": 2})).load_state(tmp_path / "adapter")
    with pytest.raises(CheckpointError, match=r"another shape than .*trainer\.lora\.modules"):
        VerlOptimizer(tiny_model, changed(ALONE, {"lora__modules": ("q_proj",)})).load_state(tmp_path / "adapter")
    with pytest.raises(CheckpointError, match=r"with trainer\.lora\.alpha = 6, and now it is 12\. Set it as it was"):
        VerlOptimizer(tiny_model, changed(ALONE, {"lora__alpha": 12})).load_state(tmp_path / "adapter")
    with pytest.raises(CheckpointError, match=r"with trainer\.lora\.alpha = 6, and now it is 12"):
        VerlOptimizer(tiny_model, changed(MERGED, {"lora__alpha": 12})).load_state(tmp_path / "disk")


def test_adapter_checksum_covers_base_scale_and_adapter(tiny_model: Path, tmp_path: Path):
    engine = VerlOptimizer(tiny_model, ALONE)
    assert written(engine, tiny_model, tmp_path / "begun").checksum != checksum_directory(tiny_model), "A counts, though B is 0"
    stored = written(trained(tiny_model, ALONE), tiny_model, tmp_path / "trained")
    file = stored.path / "adapter_config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps({**config, "lora_alpha": 7}))
    (stored.path / checkpoint.MARKER).unlink()
    with pytest.raises(CheckpointError, match="holds weights with checksum"):
        checkpoint.verify(stored.path, stored.checksum)
    file.write_text(json.dumps({**config, "use_rslora": True}))
    with pytest.raises(CheckpointError, match="asks for use_rslora"):
        checksum_directory(stored.path)
    file.write_text(json.dumps({**config, "base_model_name_or_path": str(tmp_path / "gone")}))
    with pytest.raises(CheckpointError, match="which is no directory here"):
        checksum_directory(stored.path)


def test_branch_begun_with_adapter_has_new_optimizer_and_schedule(tiny_model: Path, tmp_path: Path):
    """The parent is at the end of its cosine, where its rate is 0."""
    ended = changed(ALONE, {"optim__schedule": "cosine", "max_steps": 1})
    parent = trained(tiny_model, ended)
    begins = written(parent, tiny_model, tmp_path / "parent").path
    batch = sampled(begins, seed=2)
    before = {name: value.copy() for name, value in parent.weights()}
    assert parent.step(batch)["updated"] == 1
    assert all(np.array_equal(before[name], value) for name, value in parent.weights()), "its rate is 0"

    settings = Settings(trainer=changed(ended, {"model": begins, "directory": tmp_path / "policies"}))
    ledger = open_ledger(settings)
    head = prepare(ledger, settings)
    begun = restore(head, ledger, FakeSource([]), settings.trainer, normalise, lambda model: VerlOptimizer(model, settings.trainer))  # type: ignore[arg-type]
    ledger.close()
    assert all(np.array_equal(before[name], value) for name, value in begun.weights())
    assert begun.step(batch)["updated"] == 1
    moved = max(float(np.abs(value - before[name]).max()) for name, value in begun.weights())
    assert moved == pytest.approx(1e-2, rel=0.01), "AdamW's first step is as long as its rate"


@pytest.mark.slow
def test_adapter_run_is_continued_from_last_adapter(tiny_model: Path, store: StoreSettings, tmp_path: Path):
    trainer = changed(
        ALONE,
        {
            "run_id": RUN,
            "model": tiny_model,
            "directory": tmp_path,
            "groups_per_batch": 2,
            "modes": ("production",),
            "max_staleness": 9,
            "publish": False,
            "traces": False,
            "checkpoint__keep": 1,
        },
    )
    settings = Settings(store=store, trainer=trainer)
    for run, groups in enumerate((["a", "b"], ["c", "d"]), start=1):
        send(store, tiny_model, groups)
        build_once(settings)
        train(settings, follow=False)
        ledger = Ledger(tmp_path, trainer.policy, trainer.branch)
        newest = ledger.version(run).policy_version
        ledger.close()
        directory = Path(newest.path)
        assert adapter_facts(directory) == AdapterFacts(tiny_model, 4, 6), "of the model that the branch began with, not of its parent"
        checkpoint.verify(directory, newest.checksum)
        assert not (directory / checkpoint.WEIGHTS).exists()
