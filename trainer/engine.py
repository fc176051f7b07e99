"""The optimiser: which passes a batch takes through the workers, and in which order.

In: a model directory, settings, and `Batch`es. Out: the metrics of a step; weights and the optimiser's state as files. Invariant: weights
change only in a step whose first forward pass gave back the logprobs that the engine had sampled with. The gap is measured inside the
loss, before any update, over all workers, and beyond the alarm the loss raises on each: verl then drops the gradients and steps nothing. A
batch that is stepped more than once, or corrected, is first passed forward whole, so that what its ratios are against stays as it was
at its start.

What is PyTorch's and verl's stands in `worker`, `verl_worker`, `rows`, `losses`, `estimators` and `process`; it is imported once an
`Engine` is made or values are compared. The workers are one in this process, or several under Ray (`trainer.workers`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from spangrad.errors import BadRowsError
from spangrad.settings import TrainerSettings
from trainer.batch import Batch, parts
from trainer.estimators import over_tokens
from trainer.learning import check
from trainer.losses import correct, correction_metrics
from trainer.rollout_losses import by_rollout, needs_logprobs, several_rows
from trainer.rows import padded, scalars, tensordict
from trainer.workers import begin

_TOLD = {
    "loss": "loss",
    "actor/pg_clipfrac": "clip_fraction",
    "actor/ppo_kl": "ppo_kl",
    "entropy": "entropy",
    "clip_low": "clip_low",
    "clip_high": "clip_high",
    "kl_loss": "reference_kl",
}
"""Verl's metrics of a step that are kept, and their names here. Not every loss has all of them."""


