"""One rank of the optimizer: the policy, its reference and its critic in one process, with their weights and state.

In: verl's TrainingWorkers (`trainer.optim.verl_worker`). Out: passes, steps in two halves, states. Invariant: every rank makes the same
calls in the same order, and writes its own part of files.

verl is imported with this module, so `trainer.optim.process.choose_platform` comes first.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from verl.single_controller.base.decorator import Dispatch, make_nd_compute_dataproto_dispatch_fn, register
from verl.utils import tensordict_utils as tu

from spangrad.errors import CheckpointError
from spangrad.settings import TrainerSettings
from spangrad.weights.shards import TensorSums
from trainer.optim import staged_step
from trainer.optim.pass_times import PassTimes
from trainer.optim.process import held_versions, quiet
from trainer.optim.states import moved, sharded_state, snapshots
from trainer.optim.states.snapshots import Shards
from trainer.optim.states.weight_files import WeightFiles, written_parts
from trainer.optim.weight_shards import held_parts, own_parts
from trainer.publish import checkpoint
from trainer.publish.lora import kept, require_adapters, weights_file
from trainer.publish.rank_sender import RankAddress, RankSender
from trainer.publish.shared_file import FilePart, sums_of_parts, write_parts

MESH = "actor"
"""Name of verl's device mesh of the policy, by which rows are divided among ranks."""
on_every_rank: Callable[[Any], Any] = register(dispatch_mode=Dispatch.ONE_TO_ALL)  # pyright: ignore[reportAttributeAccessIssue]
"""Decorator of a method that verl's worker group calls on every rank, with the same arguments."""


class ModelRole(StrEnum):
    """Model of a worker."""

    POLICY = "policy"
    REFERENCE = "reference"
    CRITIC = "critic"


_WEIGHTS = {role: f"{role}.weights" for role in ModelRole}
"""Prefixes of models' weights in the state."""


