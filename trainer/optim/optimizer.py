"""The optimizer: it passes a batch forward and backward through the workers, and steps the weights.

Invariant: weights change only in a step whose first forward pass reproduced the logprobs that its rows were sampled with, and whose every
gradient was finite; a step that fails a check leaves weights, moments, gradients and random states as before. Gradients wait in the
workers until the logprobs that came with them are checked (`trainer.monitor.row_check`), and the caller has been told that weights are
about to change. A batch that is stepped more than once, or
corrected, is first passed forward whole, so that the denominators of its ratios stay as at its start.

Code that needs PyTorch and verl is in `rank`, `verl_worker`, `rows`, `losses`, `credit.estimators` and `process`; it is imported once an
`VerlOptimizer` is made or values are compared. The workers are one in this process, or several under Ray (`trainer.optim.workers`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from spangrad.errors import BadRowsError, LedgerError
from spangrad.settings import TrainerSettings
from trainer.credit.estimators import over_tokens
from trainer.credit.learning import check
from trainer.data.batch import Batch, split, take
from trainer.monitor import logprob_check
from trainer.monitor.row_check import RowCheck, blame_gradient
from trainer.optim.losses.corrected import correct, correction_metrics
from trainer.optim.losses.reshaped import corrected as reshaped_corrected
from trainer.optim.losses.rollout_losses import by_rollout, needs_logprobs, several_rows
from trainer.optim.process import dtype_of
from trainer.optim.rows import padded, scalars, tensordict
from trainer.optim.workers import begin

_METRIC_NAMES = {
    "loss": "loss",
    "actor/pg_clipfrac": "clip_fraction",
    "actor/ppo_kl": "ppo_kl",
    "entropy": "entropy",
    "clip_low": "clip_low",
    "clip_high": "clip_high",
    "kl_loss": "reference_kl",
    "mfu": "mfu",
}
"""Names of verl's metrics of a step that are kept, with their names here. Not every loss has all of them."""


