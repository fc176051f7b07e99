"""Losses and aggregations that look at a whole response: a rollout's, however its calls lie in rows."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch

from spangrad.settings import TrainerSettings
from tests.conftest import DocsTable
from tests.support.policies import NO_ALARM, PROMPT, distribution, logprobs_of, padded, perturbed, sample, trainer_settings, transition_row
from tests.support.trainers import loss_settings, mostly_slow
from trainer.credit import learning
from trainer.credit.learning import LOSSES, merges
from trainer.data.batch import layout
from trainer.data.merge import merge, separate
from trainer.optim.losses.corrected import actor_config, correction_of
from trainer.optim.losses.rollout_losses import by_rollout, several_rows
from trainer.optim.optimizer import VerlOptimizer
from trainer.optim.process import prepare_process

prepare_process()  # verl reads its platform when it is first imported

CLIP_RATIO = 0.02
"""Clip ratio of the losses by name: much is clipped."""
SEQUENCES: dict[str, dict[str, Any]] = {"weights": {"weights": "sequence"}, "rejects": {"reject": {"seq_sum_k2": "0.3"}}}
AGGREGATIONS: dict[str, dict[str, Any]] = {
    "`token-mean`": {},
    "`token-sum`": {"loss__aggregation": "token-sum"},
    "`seq-mean-token-sum`": {"loss__aggregation": "seq-mean-token-sum"},
    "`seq-mean-token-mean`": {"loss__aggregation": "seq-mean-token-mean"},
    "`seq-mean-token-sum-norm`, `loss_scale_factor = 8` (Dr. GRPO)": {
        "loss__aggregation": "seq-mean-token-sum-norm",
        "loss__options": {"loss_scale_factor": 8},
    },
    "`gspo`, `seq-mean-token-mean` (as in its paper)": {
        "loss__name": "gspo",
        "loss__aggregation": "seq-mean-token-mean",
        "clip_ratio": 0.02,
    },
    '`correction.weights = "sequence"`': {"recompute_logprobs": True, "correction": SEQUENCES["weights"]},
    "`correction.reject.seq_sum_k2`, `seq-mean-token-mean`": {
        "recompute_logprobs": True,
        "correction": SEQUENCES["rejects"],
        "loss__aggregation": "seq-mean-token-mean",
    },
    '`bypass_mode`, `correction.weights = "sequence"`, `reinforce`': {
        "loss__name": "bypass_mode",
        "correction": {**SEQUENCES["weights"], "objective": "reinforce"},
    },
    "`bypass_mode`, `correction.reject.seq_sum_k2`, `seq-mean-token-mean`": {
        "loss__name": "bypass_mode",
        "correction": SEQUENCES["rejects"],
        "loss__aggregation": "seq-mean-token-mean",
    },
}
"""Aggregations and corrections of whole sequences, each with the settings that make it."""
WHOLE: list[TrainerSettings] = [
    *(loss_settings(name, clip_ratio=CLIP_RATIO) for name in ("gspo", "geo_mean", "sapo")),
    *(trainer_settings(**facts) for facts in AGGREGATIONS.values() if "seq" in str(facts)),
]
"""Settings whose loss looks at a rollout as a whole; the page has their losses."""


@functools.lru_cache(maxsize=2)
def trajectories(model: Path) -> tuple[pl.DataFrame, pl.Series]:
    """The fixed rollouts of the losses: of four, three, two and one calls, whose prompts repeat all before; one that rewrites its history.

    Their logprobs are those of other weights, so that some ratios are clipped.
    """
    off = np.random.default_rng(7)
    rows: list[dict[str, object]] = []
    worth: list[float] = []
    for number, calls in enumerate([4, 3, 2, 1, 3]):
        history = [*PROMPT[:3], PROMPT[3] + number % 4, *PROMPT[4:]]
        for turn in range(calls):
            if number == 4 and turn == 2:
                history = list(PROMPT)
            response, logprobs = sample(model, history, 1 + (turn + 2 * number) % 4, 1.0, seed=100 * number + turn)
            moved = [float(np.float32(min(value + off.normal(0, 0.3), -1e-3))) for value in logprobs]
            facts = {"PromptIds": list(history), "ResponseIds": response, "Logprobs": moved, "Version": -1}
            rows.append(transition_row(f"r{number}", turn, **facts))
            worth.append([1.0, -0.5, 0.25, -1.5, 0.75][number])
            history = [*history, *response, 2, 1, 4]
    return pl.DataFrame(rows, schema_overrides={"Rewards.Value": pl.List(pl.Float64), "Rewards.Name": pl.List(pl.String)}), pl.Series(worth)


def step(model: Path, settings: TrainerSettings, rows: pl.DataFrame, worth: pl.Series) -> dict[str, float]:
    """Metrics of an optimizer step on calls."""
    engine = VerlOptimizer(model, settings)
    torch.manual_seed(0)
    return engine.step(layout((merge if settings.merge else separate)(rows, worth), lineage=[0]))


def trajectory_loss_by_verl(model: Path, settings: TrainerSettings) -> float:
    """Verl's function on a row a rollout, an observation of two masked tokens between its calls; logprobs by transformers."""
    from verl.trainer.ppo.core_algos import get_policy_loss_fn
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_rejection_mask

    rows, worth = trajectories(model)
    columns: dict[str, dict[str, list[float]]] = {}
    for row, value in zip(rows.iter_rows(named=True), worth, strict=True):
        current = logprobs_of(model, row["PromptIds"], row["ResponseIds"])
        of = columns.setdefault(row["RolloutId"], {"old": [], "current": [], "mask": [], "advantage": []})
        for name, values in (("old", row["Logprobs"]), ("current", current), ("mask", [1.0] * len(current))):
            of[name] += [*values, 0.0, 0.0]
        of["advantage"] += [value] * (len(current) + 2)
    old, current, mask, advantages = (padded([of[name] for of in columns.values()]) for name in ("old", "current", "mask", "advantage"))
    config = actor_config(settings, None)
    config.global_batch_info.clear()
    config.global_batch_info.update(global_batch_size=len(columns), loss_scale_factor=config.loss_scale_factor)
    weights = None
    if settings.loss.recompute_logprobs:
        corrected, mask, _ = compute_rollout_correction_and_rejection_mask(current, old, mask, **correction_of(settings))
        weights, old = corrected.batch["rollout_is_weights"] if corrected else None, current
    loss, _ = get_policy_loss_fn(settings.loss.name)(
        old_log_prob=old,
        log_prob=current,
        advantages=advantages,
        response_mask=mask.bool(),
        loss_agg_mode=settings.loss.aggregation,
        config=config,
        rollout_is_weights=weights,
    )
    return float(loss)


