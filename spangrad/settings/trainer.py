"""Settings of the trainer."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, SecretStr

from spangrad.settings.builder import Selection
from spangrad.settings.section import Section
from spangrad.types import Mode

Estimator = Literal[
    "gae",
    "gdpo",
    "gpg",
    "grpo",
    "grpo_passk",
    "grpo_vectorized",
    "opo",
    "optimal_token_baseline",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "remax",
    "rloo",
    "rloo_vectorized",
    "tir_optimal_token_baseline",
]
"""Verl's advantage estimators, by verl's names."""

Loss = Literal[
    "bypass_mode",
    "cispo",
    "clip_cov",
    "dppo_kl",
    "dppo_tv",
    "dro",
    "geo_mean",
    "gpg",
    "gspo",
    "kl_cov",
    "sapo",
    "vanilla",
]
"""Verl's policy losses, by verl's names; `vanilla` is PPO's."""

Aggregation = Literal["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
"""How verl makes one number of the losses of all tokens."""

KlEstimate = Literal["kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3", "kl+", "k1+", "abs+", "low_var_kl+", "k3+"]
"""Verl's estimates of a KL divergence from a token's two logprobs; with `+` the gradient is that of `k2`, which is unbiased."""


_NEVER_TRAINED = {
    Mode.VALIDATE: "are held out to measure versions",
    Mode.PROBE: "check a server or a canary",
    Mode.GREEDY: "are baselines, sampled at temperature 0",
    Mode.TRIAL: "try candidates of a prompt",
}


def _may_be_trained(mode: str) -> str:
    if mode in _NEVER_TRAINED:
        raise ValueError(
            f"rollouts of mode {mode} {_NEVER_TRAINED[Mode(mode)]} and are never trained. Take {mode} out of trainer.modes, and run what "
            "is to be trained in mode train"
        )
    return mode


class Correction(Section):
    """What is done about responses that other weights, or another arithmetic, sampled (docs/learning.md)."""

    weights: Literal["token", "sequence"] | None = None
    """What an importance weight, trainer's probability over sampled probability, stands for. None: no weights."""
    threshold: str = "2.0"
    """UPPER: weights are cut there (TIS). LOWER_UPPER: those outside count as 0 (IcePop)."""
    normalise: bool = False
    """Divide the weights by their mean."""
    reject: dict[str, str] = Field(default_factory=dict[str, str])
    """Which divergences make a token or a response count for nothing, by verl's names: LOWER_UPPER of a ratio, UPPER of others."""
    objective: Literal["ppo_clip", "reinforce"] = "ppo_clip"
    """What trainer.loss `bypass_mode` does with the rest."""


class LogprobAlarm(Section):
    """Differences from the logprobs that calls were sampled with, beyond which rows are refused. None: by the dtypes (docs/learning.md)."""

    mean: float | None = Field(default=None, gt=0)
    """Mean |difference| (nats)."""
    p99: float | None = Field(default=None, gt=0)
    """99th percentile of |difference| (nats)."""
    pearson: float | None = Field(default=None, ge=-1, le=1)
    """Smallest correlation of the two probabilities."""
    k3: float | None = Field(default=None, gt=0)
    """KL(rollout || trainer) (nats), by the k3 estimate."""
    held_versions: int | None = Field(default=None, ge=0)
    """Earlier versions whose weights the trainer holds in main memory, so that late calls are compared with the weights that sampled them.
    None: trainer.max_staleness."""
    drift: float = Field(default=0.1, ge=0)
    """KL divergence (nats) that each version of lag may explain where those weights are not held, their checkpoints being gone."""


class TrainerSettings(Section):
    """The trainer."""

    run_id: str = "default"
    """The run whose rollouts are trained."""
    policy: str = "policy"
    branch: str = "main"
    model: Path | None = None
    """Directory of the weights that training begins with. None: `spangrad train` asks for it."""
    directory: Path = Path("data/policies")
    """Where checkpoints live, and the ledger if trainer.ledger_url names no other place."""
    ledger_url: SecretStr | None = None
    """Database of the ledger, postgresql://USER:PASSWORD@HOST/NAME or sqlite:///FILE. None: SQLite's ledger.db in trainer.directory."""
    lease_seconds: float = Field(default=60.0, gt=0)
    """After which another trainer may take over a step whose process no longer renews its lease."""
    modes: tuple[Annotated[str, AfterValidator(_may_be_trained)], ...] = ("train",)
    """Modes of rollouts that may be trained: train, production, or one of your own. Held-out rollouts (validate), probes, greedy baselines
    and trials of prompts never are."""
    dataset: str | None = None
    """NAME, or NAME@REVISION, of the transitions to train on. None: those that the builder's settings make."""
    as_of: datetime | None = None
    """Train on the store as it was then. None: as it is."""
    selection: Selection = Selection()
    """Which of the policy's calls are trained; rewards of the others count all the same."""
    groups_per_batch: int = Field(default=4, ge=1)
    max_failed_share: float = Field(default=0.25, ge=0, le=1)
    """Largest share of the last trainer.failed_window groups that may fail a check (docs/training.md) before the run stops."""
    failed_window: int = Field(default=64, ge=1)
    """Groups of the run, trained or failed, over which trainer.max_failed_share is taken; at least four batches' worth."""
    retrain_tuned: bool = False
    """Also take groups of which `spangrad tune` has trained a rollout on this branch. False: they count as trained."""
    max_steps: int = 0
    """Steps after which `--follow` ends. 0: never."""
    reward_weights: dict[str, float] = Field(default_factory=dict[str, float])
    """What rewards of a name are multiplied by. A name that is not here: 1."""
    reward_roles: tuple[str, ...] = ()
    """Roles whose rewards count, beside those that are everybody's. Empty: every reward counts."""
    credit: Literal["identical", "final_only", "reward_to_go", "own", "gigpo"] = "identical"
    baseline: Literal["rollout", "turn", "transition"] = "rollout"
    """Values that share a baseline: those of the group's rollouts (each counts once), of the calls at the same turn of its rollouts, or of
    all calls of all its rollouts (as in Agent Lightning's paper: a rollout counts once a call). GiGPO has its own."""
    gamma: float = Field(default=1.0, ge=0, le=1)
    step_weight: float = 1.0
    """GiGPO: weight of a step's advantage beside its rollout's."""
    estimator: Estimator = "grpo"
    """How values are compared (docs/learning.md)."""
    gae_lambda: float = Field(default=1.0, ge=0, le=1)
    """GAE: how far it looks beyond the next token's value. Its discount, a token, is trainer.gamma."""
    critic_learning_rate: float = 1e-5
    """GAE: of the value model, which begins as the policy with a new head."""
    critic_clip: float = 0.5
    """GAE: how far a value may leave what it was at the batch's start and still pull."""
    norm_by_std: bool = True
    """GRPO and its kin: divide by the group's standard deviation. False is Dr. GRPO."""
    skip_equal_groups: bool = False
    """Skip groups in which no value differs from those that it is compared with (DAPO)."""
    truncated: Literal["train", "mask", "reject"] = "train"
    """Calls whose response was cut at its limit of tokens: trained like others, masked, or their whole rollout masked (DAPO's overlong
    filtering). Their rewards count in the baseline either way."""
    overlong_tokens: int = Field(default=0, ge=0)
    """Soft overlong punishment (DAPO): L_max, the most tokens that a call's response should have. 0: none."""
    overlong_buffer: int = Field(default=0, ge=0)
    """Soft overlong punishment (DAPO): L_cache, the tokens before L_max over which the punishment falls from 0 to -1."""
    merge: bool = False
    """Train calls whose prompts extend each other as one sequence: fewer tokens, the same loss (docs/merging.md)."""
    lora_rank: int = Field(default=0, ge=0)
    """Train adapters of this rank and leave the weights as they are; versions are served merged unless road is `adapter`. 0: train the
    weights."""
    lora_alpha: int = 16
    """What adapters are multiplied by, over the rank."""
    lora_modules: tuple[str, ...] = ()
    """Names of the layers that have adapters, such as `q_proj`. None: every linear one but the head."""
    learning_rate: float = 1e-6
    warmup_steps: int = Field(default=0, ge=0)
    """Optimiser steps over which the learning rate rises to trainer.learning_rate, from 0 in the first. The critic's has none."""
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.0
    loss: Loss = "vanilla"
    loss_aggregation: Aggregation = "token-mean"
    loss_options: dict[str, float] = Field(default_factory=dict[str, float])
    """Numbers of the loss, by verl's names; one that is not here has verl's default (docs/learning.md)."""
    clip_ratio: float = 0.2
    """How far a ratio may leave 1 and still pull; in `dppo_tv` and `dppo_kl` a divergence."""
    clip_ratio_low: float | None = None
    """Below 1. None: clip_ratio."""
    clip_ratio_high: float | None = None
    """Above 1. None: clip_ratio."""
    epochs: int = Field(default=1, ge=1)
    """How often a batch is gone through."""
    mini_batches: int = Field(default=1, ge=1)
    """Optimiser steps an epoch, each on a part of the batch's rows, drawn anew. Ratios are against the batch's start."""
    recompute_logprobs: bool = False
    """Take ratios against the trainer's own logprobs at the batch's start. False: against those that were sampled with."""
    correction: Correction = Correction()
    kl_coef: float = Field(default=0.0, ge=0)
    """Weight of the KL divergence from the reference in the loss."""
    kl_type: KlEstimate = "low_var_kl"
    reference: Path | None = None
    """Directory of the weights that the policy is held to. None: trainer.model."""
    entropy_coef: float = 0.0
    """Weight of the entropy that the loss rewards."""
    clip_grad: float = 1.0
    max_tokens_per_device: int = 16384
    max_staleness: int = 0
    """How many versions behind the newest a call's policy may be; older calls' groups are skipped, with a reason."""
    logprob_alarm: LogprobAlarm = LogprobAlarm()
    failed_share_alarm: float = Field(default=0.5, ge=0, le=1)
    """Share of a batch's rollouts that may have failed before the trainer warns. 1: it never does."""
    gaming_reward: str = "reward"
    """Name of the reward that stands for success: where the return rises and it does not, something is gamed (docs/credit.md)."""
    gaming_versions: int = Field(default=20, ge=0)
    """Over how many versions that is measured. 0: not at all."""
    gaming_rise: float = Field(default=0.2, ge=0)
    """How much the mean return must rise over them for an alarm: more than partial rewards bring before the first success."""
    keep_checkpoints: int = 3
    poll_seconds: float = 0.2
    dtype: Literal["fp32", "bf16"] | None = None
    """Type of the computation; weights, moments and sums of gradients are float32 (mixed precision). None: bf16 where there is a GPU."""
    packing: bool | None = None
    """Pass rows through the model end to end, without padding. None: where there are a GPU and the package flash-attn, which it needs."""
    gradient_checkpointing: bool | None = None
    """Compute activations again in the backward pass instead of keeping them: less memory, more time. None: where there is a GPU."""
    workers: int = Field(default=0, ge=0)
    """Processes on each node that share a step, under Ray; a GPU each where there are any. 0: the trainer's own process, no Ray."""
    nodes: int = Field(default=1, ge=1)
    """Machines with trainer.workers processes each (docs/cluster.md)."""
    ray_address: str | None = None
    """HOST:PORT of the Ray cluster that the workers run in, or `auto`. None: one that the trainer begins here, on loopback."""
    ray_object_store_bytes: int = Field(default=2**28, ge=2**27)
    """Shared memory of a Ray cluster that the trainer begins: for a batch's rows, not for weights."""
    publish: bool = True
    """Hand each version to the gateway."""
    in_flight: Literal["keep", "drain", "abort"] = "keep"
    """Treatment of the calls that an engine is answering when it takes new weights: they go on with them, they end first, or they are
    cut (docs/weights.md)."""
    drain_seconds: float = Field(default=60.0, ge=0)
    """Longest wait of in_flight `drain`; calls that are left go on as with `keep`."""
    road: Literal["disk", "adapter", "transfer"] = "disk"
    """How a version comes into engines: they read a whole model from `directory`, or the adapter alone, or the trainer sends them the
    weights (docs/weights.md)."""
    transfer_host: str = "127.0.0.1"
    """With road `transfer`: the address of this machine at which the gateway and the engines' workers reach the trainer."""
    transfer_port: int = Field(default=0, ge=0)
    """And the port. 0: any that is free."""
    evaluate_every: int = Field(default=0, ge=0)
    """After how many versions evaluate_command runs. 0: never."""
    evaluate_command: tuple[str, ...] = ()
    """Program and arguments that run the held-out tasks, `spangrad run --mode validate ...` say; the trainer waits for its end."""
    success_reward: float = 1.0
    """A rollout whose final reward is at least this has succeeded."""
    best_metric: str = "validate_return"
    """The metric by which the best version is chosen, whose checkpoint is kept; the highest is the best."""
    best_rollouts: int = Field(default=8, ge=1)
    """Held-out rollouts without which a version is not compared."""
    trackers: tuple[Literal["tensorboard", "wandb", "mlflow", "swanlab", "trackio", "clearml", "file"], ...] = ()
    """Where metrics go besides the store, by verl's own tracking; each needs its package and its own settings (docs/training.md)."""
    traces: bool = True
    """Send a span for each step to store.otlp_endpoint, with links to the rollouts that it consumed."""
