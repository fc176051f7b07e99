"""Optimizers without ranks and with two under Ray, which test files share: Ray and its workers start once.

In: settings that differ from the shared ones. Out: both optimizers with those settings, in the state that they began with. Invariant: no
test finds what another one left, since weights, moments, order and random numbers are read again, and ranks that have ended are replaced.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from spangrad.settings import TrainerSettings
from tests.support.policies import trainer_settings
from tests.support.trainers import save
from trainer.distributed.cluster import Cluster
from trainer.monitor import logprob_check
from trainer.monitor.row_check import RowCheck
from trainer.optim.optimizer import VerlOptimizer
from trainer.optim.process import dtype_of
from trainer.optim.workers import LocalWorkers

RATE = 1e-4
"""Learning rate of policy and critic: the workers have it from their start."""
CPUS = 6
"""CPUs of the cluster: as many workers as it has room for."""


def settings(model: Path, **changes: Any) -> TrainerSettings:
    """Return the shared settings with changes; those of a shared optimizer are such as no worker is made by."""
    rates = {"learning_rate": RATE, "critic_learning_rate": RATE}
    return trainer_settings(**{**rates, "model": model, "kl_coef": 0.05, "weight_sync__method": "transfer", **changes})


class RayOptimizers:
    """Optimizers with 0 and 2 ranks under one Ray, each with a critic and a reference, which send weights."""

    def __init__(self, model: Path, directory: Path) -> None:
        """Start Ray; the optimizers are made by the first `reset`."""
        self._model, self._state = model, directory / "state"
        self._cluster = Cluster(trainer_settings(workers__per_node=CPUS))
        self._optimizers: dict[int, VerlOptimizer] = {}

    def reset(self, **changes: Any) -> dict[int, VerlOptimizer]:
        """Return both optimizers, by their number of ranks, as they began, with changed settings."""
        for ranks in (0, 2):
            if ranks not in self._optimizers or _has_ended(self._optimizers[ranks]):
                self._optimizers[ranks] = VerlOptimizer(self._model, settings(self._model, estimator="gae", workers__per_node=ranks))
        if not self._state.exists():
            save(self._optimizers[0], self._state)
        for optimizer in self._optimizers.values():
            optimizer.load_weights(self._model)
            optimizer.load_state(self._state)
            use(optimizer, settings(self._model, **changes))
        return dict(self._optimizers)

    def close(self) -> None:
        """End the ranks and Ray."""
        for optimizer in self._optimizers.values():
            optimizer.close()
        self._cluster.close()


def use(optimizer: VerlOptimizer, chosen: TrainerSettings) -> None:
    """Have an optimizer step by other settings than it was made with: another loss or estimator, other checks and micro-batches."""
    from verl.workers.config import FSDPOptimizerConfig

    from trainer.optim.losses.corrected import policy_loss_of

    optimizer.settings = chosen
    optimizer._check = RowCheck(chosen, logprob_check.engine_dtype("auto"), dtype_of(chosen, optimizer.device))
    optimizer._held_versions = 0
    optimizer._workers.everywhere("set_loss_fn", policy_loss_of(chosen, FSDPOptimizerConfig()))
    _bound_micro_batches(optimizer, chosen.max_tokens_per_device)


def group(optimizer: VerlOptimizer) -> Any:
    """Return verl's worker group of an optimizer with ranks under Ray."""
    return optimizer._workers._trainer.actor_rollout_wg  # type: ignore[union-attr]


def _has_ended(optimizer: VerlOptimizer) -> bool:
    return getattr(optimizer._workers, "_trainer", optimizer) is None


def _bound_micro_batches(optimizer: VerlOptimizer, tokens: int) -> None:
    """Bound the tokens of a micro-batch on every rank, in each pass."""

    def bound(models: dict[Any, Any]) -> None:
        for model in models.values():
            model.engine_config.max_token_len_per_gpu = model.engine_config.infer_max_token_len_per_gpu = tokens

    if isinstance(optimizer._workers, LocalWorkers):
        bound(optimizer._workers._rank._models)
        return
    import ray

    calls = [actor.__ray_call__.remote(lambda host: bound(host.worker_dict["actor"]._models)) for actor in group(optimizer).workers]
    ray.get(calls)