class Rank:
    """Calls on the models of one process, as a part of verl's worker; `assemble` must be called first."""

    rank: int
    world_size: int

    def assemble(self, models: dict[ModelRole, Any], settings: TrainerSettings, device: str) -> None:
        """Take charge of the models of this process, verl's TrainingWorkers with weights, on a device: cuda or cpu."""
        self._models, self._settings, self._device = models, settings, device
        self._before: dict[ModelRole, snapshots.Snapshot] = {}
        self._position = 0
        """Position of the policy's schedule at the step's start, in optimizer steps."""
        self._earlier = deque[Shards](maxlen=held_versions(settings))
        """Weights of the policy's last versions, newest first."""
        self._collected: tuple[list[FilePart], dict[str, Any] | None] | None = None
        """Weights and state that `write` writes. None: there are none."""
        self._files = sharded_state.new_group()
        """Process group of writes and reads. It ends with this rank: it has a thread that wakes a hundred times a second."""
        weakref.finalize(self, torch.distributed.destroy_process_group, self._files).atexit = False
        self._sender: RankSender | None = None
        """Sender of the weights. None: none were asked for."""
        self._times = PassTimes(device)
        policy = self._engine(ModelRole.POLICY)
        _hold_after(policy.lr_scheduler, policy.optimizer_config.total_training_steps)
        for role in models:
            self._times.watch(self._engine(role))

    @on_every_rank
    def begin_step(self, undoable: bool) -> None:
        """Copy the weights that `end_step` keeps; if they may move before the last check (`undoable`), also what `undo_step` restores."""
        self._times.begin()
        self._position = self._engine(ModelRole.POLICY).lr_scheduler.last_epoch
        copied = [role for role, _ in self._trained()] if undoable else [ModelRole.POLICY] if held_versions(self._settings) else []
        self._before = {role: snapshots.take(self._engine(role), moments=undoable) for role in copied}

    @on_every_rank
    def end_step(self) -> None:
        """Hold the weights from the start of the step, as those of the previous version, and move the schedule to the step's end.

        Parts of a batch without a gradient take no optimizer step, and there may be fewer parts than mini-batches. The schedule counts them
        all the same: it follows the branch's steps, as trainer.max_steps does.
        """
        optim = self._settings.optim
        _set_position(self._engine(ModelRole.POLICY).lr_scheduler, self._position + optim.epochs * optim.mini_batches)
        if ModelRole.POLICY in self._before:
            self._earlier.appendleft(self._before[ModelRole.POLICY].weights)
        self._before = {}

    @on_every_rank
    def hold_weights(self, directory: Path) -> None:
        """Hold a checkpoint's weights as those of the version before the trained one; weights held already are older; collective.

        Raises:
            CheckpointError: the directory lacks a trained parameter.
        """
        engine = self._engine(ModelRole.POLICY)
        own = snapshots.take(engine, moments=False)
        try:
            self.load_weights(directory)
            self._earlier.appendleft(snapshots.take(engine, moments=False).weights)
        finally:
            snapshots.restore(engine, own)

    @on_every_rank
    def load_weights(self, directory: Path) -> None:
        """Give the policy the weights of a checkpoint's directory, and leave all else as it is; collective.

        Raises:
            CheckpointError: the directory lacks a trained parameter.
        """
        module = self._engine(ModelRole.POLICY).module
        parts = list(held_parts(module, {name for name, value in module.named_parameters() if value.requires_grad}))
        with WeightFiles(directory) as files:
            if lacking := files.lacking(parts):
                raise CheckpointError(
                    f"{directory} lacks {lacking[0]}. Restore it from a copy, or remove it: versions before it are not held."
                )
            for part in parts:
                files.read(part)

    @on_every_rank
    def offload(self) -> None:
        """Move the models and their moments to main memory, and give the device's memory back; collective."""
        for role in self._models:
            moved.off_device(self._engine(role), self._device)

    @on_every_rank
    def load_back(self) -> None:
        """Move what `offload` moved to the device again; collective."""
        for role in self._models:
            moved.to_device(self._engine(role), self._device)

    @on_every_rank
    def undo_step(self) -> None:
        """Clear gradients, and restore the copies of `begin_step`."""
        for role, model in self._models.items():
            if role is not ModelRole.REFERENCE:
                staged_step.discard(model)
        for role, snapshot in self._before.items():
            snapshots.restore(self._engine(role), snapshot)
        self._before = {}

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name=MESH))
    def train(self, rows: Any) -> Any:
        """Take one optimizer step of the model that the rows name; collective."""
        with quiet(), self._times.forward_and_backward():
            return self._models[ModelRole(tu.pop(rows, "role"))].train_batch(rows)

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name=MESH))
    def accumulate(self, rows: Any) -> Any:
        """Pass rows forward and backward through the model that they name, and keep their gradients for `apply`; collective."""
        with quiet(), self._times.forward_and_backward():
            return staged_step.accumulate(self._models[ModelRole(tu.pop(rows, "role"))], rows)

    @on_every_rank
    def apply(self, role: str) -> float:
        """Step a model by the gradients of `accumulate`; collective. Return the gradient's norm."""
        with quiet():
            return staged_step.apply(self._models[ModelRole(role)])

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name=MESH))
    def infer(self, rows: Any) -> Any:
        """Pass rows forward through the model that they name, or through the policy as it was `behind` versions ago; collective."""
        role, behind = ModelRole(tu.pop(rows, "role")), tu.pop(rows, "behind", default=0)
        earlier = snapshots.loaded(self._engine(role), self._earlier[behind - 1]) if behind else contextlib.nullcontext()
        with quiet(), earlier:
            return self._models[role].infer_batch(rows)

    @on_every_rank
    def pass_times(self) -> dict[str, float]:
        """Return the seconds of the step's passes (`PassTimes.take`)."""
        return self._times.take()

    def weights(self) -> Iterator[tuple[str, NDArray[np.float32]]]:
        """Yield the policy's parameters by Hugging Face names, tied ones once, adapters merged; or adapters, by PEFT's; with one rank."""
        assert self.world_size == 1
        for part in own_parts(self._engine(ModelRole.POLICY).module, self._settings):
            yield part.name, part.words.cpu().numpy().reshape(part.shape)

    def _parts(self, *, copy: bool = False) -> Iterator[FilePart]:
        """Return this rank's own parts of the policy's weights, in main memory."""
        return (part.on_host(copy=copy) for part in own_parts(self._engine(ModelRole.POLICY).module, self._settings))

    @on_every_rank
    def serve_parts(self) -> list[RankAddress]:
        """Serve this rank's own parts of the policy's weights to engines, from now on; collective. Return the addresses of all ranks."""
        if self._sender is None:
            sync = self._settings.weight_sync
            port = sync.transfer_port and sync.transfer_port + 1 + self.rank
            written = functools.partial(written_parts, ranks=self.world_size, number=self.rank)
            self._sender = RankSender(self._parts, written, sync.transfer_host, port)
        addresses: list[Any] = [None] * self.world_size
        torch.distributed.all_gather_object(addresses, self._sender.address)
        return addresses

    def stop_serving(self) -> None:
        """Stop what `serve_parts` started."""
        if self._sender:
            self._sender.close()
        self._sender = None

    @on_every_rank
    def save_weights(self, directory: Path) -> None:
        """Write the policy's parameters, each rank its own; collective."""
        self._write_weights(directory, list(self._parts()))

    def _write_weights(self, directory: Path, parts: Sequence[FilePart]) -> None:
        write_parts(directory / weights_file(self._settings), parts, {"format": "pt"}, first=self.rank == 0)

    @on_every_rank
    def weight_sums(self) -> dict[str, TensorSums]:
        """Return the sums of this rank's parts of the policy's parameters; collective."""
        return sums_of_parts(self._parts())

    @on_every_rank
    def collect(self, order: Any, with_state: bool) -> None:
        """Copy to main memory what `write` writes of this rank's; collective.

        Weights are copied, since a check of earlier versions' calls puts others in their place for a while. What changes in an update
        alone (moments, critic) is not, where it is in main memory already: it is to be written before the next update. Mini-batches are
        drawn from the random state `order`, which is not a worker's.
        """
        self._collected = list(self._parts(copy=True)), self._state(order) if with_state else None

    @on_every_rank
    def write(self, directory: Path) -> dict[str, TensorSums]:
        """Write what was collected, and free it, beside other calls; return the sums of this rank's parts of the weights."""
        assert self._collected is not None
        (weights, state), self._collected = self._collected, None
        if state is not None:  # first: in this alone ranks wait for one another
            sharded_state.write(directory / checkpoint.STATE, state, self._files)
        self._write_weights(directory, weights)
        return sums_of_parts(weights)

    def _state(self, order: Any) -> dict[str, Any]:
        """Return this rank's shards of the state beside the weights, in main memory, and its own random state under its number."""
        schedule = self._engine(ModelRole.POLICY).lr_scheduler
        state = {"order": order, "steps": schedule.last_epoch, **sharded_state.named(f"random.{self.rank}", _random_state())}
        for role, engine in self._trained():
            state |= sharded_state.moments(role, engine.module, engine.optimizer)
        if self._settings.lora.rank:
            held = kept(self._engine(ModelRole.POLICY).module.state_dict(), self._settings)
            state |= {**sharded_state.named(_WEIGHTS[ModelRole.POLICY], held), "lora_alpha": self._settings.lora.alpha}
        if ModelRole.CRITIC in self._models:
            state |= sharded_state.named(_WEIGHTS[ModelRole.CRITIC], self._engine(ModelRole.CRITIC).module.state_dict())
        return sharded_state.host_copy(state)

    @on_every_rank
    def load_state(self, directory: Path) -> Any:
        """Read this rank's shards of the state that any number of workers wrote; collective.

        A critic that it lacks starts untrained; rates and betas are as set.

        Returns:
            The random state that mini-batches are drawn from.

        Raises:
            CheckpointError: the files are missing or damaged, or have other adapters than the settings; on every rank, and nothing changed.
        """
        files, settings, policy = directory / checkpoint.STATE, self._settings, self._engine(ModelRole.POLICY)
        held = sharded_state.entries(files)
        facts = self._facts_of(files, held)
        own = f"random.{self.rank}"
        state = {name: sharded_state.empty(entry) for name, entry in held.items() if name.startswith(f"{own}.")}
        for role, engine in self._trained():
            state |= sharded_state.moments_like(role, engine.module, held)
            weights = sharded_state.named(_WEIGHTS[role], engine.module.state_dict())
            state |= {name: torch.empty_like(value) for name, value in weights.items() if name in held}
        sharded_state.read(files, state, self._files)
        for role, engine in self._trained():
            if weights := sharded_state.under(_WEIGHTS[role], state):
                adapters_alone = role is ModelRole.POLICY and settings.weight_sync.method == "adapter"
                engine.module.load_state_dict(weights, strict=not adapters_alone)
            if role is ModelRole.POLICY or weights:
                sharded_state.load_moments(role, engine.module, engine.optimizer, state)
        _set_position(policy.lr_scheduler, facts["steps"])
        _set_random_state(sharded_state.under(own, state))
        return facts["order"]

    @on_every_rank
    def load_adapters(self, directory: Path) -> None:
        """Give the policy the adapters of a state that any number of workers wrote, and leave all else as it is; collective.

        Raises:
            CheckpointError: as `load_state`.
        """
        files, module = directory / checkpoint.STATE, self._engine(ModelRole.POLICY).module
        held = sharded_state.entries(files)
        self._facts_of(files, held)
        weights = sharded_state.named(_WEIGHTS[ModelRole.POLICY], kept(module.state_dict(), self._settings))
        state: dict[str, Any] = {name: torch.empty_like(value) for name, value in weights.items()}
        sharded_state.read(files, state, self._files)
        module.load_state_dict(sharded_state.under(_WEIGHTS[ModelRole.POLICY], state), strict=False)

    def _facts_of(self, files: Path, held: Mapping[str, sharded_state.StoredTensor | None]) -> dict[str, Any]:
        """Return what a state holds beside the ranks' tensors, if it has the adapters of the settings; collective."""
        facts: dict[str, Any] = {name: sharded_state.empty(held[name]) for name in ("order", "steps", "lora_alpha") if name in held}
        sharded_state.read(files, facts, self._files)
        adapted = {name: entry.shape for name, entry in sharded_state.under(_WEIGHTS[ModelRole.POLICY], held).items() if entry}
        parameters = self._engine(ModelRole.POLICY).module.state_dict()
        require_adapters(files, adapted if "lora_alpha" in held else None, facts.get("lora_alpha"), parameters, self._settings)
        return facts

    def _trained(self) -> list[tuple[ModelRole, Any]]:
        """Return the models that are trained."""
        return [(role, self._engine(role)) for role in self._models if role is not ModelRole.REFERENCE]

    def _engine(self, role: ModelRole) -> Any:
        return self._models[role].engine


def _hold_after(schedule: Any, steps: int) -> None:
    """Hold a schedule's rates from so many optimizer steps on: the half of a cosine that follows would raise them again."""

    def held(factor: Callable[[int], float], step: int) -> float:
        return factor(min(step, steps))

    schedule.lr_lambdas = [functools.partial(held, factor) for factor in schedule.lr_lambdas]


def _set_position(schedule: Any, steps: int) -> None:
    """Move a schedule to its position after `steps` optimizer steps, with the rates of the settings."""
    schedule.last_epoch = steps
    for group, rate, factor in zip(schedule.optimizer.param_groups, schedule.base_lrs, schedule.lr_lambdas, strict=True):
        group["lr"] = rate * factor(steps)
    schedule._last_lr = [group["lr"] for group in schedule.optimizer.param_groups]  # what `snapshots.restore` goes back to


def _random_state() -> dict[str, Any]:
    return {"cpu": torch.get_rng_state(), **({"cuda": torch.cuda.get_rng_state()} if torch.cuda.is_available() else {})}


def _set_random_state(state: Mapping[str, Any]) -> None:
    if "cpu" in state:  # not in a state of fewer ranks
        torch.set_rng_state(state["cpu"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
