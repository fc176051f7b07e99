"""The optimiser of a run over files: verl's TrainingWorker with a supervised or a preference loss, and a schedule.

In: a model directory, settings, `Example`s. Out: metrics of a step, logprobs of examples, weights, the run's state as a file. Invariant: a
run that goes on from a saved state is the run that was not stopped, bit by bit on a CPU: the state holds the optimiser, the schedule, the
random state, adapters, and what the reference said of each pair, which is asked once, before the first step.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spangrad.errors import CheckpointError, TrainerError
from spangrad.settings import Settings
from trainer.engine import make_worker
from trainer.examples import Example, Method
from trainer.lora import merged
from trainer.process import prepare_process, quiet
from trainer.rendering import Tokens
from trainer.tuning_losses import dpo_loss, preferences, row_sums, sft_loss

STATE_FILE = "tuning.pt"
LEARNING_RATES = {"sft": 1e-5, "dpo": 5e-7}
"""Where tuning.learning_rate names none."""
_NO_OP = Tokens([0, 0], [0, 0])
_KEPT = ("loss", "grad_norm", "preference_accuracy", "preference_margin", "chosen_reward", "rejected_reward")


class Tuner:
    """A model, its optimiser, and what a run over files does with them."""

    def __init__(self, model: Path, settings: Settings, method: Method, steps: int) -> None:
        """Load the weights of `model` in float32, for a run of so many optimiser steps."""
        self._trainer, self._tuning, self._method = settings.trainer, settings.tuning, method
        self.reference: NDArray[np.float32] | None = None
        """Of every sequence of every example, trained before held out, its logprob under the reference. None: not asked yet, or SFT."""
        with quiet():
            self.device = prepare_process()
            loss = sft_loss() if method == "sft" else functools.partial(dpo_loss, self._tuning.beta, self._tuning.label_smoothing)
            optimizer = _optimizer(settings, method, steps)
            self._worker = make_worker(model, self._trainer, self.device, rank=self._trainer.lora_rank, optimizer=optimizer, loss=loss)

    def step(self, examples: Sequence[Example], reference: NDArray[np.float32] | None = None) -> dict[str, float]:
        """One optimiser step.

        Args:
            examples: of the batch.
            reference: DPO: logprob of each of their sequences under the reference.

        Returns:
            loss (SFT: nats a token; DPO: a pair), grad_norm, tokens (trained ones), and with DPO preference_accuracy, preference_margin,
            chosen_reward, rejected_reward.

        Raises:
            TrainerError: the gradient is not finite; the weights are as before.
        """
        from verl.utils import tensordict_utils as tu

        rows = self._rows(examples, reference)
        with quiet():
            raw = tu.get(self._worker.train_batch(rows), "metrics")
        told = {name: _scalar(raw[name]) for name in _KEPT if name in raw}
        if not np.isfinite(told["grad_norm"]):
            raise TrainerError(
                f"the gradient's norm is {told['grad_norm']}, so no step was taken. Look for odd rows in this batch, and lower "
                "tuning.learning_rate if earlier steps grew."
            )
        return {**told, "tokens": float(sum(sum(one.mask) for example in examples for one in example.sequences))}

    def logprobs(self, examples: Sequence[Example]) -> NDArray[np.float32]:
        """Of each sequence, the sum of its trained tokens' logprobs (nats) under the weights as they are."""
        found: list[NDArray[np.float32]] = []
        for part in _portions(examples, self._tuning.batch_size):
            sequences = sum(len(one.sequences) for one in part)
            found.append(self._sums(self._rows(part, np.zeros(sequences, np.float32)))[:sequences])
        return np.concatenate(found) if found else np.zeros(0, np.float32)

    def measure(self, examples: Sequence[Example], reference: NDArray[np.float32] | None) -> dict[str, float]:
        """Metrics of held-out examples, as `step` names them, without a step; nothing of none."""
        import torch

        if not examples:
            return {}
        sums = self.logprobs(examples)
        if self._method == "sft":
            return {"loss": -float(sums.sum()) / sum(sum(one.mask) for example in examples for one in example.sequences)}
        assert reference is not None
        made = preferences(torch.from_numpy(sums), torch.from_numpy(reference), self._tuning.beta, self._tuning.label_smoothing)
        margins = made.chosen - made.rejected
        return {
            "loss": float(made.losses.mean()),
            "preference_accuracy": float((margins > 0).float().mean()),
            "preference_margin": float(margins.mean()),
            "chosen_reward": float(made.chosen.mean()),
            "rejected_reward": float(made.rejected.mean()),
        }

    def weights(self) -> Iterator[tuple[str, NDArray[np.float32]]]:
        """Every parameter by its Hugging Face name, tied ones once, with adapters merged."""
        module = self._worker.engine.module
        tied = getattr(module, "all_tied_weights_keys", None) or {}
        if self._trainer.lora_rank:
            tensors = merged(module.state_dict(), self._trainer.lora_alpha / self._trainer.lora_rank)
        else:
            tensors, _ = self._worker.engine.get_per_tensor_param()
        for name, tensor in tensors:
            if name not in tied:
                yield name, np.ascontiguousarray(tensor.detach().float().cpu().numpy())

    def save_state(self, directory: Path) -> None:
        """Write what the weights do not hold."""
        import torch

        inner = self._worker.engine
        state = {
            "optimizer": inner.optimizer.state_dict(),
            "schedule": inner.lr_scheduler.state_dict(),
            "random": torch.get_rng_state(),
            "reference": None if self.reference is None else torch.from_numpy(self.reference),
        }
        if self._trainer.lora_rank:
            state["adapted"] = inner.module.state_dict()
        torch.save(state, directory / STATE_FILE)

    def load_state(self, directory: Path) -> None:
        """Read what `save_state` wrote.

        Raises:
            CheckpointError: the file is missing or damaged.
        """
        import torch

        file = directory / STATE_FILE
        try:
            state = torch.load(file, weights_only=False)  # our own file, beside weights whose checksum was verified
        except (OSError, RuntimeError, EOFError) as error:
            raise CheckpointError(f"{file} cannot be read ({error}). Restore {directory} from a copy.") from error
        inner = self._worker.engine
        if "adapted" in state:
            inner.module.load_state_dict(state["adapted"])
        inner.optimizer.load_state_dict(state["optimizer"])
        inner.lr_scheduler.load_state_dict(state["schedule"])
        torch.set_rng_state(state["random"])
        self.reference = None if state["reference"] is None else state["reference"].numpy()

    def _sums(self, rows: Any) -> NDArray[np.float32]:
        from verl.utils import tensordict_utils as tu

        tu.assign_non_tensor(rows, compute_loss=False)
        with quiet():
            output = self._worker.infer_batch(rows)
        return row_sums(output["log_probs"].cpu(), rows["loss_mask"].cpu()).numpy()

    def _rows(self, examples: Sequence[Example], reference: NDArray[np.float32] | None) -> Any:
        """Verl's jagged layout, chosen and rejected in turn, with no-op rows up to a multiple of the data-parallel size."""
        import torch
        from tensordict import TensorDict
        from verl.utils import tensordict_utils as tu

        size = 1 if self._method == "sft" else 2
        sequences = [one for example in examples for one in example.sequences]
        divisor = size * int(self._worker.engine.get_data_parallel_size())
        padding = -len(sequences) % divisor
        whole = [*sequences, *[_NO_OP] * padding]

        def jagged(values: list[list[int]]) -> Any:
            return torch.nested.as_nested_tensor([torch.tensor(one, dtype=torch.long) for one in values], layout=torch.jagged)

        columns = {
            "input_ids": jagged([one.ids for one in whole]),
            "position_ids": jagged([list(range(len(one.ids))) for one in whole]),
            "loss_mask": jagged([one.mask for one in whole]),
        }
        if self._method == "dpo":
            assert reference is not None
            columns["reference"] = torch.from_numpy(np.pad(reference, (0, padding)))
            columns["is_real"] = torch.tensor([1.0] * len(sequences) + [0.0] * padding)
        rows = TensorDict(columns, batch_size=len(whole))
        tu.assign_non_tensor(
            rows,
            temperature=1.0,
            global_batch_size=len(sequences),
            global_token_num=[len(one.ids) for one in whole],
            force_group_size=size,
            pairs=len(examples),
            update_lr_scheduler=True,
        )
        return rows


def _optimizer(settings: Settings, method: Method, steps: int) -> Any:
    from verl.workers.config import FSDPOptimizerConfig

    trainer, tuning = settings.trainer, settings.tuning
    return FSDPOptimizerConfig(
        lr=tuning.learning_rate or LEARNING_RATES[method],
        betas=trainer.betas,
        weight_decay=trainer.weight_decay,
        clip_grad=trainer.clip_grad,
        lr_scheduler_type=tuning.schedule,
        lr_warmup_steps=round(tuning.warmup * steps),
        total_training_steps=steps,
    )


def _portions(examples: Sequence[Example], size: int) -> Iterator[Sequence[Example]]:
    for at in range(0, len(examples), size):
        yield examples[at : at + size]


def _scalar(value: Any) -> float:
    """Metrics of verl come as numbers, or as one `Metric` of micro-batches a rank."""
    from verl.utils.metric import Metric

    if isinstance(value, list) and value and isinstance(value[0], Metric):
        return float(Metric.aggregate_dp(value))
    return float(value.aggregate() if isinstance(value, Metric) else np.mean(value))
