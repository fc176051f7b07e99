"""Facts of verl's estimators and losses: what each needs, and which settings go together.

Invariant: everything that a name needs is known here, so that what is not there is refused before a model is loaded; names are verl's own,
and tests/integration/test_trainer_learning.py compares them with verl's registries.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from math import inf
from typing import Literal

from spangrad.errors import SettingsError
from spangrad.settings import TrainerSettings
from spangrad.settings.trainer_learning import Baseline, CreditScheme, Estimator, Loss
from spangrad.weights.adapters import adapter_facts

Scope = Literal["group", "batch", "all", "greedy"]
"""Values that an advantage depends on: those of its group; those, and statistics of the whole batch; the batch without groups; the return
of its group's greedy rollout."""


class Need(StrEnum):
    """Requirement of an estimator beside values and groups."""

    CRITIC = "a critic"
    """A value model, which is trained beside the policy."""
    GREEDY_ROLLOUT = "a greedy rollout"
    """The return of a rollout of the same task at temperature 0 (`runner.greedy_rollouts`)."""
    FORWARD_PASS = "a forward pass"
    """The sum of squared probabilities at each token."""


@dataclass(frozen=True)
class EstimatorFacts:
    """Properties of an estimator."""

    scope: Scope
    needs: Need | None = None
    tokens: bool = False
    """True if the estimator weighs a value by its number of sampled tokens."""
    by_name: bool = False
    """True if the estimator needs the rewards of each name separately."""

    @property
    def by_token(self) -> bool:
        """True if each token gets its own advantage, from the rewards where they were paid: credit schemes have no part in it."""
        return self.needs in {Need.CRITIC, Need.FORWARD_PASS}


ESTIMATORS: Mapping[Estimator, EstimatorFacts] = {
    "gae": EstimatorFacts("all", Need.CRITIC, tokens=True),
    "gdpo": EstimatorFacts("batch", tokens=True, by_name=True),
    "gpg": EstimatorFacts("batch"),
    "grpo": EstimatorFacts("group"),
    "grpo_passk": EstimatorFacts("group"),
    "grpo_vectorized": EstimatorFacts("group"),
    "opo": EstimatorFacts("group", tokens=True),
    "optimal_token_baseline": EstimatorFacts("group", Need.FORWARD_PASS, tokens=True),
    "reinforce_plus_plus": EstimatorFacts("all", tokens=True),
    "reinforce_plus_plus_baseline": EstimatorFacts("batch", tokens=True),
    "remax": EstimatorFacts("greedy", Need.GREEDY_ROLLOUT),
    "rloo": EstimatorFacts("group"),
    "rloo_vectorized": EstimatorFacts("group"),
    "tir_optimal_token_baseline": EstimatorFacts("group", Need.FORWARD_PASS, tokens=True),
}


@dataclass(frozen=True)
class LossFacts:
    """Properties of a loss."""

    options: tuple[str, ...] = ()
    """Names of the `trainer.loss.options` that the loss reads."""
    by_rollout: bool = False
    """True if the loss looks at all responses of the policy in a rollout as a whole (`trainer.optim.losses.rollout_losses`)."""
    by_micro_batch: bool = False
    """True if the loss compares the tokens of a micro-batch with each other, so that it depends on the rows that share one."""


LOSSES: Mapping[Loss, LossFacts] = {
    "bypass_mode": LossFacts(("clip_ratio_c",)),
    "cispo": LossFacts(),
    "clip_cov": LossFacts(("clip_cov_ratio", "clip_cov_lb", "clip_cov_ub"), by_micro_batch=True),
    "dppo_kl": LossFacts(("clip_ratio_c",)),
    "dppo_tv": LossFacts(("clip_ratio_c",)),
    "dro": LossFacts(("dro_beta",)),
    "geo_mean": LossFacts(by_rollout=True),
    "gpg": LossFacts(),
    "gspo": LossFacts(by_rollout=True),
    "kl_cov": LossFacts(("kl_cov_ratio", "ppo_kl_coef"), by_micro_batch=True),
    "sapo": LossFacts(("tau_pos", "tau_neg"), by_rollout=True),
    "vanilla": LossFacts(("clip_ratio_c",)),
}