class VerlOptimizer:
    """Model with its optimizer, and the step of both."""

    def __init__(self, model: Path, settings: TrainerSettings, *, engine_dtype: str = "auto") -> None:
        """Load the weights of `model` (a Hugging Face directory), in float32 for any dtype of the file, and those of the reference.

        Raises:
            SettingsError: the settings cannot be carried out, or have no meaning.
        """
        check(settings)
        self.settings = settings
        self._workers = begin(model, settings)
        self.device = self._workers.device
        import torch

        self._order = torch.Generator()  # of mini-batches; it begins with the same state every time
        self._has_critic = settings.credit.estimator == "gae"
        self._check = RowCheck(settings, logprob_check.engine_dtype(engine_dtype), dtype_of(settings, self.device))
        held = settings.alarms.logprob.held_versions
        self._versions_to_hold = settings.sampling.max_staleness if held is None else held
        self._held_versions = 0
        self._before_update: Callable[[], None] | None = None
        self.token_advantages = np.zeros((0, 0), np.float32)
        self.pass_seconds: dict[str, float] = {}
        """Metrics of the last step: seconds_forward and seconds_backward of the first rank."""

    @property
    def data_parallel_size(self) -> int:
        """Return the number that a batch's rows must be divisible by."""
        return self._workers.size

    @property
    def versions_to_hold(self) -> int:
        """Return the number of earlier versions whose weights are held to check calls of them."""
        return 0 if self.settings.lora.rank else self._versions_to_hold

    def hold(self, checkpoints: Sequence[Path]) -> None:
        """Hold the weights of the versions before the loaded one, as if this process had made the steps.

        Args:
            checkpoints: their directories, oldest first, without a gap; `versions_to_hold` at most.

        Raises:
            CheckpointError: one of them cannot be loaded into the model.
        """
        for directory in checkpoints:
            self._workers.everywhere("hold_weights", directory.absolute(), self._versions_to_hold)
            self._held_versions += 1

    def step(self, batch: Batch, before_update: Callable[[], None] | None = None) -> dict[str, float]:
        """Train on a batch: trainer.optim.epochs x trainer.optim.mini_batches optimizer steps, without those whose gradient is 0.

        A step of zero gradient would still move the weights by AdamW's moments, so it is left out; the logprobs of the batch are checked
        all the same.

        Args:
            batch: rows that are trained.
            before_update: called once, before weights, moments or critic change; at the end where nothing does.

        Returns:
            Means over the optimizer steps of loss, entropy (nats, over trained tokens), and where the loss reports them clip_fraction,
            clip_low, clip_high, ppo_kl and reference_kl; advantage_mean and advantage_std, over trained tokens; mfu, where verl knows the
            GPU's peak; grad_norm (before clipping, the largest); `RowCheck.compare`'s, absent where no token was sampled; correction_*;
            `reshaped.corrected`'s, where rows are reshaped; updated (number of optimizer steps).

        Raises:
            BadRowsError: rows fail a check, and everything is as before.
            LedgerError: `before_update` raised it, and everything is as before.
        """
        self._check.require_recorded(batch)
        self._before_update = before_update
        settings, order = self.settings, self._order.get_state()
        several = settings.optim.epochs * settings.optim.mini_batches > 1
        self._workers.everywhere("begin_step", self._versions_to_hold, several or self._has_critic)
        try:
            metrics = self._step(batch, several=several)
            self._begin_update()
        except (BadRowsError, LedgerError):
            self._workers.everywhere("undo_step")
            self._order.set_state(order)
            raise
        self.pass_seconds = self._workers.everywhere("pass_times")
        self._workers.everywhere("end_step")
        self._held_versions = min(self._held_versions + 1, self._versions_to_hold)
        return metrics

    def _begin_update(self) -> None:
        """Call `before_update`, unless it was."""
        before, self._before_update = self._before_update, None
        if before:
            before()

    def _step(self, batch: Batch, *, several: bool) -> dict[str, float]:
        metrics: dict[str, float] = {}
        if batch.chains:
            batch = self._estimated(batch)
            self.token_advantages = batch.advantages
        if self.settings.loss.kl_coef:
            batch = replace(batch, reference_logprobs=self._logprobs("reference", batch))
        first = several or self.settings.loss.recompute_logprobs
        if first:
            batch, metrics = self._with_old_logprobs(batch)
        of_reshaped: dict[str, float] = {}
        if batch.reshaped.any():
            batch, of_reshaped = self._with_reshaped_weights(batch)
        steps: list[dict[str, float]] = []
        for _ in range(self.settings.optim.epochs):
            for rows, part in self._parts(batch):
                if self._trainable(part):
                    part, corrected = self._by_rollout(part, first=not steps)
                    steps.append({**self._train(part, rows, checked=first), **corrected})
        metrics |= _means(steps)
        if not metrics:
            metrics, _ = self._infer(batch)
        if self.device == "cpu" or not metrics.get("mfu"):
            metrics.pop("mfu", None)  # verl has the peaks of many GPUs, a guess for every CPU, and infinity for the rest
        metrics |= batch.advantage_spread
        metrics |= of_reshaped | {"grad_norm": max((step["grad_norm"] for step in steps), default=0.0), "updated": float(len(steps))}
        if self._has_critic and batch.response_mask.any():
            metrics |= self._train_critic(batch)
        return metrics

    def _estimated(self, batch: Batch) -> Batch:
        """Return the batch with advantages that depend on the policy's weights or the critic."""
        if self._has_critic:
            token_values = {"values": self._forward("critic", batch, "values")["values"]}
        else:
            outputs = self._forward("policy", batch, "log_probs", "sum_pi_squared", calculate_sum_pi_squared=True)
            token_values = {"old_log_probs": outputs["log_probs"], "sum_pi_squared": outputs["sum_pi_squared"]}
        advantages, returns = over_tokens(self.settings, batch, **token_values)
        known = {"values": token_values["values"], "returns": returns} if self._has_critic else {}
        return replace(batch, advantages=advantages, chains=None, **known)

    def _train_critic(self, batch: Batch) -> dict[str, float]:
        """Train the value model on the batch's returns, with as many steps as the policy; return metrics."""
        losses: list[float] = []
        for _ in range(self.settings.optim.epochs):
            for rows, part in self._parts(batch):
                if part.response_mask.any():
                    self._begin_update()
                    metrics = scalars(self._workers.by_rows("train", tensordict(part, role="critic", stepped=True)))
                    self._require_finite(metrics["grad_norm"], part, rows, part.logprobs)
                    losses.append(metrics["critic/vf_loss"])
        assert batch.values is not None
        assert batch.returns is not None
        mask = batch.response_mask.astype(bool)
        left, spread = (batch.returns - batch.values)[mask].var(), batch.returns[mask].var()
        return {"critic_loss": float(np.mean(losses)), "critic_explained": float(1 - left / max(spread, 1e-8))}

    def _with_old_logprobs(self, batch: Batch) -> tuple[Batch, dict[str, float]]:
        """Check a batch; return it with its logprobs at the start of the step and the correction by them, and metrics."""
        metrics, logprobs = self._infer(batch)
        if self.settings.loss.recompute_logprobs:
            batch = replace(batch, old_logprobs=logprobs)
            if self.settings.loss.correction.weights or self.settings.loss.correction.reject:
                changes, corrected = correct(batch, self.settings)
                batch, metrics = replace(batch, **changes), {**metrics, **corrected}
        return batch, metrics

    def _with_reshaped_weights(self, batch: Batch) -> tuple[Batch, dict[str, float]]:
        """Return the batch with ratios and weights of its reshaped rows, and metrics."""
        settings = self.settings
        if settings.loss.recompute_logprobs and settings.loss.correction.weights:
            return batch, {}  # every row has them
        logprobs = batch.old_logprobs if settings.loss.recompute_logprobs else None
        if logprobs is None:
            rows = np.flatnonzero(batch.reshaped)
            logprobs = np.zeros_like(batch.logprobs)
            logprobs[rows] = self._logprobs("policy", take(batch, rows, divisor=self.data_parallel_size))[: len(rows)]
        batch, metrics = reshaped_corrected(batch, logprobs, settings.loss.correction.threshold)
        if settings.loss.name == "bypass_mode":  # it makes weights of its own against the sampled logprobs: here of ratios that are 1
            assert batch.old_logprobs is not None
            assert batch.weights is not None
            weighted = batch.advantages * batch.weights
            batch = replace(batch, logprobs=batch.old_logprobs, old_logprobs=None, advantages=weighted, weights=None)
        return batch, metrics

    def _by_rollout(self, part: Batch, *, first: bool) -> tuple[Batch, dict[str, float]]:
        """Return a step's part, prepared where a rollout has several rows, and metrics of a correction.

        Args:
            part: of the batch.
            first: True if the weights are those of the batch's start.
        """
        if not several_rows(part):
            return part, {}
        logprobs: NDArray[np.float32] | None = None
        if needs_logprobs(self.settings):
            logprobs = part.old_logprobs if first and self.settings.loss.recompute_logprobs else None
            logprobs = self._logprobs("policy", part) if logprobs is None else logprobs
        return by_rollout(part, self.settings, logprobs)

    def _parts(self, batch: Batch) -> list[tuple[NDArray[np.int64], Batch]]:
        """Return a batch's mini-batches with their rows in it, drawn again each time from the random state that is saved with the state."""
        import torch

        if self.settings.optim.mini_batches == 1:
            return [(np.arange(batch.real_rows), batch)]
        order = torch.randperm(batch.rollouts, generator=self._order).tolist()
        count = self.settings.optim.mini_batches
        return [(rows, take(batch, rows, divisor=self.data_parallel_size)) for rows in split(batch, order, count)]

    def _trainable(self, batch: Batch) -> bool:
        """Return whether the gradient can differ from 0."""
        beside = self.settings.loss.kl_coef != 0 or self.settings.loss.entropy_coef != 0
        return batch.trainable or (beside and bool(batch.response_mask.any()))

    def _train(self, part: Batch, rows: NDArray[np.int64], *, checked: bool) -> dict[str, float]:
        """Take one optimizer step on some rows of a batch, once their logprobs are checked; return its metrics.

        Args:
            part: the rows.
            rows: their indices in the batch.
            checked: True if the whole batch's logprobs were compared before.
        """
        sent = tensordict(part, role="policy", entropy=self.settings.loss.entropy_coef != 0)
        output = self._workers.by_rows("accumulate", sent)
        metrics, logprobs = _kept(scalars(output)), padded(output, "log_probs", sent, part)
        if not checked:
            metrics |= self._check.compare(part, logprobs, functools.partial(self._earlier, part))
        self._begin_update()
        norm = self._workers.everywhere("apply", "policy")
        self._require_finite(norm, part, rows, logprobs)
        return {**metrics, "grad_norm": norm}

    def _require_finite(self, norm: float, part: Batch, rows: NDArray[np.int64], logprobs: NDArray[np.float32]) -> None:
        if not np.isfinite(norm):
            error = blame_gradient(part, logprobs, norm)
            raise BadRowsError(str(error), {int(rows[row]): reason for row, reason in error.rows.items()})

    def _infer(self, batch: Batch) -> tuple[dict[str, float], NDArray[np.float32]]:
        """Pass a batch forward and check its logprobs; return metrics and logprobs."""
        sent = tensordict(batch, role="policy", entropy=self.settings.loss.entropy_coef != 0)
        output = self._workers.by_rows("infer", sent)
        logprobs = padded(output, "log_probs", sent, batch)
        return {**_kept(scalars(output)), **self._check.compare(batch, logprobs, functools.partial(self._earlier, batch))}, logprobs

    def _earlier(self, batch: Batch, chosen: NDArray[np.bool_], behind: int) -> NDArray[np.float32] | None:
        """Return logprobs of rows with chosen tokens under the policy `behind` versions ago; None where its weights are not held."""
        if behind > self._held_versions:
            return None
        rows = np.flatnonzero(chosen.any(axis=1))
        part = take(replace(batch, chains=None), rows, divisor=self.data_parallel_size)
        logprobs = np.zeros_like(batch.logprobs)
        logprobs[rows] = self._forward("policy", part, "log_probs", behind=behind)["log_probs"][: len(rows)]
        return logprobs

    def _logprobs(self, role: str, batch: Batch) -> NDArray[np.float32]:
        """Return the logprobs (nats) of the sampled tokens under a model's weights; 0 elsewhere."""
        return self._forward(role, batch, "log_probs")["log_probs"]

    def _forward(self, role: str, batch: Batch, *names: str, **flags: bool | int) -> dict[str, NDArray[np.float32]]:
        """Return the outputs of a model's forward pass for the sampled tokens, by verl's names; 0 elsewhere."""
        rows = tensordict(batch, role=role, compute_loss=False, **flags)
        output = self._workers.by_rows("infer", rows)
        return {name: padded(output, name, rows, batch) for name in names}

    def weights(self) -> Iterator[tuple[str, NDArray[np.float32]]]:
        """Yield every parameter by its Hugging Face name, tied ones once, with adapters merged."""
        return self._workers.weights()

    def collect(self, *, state: bool = True) -> None:
        """Copy to main memory what `write` writes.

        That is the parameters of `weights`, and with `state` AdamW's moments, schedule, random states, adapters beside their base, and the
        critic.
        """
        self._workers.everywhere("collect", self._order.get_state(), state)

    def write(self, directory: Path) -> None:
        """Write what was collected into a directory, from any thread, until the next update; under Ray a worker writes it."""
        self._workers.write(directory.absolute())

    def load_state(self, directory: Path) -> None:
        """Read the state that `write` wrote, so that training resumes as if it had never stopped. A critic that it lacks starts untrained.

        The number of workers may differ from the number that wrote it.

        Raises:
            CheckpointError: the file is missing or damaged, or has other adapters than the settings.
        """
        self._order.set_state(self._workers.everywhere("load_state", directory.absolute()))

    def load_weights(self, directory: Path) -> None:
        """Give the policy the weights of a checkpoint, and leave all else as it is.

        Raises:
            CheckpointError: the directory lacks a trained parameter.
        """
        self._workers.everywhere("load_weights", directory.absolute())

    def close(self) -> None:
        """End the workers; nothing may be called after that."""
        self._workers.close()


def _kept(metrics: dict[str, float]) -> dict[str, float]:
    return {name: metrics[verl_name] for verl_name, name in _METRIC_NAMES.items() if verl_name in metrics} | correction_metrics(metrics)


def _means(steps: list[dict[str, float]]) -> dict[str, float]:
    """Return the mean of each metric over the steps that have it."""
    names = dict.fromkeys(name for step in steps for name in step)
    return {name: float(np.mean([step[name] for step in steps if name in step])) for name in names}
