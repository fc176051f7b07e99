"""One rank of the optimizer: the policy, its reference and its critic in one process, with their weights and state.

In: verl's TrainingWorkers (`trainer.optim.verl_worker`). Out: passes, steps in two halves, states. Invariant: every rank makes the same
calls in the same order, and writes its own part of files.

verl is imported with this module, so `trainer.optim.process.choose_platform` comes first.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor
from verl.single_controller.base.decorator import Dispatch, make_nd_compute_dataproto_dispatch_fn, register
from verl.utils import tensordict_utils as tu

from spangrad.errors import CheckpointError
from spangrad.settings import TrainerSettings
from spangrad.weights.shards import TensorSums
from trainer.optim import staged_step
from trainer.optim.pass_times import PassTimes
from trainer.optim.process import quiet
from trainer.optim.states import snapshots
from trainer.optim.states.host_parts import host_part
from trainer.optim.states.snapshots import EarlierWeights
from trainer.optim.weight_shards import WeightPart, kind_of, load_whole, own_parts, shard_of
from trainer.publish import checkpoint
from trainer.publish.experts import fuse_experts
from trainer.publish.lora import kept, require_adapters, weights_file
from trainer.publish.rank_sender import RankAddress, RankSender
from trainer.publish.shared_file import FilePart, sums_of_parts, write_parts

MESH = "actor"
"""Name of verl's device mesh of the policy, by which rows are divided among ranks."""


class ModelRole(StrEnum):
    """Model of a worker."""

    POLICY = "policy"
    REFERENCE = "reference"
    CRITIC = "critic"


