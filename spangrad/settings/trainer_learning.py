"""Sections of the trainer's settings that say how it learns: from rewards to an optimizer step."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, FiniteFloat

from spangrad.settings.section import Section

CreditScheme = Literal["identical", "final_only", "reward_to_go", "own", "gigpo"]
"""Credit schemes."""
Baseline = Literal["rollout", "turn", "transition"]
"""Sets of values that a value is compared with."""
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


_Decay = Annotated[float, Field(ge=0, lt=1)]


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
    """Objective of trainer.loss.name `bypass_mode` over the tokens that are not rejected."""


class SamplingSettings(Section):
    """Settings of the choice of rollouts and calls that a batch trains."""

    groups_per_batch: int = Field(default=4, ge=1)
    """Number of groups of rollouts in the batch of a step."""
    max_staleness: int = Field(default=0, ge=0)
    """Largest staleness of a call, in versions behind the newest; groups with older calls are skipped, with a reason."""
    agent_staleness: dict[str, Annotated[int, Field(ge=0)]] = Field(default_factory=dict[str, int])
    """Largest staleness of the calls of single agents, such as the roles of a game, in versions, by name: bounds tighter than
    trainer.sampling.max_staleness. Older calls are not trained, and their rewards count."""
    skip_equal_groups: bool = False
    """True to skip groups in which no value differs from those that it is compared with (DAPO); not for trainer.credit.estimator `gae` and
    `reinforce_plus_plus`, which compare with the whole batch."""
    truncated: Literal["train", "mask", "reject"] = "train"
    """Treatment of calls whose response was cut at its token limit: trained like others, masked, or their whole rollout masked (DAPO's
    overlong filtering). Their rewards count in the baseline either way; in that of the optimal token baselines only beside a trained call
    of their rollout."""
    retrain_finetuned: bool = False
    """True to also train groups of which `spangrad finetune` has trained a rollout on this branch. False: they count as trained."""


class CreditSettings(Section):
    """Settings of credit assignment: from rewards to advantages."""

    scheme: CreditScheme = "identical"
    """Credit scheme: how a rollout's rewards become values of its calls (docs/concepts/credit.md)."""
    estimator: Estimator = "grpo"
    """Advantage estimator, which compares values with their baselines (docs/guides/learning.md)."""
    baseline: Baseline = "rollout"
    """Values that share a baseline: those of the group's rollouts (each counts once), of the calls at the same turn of its rollouts, or
    of all calls of all its rollouts (as in Agent Lightning's paper: a rollout counts once for each call). GiGPO has its own."""
    gamma: float = Field(default=1.0, ge=0, le=1)
    """Discount of a reward per call between it and the call that it is credited to."""
    gae_lambda: float = Field(default=1.0, ge=0, le=1)
    """GAE: lambda, the weight of values beyond the next token's. The discount of each token is trainer.credit.gamma."""
    step_weight: float = Field(default=1.0, ge=0, allow_inf_nan=False)
    """GiGPO: weight of a step's advantage beside its rollout's."""
    norm_by_std: bool = True
    """GRPO and related estimators: divide by the group's standard deviation. False is Dr. GRPO."""
    reward_weights: dict[str, FiniteFloat] = Field(default_factory=dict[str, float])
    """Factor of each reward, by name. A name that is not listed: 1."""
    reward_roles: tuple[str, ...] = ()
    """Roles whose rewards count, beside rewards of every role. Empty: every reward counts."""
    by_role: bool = False
    """True to give each call the rewards of its own agent's role alone, and to compare it with calls of that role: for a policy that plays
    several roles, as in self-play."""
    overlong_tokens: int = Field(default=0, ge=0)
    """Soft overlong punishment (DAPO): L_max, the largest number of tokens that a call's response should have. 0: no punishment."""
    overlong_buffer: int = Field(default=0, ge=0)
    """Soft overlong punishment (DAPO): L_cache, the number of tokens before L_max over which the punishment falls from 0 to -1."""


class LossSettings(Section):
    """Settings of the policy loss."""

    name: Loss = "vanilla"
    """Policy loss, by verl's name (docs/guides/learning.md)."""
    aggregation: Aggregation = "token-mean"
    """Aggregation of token losses to the loss of a step (docs/guides/learning.md)."""
    options: dict[str, float] = Field(default_factory=dict[str, float])
    """Numeric options of the loss, by verl's names; an option that is not listed has verl's default (docs/guides/learning.md)."""
    clip_ratio: float = Field(default=0.2, gt=0)
    """Clip range of importance ratios around 1; in `dppo_tv` and `dppo_kl` of a divergence."""
    clip_ratio_low: float | None = Field(default=None, ge=0)
    """Clip range of importance ratios below 1. None: clip_ratio."""
    clip_ratio_high: float | None = Field(default=None, ge=0)
    """Clip range of importance ratios above 1. None: clip_ratio."""
    critic_clip: float = Field(default=0.5, gt=0)
    """GAE: clip range of a value around its prediction at the batch's start."""
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


class OptimSettings(Section):
    """Settings of the optimizer and of its steps over a batch."""

    learning_rate: float = Field(default=1e-6, gt=0)
    """Learning rate of AdamW after the warm-up."""
    critic_learning_rate: float = Field(default=1e-5, gt=0)
    """GAE: learning rate of the value model, which begins as the policy with a new head."""
    warmup_steps: int = Field(default=0, ge=0)
    """Optimizer steps over which the learning rate rises from 0 to trainer.optim.learning_rate. A step of the branch counts as
    trainer.optim.epochs x trainer.optim.mini_batches, whatever has a gradient in it. The critic's has no warm-up."""
    schedule: Literal["constant", "cosine"] = "constant"
    """Schedule of the learning rate after its warm-up: it stays (constant), or falls along half a cosine to 0 at trainer.max_steps
    (cosine). The critic's stays."""
    betas: tuple[_Decay, _Decay] = (0.9, 0.95)
    """AdamW's decay rates of the first and the second moment."""
    weight_decay: float = Field(default=0.0, ge=0)
    """AdamW's weight decay, as a factor of the weights per step and learning rate."""
    clip_grad: float = Field(default=1.0, gt=0)
    """Largest norm of the gradient of an optimizer step; a larger one is scaled down to it."""
    epochs: int = Field(default=1, ge=1)
    """Number of passes over a batch."""
    mini_batches: int = Field(default=1, ge=1)
    """Optimizer steps in an epoch, each on a part of the batch's rows, drawn anew. Ratios are relative to the batch's start."""


class LoraSettings(Section):
    """Settings of low-rank adapters (LoRA)."""

    rank: int = Field(default=0, ge=0)
    """Rank of the adapters that are trained while the weights stay fixed; versions are served merged unless trainer.weight_sync.method is
    `adapter`. 0: train the weights."""
    alpha: int = Field(default=16, ge=1)
    """LoRA's alpha: adapters are multiplied by alpha / rank."""
    modules: tuple[str, ...] = ()
    """Names of the layers that have adapters, such as `q_proj`. Empty: every linear layer but the head; in a mixture of experts the layers
    of attention, since experts cannot have adapters."""
