"""Optimizer of a run over files: examples through verl's workers, in this process or several under Ray.

In: a model directory, settings, `Example`s. Out: metrics of a step, logprobs of examples; weights and the run's state as files. Invariant:
a run that is resumed from a saved state equals the run that was not stopped, bit by bit on a CPU: the state holds the optimizer, the
schedule, the random states, adapters, and the reference's logprobs of each pair, which are computed once, before the first step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spangrad.errors import TrainerError
from spangrad.settings import Settings
from spangrad.weights.shards import TensorSums
from trainer.optim.rows import scalars
from trainer.optim.workers import begin
from trainer.sft.examples import Example
from trainer.sft.objective import Method, Objective
from trainer.sft.rendering import TokenSequence

_NO_OP = TokenSequence([0, 0], [0, 0])
_KEPT = ("loss", "grad_norm", "preference_accuracy", "preference_margin", "chosen_reward", "rejected_reward")


class FileOptimizer:
    """Model with its optimizer, and the steps of a run over files."""

    def __init__(self, model: Path, settings: Settings, method: Method, steps: int) -> None:
        """Load the weights of `model` in float32, for a run of `steps` optimizer steps.

        Raises:
            SettingsError: the settings cannot be carried out.
            TrainerError: Ray has no resources for the workers.
        """
        self._finetune, self._objective = settings.finetune, Objective.of(method, settings.finetune, steps)
        loss = settings.trainer.loss.model_copy(update={"kl_coef": 0.0})  # no reference is loaded beside the policy,
        credit = settings.trainer.credit.model_copy(update={"estimator": "grpo"})  # and no critic
        trainer = settings.trainer.model_copy(update={"loss": loss, "credit": credit})
        self._workers = begin(model, trainer, self._objective)
        self.device = self._workers.device
        self.reference: NDArray[np.float32] | None = None
        """Logprob (nats) of each sequence of all examples under the reference, trained before held out. None: not computed yet, or SFT."""

    def step(self, examples: Sequence[Example], reference: NDArray[np.float32] | None = None) -> dict[str, float]:
        """Take one optimizer step; `reference` is for DPO: the logprob (nats) of each sequence of the examples under the reference.

        Returns:
            loss (SFT: nats per token; DPO: per pair), grad_norm, tokens (trained ones), and with DPO preference_accuracy,
            preference_margin, chosen_reward, rejected_reward.

        Raises:
            TrainerError: the gradient is not finite; the weights are as before.
        """
        raw = scalars(self._workers.by_rows("train", self._rows(examples, reference)))
        metrics = {name: raw[name] for name in _KEPT if name in raw}
        if not np.isfinite(metrics["grad_norm"]):
            raise TrainerError(
                f"the gradient's norm is {metrics['grad_norm']}, so no step was taken. Look for odd rows in this batch, and lower "
                "finetune.learning_rate if earlier steps grew."
            )
        return {**metrics, "tokens": float(_trained_tokens(examples))}

    def logprobs(self, examples: Sequence[Example]) -> NDArray[np.float32]:
        """Return for each sequence the sum of its trained tokens' logprobs (nats) under the current weights."""
        sums = [self._sums(part) for part in _slices(examples, self._finetune.batch_size)]
        return np.concatenate(sums) if sums else np.zeros(0, np.float32)

    def measure(self, examples: Sequence[Example], reference: NDArray[np.float32] | None) -> dict[str, float]:
        """Return the metrics of held-out examples, named as in `step`, without a step; empty where there are no examples."""
        import torch

        from trainer.sft.losses import preferences

        if not examples:
            return {}
        sums = self.logprobs(examples)
        if self._objective.method == "sft":
            return {"loss": -float(sums.sum()) / _trained_tokens(examples)}
        assert reference is not None
        both = torch.from_numpy(sums), torch.from_numpy(reference)
        pairs = preferences(*both, self._objective.beta, self._objective.label_smoothing)
        return {"loss": float(pairs.losses.mean()), **{name: float(value.mean()) for name, value in pairs.figures().items()}}

    def collect(self, *, state: bool = True) -> None:
        """Copy the weights for `write`, adapters merged, and the state; the reference's logprobs take the place of the mini-batches' order.

        Mini-batches are drawn from the seed.
        """
        self._workers.everywhere("collect", self.reference, state)

    def write(self, directory: Path) -> dict[str, TensorSums]:
        """Write what was collected; return the sums of the weights."""
        return self._workers.write(directory.absolute())

    def load_state(self, directory: Path) -> None:
        """Read the state that `write` wrote, by any number of workers.

        Raises:
            CheckpointError: the file is missing or damaged.
        """
        self.reference = self._workers.everywhere("load_state", directory.absolute())

    def close(self) -> None:
        """End the workers; nothing may be called after that."""
        self._workers.close()

    def _sums(self, examples: Sequence[Example]) -> NDArray[np.float32]:
        from trainer.sft.losses import row_sums

        sequences = len(examples) * self._objective.sequences
        rows = self._rows(examples, np.zeros(sequences, np.float32), compute_loss=False)
        output = self._workers.by_rows("infer", rows)
        return row_sums(output["log_probs"].cpu(), rows["loss_mask"])[:sequences].numpy()

    def _rows(self, examples: Sequence[Example], reference: NDArray[np.float32] | None, **flags: bool) -> Any:
        """Return verl's jagged layout, chosen and rejected in turn, with no-op rows up to a multiple of the number of workers."""
        import torch
        from tensordict import TensorDict
        from verl.utils import tensordict_utils as tu

        size = self._objective.sequences
        sequences = [sequence for example in examples for sequence in example.sequences]
        padding = -len(sequences) % (size * self._workers.size)
        whole = [*sequences, *[_NO_OP] * padding]

        def jagged(values: list[list[int]]) -> Any:
            return torch.nested.as_nested_tensor([torch.tensor(row, dtype=torch.long) for row in values], layout=torch.jagged)

        columns = {
            "input_ids": jagged([sequence.ids for sequence in whole]),
            "position_ids": jagged([list(range(len(sequence.ids))) for sequence in whole]),
            "loss_mask": jagged([sequence.mask for sequence in whole]),
        }
        if size == 2:
            assert reference is not None
            columns["reference"] = torch.from_numpy(np.pad(reference, (0, padding)))
            columns["is_real"] = torch.tensor([1.0] * len(sequences) + [0.0] * padding)
        rows = TensorDict(columns, batch_size=len(whole))
        tu.assign_non_tensor(
            rows,
            role="policy",
            temperature=1.0,
            global_batch_size=len(sequences),
            global_token_num=[len(sequence.ids) for sequence in whole],
            force_group_size=size,
            pairs=len(examples),
            update_lr_scheduler=True,
            **flags,
        )
        return rows


def _trained_tokens(examples: Sequence[Example]) -> int:
    return sum(sum(sequence.mask) for example in examples for sequence in example.sequences)


def _slices(examples: Sequence[Example], size: int) -> Iterator[Sequence[Example]]:
    for at in range(0, len(examples), size):
        yield examples[at : at + size]
