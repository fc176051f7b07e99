"""Ranks of verl's trainer: its workers of policy, reference and critic, whose passes take rows from TransferQueue.

In: metadata of rows in the queue, or rows themselves (training on files). Out: outputs in the queue; metrics. Invariant: rows have the
layout, value by value, that they have in one process; one rank in each process is in charge of all of its models.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from tensordict import NonTensorData, TensorDict
from torch.nn.utils.rnn import pad_sequence
from verl.single_controller.base.decorator import make_nd_compute_dataproto_dispatch_fn, register
from verl.utils import tensordict_utils as tu

from trainer.distributed.row_queue import PER_ROW, attach
from trainer.optim.rank import MESH, ModelRole, on_every_rank
from trainer.optim.rows import scalars, unpadded
from trainer.optim.verl_worker import ActorWorker, CriticWorker

_MODELS: dict[ModelRole, Any] = {}
"""Models of this process."""
_METRICS: dict[str, float] = {}
"""verl's metrics of the last pass of this process."""


class QueueActor(ActorWorker):
    """Worker of the policy, in charge of all models of its process; or of the reference."""

    @on_every_rank
    def init_model(self) -> None:
        """Load the weights."""
        _MODELS[ModelRole.REFERENCE if self._is_ref else ModelRole.POLICY] = self.load_models()

    @on_every_rank
    def take_charge(self, controller: Any) -> None:
        """Take charge of all models of the process, which are loaded; without a queue's controller rows come with the calls."""
        self.assemble(_MODELS, self._loaded, self._device)
        if controller is not None:
            attach(controller)

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name=MESH))
    def compute_log_prob(self, data: Any) -> Any:
        """Pass rows of the queue forward through the policy, or through it as it was `behind` versions ago; collective."""
        return _passed(self.infer, data)

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="ref"))
    def compute_ref_log_prob(self, data: Any) -> Any:
        """Pass rows of the queue forward through the reference; collective."""
        assert self.ref is not None
        return _passed(self.ref.infer_batch, data)

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name=MESH))
    def accumulate_rows(self, data: Any) -> Any:
        """Pass rows of the queue forward and backward through the policy, and keep their gradients for `apply`; collective."""
        return _passed(self.accumulate, data)

    @on_every_rank
    def pass_metrics(self) -> dict[str, float]:
        """Return verl's metrics of the last pass."""
        return _METRICS


class QueueCritic(CriticWorker):
    """Worker of the critic."""

    @on_every_rank
    def reset(self) -> None:
        """Load the weights, with a new head."""
        self.load_models()
        _MODELS[ModelRole.CRITIC] = self

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="train"))
    def infer_batch(self, data: Any) -> Any:
        """Pass rows of the queue forward; collective."""
        return _passed(super().infer_batch, data)

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="train"))
    def train_batch(self, data: Any) -> Any:
        """Take one optimizer step on rows of the queue; collective."""
        return _passed(super().train_batch, data)


def _passed(method: Callable[[Any], Any], data: Any) -> Any:
    """Do a pass of rows of the queue; return the outputs that are kept."""
    names = tu.pop(data, "outputs").split()
    result = method(of_queue(data))
    if result is None:  # another rank of the same rows has the outputs
        return None
    _METRICS.clear()
    _METRICS.update(scalars(result))
    return TensorDict({name: result[name] for name in names}, batch_size=data.batch_size)


def of_queue(data: Any) -> Any:
    """Return rows of the queue, columns without padding and the flags of the pass, in verl's jagged layout."""
    tensors = {name: value for name, value in data.items() if isinstance(value, torch.Tensor)}
    flags = {name: tu.get(data, name) for name in data.keys() if name not in tensors}  # noqa: SIM118
    counts = [int(count) for count in flags["global_token_num"].split()]
    flags["global_token_num"] = NonTensorData(counts)  # of all ranks' rows, so that it is no column of these
    prompt_width, response_width = flags.pop("prompt_width"), flags.pop("response_width")
    prompts, lengths = tensors.pop("prompts"), torch.stack(tensors.pop("response_length").unbind())
    columns = {
        name.removesuffix("_of_row"): torch.cat(value.unbind()) if name in PER_ROW else _padded(value, response_width)
        for name, value in tensors.items()
    }
    columns["prompts"] = _padded(prompts, prompt_width, side="left")
    prompt_lengths = torch.tensor([len(row) for row in prompts.unbind()])[:, None]
    attention = torch.cat([torch.arange(prompt_width).flip(0) < prompt_lengths, torch.arange(response_width) < lengths], dim=1)
    return unpadded({**columns, "attention_mask": attention.long()}, flags)


def _padded(rows: Any, width: int, side: str = "right") -> torch.Tensor:
    whole = pad_sequence(list(rows.unbind()), batch_first=True, padding_side=side)
    lacking = width - whole.shape[1]
    return torch.nn.functional.pad(whole, (lacking, 0) if side == "left" else (0, lacking))
