"""Loading of models by verl: each rank reads its rows of the files; verl's own loading remains where names in the files are others."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from examples.two_tools.model import random_llama
from tests.support.policies import trainer_settings
from trainer.optim.optimizer import VerlOptimizer
from trainer.optim.process import prepare_process

prepare_process()  # verl reads its platform when it is first imported


@pytest.fixture
def whole_loads(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Models that verl has loaded whole."""
    from verl.workers.engine.fsdp import transformer_impl

    loaded: list[Any] = []
    original = transformer_impl.fsdp2_load_full_state_dict

    def load(module: Any, *arguments: Any) -> None:
        loaded.append(module)
        original(module, *arguments)

    monkeypatch.setattr(transformer_impl, "fsdp2_load_full_state_dict", load)
    return loaded


@pytest.fixture(scope="module")
def tied_model(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import AutoTokenizer

    directory = tmp_path_factory.mktemp("tied")
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    random_llama(tokenizer, hidden=64, spread=0.15, tied=True).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def require_weights_of(engine: VerlOptimizer, directory: Path) -> None:
    held, expected = dict(engine.weights()), load_file(directory / "model.safetensors")
    assert held.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(held[name], value, err_msg=name)


@pytest.mark.parametrize(
    "changes",
    [{}, {"lora__rank": 4}, {"estimator": "gae", "kl_coef": 0.1}],
    ids=["whole", "adapters", "critic and reference"],
)
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_optimizer_loads_models_by_rows(
    tiny_model: Path, tied_model: Path, whole_loads: list[Any], changes: dict[str, Any], tied: bool
) -> None:
    model = tied_model if tied else tiny_model
    engine = VerlOptimizer(model, trainer_settings(model=model, **changes))
    assert whole_loads == []
    require_weights_of(engine, model)  # B of adapters is 0
    module = engine._workers._rank._models["policy"].engine.module  # type: ignore[union-attr]
    assert not any(value.is_meta for value in (*module.parameters(), *module.buffers()))
    initial = [value.full_tensor() for name, value in module.named_parameters() if ".lora_A." in name]
    assert all(0 < value.abs().max() < 1 for value in initial)
    assert bool(initial) == bool(changes.get("lora__rank"))


def test_critic_head_is_initialised_alike_each_time(tiny_model: Path) -> None:
    heads = list[Any]()
    for _ in range(2):
        engine = VerlOptimizer(tiny_model, trainer_settings(model=tiny_model, estimator="gae"))
        module = engine._workers._rank._models["critic"].engine.module  # type: ignore[union-attr]
        heads.append(module.score.weight.full_tensor().detach())
    assert (heads[0] == heads[1]).all()
    assert 1e-3 < heads[0].std() < 1


def test_optimizer_loads_files_of_other_names_whole(tiny_model: Path, tmp_path: Path, whole_loads: list[Any]) -> None:
    shutil.copytree(tiny_model, tmp_path / "model")
    file = tmp_path / "model/model.safetensors"
    tensors = {name.removeprefix("model."): value for name, value in load_file(file).items() if name != "lm_head.weight"}
    save_file(tensors, file, metadata={"format": "pt"})
    engine = VerlOptimizer(tmp_path / "model", trainer_settings())
    assert len(whole_loads) == 1
    assert np.array_equal(dict(engine.weights())["model.embed_tokens.weight"], tensors["embed_tokens.weight"])
