"""Processes that are ranks of one gloo group, and the models that they shard.

In: a function of this package. Out: what it returned on each rank. The processes are forked from one that has imported PyTorch, what it
imports with the first sharded module, and what tests import, which is most of what such a process costs otherwise.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import tempfile
from collections.abc import Callable
from multiprocessing import forkserver
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

PRELOADED = (
    "torch",
    "torch._dynamo",  # by the first call of `fully_shard`
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint",
    "hypothesis",
    "pytest",
    "tests.support.policies",
    "tests.support.ranks",
    "trainer.optim.states.sharded_state",
    "trainer.optim.states.weight_files",
    "trainer.optim.weight_shards",
)
DEADLINE_SECONDS = 120.0
_ROOT = str(Path(__file__).parents[2])


def start_fork_server(*further: str) -> None:
    """Start the one process that all ranks of this process are forked from, with further modules imported, unless it runs already."""
    multiprocessing.set_forkserver_preload([*PRELOADED, *further])
    with mock.patch.dict(os.environ, PYTHONPATH=_ROOT):  # a fork server of another directory finds our tests, and not verl's
        forkserver.ensure_running()


def on_ranks(count: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Call a function on each rank of a group; return its results, by rank."""
    context = multiprocessing.get_context("forkserver")
    start_fork_server()
    with tempfile.TemporaryDirectory(prefix="ranks-") as directory:
        ranks = [context.Process(target=_run, args=(rank, count, directory, function, arguments)) for rank in range(count)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join(DEADLINE_SECONDS)
        for process in ranks:
            if process.is_alive():
                process.kill()
                process.join()
        assert [process.exitcode for process in ranks] == [0] * count
        return [pickle.loads((Path(directory) / str(rank)).read_bytes()) for rank in range(count)]


def _run(rank: int, count: int, directory: str, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{directory}/meeting", rank=rank, world_size=count)
    result = function(*arguments)
    (Path(directory) / str(rank)).write_bytes(pickle.dumps(result))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


class Adapted(nn.Module):
    """Weight with an adapter beside it, by PEFT's names."""

    def __init__(self, rows: int, columns: int, rank: int) -> None:
        super().__init__()
        self.base_layer = nn.Linear(columns, rows)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(columns, rank, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(rank, rows, bias=False)})


def odd_module(*, adapted: bool = False) -> nn.Module:
    """Return a model whose tensors no number of ranks divides: rows of 1 to 7, experts, a scalar, a tied head; the same on every rank."""
    with torch.random.fork_rng():
        torch.manual_seed(7)
        module, layer, mlp, experts = nn.Module(), nn.Module(), nn.Module(), nn.Module()
        experts.gate_up_proj = nn.Parameter(torch.randn(3, 4, 5))
        experts.down_proj = nn.Parameter(torch.randn(3, 5, 2))
        mlp.experts = experts
        layer.mlp, layer.q_proj, layer.norm = mlp, Adapted(7, 6, 2) if adapted else nn.Linear(6, 7), nn.LayerNorm(3)
        module.layers, module.embed, module.head = nn.ModuleList([layer]), nn.Embedding(5, 6), nn.Linear(6, 5, bias=False)
        module.head.weight = module.embed.weight
        module.one = nn.Parameter(torch.randn(1, 3))
        module.register_buffer("count", torch.tensor(3.0))
        module.config = SimpleNamespace(model_type="qwen3_moe")  # type: ignore[assignment]
        module.all_tied_weights_keys = {"head.weight": "embed.weight"}  # type: ignore[assignment]
        return module


def sharded(module: nn.Module, shape: tuple[int, ...]) -> nn.Module:
    """Return a model sharded along the last dimension of a mesh of ranks, and replicated along the others; (): not at all."""
    if shape:
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("ddp", "fsdp")[-len(shape) :])
        fully_shard(module.layers[0], mesh=mesh)
        fully_shard(module, mesh=mesh)
    return module