class Engine:
    """A model, its optimiser and one way to step them."""

    def __init__(self, model: Path, settings: TrainerSettings) -> None:
        """Load the weights of `model` (a Hugging Face directory), in float32 whatever the file holds, and those of the reference if any.

        Raises:
            SettingsError: what the settings ask for cannot be done, or has no meaning.
        """
        check(settings)
        self.settings = settings
        self._workers = begin(model, settings)
        self.device = self._workers.device
        import torch

        self._order = torch.Generator()  # of mini-batches; it begins with the same state every time
        self._has_critic = settings.estimator == "gae"

    @property
    def data_parallel_size(self) -> int:
        """The number that a batch's rows must be divisible by."""
        return self._workers.size

    def step(self, batch: Batch) -> dict[str, float]:
        """Train on a batch: trainer.epochs x trainer.mini_batches optimiser steps, without those whose gradient is 0.

        A step of zero gradient would still move the weights by AdamW's moments, so it is left out; the logprobs of the batch are checked
        all the same.

        Returns:
            Means over the optimiser steps of loss, and where the loss tells them clip_fraction, ppo_kl, entropy and reference_kl;
            grad_norm (before clipping, the largest); logprob_gap and logprob_gap_mean: largest and mean |rollout logprob - trainer
            logprob| (nats) over the response tokens that the current weights sampled, absent when they sampled none; correction_*;
            updated (how many optimiser steps).

        Raises:
            TrainerError: the gap exceeds trainer.logprob_gap_alarm, and the weights are as before.
            BadRowsError: a gradient is not finite, for which no row is to blame by itself, and the
                weights are as the optimiser steps before it left them: as before, when it was the first.
        """
        settings, known = self.settings, {}
        several = settings.epochs * settings.mini_batches > 1
        if batch.chains:
            batch = self._estimated(batch)
        if settings.kl_coef:
            batch = replace(batch, reference_logprobs=self._logprobs("reference", batch))
        if several or settings.recompute_logprobs:
            batch, known = self._begun(batch)
        steps: list[dict[str, float]] = []
        for _ in range(settings.epochs):
            for part in self._parts(batch):
                if self._trainable(part):
                    part, corrected = self._by_rollout(part, first=not steps)
                    steps.append({**self._pass("train", part, step=len(steps)), **corrected})
        told = {**known, **_means(steps)} or self._pass("infer", batch)
        told |= {"grad_norm": max((one["grad_norm"] for one in steps), default=0.0), "updated": float(len(steps))}
        if self._has_critic and batch.response_mask.any():
            told |= self._train_critic(batch)
        return told

    def _estimated(self, batch: Batch) -> Batch:
        """The batch with advantages that the weights, or the critic, have a part in."""
        if self._has_critic:
            told = {"values": self._forward("critic", batch, "values")["values"]}
        else:
            found = self._forward("policy", batch, "log_probs", "sum_pi_squared", calculate_sum_pi_squared=True)
            told = {"old_log_probs": found["log_probs"], "sum_pi_squared": found["sum_pi_squared"]}
        advantages, returns = over_tokens(self.settings, batch, **told)
        known = {"values": told["values"], "returns": returns} if self._has_critic else {}
        return replace(batch, advantages=advantages, chains=None, **known)

    def _train_critic(self, batch: Batch) -> dict[str, float]:
        """Step the value model as often as the policy, towards the batch's returns."""
        passes = (part for _ in range(self.settings.epochs) for part in self._parts(batch) if part.response_mask.any())
        losses = [self._raw("train", part, role="critic")["critic/vf_loss"] for part in passes]
        assert batch.values is not None
        assert batch.returns is not None
        mask = batch.response_mask.astype(bool)
        left, spread = (batch.returns - batch.values)[mask].var(), batch.returns[mask].var()
        return {"critic_loss": float(np.mean(losses)), "critic_explained": float(1 - left / max(spread, 1e-8))}

    def _begun(self, batch: Batch) -> tuple[Batch, dict[str, float]]:
        """The batch with its logprobs at the start of the step and what follows of them; metrics. Later passes do not check the gap."""
        told = self._pass("infer", batch)
        if self.settings.recompute_logprobs:
            batch = replace(batch, old_logprobs=self._logprobs("policy", batch))
            if self.settings.correction.weights or self.settings.correction.reject:
                changes, metrics = correct(batch, self.settings)
                batch, told = replace(batch, **changes), {**told, **metrics}
        return replace(batch, checked=np.zeros_like(batch.checked)), told

    def _by_rollout(self, part: Batch, *, first: bool) -> tuple[Batch, dict[str, float]]:
        """A step's part, prepared where a rollout has several rows; metrics of a correction.

        Args:
            part: of the batch.
            first: whether the weights are those of the batch's start.
        """
        if not several_rows(part):
            return part, {}
        logprobs: NDArray[np.float32] | None = None
        if needs_logprobs(self.settings):
            logprobs = part.old_logprobs if first else None
            logprobs = self._logprobs("policy", part) if logprobs is None else logprobs
        return by_rollout(part, self.settings, logprobs)

    def _parts(self, batch: Batch) -> list[Batch]:
        """A batch's mini-batches, drawn anew each time from the random state that is saved with the optimiser's."""
        import torch

        if self.settings.mini_batches == 1:
            return [batch]
        order = torch.randperm(batch.rollouts, generator=self._order).tolist()
        return parts(batch, order, self.settings.mini_batches, divisor=self.data_parallel_size)

    def _trainable(self, batch: Batch) -> bool:
        """Whether the gradient can differ from 0."""
        beside = self.settings.kl_coef != 0 or self.settings.entropy_coef != 0
        return batch.trainable or (beside and bool(batch.response_mask.any()))

    def _pass(self, through: str, batch: Batch, *, step: int = 0) -> dict[str, float]:
        """One pass over a batch, forward and maybe backward, and its metrics."""
        metrics = self._raw(through, batch)
        norm = metrics.get("grad_norm", 0.0)
        if not np.isfinite(norm):
            before = f"after {step} others of this batch" if step else "so no step was taken"
            message = (
                f"the gradient's norm is {norm}, {before}. Look for extreme advantages or logprobs in this batch, and lower "
                f"trainer.learning_rate = {self.settings.learning_rate:g} if earlier steps grew."
            )
            raise BadRowsError(message, {})
        told = {ours: metrics[theirs] for theirs, ours in _TOLD.items() if theirs in metrics} | correction_metrics(metrics)
        if batch.checked.any():
            told |= {"logprob_gap": metrics["logprob_gap"], "logprob_gap_mean": metrics["logprob_gap_mean"]}
        return {**told, "grad_norm": norm}

    def _raw(self, through: str, batch: Batch, *, role: str = "policy") -> dict[str, float]:
        """One pass over a batch, and verl's metrics of it."""
        rows = tensordict(batch, role=role, entropy=self.settings.entropy_coef != 0, stepped=through == "train")
        return scalars(self._workers.by_rows(through, rows))

    def _logprobs(self, role: str, batch: Batch) -> NDArray[np.float32]:
        """Of the sampled tokens, under a model's weights; 0 elsewhere."""
        return self._forward(role, batch, "log_probs")["log_probs"]

    def _forward(self, role: str, batch: Batch, *names: str, **flags: bool) -> dict[str, NDArray[np.float32]]:
        """What a model's forward pass tells of the sampled tokens, by verl's names; 0 elsewhere."""
        rows = tensordict(batch, role=role, compute_loss=False, **flags)
        output = self._workers.by_rows("infer", rows)
        return {name: padded(output, name, rows, batch) for name in names}

    def weights(self) -> Iterator[tuple[str, NDArray[np.float32]]]:
        """Every parameter by its Hugging Face name, tied ones once, with adapters merged."""
        return self._workers.weights()

    def save_weights(self, directory: Path) -> None:
        """Write what `weights` gives to a file (`trainer.lora.weights_file`); under Ray a worker writes it."""
        self._workers.everywhere("save_weights", directory.absolute())

    def save_state(self, directory: Path) -> None:
        """Write what the weights do not hold: AdamW's moments, schedule, random states, adapters beside their base, and the critic."""
        self._workers.everywhere("save_state", directory.absolute(), self._order.get_state())

    def load_state(self, directory: Path) -> None:
        """Read what `save_state` wrote, so that training goes on as if it had never stopped. A critic that it lacks begins anew.

        Any number of workers reads what any other number wrote.

        Raises:
            CheckpointError: the file is missing or damaged, or has other adapters than the settings.
        """
        self._order.set_state(self._workers.everywhere("load_state", directory.absolute()))

    def close(self) -> None:
        """End the workers; nothing may be called after that."""
        self._workers.close()


def _means(steps: list[dict[str, float]]) -> dict[str, float]:
    """Of each metric, over the steps that tell it."""
    names = dict.fromkeys(name for one in steps for name in one)
    return {name: float(np.mean([one[name] for one in steps if name in one])) for name in names}
