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
"""Advantage estimators of verl, by verl's names."""

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
"""Policy losses of verl, by verl's names; `vanilla` is PPO's."""

Aggregation = Literal["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
"""Reductions of the losses of all tokens to one number, by verl's names."""

KlEstimate = Literal["kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3", "kl+", "k1+", "abs+", "low_var_kl+", "k3+"]
"""Estimates of a KL divergence from a token's two logprobs, by verl's names; with `+` the gradient is that of `k2`, which is unbiased."""


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
    """Rollout correction: treatment of responses that other weights, or another arithmetic, sampled (docs/guides/learning.md)."""

    weights: Literal["token", "sequence"] | None = None
    """Level of the importance weights (trainer's probability over sampled probability): token or sequence. None: no weights."""
    threshold: str = "2.0"
    """Bounds of the importance weights. UPPER: larger weights are cut to it (TIS). LOWER_UPPER: weights outside count as 0 (IcePop)."""
    normalise: bool = False
    """True to divide the weights by their mean."""
    reject: dict[str, str] = Field(default_factory=dict[str, str])
    """Divergences, by verl's names, beyond whose limits a token or a response is rejected: LOWER_UPPER of a ratio, UPPER of others."""
    objective: Literal["ppo_clip", "reinforce"] = "ppo_clip"
    """Objective of trainer.loss `bypass_mode` over the tokens that are not rejected."""


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
    sampled them. None: trainer.max_staleness."""
    drift: float = Field(default=0.1, ge=0)
    """KL divergence, in nats, that each version of lag may explain where the version's weights are neither held nor in a checkpoint."""


class TrainerSettings(Section):
    """Settings of the trainer."""

    run_id: str = "default"
    """Run whose rollouts are trained."""
    policy: str = "policy"
    """Name of the policy that is trained, as the gateway and the ledger know it."""
    branch: str = "main"
    """Name of the policy's branch that versions are committed to."""
    model: Path | None = None
    """Directory of the weights that training begins with. None: `spangrad train` requires it as an argument."""
    directory: Path = Path("data/policies")
    """Directory of the checkpoints, and of the ledger unless trainer.ledger_url names another place."""
    ledger_url: SecretStr | None = None
    """Database of the ledger, postgresql://USER:PASSWORD@HOST/NAME or sqlite:///FILE. None: SQLite's ledger.db in trainer.directory."""
    lease_seconds: float = Field(default=60.0, gt=0)
    """Time without renewal of its lease after which another trainer may take over a step, in seconds."""
    modes: tuple[Annotated[str, AfterValidator(_may_be_trained)], ...] = ("train",)
    """Modes of rollouts that may be trained: train, production, or a mode of the user's own. Held-out rollouts (validate), probes,
    greedy baselines and trials of prompts never are."""
    dataset: str | None = None
    """Transitions to train on, as NAME or NAME@REVISION. None: those that the builder's settings produce."""
    as_of: datetime | None = None
    """Time of the store's state to train on. None: the current state."""
    selection: Selection = Selection()
    """Filter of the policy's calls that are trained; rewards of the others count all the same."""
    groups_per_batch: int = Field(default=4, ge=1)
    """Number of groups of rollouts in the batch of a step."""
    max_failed_share: float = Field(default=0.25, ge=0, le=1)
    """Largest share of the last trainer.failed_window groups that may fail a check (docs/guides/training.md) before the run stops."""
    failed_window: int = Field(default=64, ge=1)
    """Number of the run's latest groups, trained or failed, over which trainer.max_failed_share is taken; at least four batches' worth."""
    retrain_tuned: bool = False
    """True to also train groups of which `spangrad tune` has trained a rollout on this branch. False: they count as trained."""
    max_steps: int = 0
    """Number of steps after which `--follow` ends. 0: never."""
    reward_weights: dict[str, float] = Field(default_factory=dict[str, float])
    """Factor of each reward, by name. A name that is not listed: 1."""
    reward_roles: tuple[str, ...] = ()
    """Roles whose rewards count, beside rewards of every role. Empty: every reward counts."""
    credit: Literal["identical", "final_only", "reward_to_go", "own", "gigpo"] = "identical"
    """Credit scheme: how a rollout's rewards become values of its calls (docs/concepts/credit.md)."""
    baseline: Literal["rollout", "turn", "transition"] = "rollout"
    """Values that share a baseline: those of the group's rollouts (each counts once), of the calls at the same turn of its rollouts, or
    of all calls of all its rollouts (as in Agent Lightning's paper: a rollout counts once for each call). GiGPO has its own."""
    gamma: float = Field(default=1.0, ge=0, le=1)
    """Discount of a reward per call between it and the call that it is credited to."""
    step_weight: float = 1.0
    """GiGPO: weight of a step's advantage beside its rollout's."""
    estimator: Estimator = "grpo"
    """Advantage estimator, which compares values with their baselines (docs/guides/learning.md)."""
    gae_lambda: float = Field(default=1.0, ge=0, le=1)
    """GAE: lambda, the weight of values beyond the next token's. The discount of each token is trainer.gamma."""
    critic_learning_rate: float = 1e-5
    """GAE: learning rate of the value model, which begins as the policy with a new head."""
    critic_clip: float = 0.5
    """GAE: clip range of a value around its prediction at the batch's start."""
    norm_by_std: bool = True
    """GRPO and related estimators: divide by the group's standard deviation. False is Dr. GRPO."""
    skip_equal_groups: bool = False
    """True to skip groups in which no value differs from those that it is compared with (DAPO)."""
    truncated: Literal["train", "mask", "reject"] = "train"
    """Treatment of calls whose response was cut at its token limit: trained like others, masked, or their whole rollout masked (DAPO's
    overlong filtering). Their rewards count in the baseline either way."""
    overlong_tokens: int = Field(default=0, ge=0)
    """Soft overlong punishment (DAPO): L_max, the largest number of tokens that a call's response should have. 0: no punishment."""
    overlong_buffer: int = Field(default=0, ge=0)
    """Soft overlong punishment (DAPO): L_cache, the number of tokens before L_max over which the punishment falls from 0 to -1."""
    merge: bool = False
    """True to train calls whose prompts extend each other as one sequence: fewer tokens, the same loss (docs/concepts/merging.md)."""
    lora_rank: int = Field(default=0, ge=0)
    """Rank of the adapters that are trained while the weights stay fixed; versions are served merged unless trainer.weight_sync is
    `adapter`. 0: train the weights."""
    lora_alpha: int = 16
    """LoRA's alpha: adapters are multiplied by lora_alpha / lora_rank."""
    lora_modules: tuple[str, ...] = ()
    """Names of the layers that have adapters, such as `q_proj`. Empty: every linear layer but the head."""
    learning_rate: float = 1e-6
    """Learning rate of AdamW after the warm-up."""
    warmup_steps: int = Field(default=0, ge=0)
    """Optimizer steps over which the learning rate rises from 0 to trainer.learning_rate. The critic's has no warm-up."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's decay rates of the first and the second moment."""
    weight_decay: float = 0.0
    """AdamW's weight decay, as a factor of the weights per step and learning rate."""
    loss: Loss = "vanilla"
    """Policy loss, by verl's name (docs/guides/learning.md)."""
    loss_aggregation: Aggregation = "token-mean"
    """Aggregation of token losses to the loss of a step (docs/guides/learning.md)."""
    loss_options: dict[str, float] = Field(default_factory=dict[str, float])
    """Numeric options of the loss, by verl's names; an option that is not listed has verl's default (docs/guides/learning.md)."""
    clip_ratio: float = 0.2
    """Clip range of importance ratios around 1; in `dppo_tv` and `dppo_kl` of a divergence."""
    clip_ratio_low: float | None = None
    """Clip range of importance ratios below 1. None: clip_ratio."""
    clip_ratio_high: float | None = None
    """Clip range of importance ratios above 1. None: clip_ratio."""
    epochs: int = Field(default=1, ge=1)
    """Number of passes over a batch."""
    mini_batches: int = Field(default=1, ge=1)
    """Optimizer steps in an epoch, each on a part of the batch's rows, drawn anew. Ratios are relative to the batch's start."""
    recompute_logprobs: bool = False
    """True to take ratios against the trainer's own logprobs at the batch's start. False: against those that were sampled with."""
    correction: Correction = Correction()
    """Rollout correction of the loss; off by default."""
    kl_coef: float = Field(default=0.0, ge=0)
    """Weight in the loss of the KL divergence from the reference."""
    kl_type: KlEstimate = "low_var_kl"
    """Estimator of the KL divergence from the reference, by verl's name."""
    reference: Path | None = None
    """Directory of the reference weights of the KL divergence. None: trainer.model."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus in the loss."""
    clip_grad: float = 1.0
    """Largest norm of the gradient of an optimizer step; a larger one is scaled down to it."""
    max_tokens_per_device: int = 16384
    """Largest number of tokens in a micro-batch of one device."""
    max_staleness: int = 0
    """Largest staleness of a call, in versions behind the newest; groups with older calls are skipped, with a reason."""
    logprob_alarm: LogprobAlarm = LogprobAlarm()
    """Limits of the logprob gap, beyond which rows are refused."""
    failed_share_alarm: float = Field(default=0.5, ge=0, le=1)
    """Share of a batch's rollouts that may have failed before the trainer warns. 1: it never warns."""
    gaming_reward: str = "reward"
    """Name of the reward that stands for success: where the return rises and it does not, a reward is gamed (docs/concepts/credit.md)."""
    gaming_versions: int = Field(default=20, ge=0)
    """Number of versions over which the gaming alarm measures the rise. 0: no alarm."""
    gaming_rise: float = Field(default=0.2, ge=0)
    """Smallest rise of the mean return over trainer.gaming_versions that raises the gaming alarm: more than partial rewards bring before
    the first success."""
    keep_checkpoints: int = 3
    """Number of newest checkpoints that are kept, beside pinned ones and those still needed."""
    poll_seconds: float = 0.2
    """Shortest time between two looks for ready groups, in seconds; an idle trainer looks less often."""
    dtype: Literal["fp32", "bf16"] | None = None
    """Type of the computation; weights, moments and sums of gradients are float32 (mixed precision). None: bf16 where there is a GPU."""
    packing: bool | None = None
    """True to pass rows through the model end to end, without padding. None: where there are a GPU and the package flash-attn, which it
    needs."""
    gradient_checkpointing: bool | None = None
    """True to recompute activations in the backward pass instead of keeping them: less memory, more time. None: where there is a GPU."""
    workers: int = Field(default=0, ge=0)
    """Number of processes on each node that share a step, under Ray; with GPUs, one each. 0: the trainer's own process, no Ray."""
    nodes: int = Field(default=1, ge=1)
    """Number of machines with trainer.workers processes each (docs/start/scaling.md)."""
    ray_address: str | None = None
    """Address (HOST:PORT) of the Ray cluster that the workers run in, or `auto`. None: a cluster that the trainer starts on loopback."""
    ray_object_store_bytes: int = Field(default=2**28, ge=2**27)
    """Shared memory of a Ray cluster that the trainer starts, in bytes: for a batch's rows, not for weights."""
    publish: bool = True
    """True to publish each version to the gateway."""
    in_flight: Literal["keep", "drain", "abort"] = "keep"
    """Treatment of the calls in flight when an engine loads new weights: they continue with them (keep), they end first (drain), or they
    are aborted (abort) (docs/guides/weights.md)."""
    drain_seconds: float = Field(default=60.0, ge=0)
    """Time limit of in_flight `drain`, in seconds; calls that are left continue as with `keep`."""
    weight_sync: Literal["disk", "adapter", "transfer"] = "disk"
    """Weight sync method: engines read a whole model from `trainer.directory` (disk) or the adapter alone (adapter), or the trainer
    sends them the weights (transfer) (docs/guides/weights.md)."""
    transfer_host: str = "127.0.0.1"
    """Address of this machine at which the gateway and the engines' workers reach the trainer; for trainer.weight_sync `transfer`."""
    transfer_port: int = Field(default=0, ge=0)
    """Port at which the gateway and the engines' workers reach the trainer; for trainer.weight_sync `transfer`. 0: any free port."""
    evaluate_every: int = Field(default=0, ge=0)
    """Number of versions after which evaluate_command runs again. 0: never."""
    evaluate_command: tuple[str, ...] = ()
    """Program and arguments that run the held-out tasks, such as `spangrad run --mode validate ...`; the trainer waits for its end."""
    success_reward: float = 1.0
    """Smallest final reward with which a rollout counts as a success."""
    best_metric: str = "validate_return"
    """Metric by which the best version is chosen, whose checkpoint is kept; the highest value is the best."""
    best_rollouts: int = Field(default=8, ge=1)
    """Smallest number of held-out rollouts on which a version must be measured to be compared."""
    trackers: tuple[Literal["tensorboard", "wandb", "mlflow", "swanlab", "trackio", "clearml", "file"], ...] = ()
    """Trackers that metrics are sent to besides the store, by verl's own tracking; each needs its package and its own settings
    (docs/guides/training.md)."""
    traces: bool = True
    """True to send a span for each step to store.otlp_endpoint, with links to the rollouts that it consumed."""
