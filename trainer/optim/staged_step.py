"""Optimizer step in two halves: gradients first, the weights once the caller has checked the outputs of the forward passes.

In: verl's TrainingWorker, rows in verl's layout. Out: its metrics and model outputs; the gradient's norm. Invariant: between the halves the
gradients of all micro-batches lie summed and sharded in `.grad`, where `discard` clears them; weights and moments move in `apply` alone.

verl is imported with this module, so `trainer.optim.process.choose_platform` comes first.
"""

from __future__ import annotations

import math
from typing import Any

from codetiming import Timer
from verl.utils import tensordict_utils as tu


def accumulate(worker: Any, rows: Any) -> Any:
    """Pass rows forward and backward and keep their gradients; collective.

    Returns:
        The result of `TrainingWorker.train_batch`, without a gradient's norm, and with the model's outputs row by row beside it.
    """
    config, engine = worker.engine_config, worker.engine
    defaults = {
        "use_remove_padding": worker.model_config.get("use_remove_padding", False),
        "use_dynamic_bsz": config.use_dynamic_bsz,
        "max_token_len_per_gpu": config.max_token_len_per_gpu,
        "micro_batch_size_per_gpu": config.micro_batch_size_per_gpu,
        "use_fused_kernels": config.use_fused_kernels,
    }
    tu.assign_non_tensor(rows, return_model_output=True, **{key: value for key, value in defaults.items() if key not in rows.keys()})  # noqa: SIM118
    with engine.train_mode(zero_grad_on_exit=False), Timer(name="accumulate", logger=None) as timer:
        engine.optimizer_zero_grad()
        output = engine.forward_backward_batch(rows, worker.loss_fn)
    return worker._postprocess_output(
        output,
        global_token_num=tu.get(rows, "global_token_num"),
        delta_time=timer.last,
        forward_only=False,
        images_seqlens=None,
    ).cpu()


def apply(worker: Any) -> float:
    """Step the optimizer and its schedule by the gradients of `accumulate`, and clear them; collective.

    Returns:
        The gradient's norm before clipping. Where it is not finite, weights, moments and schedule are as before.
    """
    with worker.engine.train_mode():
        norm = worker.engine.optimizer_step()
        if math.isfinite(norm):
            worker.engine.lr_scheduler_step()
    return norm


def discard(worker: Any) -> None:
    """Clear the gradients of `accumulate`."""
    worker.engine.optimizer_zero_grad()