class Rank:
    """Calls on the models of one process, as a part of verl's worker; `assemble` must be called first."""

    rank: int
    world_size: int

    def assemble(self, models: dict[ModelRole, Any], settings: TrainerSettings, device: str) -> None:
        """Take charge of the models of this process.

        Args:
            models: verl's TrainingWorker of each model, with its weights.
            settings: the trainer's.
            device: cuda or cpu.
        """
        self._models, self._settings = models, settings
        self._before: dict[ModelRole, snapshots.Snapshot] = {}
        self._earlier: EarlierWeights | None = None
        self._collected: tuple[list[FilePart], dict[str, Any] | None] | None = None
        """Weights and state that `write` writes. None: there are none."""
        self._sender: RankSender | None = None
        """Sender of the weights. None: none were asked for."""
        self._times = PassTimes(device)
        for role in models:
            self._times.watch(self._engine(role))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def begin_step(self, held_versions: int, undoable: bool) -> None:
        """Copy the weights that `end_step` keeps for later versions' checks and the state that `undo_step` restores.

        Args:
            held_versions: number of earlier versions whose policy weights are held in main memory.
            undoable: True if weights may move before the last check of the step.
        """
        if self._earlier is None:
            self._earlier = EarlierWeights(held_versions)
        self._times.begin()
        trained = [role for role in self._models if role is not ModelRole.REFERENCE]
        copied = trained if undoable else [ModelRole.POLICY] if held_versions else []
        self._before = {role: snapshots.take(self._engine(role), moments=undoable) for role in copied}

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def end_step(self) -> None:
        """Hold the weights from the start of the step, as those of the previous version."""
        if ModelRole.POLICY in self._before and self._earlier:
            self._earlier.hold(self._before[ModelRole.POLICY].weights)
        self._before = {}

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def hold_weights(self, directory: Path, held_versions: int) -> None:
        """Hold a checkpoint's weights as those of the version before the trained one; weights held already are older; collective.

        Args:
            directory: directory of the checkpoint.
            held_versions: as in `begin_step`.

        Raises:
            CheckpointError: the directory lacks a trained parameter.
        """
        if self._earlier is None:
            self._earlier = EarlierWeights(held_versions)
        engine = self._engine(ModelRole.POLICY)
        own = snapshots.take(engine, moments=False)
        try:
            self.load_weights(directory)
            self._earlier.hold(snapshots.take(engine, moments=False).weights)
        finally:
            snapshots.restore(engine, own)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def load_weights(self, directory: Path) -> None:
        """Give the policy the weights of a checkpoint, and leave all else as it is; collective.

        Args:
            directory: directory of the checkpoint.

        Raises:
            CheckpointError: the directory lacks a trained parameter.
        """
        module = self._engine(ModelRole.POLICY).module
        files = {name: tensor for file in sorted(directory.glob("*.safetensors")) for name, tensor in load_file(file).items()}
        state = fuse_experts(files, kind_of(module))
        tied = getattr(module, "all_tied_weights_keys", None) or {}
        lacking = [name for name, value in module.named_parameters() if value.requires_grad and name not in state and name not in tied]
        if lacking:
            raise CheckpointError(f"{directory} lacks {lacking[0]}. Restore it from a copy, or remove it: versions before it are not held.")
        load_whole(module, state, strict=False)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
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

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def apply(self, role: str) -> float:
        """Step a model by the gradients of `accumulate`; collective. Return the gradient's norm."""
        with quiet():
            return staged_step.apply(self._models[ModelRole(role)])

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name=MESH))
    def infer(self, rows: Any) -> Any:
        """Pass rows forward through the model that they name, or through the policy as it was `behind` versions ago; collective."""
        role, behind = ModelRole(tu.pop(rows, "role")), tu.pop(rows, "behind", default=0)
        with quiet(), self._with_weights_of(role, behind):
            return self._models[role].infer_batch(rows)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def pass_times(self) -> dict[str, float]:
        """Return the seconds of the step's passes (`PassTimes.take`)."""
        return self._times.take()

    def _with_weights_of(self, role: ModelRole, behind: int) -> contextlib.AbstractContextManager[None]:
        if not behind:
            return contextlib.nullcontext()
        assert self._earlier is not None
        return self._earlier.loaded(self._engine(role), behind)

    def weights(self) -> Iterator[tuple[str, NDArray[np.float32]]]:
        """Yield the policy's parameters by Hugging Face names, tied ones once, adapters merged; or adapters, by PEFT's; with one rank."""
        assert self.world_size == 1
        for part in self._parts():
            yield part.name, part.words.cpu().numpy().reshape(part.shape)

    def _parts(self) -> Iterator[WeightPart]:
        return own_parts(self._engine(ModelRole.POLICY).module, self._settings)

    def _weight_parts(self) -> list[FilePart]:
        return [host_part(part.name, part.shape, part.first, part.words, copy=True) for part in self._parts()]

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def serve_parts(self) -> list[RankAddress]:
        """Serve this rank's own parts of the policy's weights to engines, from now on; collective. Return the addresses of all ranks."""
        if self._sender is None:
            sync = self._settings.weight_sync
            port = sync.transfer_port and sync.transfer_port + 1 + self.rank
            self._sender = RankSender(self._sent_parts, sync.transfer_host, port)
        addresses: list[Any] = [None] * self.world_size
        torch.distributed.all_gather_object(addresses, self._sender.address)
        return addresses

    def stop_serving(self) -> None:
        """Stop what `serve_parts` started."""
        if self._sender:
            self._sender.close()
        self._sender = None

    def _sent_parts(self) -> Iterator[FilePart]:
        return (host_part(part.name, part.shape, part.first, part.words, copy=False) for part in self._parts())

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def save_weights(self, directory: Path) -> None:
        """Write the policy's parameters, each rank its own; collective."""
        self._write_weights(directory, self._weight_parts())

    def _write_weights(self, directory: Path, parts: Sequence[FilePart]) -> None:
        write_parts(directory / weights_file(self._settings), parts, {"format": "pt"}, first=self.rank == 0)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def weight_sums(self) -> dict[str, TensorSums]:
        """Return the sums of this rank's parts of the policy's parameters; collective."""
        sums: dict[str, TensorSums] = {}
        for part in self._parts():
            sums |= sums_of_parts([host_part(part.name, part.shape, part.first, part.words, copy=False)])
        return sums

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def collect(self, order: Any, with_state: bool) -> None:
        """Copy to main memory what `write` writes of this rank's; collective.

        Weights are copied, since a check of earlier versions' calls puts others in their place for a while. What changes in an update
        alone (moments, critic) is not, where it is in main memory already: it is to be written before the next update.

        Args:
            order: random state that mini-batches are drawn from, which is not a worker's.
            with_state: True to collect the state beside the weights.
        """
        self._collected = self._weight_parts(), self._state(order) if with_state else None

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def write(self, directory: Path) -> dict[str, TensorSums]:
        """Write what was collected, and free it, beside other calls; return the sums of this rank's parts of the weights."""
        assert self._collected is not None
        (weights, state), self._collected = self._collected, None
        self._write_weights(directory, weights)
        if state is not None and self.rank == 0:
            torch.save(state, directory / checkpoint.STATE)
        return sums_of_parts(weights)

    def _state(self, order: Any) -> dict[str, Any]:
        """Return the state beside the weights; collective. Tensors are None on other ranks than 0."""
        keep, policy = self.rank == 0, self._engine(ModelRole.POLICY)
        ranks: list[Any] = [None] * self.world_size
        torch.distributed.all_gather_object(ranks, _random_state())
        state = {
            "moments": _moments(policy.optimizer, keep),
            "steps": policy.lr_scheduler.last_epoch,
            "order": order,
            "random": ranks,
        }
        if self._settings.lora.rank:
            held = kept(policy.module.state_dict(), self._settings)
            state["adapted"] = {name: _whole(value, keep, copy=".lora_" in name) for name, value in held.items()}
            state["lora_alpha"] = self._settings.lora.alpha
        if ModelRole.CRITIC in self._models:
            critic = self._engine(ModelRole.CRITIC)
            state["critic"] = {"weights": _whole(critic.module.state_dict(), keep), "moments": _moments(critic.optimizer, keep)}
        return state

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def load_state(self, directory: Path) -> Any:
        """Read the state that `write` wrote, by any number of workers. A critic that it lacks starts untrained; rates and betas are as set.

        Returns:
            The random state that mini-batches are drawn from.

        Raises:
            CheckpointError: the file is missing or damaged, or has other adapters than the settings; on every rank.
        """
        file, settings = directory / checkpoint.STATE, self._settings
        try:
            state = torch.load(file, weights_only=False, mmap=True)  # our own file, beside weights whose checksum was verified
        except (OSError, RuntimeError, EOFError) as error:
            raise CheckpointError(f"{file} cannot be read ({error}). Restore {directory} from a copy.") from error
        if not {"order", "steps", "moments"} <= state.keys():
            raise CheckpointError(
                f"{file} is of another release. Begin a branch with the weights beside it (trainer.branch, trainer.model), or go on there."
            )
        policy = self._engine(ModelRole.POLICY)
        require_adapters(file, state.get("adapted"), state.get("lora_alpha"), policy.module.state_dict(), settings)
        if settings.lora.rank:
            load_whole(policy.module, state["adapted"], strict=settings.weight_sync.method != "adapter")
        _load_moments(policy.optimizer, state["moments"])
        _resume_schedule(policy.lr_scheduler, state["steps"])
        if self.rank < len(state["random"]):
            _set_random_state(state["random"][self.rank])
        if ModelRole.CRITIC in self._models and "critic" in state:
            load_whole(self._engine(ModelRole.CRITIC).module, state["critic"]["weights"])
            _load_moments(self._engine(ModelRole.CRITIC).optimizer, state["critic"]["moments"])
        return state["order"]

    def _engine(self, role: ModelRole) -> Any:
        return self._models[role].engine


