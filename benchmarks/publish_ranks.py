"""Ranks of a trainer that hold a model in shards, step it and serve their parts, for the benchmark of publications from shards, and tests.

In: a Hugging Face directory, and orders. Out: senders of weights; files that the first rank gathered. Invariant: no rank reads or holds a
whole tensor but for `gather`: shards are read from the file row by row, into FSDP2's parameters.

Gradients are random: what matters is how AdamW moves words, not where to.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from safetensors.numpy import save_file
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.scratch import scratch
from spangrad.settings import TrainerSettings
from trainer.optim.states.weight_files import WeightFiles, written_parts
from trainer.optim.weight_shards import held_parts, own_parts
from trainer.publish import checkpoint
from trainer.publish.rank_sender import RankAddress, RankSender
from trainer.publish.shared_file import FilePart

_SECONDS = 300.0
"""Time in which a rank must obey."""


@dataclass(frozen=True, slots=True)
class RankMemory:
    """Main memory of a rank's process, in bytes."""

    resident: int
    peak: int
    """Most since the last reset."""
    share: int
    """Bytes of its parameters in float32."""


class TrainerRanks:
    """Processes of one gloo group that hold a model in shards."""

    def __init__(self, count: int, model: Path) -> None:
        """Start the ranks and load their shards of the model's only file of weights."""
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["benchmarks.publish_ranks"])  # most of what a rank's start costs otherwise
        self._scratch = ExitStack()
        directory = self._scratch.enter_context(scratch("ranks"))
        pairs = [context.Pipe() for _ in range(count)]
        self.processes = [
            context.Process(target=_rank, args=(rank, count, directory, model, pairs[rank][1]), daemon=True) for rank in range(count)
        ]
        self._orders: list[Connection] = [own for own, _ in pairs]
        for process, (_, its) in zip(self.processes, pairs, strict=True):
            process.start()
            its.close()
        self.addresses: list[RankAddress] = self._answers()

    def __enter__(self) -> Self:
        """Return the ranks."""
        return self

    def __exit__(self, *_: object) -> None:
        """End all processes."""
        for process in self.processes:
            process.kill()
            process.join()
        self._scratch.close()

    def step(self, rate: float, seed: int) -> float:
        """Step AdamW with random gradients; return the share of the words that changed in bfloat16."""
        return float(np.mean(self.order("step", rate, seed)))

    def gather(self, directory: Path, *, moments: bool = False) -> None:
        """Have the first rank write all parameters, each gathered, to a directory; `moments`: and AdamW's moments, beside them."""
        self.order("gather", directory, moments)

    def memory(self, *, reset: bool = False) -> list[RankMemory]:
        """Return the memory of each rank; `reset`: count the peak anew."""
        return self.order("memory", reset)

    def order(self, method: str, *arguments: Any) -> list[Any]:
        """Give all ranks an order; return their answers."""
        for orders in self._orders:
            orders.send((method, arguments))
        return self._answers()

    def _answers(self) -> list[Any]:
        answers: list[Any] = []
        for rank, orders in enumerate(self._orders):
            if not orders.poll(_SECONDS):
                raise SystemExit(f"rank {rank} does not answer within {_SECONDS:g} s")
            answers.append(orders.recv())
        return answers


class _Rank:
    """Shards of one rank."""

    def __init__(self, model: Path) -> None:
        config = AutoConfig.from_pretrained(model)
        with torch.device("meta"):
            self.module = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        for layer in self.module.model.layers:
            fully_shard(layer)
        fully_shard(self.module)
        self.module.to_empty(device="cpu")
        with WeightFiles(model) as files:
            for part in held_parts(self.module, dict(self.module.named_parameters())):
                files.read(part)
        self.optimizer = torch.optim.AdamW(self.module.parameters(), lr=1e-6, foreach=False)

    def step(self, rate: float, seed: int) -> float:
        """Step, tensor by tensor; return the share of words that changed in bfloat16."""
        generator = torch.Generator().manual_seed(1000 * seed + torch.distributed.get_rank())
        changed = total = 0
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        before = [_local(value).detach().bfloat16() for value in self.module.parameters()]
        for value in self.module.parameters():
            local = _local(value)
            gradient = torch.randn(local.shape, generator=generator)
            value.grad = DTensor.from_local(gradient, value.device_mesh, value.placements, shape=value.shape, stride=value.stride())
        self.optimizer.step()
        self.optimizer.zero_grad()
        for old, value in zip(before, self.module.parameters(), strict=True):
            changed += int((old != _local(value).detach().bfloat16()).sum())
            total += old.numel()
        return changed / max(total, 1)

    def gather(self, directory: Path, moments: bool) -> None:
        """Collect all parameters, and AdamW's moments where asked, in the first rank, which then writes them; collective."""
        tied = getattr(self.module, "all_tied_weights_keys", None) or {}
        held = {name: value for name, value in self.module.state_dict().items() if name not in tied}
        weights = _whole(held)
        state = [_whole(each) for each in self.optimizer.state_dict()["state"].values()] if moments else None
        if torch.distributed.get_rank() == 0:
            directory.mkdir(parents=True, exist_ok=True)
            arrays = {name: value.float().numpy() for name, value in weights.items()}
            save_file(arrays, directory / checkpoint.WEIGHTS, metadata={"format": "pt"})
            if state is not None:
                torch.save(state, directory / "moments.pt")

    def memory(self, reset: bool) -> RankMemory:
        """Return this process's memory."""
        status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        resident, peak = (1024 * int(status[name].split()[0]) for name in ("VmRSS", "VmHWM"))
        if reset:
            Path("/proc/self/clear_refs").write_text("5")
        share = sum(4 * _local(value).numel() for value in self.module.parameters())
        return RankMemory(resident, peak, share)

    def parts(self) -> Iterator[FilePart]:
        """Yield this rank's parts."""
        for part in own_parts(self.module, TrainerSettings()):
            yield part.on_host(copy=False)


def _whole(held: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return whole tensors in the first rank, and none in the others; collective: each whole tensor takes all ranks."""
    first = torch.distributed.get_rank() == 0
    whole = ((name, value.full_tensor() if isinstance(value, DTensor) else value) for name, value in held.items())
    return {name: value for name, value in whole if first}


def _local(value: Any) -> torch.Tensor:
    return value.to_local() if isinstance(value, DTensor) else value


def _rank(rank: int, count: int, directory: Path, model: Path, orders: Connection) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{directory}/meeting", rank=rank, world_size=count)
    own = _Rank(model)
    sender = RankSender(own.parts, lambda directory: written_parts(directory, count, rank), "127.0.0.1")
    orders.send(sender.address)
    while True:
        try:
            method, arguments = orders.recv()
        except EOFError:
            return
        orders.send(getattr(own, method)(*arguments))
