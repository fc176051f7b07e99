"""Sections of the trainer's settings that say how it runs: its processes, versions, evaluations and alarms."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from spangrad.settings.section import Section

_VALIDATION_METRICS = ("validate_return", "validate_success", "validate_rollouts")
"""Metrics that every validation gives."""
_NAMED_VALIDATION_METRICS = {"validate_reward_": "NAME", "validate_rating_": "ROLE"}
"""Beginnings of the metrics that a validation gives by name, and what follows."""


def _given_by_validation(metric: str) -> str:
    named = any(metric.startswith(start) and metric != start for start in _NAMED_VALIDATION_METRICS)
    if metric not in _VALIDATION_METRICS and not named:
        names = [*_VALIDATION_METRICS, *(start + name for start, name in _NAMED_VALIDATION_METRICS.items())]
        raise ValueError(
            f"no validation gives the metric {metric!r}, so that no version would ever be the best. Set one of {', '.join(names)}"
        )
    return metric


class LogprobAlarm(Section):
    """Limits of the differences from the logprobs of sampling; rows beyond them are refused. None: by dtype (docs/guides/learning.md)."""

    mean: float | None = Field(default=None, gt=0)
    """Largest mean of |difference|, in nats."""
    p99: float | None = Field(default=None, gt=0)
    """Largest 99th percentile of |difference|, in nats."""
    pearson: float | None = Field(default=None, ge=-1, le=1)
    """Smallest Pearson correlation of the two probabilities."""
    k3: float | None = Field(default=None, gt=0)
    """Largest KL(rollout || trainer), in nats, by the k3 estimate."""
    held_versions: int | None = Field(default=None, ge=0)
    """Number of earlier versions whose weights the trainer holds in main memory, so that late calls are compared with the weights that
    sampled them. None: trainer.sampling.max_staleness."""
    drift: float = Field(default=0.1, ge=0)
    """KL divergence, in nats, that each version of lag may explain where the version's weights are neither held nor in a checkpoint."""


class WorkersSettings(Section):
    """Settings of the processes that share a step, under Ray."""

    per_node: int = Field(default=0, ge=0)
    """Number of processes on each node that share a step, under Ray; with GPUs, one each. 0: the trainer's own process, no Ray."""
    nodes: int = Field(default=1, ge=1)
    """Number of machines with trainer.workers.per_node processes each (docs/start/scaling.md)."""
    ray_address: str | None = None
    """Address (HOST:PORT) of the Ray cluster that the workers run in, or `auto`. None: a cluster that the trainer starts on loopback."""
    colocated: bool = False
    """True if the policy's engines run on the trainer's GPUs: they sleep while a step computes, and the trainer's models are in main memory
    while they serve (docs/start/scaling.md)."""


class WeightSyncSettings(Section):
    """Settings of the way in which engines get each version's weights."""

    publish: bool = True
    """True to publish each version to the gateway."""
    method: Literal["disk", "adapter", "transfer"] = "disk"
    """Weight sync method: engines read a whole model from `trainer.directory` (disk) or the adapter alone (adapter), or the trainer
    sends them the weights (transfer) (docs/guides/weights.md)."""
    in_flight: Literal["keep", "drain", "abort"] = "keep"
    """Treatment of the calls in flight when an engine loads new weights: they continue with them (keep), they end first (drain), or they
    are aborted (abort) (docs/guides/weights.md)."""
    drain_seconds: float = Field(default=60.0, ge=0)
    """Time limit of in_flight `drain`, in seconds; calls that are left continue as with `keep`."""
    transfer_host: str = "127.0.0.1"
    """Address of this machine at which the gateway and the engines' workers reach the trainer; for trainer.weight_sync.method
    `transfer`."""
    transfer_port: int = Field(default=0, ge=0)
    """Port at which the gateway and the engines' workers reach the trainer; for trainer.weight_sync.method `transfer`. The trainer's ranks
    listen at the ports after it, rank 0 at the next one. 0: any free ports."""
    delta: bool = True
    """True to send workers that hold the version before only what changed since; for engine.transfer `http`. Each rank then keeps its share
    of the weights, in the engine's dtype, in main memory."""


class CheckpointSettings(Section):
    """Settings of what a checkpoint holds, and of the choice of those that are kept."""

    every: int = Field(default=1, ge=1)
    """Number of steps after which the optimizer's state is written beside the weights, which each version has; the state of adapters is
    written with each version. After a crash the steps since then are replayed from the store."""
    minutes: float | None = Field(default=None, gt=0)
    """Time after which the optimizer's state is written even if fewer steps were made, in minutes. None: steps alone decide."""
    after_crash: Literal["replay", "orphan"] = "replay"
    """Treatment of the steps since the last state that was written: their batches are trained again, so that the state is restored
    (replay), or their versions are orphaned and their rollouts are free again (orphan), unless one of them is pinned, other versions
    came of one, or another trainer of the branch runs."""
    keep: int = Field(default=3, ge=1)
    """Number of newest checkpoints that are kept, beside pinned ones and those still needed."""
    best_metric: Annotated[str, AfterValidator(_given_by_validation)] = "validate_return"
    """Metric of held-out rollouts by which the best version is chosen, whose checkpoint is kept; the highest value is the best."""
    best_rollouts: int = Field(default=8, ge=1)
    """Smallest number of held-out rollouts on which a version must be measured to be compared."""


class EvaluationSettings(Section):
    """Settings of the evaluation on held-out tasks."""

    every: int = Field(default=0, ge=0)
    """Number of versions after which trainer.evaluation.command runs again. 0: never."""
    command: tuple[str, ...] = ()
    """Program and arguments that run the held-out tasks beside training, such as `spangrad run --mode validate ...`; one runs at a time."""
    timeout_seconds: float = Field(default=3600.0, gt=0)
    """Time limit of trainer.evaluation.command, in seconds; a run that takes longer is ended. At its end the trainer waits for it."""
    success_reward: float = 1.0
    """Smallest final reward with which a rollout counts as a success."""
    past_policy: str = ""
    """Name under which older versions of the policy are served as opponents, with their numbers: their held-out games count in the ratings
    by role. Empty: none are."""


class AlarmSettings(Section):
    """Settings of the limits beyond which the trainer warns, refuses rows or stops."""

    logprob: LogprobAlarm = LogprobAlarm()
    """Limits of the logprob gap, beyond which rows are refused."""
    max_failed_share: float = Field(default=0.25, ge=0, le=1)
    """Largest share of the run's last 64 groups, or of four batches' worth if that is more, that may fail a check
    (docs/guides/training.md) before the run stops."""
    failed_share: float = Field(default=0.5, ge=0, le=1)
    """Share of a batch's rollouts that may have failed before the trainer warns. 1: it never warns."""
    gaming_reward: str = "reward"
    """Name of the reward that measures success: where the return rises and it does not, a reward is gamed (docs/concepts/credit.md)."""
    gaming_versions: int = Field(default=20, ge=0)
    """Number of versions over which the gaming alarm measures the rise. 0: no alarm."""
    gaming_rise: float = Field(default=0.2, ge=0)
    """Smallest rise of the mean return over trainer.alarms.gaming_versions that raises the gaming alarm: more than partial rewards bring
    before the first success."""