def _whole(state: Any, keep: bool, *, copy: bool = False) -> Any:
    """Return a state with its tensors whole and in main memory; collective.

    Args:
        state: tensors, in dicts or not, and values that are left as they are.
        keep: False to return None for tensors: another rank keeps them.
        copy: True to copy tensors that are in main memory already.
    """
    if isinstance(state, dict):
        return {key: _whole(value, keep, copy=copy) for key, value in state.items()}
    if not isinstance(state, torch.Tensor):
        return state
    whole = state.full_tensor() if isinstance(state, DTensor) else state
    return whole.detach().to("cpu", copy=copy) if keep else None


def _moments(optimizer: Any, keep: bool) -> dict[int, dict[str, Any]]:
    """Return an optimizer's state of each parameter; collective."""
    return _whole(optimizer.state_dict()["state"], keep)


def _load_moments(optimizer: Any, moments: dict[int, dict[str, Any]]) -> None:
    """Load the moments; rates, betas and decay stay as in the settings."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    own = {at: {name: shard_of(value, parameters[at]) for name, value in held.items()} for at, held in moments.items()}
    optimizer.load_state_dict({**optimizer.state_dict(), "state": own})


def _resume_schedule(schedule: Any, steps: int) -> None:
    """Resume a schedule after `steps` optimizer steps, from the rates of the settings."""
    schedule.last_epoch = steps
    for group, rate, factor in zip(schedule.optimizer.param_groups, schedule.base_lrs, schedule.lr_lambdas, strict=True):
        group["lr"] = rate * factor(steps)


def _random_state() -> dict[str, Any]:
    return {"cpu": torch.get_rng_state(), **({"cuda": torch.cuda.get_rng_state()} if torch.cuda.is_available() else {})}


def _set_random_state(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["cpu"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