_RANGES = {
    "clip_ratio_c": (1.0, inf),
    "clip_cov_ratio": (0.0, 1.0),
    "dro_beta": (0.0, inf),
    "kl_cov_ratio": (0.0, 1.0),
    "loss_scale_factor": (0.0, inf),
    "tau_neg": (0.0, inf),
    "tau_pos": (0.0, inf),
}
"""Bounds of each option: it must be above the first number and at most the second; any number is allowed for options not listed."""
SCALE = "loss_scale_factor"
"""Divisor of each rollout's sum, in tokens: the option that the aggregation `seq-mean-token-sum-norm` needs (Dr. GRPO)."""
REJECTIONS = frozenset(f"{level}_{kind}" for level in ("token", "seq_sum", "seq_mean", "seq_max") for kind in ("k1", "k2", "k3")) - {
    "seq_max_k1"
}
"""Verl's names of what `trainer.loss.correction.reject` may look at."""


BASELINES: Mapping[CreditScheme, tuple[Baseline, ...]] = {
    "identical": ("rollout", "turn", "transition"),
    "final_only": ("rollout",),
    "reward_to_go": ("turn", "transition"),
    "own": ("turn", "transition"),
    "gigpo": ("rollout",),
}
"""Baselines that have a meaning for each scheme: values that differ from call to call are not a single value of a rollout, and where calls
of the same turn have values of different kinds (final_only), or the scheme compares states (gigpo), turns cannot be compared."""
_COMPARED: Mapping[Baseline, str] = {
    "rollout": "one value a rollout",
    "turn": "the calls at the same turn",
    "transition": "all calls of a group",
}


def check(settings: TrainerSettings) -> None:
    """Refuse settings that cannot be carried out or have no meaning.

    Raises:
        SettingsError: naming the setting, and what to set instead.
    """
    _check_estimator(settings)
    _check_loss(settings)
    _check_correction(settings)
    _check_weight_sync(settings)
    if settings.loss.kl_coef and settings.loss.reference is None and settings.model is None:
        raise SettingsError(
            f"trainer.loss.kl_coef = {settings.loss.kl_coef:g} holds the policy to a reference, and none is named. Set "
            "trainer.loss.reference to the directory of its weights, or trainer.loss.kl_coef = 0."
        )
    if settings.loss.kl_coef and settings.loss.reference is not None and not settings.loss.reference.is_dir():
        raise SettingsError(
            f"trainer.loss.reference = {str(settings.loss.reference)!r} is no directory. Give the one that holds the weights."
        )
    _check_merge(settings)
    _check_overlong(settings)
    _check_baseline(settings)
    if settings.optim.schedule == "cosine" and not settings.max_steps:
        raise SettingsError(
            "trainer.optim.schedule = cosine falls to 0 at trainer.max_steps, and trainer.max_steps = 0 has no end. Set the number of "
            "steps, or trainer.optim.schedule = constant."
        )


def _check_baseline(settings: TrainerSettings) -> None:
    scheme, baseline = settings.credit.scheme, settings.credit.baseline
    takes = BASELINES[scheme]
    if baseline not in takes:
        others = ", ".join(repr(other) for other, baselines in BASELINES.items() if baseline in baselines)
        raise SettingsError(
            f"trainer.credit.scheme = {scheme!r} does not go with trainer.credit.baseline = {baseline!r}, which compares "
            f"{_COMPARED[baseline]}. Set trainer.credit.baseline = {takes[0]!r}, or trainer.credit.scheme to one of {others}."
        )


def _check_overlong(settings: TrainerSettings) -> None:
    longest, buffer = settings.credit.overlong_tokens, settings.credit.overlong_buffer
    if (longest or buffer) and not 0 < buffer <= longest:
        raise SettingsError(
            f"trainer.credit.overlong_tokens = {longest} with trainer.credit.overlong_buffer = {buffer} has no meaning: a buffer lies "
            "within the tokens. Set trainer.credit.overlong_tokens to the limit of a response (max_tokens) and "
            "trainer.credit.overlong_buffer to the tokens before it, such as 20480 and 4096, or both to 0."
        )


def by_token(settings: TrainerSettings) -> bool:
    """Return whether each token has an advantage of its own."""
    return ESTIMATORS[settings.credit.estimator].by_token


def clip_range(settings: TrainerSettings) -> tuple[float, float]:
    """Return how far a ratio may lie below 1, and above it, before a loss clips it."""
    loss = settings.loss
    low, high = (loss.clip_ratio if bound is None else bound for bound in (loss.clip_ratio_low, loss.clip_ratio_high))
    return low, high


