"""State of training on gloo ranks: written by some, read by others, which go on as those would have; no rank holds more than its share."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Generator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from spangrad.errors import CheckpointError
from tests.support.policies import trainer_settings
from tests.support.ranks import on_ranks
from trainer.optim.states import sharded_state
from trainer.optim.states.weight_files import WeightFiles
from trainer.optim.weight_shards import held_parts, own_parts
from trainer.publish.shared_file import write_parts

FILE = "model.safetensors"
STATE = "optimizer"


class Layers(nn.Module):
    """Residual layers with an embedding that is the head as well."""

    def __init__(self, words: int, width: int, layers: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.head = nn.Linear(width, words, bias=False)
        self.head.weight = self.embed.weight
        self.all_tied_weights_keys = {"head.weight": "embed.weight"}

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return logits."""
        hidden = self.embed(ids)
        for layer in self.layers:
            hidden = hidden + torch.tanh(layer(hidden))
        return self.head(hidden)


def filled(directory: Path, sizes: tuple[int, int, int], mesh: tuple[int, ...]) -> Any:
    """Return a model and its optimizer, sharded along the last dimension of a mesh, with each rank's rows of the directory's file."""
    with torch.device("meta"):
        module = Layers(*sizes)
    device_mesh = init_device_mesh("cpu", mesh, mesh_dim_names=("ddp", "fsdp")[-len(mesh) :])
    for layer in module.layers:
        fully_shard(layer, mesh=device_mesh)
    fully_shard(module, mesh=device_mesh)
    module.to_empty(device="cpu")
    with WeightFiles(directory) as files:
        for part in held_parts(module, dict(module.named_parameters())):
            files.read(part)
    return SimpleNamespace(module=module, optimizer=torch.optim.AdamW(module.parameters(), lr=1e-2, foreach=False))


def step(engine: Any, seed: int) -> float:
    """Step on a batch that all ranks have alike: a mean over ranks is then exact. Return the loss."""
    ids = torch.randint(0, engine.module.embed.num_embeddings, (2, 9), generator=torch.Generator().manual_seed(seed))
    logits = engine.module(ids[:, :-1])
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
    loss.backward()
    engine.optimizer.step()
    engine.optimizer.zero_grad()
    return loss.item()


def write(engine: Any, directory: Path, group: Any) -> None:
    state = sharded_state.moments("policy", engine.module, engine.optimizer)
    sharded_state.write(directory / STATE, sharded_state.host_copy(state), group)
    parts = [part.on_host(copy=False) for part in own_parts(engine.module, trainer_settings())]
    write_parts(directory / FILE, parts, {}, first=torch.distributed.get_rank() == 0)
    torch.distributed.barrier()


def read(engine: Any, directory: Path, group: Any) -> None:
    state = sharded_state.moments_like("policy", engine.module, sharded_state.entries(directory / STATE))
    sharded_state.read(directory / STATE, state, group)
    sharded_state.load_moments("policy", engine.module, engine.optimizer, state)


def new_model(directory: Path, sizes: tuple[int, int, int]) -> None:
    module = Layers(*sizes)
    save_file({name: value for name, value in module.state_dict().items() if name != "head.weight"}, directory / FILE)


SMALL = (13, 6, 3)
"""Words, width and layers, which no number of ranks divides."""


def begun(mesh: tuple[int, ...], base: Path, directory: Path) -> tuple[float, list[torch.Tensor]]:
    """Make two steps, write the state after the first, and return loss and parameters of the second."""
    engine, group = filled(base, SMALL, mesh), sharded_state.new_group()
    step(engine, 1)
    write(engine, directory, group)
    return step(engine, 2), whole(engine)


def resumed(mesh: tuple[int, ...], directory: Path) -> tuple[float, list[torch.Tensor]]:
    engine, group = filled(directory, SMALL, mesh), sharded_state.new_group()
    read(engine, directory, group)
    return step(engine, 2), whole(engine)


def whole(engine: Any) -> list[torch.Tensor]:
    return [value.full_tensor().detach() for value in engine.module.parameters()]


def test_sharded_state_of_two_ranks_resumes_on_any_number_of_ranks(tmp_path: Path) -> None:
    base, directory = tmp_path / "base", tmp_path / "version"
    base.mkdir()
    directory.mkdir()
    new_model(base, SMALL)
    loss, parameters = on_ranks(2, begun, (2,), base, directory)[0]
    assert sorted(file.name for file in (directory / STATE).iterdir()) == [".metadata", "__0_0.distcp", "__1_0.distcp"]
    for ranks, mesh in ((2, (2,)), (1, (1,)), (4, (4,)), (4, (2, 2))):
        for own_loss, own in on_ranks(ranks, resumed, mesh, directory):
            assert own_loss == loss
            for value, expected in zip(own, parameters, strict=True):
                torch.testing.assert_close(value, expected, rtol=0, atol=1e-6)


