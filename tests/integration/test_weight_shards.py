"""Parts of a model's weights on gloo ranks: together they are each tensor once, word by word that of the unsharded model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from safetensors.numpy import save_file
from torch.distributed.tensor import DTensor

from spangrad.errors import SettingsError
from tests.support.policies import trainer_settings
from tests.support.ranks import odd_module, on_ranks, sharded
from trainer.optim.states.weight_files import WeightFiles
from trainer.optim.weight_shards import held_parts, own_parts, row_range

SHAPES: tuple[tuple[int, ...], ...] = ((4,), (2, 2), (4, 1), ())
"""Meshes of four ranks: all shards, two replicas of two shards, four replicas, no mesh."""
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "merged": {"lora__rank": 2, "lora__alpha": 3},
    "alone": {"lora__rank": 2, "weight_sync__method": "adapter"},
}
Part = tuple[str, tuple[int, ...], int, NDArray[np.float32]]


def all_parts() -> dict[tuple[str, tuple[int, ...]], list[Part]]:
    """Return this rank's parts by kind and mesh, and under the mesh (1,) those of the unsharded model in one process."""
    parts: dict[tuple[str, tuple[int, ...]], list[Part]] = {}
    for kind, changes in KINDS.items():
        for shape in SHAPES:
            module = sharded(odd_module(adapted=kind != "plain"), shape)
            taken = list(own_parts(module, trainer_settings(**changes)))
            parts[kind, shape] = [(part.name, part.shape, part.first, part.words.numpy().copy()) for part in taken]
    return parts


@pytest.fixture(scope="module")
def ranks() -> list[dict[tuple[str, tuple[int, ...]], list[Part]]]:
    return on_ranks(4, all_parts)


def whole(kind: str) -> dict[str, NDArray[np.float32]]:
    parts = own_parts(odd_module(adapted=kind != "plain"), trainer_settings(**KINDS[kind]))
    return {part.name: part.words.numpy().reshape(part.shape) for part in parts}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", KINDS)
def test_own_parts_of_all_ranks_are_each_word_once(ranks: list[dict[Any, list[Part]]], kind: str, shape: tuple[int, ...]) -> None:
    expected, taken = whole(kind), [rank[kind, shape] for rank in ranks]
    assert all([part[:2] for part in parts] == [(name, value.shape) for name, value in expected.items()] for parts in taken)
    joined = {name: np.full(value.size, np.nan, np.float32) for name, value in expected.items()}
    for name, _, first, words in (part for parts in taken for part in parts):
        assert np.isnan(joined[name][first : first + words.size]).all(), f"two ranks have words of {name}"
        joined[name][first : first + words.size] = words.ravel()
    for name, value in expected.items():
        np.testing.assert_array_equal(joined[name], value.ravel(), err_msg=name)


def test_own_parts_names_are_those_of_files() -> None:
    names = list(whole("merged"))
    assert "layers.0.q_proj.weight" in names
    assert "layers.0.mlp.experts.2.up_proj.weight" in names
    assert "head.weight" not in names, "tied with another"
    assert list(whole("alone")) == ["layers.0.q_proj.lora_A.weight", "layers.0.q_proj.lora_B.weight"]


def read_back(directory: Path) -> list[str]:
    """Return the tensors of models on meshes of ranks that differ from the files that were read into them."""
    different: list[str] = []
    for shape in SHAPES:
        module = sharded(odd_module(), shape)
        for parameter in module.parameters():
            torch.nn.init.zeros_(parameter)
        with WeightFiles(directory) as files:
            parts = list(held_parts(module, dict(module.named_parameters())))
            assert files.lacking(parts) == []
            for part in parts:
                files.read(part)
        held = {name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in module.state_dict().items()}
        different += [name for name, value in odd_module().state_dict().items() if not torch.equal(held[name], value)]
    return different


@pytest.mark.parametrize("files", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_held_parts_are_filled_with_each_ranks_rows_of_files(tmp_path: Path, files: int) -> None:
    tensors = whole("plain")
    names = [list(tensors)[number::files] for number in range(files)]
    for number, held in enumerate(names):
        save_file({name: tensors[name] for name in held}, tmp_path / f"model-{number}.safetensors")
    if files > 1:
        places = {name: f"model-{number}.safetensors" for number, held in enumerate(names) for name in held}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    assert on_ranks(4, read_back, tmp_path) == [[]] * 4


def test_own_parts_divides_replicated_tensors_evenly(ranks: list[dict[Any, list[Part]]]) -> None:
    words = [sum(part[3].size for part in rank["plain", ()]) for rank in ranks]
    assert max(words) < 2 * sum(words) / 4


def test_own_parts_of_tensor_sharded_by_columns_raises() -> None:
    assert on_ranks(2, columns) == ["weight is placed as S(1), and weights are read where they are sharded along dimension 0."] * 2


def columns() -> str:
    """Return the error of a model that is sharded along dimension 1, but for its remedy."""
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard

    module = nn.Linear(4, 4, bias=False)
    fully_shard(module, mesh=init_device_mesh("cpu", (2,)), shard_placement_fn=lambda _: Shard(1))
    with pytest.raises(SettingsError) as raised:
        list(own_parts(module, trainer_settings()))
    return str(raised.value).partition(" Remove")[0]


@given(st.integers(0, 50), st.integers(1, 9))
def test_row_range_divides_rows_as_pytorch_does(rows: int, ranks: int) -> None:
    chunks = [len(chunk) for chunk in torch.arange(rows).chunk(ranks)] if rows else []
    ranges = [row_range(rows, ranks, number) for number in range(ranks)]
    assert [count for _, count in ranges] == chunks + [0] * (ranks - len(chunks))
    assert [first for first, _ in ranges] == [min(sum(chunks[:number]), rows) for number in range(ranks)]


def test_ranks_started_in_another_directory_import_this_projects_tests(tmp_path: Path) -> None:
    """A library installs a package `tests` of its own, which the fork server would find there; it imports no more than that shows."""
    root = str(Path(__file__).parents[2])
    program = (
        f"import sys; sys.path.insert(0, {root!r}); from tests.support import ranks; ranks.PRELOADED = (ranks.__name__,); "
        "print(ranks.on_ranks(2, max, 1, 2))"
    )
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    ended = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert (ended.returncode, ended.stdout) == (0, "[2, 2]\n"), ended.stderr