def merges(settings: TrainerSettings) -> bool:
    """Return whether calls whose prompts extend each other are trained as one sequence (trainer.merge).

    Where the setting decides nothing, they are if the gradient is proven to be that of the calls one by one: each token has its call's
    advantage, and nothing is compared within a micro-batch, whose rows merging changes.
    """
    if settings.merge is None:
        return not (by_token(settings) or LOSSES[settings.loss.name].by_micro_batch)
    return settings.merge


def _check_weight_sync(settings: TrainerSettings) -> None:
    if settings.weight_sync.method == "adapter" and not settings.lora.rank:
        raise SettingsError(
            "trainer.weight_sync.method = adapter, and trainer.lora.rank = 0 trains no adapters. Set the rank, or "
            "trainer.weight_sync.method = disk for whole models."
        )
    if settings.workers.colocated and not settings.weight_sync.publish:
        raise SettingsError(
            "trainer.workers.colocated = true, and trainer.weight_sync.publish = false: engines would not wake with new weights. Set the "
            "one to false, or the other to true."
        )
    held = settings.loss.reference or settings.model
    if settings.loss.kl_coef and held and adapter_facts(held):
        raise SettingsError(
            f"{held}, to which the policy is held (trainer.loss.kl_coef), is an adapter. Set trainer.loss.reference to a whole model."
        )


def _check_estimator(settings: TrainerSettings) -> None:
    facts = ESTIMATORS[settings.credit.estimator]
    if facts.by_token and (settings.credit.scheme, settings.credit.baseline) != ("identical", "rollout"):
        raise SettingsError(
            f"trainer.credit.estimator = {settings.credit.estimator!r} gives credit to each token by itself, and trainer.credit.scheme = "
            f"{settings.credit.scheme!r} with trainer.credit.baseline = {settings.credit.baseline!r} has no part in it. Leave both out."
        )
    if settings.sampling.skip_equal_groups and facts.scope == "all":
        raise SettingsError(
            "trainer.sampling.skip_equal_groups = true skips groups whose values are equal, and trainer.credit.estimator = "
            f"{settings.credit.estimator!r} compares values of the whole batch, so that such groups teach as well. Set "
            "trainer.sampling.skip_equal_groups = false, or an estimator that compares a group, such as 'grpo'."
        )
    if settings.credit.by_role and (facts.by_token or facts.needs is Need.GREEDY_ROLLOUT or settings.loss.name == "geo_mean"):
        raise SettingsError(
            "trainer.credit.by_role = true gives the calls of a rollout's roles values of their own, and trainer.credit.estimator = "
            f"{settings.credit.estimator!r} with trainer.loss.name = {settings.loss.name!r} needs a value of the whole rollout. Set "
            "trainer.credit.estimator = 'grpo' and another loss, or trainer.credit.by_role = false."
        )
    whole = {"gdpo": "the rewards of each name over whole rollouts", "remax": "returns with that of a whole greedy rollout"}
    if settings.credit.estimator in whole and (
        settings.credit.baseline != "rollout" or settings.credit.scheme not in {"identical", "final_only"}
    ):
        raise SettingsError(
            f"trainer.credit.estimator = {settings.credit.estimator!r} compares {whole[settings.credit.estimator]}, which "
            f"trainer.credit.scheme = {settings.credit.scheme!r} with trainer.credit.baseline = {settings.credit.baseline!r} does not. Set "
            "trainer.credit.scheme = 'identical' and trainer.credit.baseline = 'rollout'."
        )


