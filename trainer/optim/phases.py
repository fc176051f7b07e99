"""Phases of one step on a batch: checks, credit by token, corrections, and the optimizer steps of policy and critic.

In: a batch, the workers. Out: metrics, the batch with what was computed of it. Invariant: gradients wait in the workers until the logprobs
that came with them are checked (`trainer.monitor.row_check`), and the caller has been told that weights are about to change. A batch that
is stepped more than once, or corrected, is first passed forward whole, so that the denominators of its ratios stay as at its start.

The order of the phases is that of verl's trainer (`LocalWorkers.run`), but for the critic, which is trained after the policy:
the policy's first pass may be the one that checks the rows.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from spangrad.errors import BadRowsError
from spangrad.settings import TrainerSettings
from trainer.credit.estimators import over_tokens
from trainer.data.batch import Batch, TokenValues, split, take
from trainer.monitor.row_check import RowCheck, blame_gradient
from trainer.optim.losses.corrected import correct, correction_metrics
from trainer.optim.losses.reshaped import corrected as reshaped_corrected
from trainer.optim.losses.rollout_losses import by_rollout, needs_logprobs, normalises_weights, several_rows
from trainer.optim.workers import LocalWorkers, PassKind

if TYPE_CHECKING:
    import torch

    from trainer.distributed.workers import DistributedWorkers

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
_ENTROPY = "measured_entropy"
"""Output of a pass: entropy (nats) of the distribution that each sampled token is from."""


class StepPhases:
    """Step on one batch."""

    def __init__(
        self,
        batch: Batch,
        settings: TrainerSettings,
        workers: LocalWorkers | DistributedWorkers,
        check: RowCheck,
        order: torch.Generator,
        held_versions: int,
        before_update: Callable[[], None] | None,
    ) -> None:
        """Compute nothing yet.

        Mini-batches are drawn from the random numbers `order`. The workers hold the weights of `held_versions` earlier versions.
        `before_update` is called once, before weights, moments or critic change; at the end where nothing does.
        """
        self.batch = batch
        """The batch, with what the phases so far computed of it."""
        self._settings, self._workers, self._check = settings, workers, check
        self._order, self._held_versions = order, held_versions
        self._before_update = before_update
        self.several = settings.optim.epochs * settings.optim.mini_batches > 1
        """True if a batch is stepped more than once."""
        self.has_critic = settings.credit.estimator == "gae"
        self._first = self.several or settings.loss.recompute_logprobs
        self._logprobs: NDArray[np.float32] | None = None
        """Logprobs (nats) under the weights at the step's start. None: they were not computed before the first optimizer step."""
        self._checked: NDArray[np.float32] | None = None
        """Logprobs (nats) that were checked: those of the first pass. None: there was none."""
        self._entropies: NDArray[np.float32] | None = None
        """Entropies (nats) of the pass whose logprobs were checked. None: there was none."""
        self._of_check: dict[str, float] = {}
        self._of_batch: dict[str, float] = {}
        self._steps: list[dict[str, float]] = []
        self._of_critic: dict[str, float] = {}

    def compute_old_logprobs(self) -> None:
        """Pass the rows forward through the policy, where the step needs that before its first update, and check them."""
        if self._first:
            outputs = self._forward("policy", self.batch, "log_probs", _ENTROPY, measure_entropy=True)
            self._logprobs, self._entropies = outputs["log_probs"], outputs[_ENTROPY]
            self._of_check = self._compared(self.batch, self._logprobs)

    def compute_reference_logprobs(self) -> None:
        """Pass the rows forward through the reference, where the loss has a term against it."""
        if self._settings.loss.kl_coef:
            self.batch = replace(self.batch, reference_logprobs=self.logprobs_under("reference", self.batch))

    def compute_values(self) -> None:
        """Pass the rows forward through the critic, where there is one."""
        if self.has_critic and self.batch.call_rewards is not None:
            self.batch = replace(self.batch, values=self._forward("critic", self.batch, "values")["values"])

    def compute_advantages(self) -> None:
        """Derive advantages and weights that depend on passes: credit by token, rollout correction, weights of reshaped rows."""
        if self.batch.call_rewards is not None:
            self.batch = self._estimated()
        if self._settings.loss.recompute_logprobs:
            self.batch = replace(self.batch, old_logprobs=self._logprobs)
            if self._settings.loss.correction.weights or self._settings.loss.correction.reject:
                changes, metrics = correct(self.batch, self._settings)
                self.batch, self._of_check = replace(self.batch, **changes), {**self._of_check, **metrics}
        if self.batch.reshaped.any():
            self._weigh_reshaped()

    def update_policy(self) -> None:
        """Take the optimizer steps of the policy."""
        for _ in range(self._settings.optim.epochs):
            for part in self.parts():
                if self._trainable(part):
                    part, corrected = self._by_rollout(part)
                    self._steps.append({**self._train(part), **corrected})
        if not self._steps:
            self._of_check = self._of_loss() | self._of_check

    def update_critic(self) -> None:
        """Take the optimizer steps of the critic on the batch's returns, as many as the policy's."""
        batch, losses = self.batch, list[float]()
        if not self.has_critic or not batch.response_mask.any():
            return
        for _ in range(self._settings.optim.epochs):
            for part in self.parts():
                if part.response_mask.any():
                    self._begin_update()
                    metrics = self._workers.pass_batch(PassKind.TRAIN, part, "critic", stepped=True).metrics
                    self._require_finite(metrics["grad_norm"], part, part.logprobs)
                    losses.append(metrics["critic/vf_loss"])
        assert batch.values is not None
        assert batch.returns is not None
        mask = batch.response_mask.astype(bool)
        left, spread = (batch.returns - batch.values)[mask].var(), batch.returns[mask].var()
        self._of_critic = {"critic_loss": float(np.mean(losses)), "critic_explained": float(1 - left / max(spread, 1e-8))}

    def end(self) -> dict[str, float]:
        """Call `before_update`, unless it was, and return the step's metrics."""
        metrics = self._of_check | _means(self._steps)
        if self._workers.device == "cpu" or not metrics.get("mfu"):
            metrics.pop("mfu", None)  # verl has the peaks of many GPUs, a guess for every CPU, and infinity for the rest
        metrics |= self.batch.advantage_spread | self._of_batch
        metrics |= {"grad_norm": max((step["grad_norm"] for step in self._steps), default=0.0), "updated": float(len(self._steps))}
        self._begin_update()
        return metrics | self._of_critic

    def token_values(self) -> TokenValues:
        """Return what the phases computed of the sampled tokens; once the policy was updated."""
        assert self._checked is not None
        assert self._entropies is not None
        return TokenValues(self.batch.advantages, self._checked, self._entropies)

    def _of_loss(self) -> dict[str, float]:
        """Return the loss's metrics of a batch without a gradient, whose rows are checked now unless they were."""
        passed = self._workers.pass_batch(PassKind.INFER, self.batch, "policy", "log_probs", _ENTROPY, entropy=self._has_entropy_term)
        if self._first:
            return _kept(passed.metrics)
        self._entropies = passed.outputs[_ENTROPY]
        return _kept(passed.metrics) | self._compared(self.batch, passed.outputs["log_probs"])

    @property
    def _has_entropy_term(self) -> bool:
        return self._settings.loss.entropy_coef != 0

    def _begin_update(self) -> None:
        """Call `before_update`, unless it was."""
        before, self._before_update = self._before_update, None
        if before:
            before()

    def _estimated(self) -> Batch:
        """Return the batch with advantages that depend on the policy's weights or the critic."""
        batch = self.batch
        if batch.values is not None:
            advantages, returns = over_tokens(self._settings, batch, values=batch.values)
            return replace(batch, advantages=advantages, returns=returns, call_rewards=None)
        outputs = self._forward("policy", batch, "log_probs", "sum_pi_squared", calculate_sum_pi_squared=True)
        known = {"old_log_probs": outputs["log_probs"], "sum_pi_squared": outputs["sum_pi_squared"]}
        return replace(batch, advantages=over_tokens(self._settings, batch, **known)[0], call_rewards=None)

    def _weigh_reshaped(self) -> None:
        """Give reshaped rows their ratios and weights."""
        settings, batch = self._settings, self.batch
        if settings.loss.recompute_logprobs and settings.loss.correction.weights:
            return  # every row has them
        logprobs = self._logprobs
        if logprobs is None:
            rows = np.flatnonzero(batch.reshaped)
            logprobs = np.zeros_like(batch.logprobs)
            logprobs[rows] = self.logprobs_under("policy", take(batch, rows, divisor=self._workers.size))[: len(rows)]
        batch, self._of_batch = reshaped_corrected(batch, logprobs, settings.loss.correction.threshold)
        if settings.loss.name == "bypass_mode":  # it makes weights of its own against the sampled logprobs: here of ratios that are 1
            assert batch.old_logprobs is not None
            assert batch.weights is not None
            weighted = batch.advantages * batch.weights
            batch = replace(batch, logprobs=batch.old_logprobs, old_logprobs=None, advantages=weighted, weights=None)
        self.batch = batch

    def _by_rollout(self, part: Batch) -> tuple[Batch, dict[str, float]]:
        """Return a step's part, prepared where a rollout has several rows or weights are normalised, and metrics of a correction."""
        if not several_rows(part) and not normalises_weights(self._settings):
            return part, {}
        logprobs: NDArray[np.float32] | None = None
        if needs_logprobs(self._settings):
            at_start = not self._steps and self._settings.loss.recompute_logprobs
            logprobs = part.old_logprobs if at_start else None
            logprobs = self.logprobs_under("policy", part) if logprobs is None else logprobs
        return by_rollout(part, self._settings, logprobs)

    def parts(self) -> list[Batch]:
        """Return a batch's mini-batches, drawn again each time from the random state that is saved with the state."""
        import torch

        batch, count = self.batch, self._settings.optim.mini_batches
        if count == 1:
            return [batch]
        order = torch.randperm(batch.rollouts, generator=self._order).tolist()
        return [take(batch, rows, divisor=self._workers.size) for rows in split(batch, order, count)]

    def _trainable(self, batch: Batch) -> bool:
        """Return whether the gradient can differ from 0."""
        beside = self._settings.loss.kl_coef != 0 or self._has_entropy_term
        return batch.trainable or (beside and bool(batch.response_mask.any()))

    def _train(self, part: Batch) -> dict[str, float]:
        """Take one optimizer step on some rows of the batch, once their logprobs are checked; return its metrics."""
        names = ("log_probs",) if self._first else ("log_probs", _ENTROPY)
        passed = self._workers.pass_batch(PassKind.ACCUMULATE, part, "policy", *names, entropy=self._has_entropy_term)
        metrics, logprobs = _kept(passed.metrics), passed.outputs["log_probs"]
        if not self._first:
            self._entropies = passed.outputs[_ENTROPY]
            metrics |= self._compared(part, logprobs)
        self._begin_update()
        norm = self._workers.everywhere("apply", "policy")
        self._require_finite(norm, part, logprobs)
        return {**metrics, "grad_norm": norm}

    def _require_finite(self, norm: float, part: Batch, logprobs: NDArray[np.float32]) -> None:
        if not np.isfinite(norm):
            error = blame_gradient(part, logprobs, norm)
            assert part.index is not None
            raise BadRowsError(str(error), {int(part.index[row]): reason for row, reason in error.rows.items()})

    def _compared(self, batch: Batch, logprobs: NDArray[np.float32]) -> dict[str, float]:
        self._checked = logprobs
        return self._check.compare(batch, logprobs, functools.partial(self._earlier, batch))

    def _earlier(self, batch: Batch, chosen: NDArray[np.bool_], behind: int) -> NDArray[np.float32] | None:
        """Return logprobs of rows with chosen tokens under the policy `behind` versions ago; None where its weights are not held."""
        if behind > self._held_versions:
            return None
        rows = np.flatnonzero(chosen.any(axis=1))
        part = take(batch, rows, divisor=self._workers.size)
        logprobs = np.zeros_like(batch.logprobs)
        logprobs[rows] = self._forward("policy", part, "log_probs", behind=behind)["log_probs"][: len(rows)]
        return logprobs

    def logprobs_under(self, role: str, batch: Batch) -> NDArray[np.float32]:
        """Return the logprobs (nats) of the sampled tokens under a model's weights; 0 elsewhere."""
        return self._forward(role, batch, "log_probs")["log_probs"]

    def _forward(self, role: str, batch: Batch, *names: str, **flags: bool | int) -> dict[str, NDArray[np.float32]]:
        """Return the outputs of a model's forward pass for the sampled tokens, by verl's names; 0 elsewhere."""
        return self._workers.pass_batch(PassKind.INFER, batch, role, *names, compute_loss=False, **flags).outputs


def _kept(metrics: dict[str, float]) -> dict[str, float]:
    return {name: metrics[verl_name] for verl_name, name in _METRIC_NAMES.items() if verl_name in metrics} | correction_metrics(metrics)


def _means(steps: list[dict[str, float]]) -> dict[str, float]:
    """Return the mean of each metric over the steps that have it."""
    names = dict.fromkeys(name for step in steps for name in step)
    return {name: float(np.mean([step[name] for step in steps if name in step])) for name in names}
