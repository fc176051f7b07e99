"""Names of experts: tensors of a layer split into those of each expert as files have them, and fused again."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from spangrad.errors import SettingsError
from trainer.publish.experts import adapted_modules, are_experts, expert_names, split_experts

STEM = "model.layers.0.mlp.experts"


@pytest.mark.parametrize(
    ("kind", "gate", "down"),
    [
        ("qwen3_moe", "model.layers.0.mlp.experts.1.gate_proj.weight", "model.layers.0.mlp.experts.1.down_proj.weight"),
        ("mixtral", "model.layers.0.block_sparse_moe.experts.1.w1.weight", "model.layers.0.block_sparse_moe.experts.1.w2.weight"),
    ],
)
def test_split_experts_are_views_of_the_tensor_that_hold_each_word_once(kind: str, gate: str, down: str) -> None:
    names = expert_names(kind)
    assert names
    tensors = {f"{STEM}.gate_up_proj": torch.randn(11, 6, 5), f"{STEM}.down_proj": torch.randn(11, 5, 3)}
    router = torch.randn(11, 5)
    files: dict[str, torch.Tensor] = {names.in_file("model.layers.0.mlp.gate.weight"): router}
    for name, tensor in tensors.items():
        assert are_experts(name, tuple(tensor.shape), kind)
        files |= {part: rows for part, _, rows in split_experts(name, tuple(tensor.shape), 0, tensor, names)}
    assert torch.equal(files[gate], tensors[f"{STEM}.gate_up_proj"][1, :3])
    assert torch.equal(files[down], tensors[f"{STEM}.down_proj"][1])
    assert len(files) == 3 * 11 + 1
    for rows in files.values():
        rows += 100
    assert all((tensor > 50).all() and (tensor < 150).all() for tensor in tensors.values()), "filled in place, each word once"


def test_split_experts_of_a_part_are_empty_where_another_rank_has_them() -> None:
    names = expert_names("qwen3_moe")
    assert names
    parts = list(split_experts(f"{STEM}.gate_up_proj", (4, 6, 5), 1, np.ones((2, 6, 5), np.float32), names))
    assert [shape for _, shape, _ in parts] == [(3, 5)] * 8
    assert [rows.shape for _, _, rows in parts] == [(0, 5)] * 2 + [(3, 5)] * 4 + [(0, 5)] * 2


def test_experts_of_a_kind_whose_files_are_unknown_are_refused() -> None:
    with pytest.raises(SettingsError, match="holds the experts of a layer, and how files of model_type 'novel_moe' name them is not known"):
        are_experts(f"{STEM}.gate_up_proj", (4, 6, 5), "novel_moe")
    assert not are_experts(f"{STEM}.gate_up_proj", (4, 6, 5), "gpt_oss"), "its files have one tensor as well"
    assert not are_experts("model.layers.0.conv.weight", (4, 6, 5), "novel_moe")


def test_adapted_modules_of_a_model_of_experts_are_those_of_attention(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"model_type": "qwen2"}))
    assert adapted_modules(tmp_path, ()) == "all-linear"
    assert adapted_modules(tmp_path, ["up_proj"]) == ["up_proj"]
    config.write_text(json.dumps({"model_type": "mixtral", "num_local_experts": 8}))
    assert adapted_modules(tmp_path, ()) == ["q_proj", "k_proj", "v_proj", "o_proj"]
    assert adapted_modules(tmp_path, ["q_proj"]) == ["q_proj"]
    with pytest.raises(SettingsError, match=r"trainer\.lora\.modules names up_proj, and experts of .* cannot have adapters"):
        adapted_modules(tmp_path, ["q_proj", "up_proj"])