def _check_loss(settings: TrainerSettings) -> None:
    takes = {*LOSSES[settings.loss.name].options, *([SCALE] if settings.loss.aggregation == "seq-mean-token-sum-norm" else [])}
    unknown = sorted(set(settings.loss.options) - takes)
    if unknown:
        accepted = f"takes {', '.join(sorted(takes))}" if takes else "takes none"
        raise SettingsError(
            f"trainer.loss.options.{unknown[0]}: trainer.loss.name = {settings.loss.name!r} with trainer.loss.aggregation = "
            f"{settings.loss.aggregation!r} {accepted}. Take it out."
        )
    if settings.loss.aggregation == "seq-mean-token-sum-norm" and SCALE not in settings.loss.options:
        raise SettingsError(
            "trainer.loss.aggregation = 'seq-mean-token-sum-norm' needs the number that each rollout's sum is divided by: without it, a "
            "rollout's loss would depend on the longest one beside it. Set trainer.loss.options.loss_scale_factor to the most tokens that "
            "a rollout may have, and leave it so throughout a run (Dr. GRPO)."
        )
    if settings.loss.name == "dro" and "dro_beta" not in settings.loss.options:
        raise SettingsError(
            "trainer.loss.name = 'dro' needs the weight of its penalty. Set trainer.loss.options.dro_beta to a number above 0."
        )
    if settings.loss.name == "geo_mean" and (
        settings.credit.scheme != "identical" or settings.credit.baseline == "turn" or by_token(settings)
    ):
        raise SettingsError(
            f"trainer.loss.name = 'geo_mean' takes one advantage a rollout; trainer.credit.estimator = {settings.credit.estimator!r} with "
            f"trainer.credit.scheme = {settings.credit.scheme!r} and trainer.credit.baseline = {settings.credit.baseline!r} gives its "
            "calls different ones. Set trainer.credit.scheme = 'identical' and trainer.credit.baseline = 'rollout', with an estimator "
            "that compares rollouts."
        )
    for name, value in settings.loss.options.items():
        low, high = _RANGES.get(name, (-inf, inf))
        if not low < value < inf or value > high:
            within = (f" above {low:g}" if low > -inf else " that is finite") + (f" and at most {high:g}" if high < inf else "")
            raise SettingsError(f"trainer.loss.options.{name} = {value:g} has no meaning. Give a number{within}.")


def _check_correction(settings: TrainerSettings) -> None:
    correction, bypass = settings.loss.correction, settings.loss.name == "bypass_mode"
    unknown = sorted(set(correction.reject) - REJECTIONS)
    if unknown:
        raise SettingsError(f"trainer.loss.correction.reject.{unknown[0]} is not known. Name one of {', '.join(sorted(REJECTIONS))}.")
    bounds(correction.threshold, "trainer.loss.correction.threshold")
    for name, spec in correction.reject.items():
        where = f"trainer.loss.correction.reject.{name}"
        if bounds(spec, where)[0] is None and name.endswith("k1"):
            raise SettingsError(f"{where} = {spec!r} needs both bounds of a ratio. Write LOWER_UPPER, such as 0.5_2.0.")
        if bounds(spec, where)[0] is not None and not name.endswith("k1"):
            raise SettingsError(f"{where} = {spec!r} has no lower bound to keep to. Write the upper one alone, such as 0.01.")
    if (correction.weights or correction.reject) and not settings.loss.recompute_logprobs and not bypass:
        raise SettingsError(
            "trainer.loss.correction compares the trainer's logprobs at the batch's start with those that were sampled with. Set "
            "trainer.loss.recompute_logprobs = true, or trainer.loss.name = 'bypass_mode', which compares them at each step."
        )
    if bypass and settings.loss.recompute_logprobs:
        raise SettingsError(
            "trainer.loss.name = 'bypass_mode' corrects against the logprobs that were sampled with. Set trainer.loss.recompute_logprobs "
            "= false."
        )
    if correction.objective != "ppo_clip" and not bypass:
        raise SettingsError(
            f"trainer.loss.correction.objective = {correction.objective!r} is for trainer.loss.name = 'bypass_mode'. Set that, or take it "
            f"out."
        )


def _check_merge(settings: TrainerSettings) -> None:
    if settings.merge and by_token(settings):
        raise SettingsError(
            f"trainer.credit.estimator = {settings.credit.estimator!r} takes a row for one call, and trainer.merge = true puts several in "
            "a row. Set trainer.merge = false."
        )


def bounds(spec: str, where: str) -> tuple[float | None, float]:
    """Return the lower bound (None if there is none) and the upper one of `UPPER` or `LOWER_UPPER`.

    Raises:
        SettingsError: they are no positive numbers in order.
    """
    parts = spec.split("_")
    try:
        numbers = [float(part) for part in parts]
    except ValueError:
        numbers = []
    if len(numbers) not in {1, 2} or not all(0 < number < float("inf") for number in numbers) or numbers != sorted(numbers):
        raise SettingsError(f"{where} = {spec!r} is neither UPPER nor LOWER_UPPER. Write positive numbers, such as 2.0 or 0.5_2.0.")
    return (None if len(numbers) == 1 else numbers[0]), numbers[-1]