@functools.cache
def _first_step(model: Path, settings: str) -> dict[str, float]:
    return step(model, TrainerSettings.model_validate_json(settings), *trajectories(model))


def first_step(model: Path, settings: TrainerSettings, *, merge: bool) -> dict[str, float]:
    """Metrics of a step on the fixed rollouts with a row a call or merged rows; tests and tables share it."""
    return _first_step(model, settings.model_copy(update={"merge": merge}).model_dump_json())


def losses(model: Path, settings: TrainerSettings) -> tuple[float, float, float]:
    """The loss of the fixed rollouts with a row a call, with merged rows, and by verl with a row a rollout."""
    apart, together = (first_step(model, settings, merge=merge)["loss"] for merge in (False, True))
    return apart, together, trajectory_loss_by_verl(model, settings)


def loss_table(model: Path) -> list[str]:
    """A line a loss."""
    lines = [
        "| `trainer.loss.name` | `trainer.loss.options` | looks at | here, a row a call | here, merged | verl, a row a rollout |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for name, facts in learning.LOSSES.items():
        settings = loss_settings(name, clip_ratio=CLIP_RATIO)
        options = ", ".join(f"`{option}`" for option in facts.options)
        numbers = " | ".join(f"{value:+.4f}" for value in losses(model, settings))
        lines.append(f"| `{name}` | {options} | {'rollouts' if facts.by_rollout else 'tokens'} | {numbers} |")
    return lines


def aggregation_table(model: Path) -> list[str]:
    """A line an aggregation, and a line a correction of whole sequences."""
    lines = ["| settings | here, a row a call | here, merged | verl, a row a rollout |", "| --- | --- | --- | --- |"]
    for named, facts in AGGREGATIONS.items():
        settings = trainer_settings(**facts)
        numbers = " | ".join(f"{value:+.4f}" for value in losses(model, settings))
        lines.append(f"| {named} | {numbers} |")
    return lines


@pytest.mark.parametrize(
    "settings", mostly_slow(WHOLE, WHOLE[1::2]), ids=lambda settings: f"{settings.loss.name}-{settings.loss.aggregation}"
)
def test_loss_of_rollouts_does_not_depend_on_merging_or_micro_batches(settings: TrainerSettings, tiny_model: Path):
    rows, worth = trajectories(tiny_model)
    apart, merged, by_verl = losses(tiny_model, settings)
    split = step(tiny_model, settings.model_copy(update={"max_tokens_per_device": 45}), rows, worth)["loss"]
    assert apart == pytest.approx(by_verl, abs=2e-6)
    assert merged == pytest.approx(by_verl, abs=2e-6)
    assert split == pytest.approx(by_verl, abs=2e-6)
    if settings.loss.aggregation not in {"seq-mean-token-sum-norm", "seq-mean-token-sum"}:
        own = step(tiny_model, settings, rows.with_columns(RolloutId="CallId"), worth)["loss"]
        assert own != pytest.approx(by_verl, abs=1e-3), "a call for a sequence is another loss"


@pytest.mark.parametrize("name", mostly_slow(["vanilla", "gspo", "geo_mean", "sapo"], {"vanilla", "gspo"}))
def test_gradient_of_rollouts_equals_verl_loss_on_row_per_rollout(name: Any, tiny_model: Path):
    """The ratio of a rollout, of which verl stops the gradient or not, is in the gradient as it would be in one row."""
    settings = trainer_settings(loss__name=name, clip_ratio=0.1, loss__aggregation="seq-mean-token-mean")
    rows, worth = trajectories(tiny_model)
    expected = _gradient_norm(tiny_model, settings, rows, worth)
    by_layout = {
        "a row a call": step(tiny_model, settings, rows, worth),
        "merged": step(tiny_model, settings.model_copy(update={"merge": True}), rows, worth),
        "split": step(tiny_model, settings.model_copy(update={"max_tokens_per_device": 45}), rows, worth),
    }
    assert {how: metrics["grad_norm"] for how, metrics in by_layout.items()} == pytest.approx(dict.fromkeys(by_layout, expected), rel=1e-4)


@pytest.mark.parametrize("name", [name for name in LOSSES if merges(trainer_settings(loss__name=name))])
def test_gradient_of_each_loss_merged_by_default_equals_that_of_separate_calls(name: Any, tiny_model: Path):
    apart, merged = (first_step(tiny_model, loss_settings(name, clip_ratio=CLIP_RATIO), merge=merge) for merge in (False, True))
    assert (merged["loss"], merged["grad_norm"]) == pytest.approx((apart["loss"], apart["grad_norm"]), rel=1e-4)
    assert merged["grad_norm"] > 0


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("by_loss", [True, False])
def test_normalised_weights_merged_by_default_have_the_gradient_of_separate_calls(by_loss: bool, level: Any, tiny_model: Path):
    """Weights are divided by their mean over the step, whatever rows and micro-batches hold its tokens."""
    correction = {"weights": level, "threshold": "1.1", "normalise": True, "objective": "reinforce" if by_loss else "ppo_clip"}
    facts: dict[str, Any] = {"loss__name": "bypass_mode"} if by_loss else {"recompute_logprobs": True}
    settings = trainer_settings(**facts, correction=correction)
    assert merges(settings)
    apart, merged = (first_step(tiny_model, settings, merge=merge) for merge in (False, True))
    split = first_step(tiny_model, settings.model_copy(update={"max_tokens_per_device": 45}), merge=False)
    for metrics in (merged, split):
        assert metrics["loss"] == pytest.approx(apart["loss"], rel=1e-3, abs=1e-6)
        assert metrics["grad_norm"] == pytest.approx(apart["grad_norm"], rel=1e-4)
    assert apart["grad_norm"] > 0


def _gradient_norm(model: Path, settings: TrainerSettings, rows: pl.DataFrame, worth: pl.Series) -> float:
    """Return the norm of the gradient of verl's loss on one row a rollout, by torch and transformers alone."""
    from transformers import AutoModelForCausalLM
    from verl.trainer.ppo.core_algos import get_policy_loss_fn

    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    current: dict[str, list[torch.Tensor]] = {}
    old: dict[str, list[float]] = {}
    advantage: dict[str, float] = {}
    for row, value in zip(rows.iter_rows(named=True), worth, strict=True):
        ids, prompt = [*row["PromptIds"], *row["ResponseIds"]], len(row["PromptIds"])
        logprobs = policy(torch.tensor([ids])).logits[0, prompt - 1 : -1].log_softmax(-1)
        chosen = logprobs.gather(1, torch.tensor(row["ResponseIds"])[:, None])[:, 0]
        current.setdefault(row["RolloutId"], []).append(chosen)
        old.setdefault(row["RolloutId"], []).extend(row["Logprobs"])
        advantage[row["RolloutId"]] = value
    lengths = [len(values) for values in old.values()]
    config = actor_config(settings, None)
    config.global_batch_info.clear()
    config.global_batch_info.update(global_batch_size=len(old))
    loss, _ = get_policy_loss_fn(settings.loss.name)(
        old_log_prob=padded(list(old.values())),
        log_prob=torch.nn.utils.rnn.pad_sequence([torch.cat(tensors) for tensors in current.values()], batch_first=True),
        advantages=padded([[value] * length for value, length in zip(advantage.values(), lengths, strict=True)]),
        response_mask=padded([[1.0] * length for length in lengths]).bool(),
        loss_agg_mode=settings.loss.aggregation,
        config=config,
    )
    loss.backward()
    gradients = [parameter.grad.flatten() for parameter in policy.parameters() if parameter.grad is not None]
    return float(torch.cat(gradients).norm())


def test_entropy_and_reference_kl_are_aggregated_by_rollout(tiny_model: Path, tmp_path: Path):
    """Merged rows hold whole rollouts here, so that verl's own aggregation of them is the measure."""
    reference = perturbed(tiny_model, tmp_path / "reference")
    rows, worth = trajectories(tiny_model)
    whole = rows["RolloutId"] != "r4"
    settings = trainer_settings(loss__aggregation="seq-mean-token-mean", entropy_coef=0.3, kl_coef=0.2, reference=reference)
    apart, merged = (
        step(tiny_model, settings.model_copy(update={"merge": how}), rows.filter(whole), worth.filter(whole)) for how in (False, True)
    )
    for name in ("loss", "entropy", "reference_kl", "grad_norm", "clip_low", "clip_high"):
        assert apart[name] == pytest.approx(merged[name], rel=1e-4), name
    plain = step(tiny_model, trainer_settings(loss__aggregation="seq-mean-token-mean"), rows.filter(whole), worth.filter(whole))
    assert plain["loss"] != pytest.approx(apart["loss"], abs=1e-3)


def test_entropy_by_default_is_that_of_policy(tiny_model: Path):
    """The mean over the trained tokens of the entropy of the distribution that each was drawn from, at its temperature."""
    rows, worth = trajectories(tiny_model)
    rows = rows.with_columns(Temperature=pl.Series(np.resize([1.0, 0.5], len(rows))))
    expected: list[float] = []
    for row in rows.iter_rows(named=True):
        for at in range(len(row["ResponseIds"])):
            logprobs = distribution(tiny_model, [*row["PromptIds"], *row["ResponseIds"][:at]], row["Temperature"])
            expected.append(-float((logprobs.exp() * logprobs).sum()))
    changes: list[dict[str, Any]] = [{}, {"merge": True}, {"max_tokens_per_device": 45}, {"entropy_coef": 0.1}]
    for change in changes:
        metrics = step(tiny_model, trainer_settings(**change), rows, worth)
        assert metrics["entropy"] == pytest.approx(np.mean(expected), rel=1e-4), change
        assert "mfu" not in metrics, "a CPU has no peak that is known"


@pytest.mark.parametrize(
    "facts",
    [
        {"loss__name": "vanilla", "clip_ratio": 0.1},
        {"loss__name": "bypass_mode", "clip_ratio": 0.1, "correction": {"weights": "token", "reject": {"token_k3": "0.02"}}},
    ],
    ids=["vanilla", "bypass_mode"],
)
def test_means_over_tokens_do_not_depend_on_micro_batches(facts: dict[str, Any], tiny_model: Path):
    """A micro-batch counts by its tokens, and one of no-op rows not at all."""
    rows, worth = trajectories(tiny_model)
    whole = step(tiny_model, trainer_settings(**facts), rows, worth)
    split = VerlOptimizer(tiny_model, trainer_settings(**facts, max_tokens_per_device=45))
    metrics = split.step(layout(separate(rows, worth), lineage=[0], divisor=32))
    names = (
        ["clip_fraction", "ppo_kl"]
        if facts["loss__name"] == "vanilla"
        else ["correction_rejected", "correction_weight_mean", "correction_kl"]
    )
    assert [metrics[name] for name in names] == pytest.approx([whole[name] for name in names], rel=1e-4)
    assert 0.05 < whole[names[0]] < 0.95


@pytest.mark.parametrize("name", ["vanilla", "gspo"])
def test_clip_low_and_clip_high_sum_to_verl_clip_fraction(name: Any, tiny_model: Path):
    rows, worth = trajectories(tiny_model)
    settings = trainer_settings(loss__name=name, clip_ratio_low=0.05, clip_ratio_high=0.15)
    metrics = step(tiny_model, settings, rows, worth)
    assert metrics["clip_low"] + metrics["clip_high"] == pytest.approx(metrics["clip_fraction"], abs=1e-6)
    assert 0 < metrics["clip_high"] < 1
    if name == "vanilla":
        ratios, advantages = [], []
        for row, value in zip(rows.iter_rows(named=True), worth, strict=True):
            ratios += list(np.exp(np.subtract(logprobs_of(tiny_model, row["PromptIds"], row["ResponseIds"]), row["Logprobs"])))
            advantages += [value] * len(row["ResponseIds"])
        high = np.mean((np.array(ratios) > 1.15) & (np.array(advantages) > 0))
        assert metrics["clip_high"] == pytest.approx(high)
        assert metrics["advantage_mean"] == pytest.approx(np.mean(advantages))
        assert metrics["advantage_std"] == pytest.approx(np.std(advantages))


@pytest.mark.parametrize("name", ["gspo", "geo_mean"])
def test_step_with_several_epochs_uses_ratio_of_current_weights(name: Any, tiny_model: Path):
    rows, worth = trajectories(tiny_model)
    settings = trainer_settings(loss__name=name, epochs=3, learning_rate=3e-3, clip_ratio=0.3, recompute_logprobs=True)
    apart, merged = (step(tiny_model, settings.model_copy(update={"merge": how}), rows, worth) for how in (False, True))
    assert apart["updated"] == merged["updated"] == 3
    # AdamW's step is the gradient's sign: where that is all but 0, rounding decides, and the weights part a little.
    assert apart["loss"] == pytest.approx(merged["loss"], abs=5e-4)
    assert apart["ppo_kl"] == pytest.approx(merged["ppo_kl"], abs=5e-4)
    assert apart["ppo_kl"] != 0


@pytest.mark.parametrize("facts", [{}, {"merge": True, "entropy_coef": 0.1}, {"loss__aggregation": "seq-mean-token-mean"}], ids=str)
def test_loss_of_batch_whose_tokens_are_all_rejected_is_0(facts: dict[str, Any], tiny_model: Path):
    rejection = {"recompute_logprobs": True, "correction": {"reject": {"token_k2": "1e-12"}}, "alarms__logprob": NO_ALARM}
    metrics = step(tiny_model, trainer_settings(**rejection, **facts), *trajectories(tiny_model))
    assert (metrics["updated"], metrics["loss"], metrics["correction_rejected"]) == (0, 0, 1)
    assert all(np.isfinite(value) for value in metrics.values()), metrics


def test_mini_batches_keep_a_rollouts_rows_together(tiny_model: Path):
    rows, worth = trajectories(tiny_model)
    engine = VerlOptimizer(tiny_model, trainer_settings(mini_batches=3))
    batch = layout(separate(rows, worth), lineage=[0])
    rollouts = [set(part.rollout[: part.real_rows].tolist()) for part in engine.phases(batch).parts()]
    assert [len(members) for members in rollouts] == [2, 2, 1]
    assert set.union(*rollouts) == set(range(5))
    assert sum(part.real_rows for part in engine.phases(batch).parts()) == len(rows)


def test_several_rows_false_for_rollouts_merged_into_one_row(tiny_model: Path):
    rows, worth = trajectories(tiny_model)
    assert several_rows(layout(separate(rows, worth), lineage=[0]))
    assert several_rows(layout(merge(rows, worth), lineage=[0])), "one of the rollouts rewrites its history"
    whole = rows["RolloutId"] != "r4"
    assert not several_rows(layout(merge(rows.filter(whole), worth.filter(whole)), lineage=[0], divisor=8))


@pytest.mark.parametrize("neighbour", [100, 1000, 8000])
def test_seq_mean_token_sum_norm_divides_by_loss_scale_factor_only(neighbour: int):
    """A rollout's loss is its sum over the same number; the longest response of the batch has no part in it."""
    from verl.trainer.ppo.core_algos import agg_loss

    settings = trainer_settings(loss__aggregation="seq-mean-token-sum-norm", loss__options={"loss_scale_factor": 200})
    rows = [transition_row(name, ResponseIds=[4] * size, Logprobs=[-1.0] * size) for name, size in (("a", 100), ("b", neighbour))]
    batch = layout(separate(pl.DataFrame(rows), pl.Series([1.0, 0.0])), lineage=[0])
    config = actor_config(settings, None)
    loss = agg_loss(
        torch.from_numpy(-batch.advantages),
        torch.from_numpy(batch.response_mask),
        settings.loss.aggregation,
        global_batch_size=batch.rollouts,
        loss_scale_factor=config.loss_scale_factor,
    )
    assert float(loss) == pytest.approx(-100 / 200 / 2)


def test_by_rollout_shares_mean_among_rows_of_a_rollout():
    """Three tokens in one row, one in another: each token weighs a quarter of the rollout, and a no-op row nothing."""
    rows = [transition_row("a", 0, ResponseIds=[4] * 3, Logprobs=[-1.0] * 3), transition_row("a", 1, ResponseIds=[4], Logprobs=[-1.0])]
    batch = layout(separate(pl.DataFrame(rows), pl.Series([1.0, 1.0])), lineage=[0], divisor=3)
    prepared, _ = by_rollout(batch, trainer_settings(loss__aggregation="seq-mean-token-mean"))
    assert prepared.row_share is not None
    assert prepared.row_share.tolist() == [0.75, 0.25, 0.0]
    assert batch.rollouts == 1
    rejected = replace(batch, response_mask=batch.response_mask * np.array([[1], [0], [1]]))
    assert by_rollout(rejected, trainer_settings(loss__aggregation="seq-mean-token-mean"))[0].row_share.tolist() == [1.0, 0.0, 0.0]  # type: ignore[union-attr]


def test_losses_match_tables_of_learning_page(docs_table: DocsTable, tiny_model: Path):
    docs_table("guides/learning.md", loss_table(tiny_model))
    docs_table("guides/learning.md", aggregation_table(tiny_model))