def failing(base: Path, directory: Path) -> list[str]:
    """Return the errors of a rank where the second one sees no directory, then of reading what the first one lost."""
    engine, group = filled(base, SMALL, (2,)), sharded_state.new_group()
    step(engine, 1)
    state, errors = sharded_state.host_copy(sharded_state.moments("policy", engine.module, engine.optimizer)), list[str]()
    with pytest.raises(FileNotFoundError) as lost:
        sharded_state.write(directory / ("version" if torch.distributed.get_rank() == 0 else "absent") / STATE, state, group)
    errors.append(str(lost.value.filename))
    sharded_state.write(directory / "version" / STATE, state, group)
    if torch.distributed.get_rank() == 0:
        (directory / "version" / STATE / "__1_0.distcp").write_bytes(b"cut")
    torch.distributed.barrier()
    before = [parameter.to_local().clone() for parameter in engine.module.parameters()]
    with pytest.raises(CheckpointError) as cut:
        read(engine, directory / "version", group)
    assert all(torch.equal(value, parameter.to_local()) for value, parameter in zip(before, engine.module.parameters(), strict=True))
    return [*errors, str(cut.value)]


def test_sharded_state_that_one_rank_cannot_write_fails_on_all(tmp_path: Path) -> None:
    base = tmp_path / "base"
    base.mkdir()
    (tmp_path / "version").mkdir()
    new_model(base, SMALL)
    errors = on_ranks(2, failing, base, tmp_path)
    assert errors[0] == errors[1]
    assert errors[0][0] == str(tmp_path / "absent" / STATE)
    assert errors[0][1].startswith(f"{tmp_path / 'version' / STATE} cannot be read (")


class LargestStorage(TorchDispatchMode):
    """Size of the largest storage of a tensor that an operation returns, in bytes."""

    largest = 0

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        """Call the operation."""
        result = function(*arguments, **(options or {}))
        for value in result if isinstance(result, tuple | list) else (result,):
            held = value.to_local() if isinstance(value, DTensor) else value
            if isinstance(held, torch.Tensor) and held.device.type == "cpu":
                self.largest = max(self.largest, held.untyped_storage().nbytes())
        return result


def bounded(directory: Path, sizes: tuple[int, int, int]) -> dict[str, int]:
    """Do with a small model, so that all code is loaded, then with this one: read, step, write weights and state, and read both again.

    Returns:
        Sizes in bytes.
    """
    group = sharded_state.new_group()
    _measured(directory / "small", SMALL, group)
    return _measured(directory / "large", sizes, group)


def _measured(base: Path, sizes: tuple[int, int, int], group: Any) -> dict[str, int]:
    ranks, version = torch.distributed.get_world_size(), base / "version"
    with _peak() as memory, LargestStorage() as storages:
        engine = filled(base, sizes, (ranks,))
        for parameter in engine.module.parameters():  # no passes: their gathered layers are not what is bounded here
            parameter.grad = torch.ones_like(parameter)
        engine.optimizer.step()
        engine.optimizer.zero_grad()
        write(engine, version, group)
        held = sum(parameter.to_local().nbytes for parameter in engine.module.parameters())
        engine.optimizer.state.clear()
        engine = None
        engine = filled(version, sizes, (ranks,))
        read(engine, version, group)
    return {"share": held * 4, "weights": held * ranks, "taken": memory["taken"], "largest": storages.largest}


@contextlib.contextmanager
def _peak() -> Generator[dict[str, int]]:
    def status(name: str) -> int:
        lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        return 1024 * int(lines[name].split()[0])

    Path("/proc/self/clear_refs").write_text("5")
    before, taken = status("VmRSS"), dict[str, int]()
    yield taken
    taken["taken"] = status("VmHWM") - before


@pytest.mark.parametrize(
    ("sizes", "slack"),
    [
        pytest.param((8000, 512, 40), 16 * 2**20, id="15M"),
        pytest.param((16000, 1024, 176), 0, marks=[pytest.mark.slow, pytest.mark.timeout(900)], id="200M"),
    ],
)
def test_rank_memory_is_bounded_by_its_share(tmp_path: Path, sizes: tuple[int, int, int], slack: int) -> None:
    """Its share: weights, gradients and two moments in float32. `slack`: of libraries and buffers, which do not grow with a model."""
    for name, own in (("small", SMALL), ("large", sizes)):
        (tmp_path / name / "version").mkdir(parents=True)
        new_model(tmp_path / name, own)
    results = on_ranks(4, bounded, tmp_path, sizes)
    print(json.dumps(results))
    for result in results:
        assert result["taken"] <= 1.3 * result["share"] + slack
        assert result["largest"] <= sizes[0] * sizes[1] * 4 / 4 * 1.01 + 2**20, "no tensor of a rank is larger than its shard of one"
        assert result["largest"] < result["weights"] / 4
