"""verl's estimators and losses as the settings name them, against verl's own functions."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import polars as pl
import pytest
import torch

from spangrad.errors import CheckpointError, TrainerError
from spangrad.settings import TrainerSettings
from spangrad.settings.trainer_learning import Aggregation, Correction, Estimator, KlEstimate, Loss
from tests.support import learning_tables
from tests.support.learning_tables import (
    advantages_by_verl,
    advantages_here,
    loss_by_verl,
    loss_here,
    loss_settings,
    padded,
    tokens_by_verl,
    tokens_here,
)
from tests.support.policies import NO_ALARM, distribution, logprobs_of, sampled_by, sampled_rows
from tests.support.sections import changed, trainer_settings, transition_row
from tests.support.trainers import save, written
from trainer.credit import learning
from trainer.credit.estimators import over_tokens
from trainer.data.batch import layout
from trainer.data.chains import chains
from trainer.data.merge import separate
from trainer.optim.losses.corrected import actor_config
from trainer.optim.optimizer import VerlOptimizer
from trainer.optim.process import prepare_process

prepare_process()  # verl reads its platform when it is first imported

RATE = 1e-3
ABLE = [name for name, facts in learning.ESTIMATORS.items() if not facts.by_token]


def test_estimators_losses_and_rejections_match_verl_registries():
    from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY, POLICY_LOSS_REGISTRY
    from verl.trainer.ppo.rollout_corr_helper import SUPPORTED_ROLLOUT_RS_OPTIONS

    assert set(get_args(Estimator)) == set(learning.ESTIMATORS) == {getattr(name, "value", name) for name in ADV_ESTIMATOR_REGISTRY}
    assert set(get_args(Loss)) == set(learning.LOSSES) == {name for name in POLICY_LOSS_REGISTRY if not name.startswith("spangrad_")}
    assert learning.REJECTIONS == SUPPORTED_ROLLOUT_RS_OPTIONS


def test_aggregations_and_kl_estimates_are_known_to_verl():
    from verl.trainer.ppo.core_algos import agg_loss, kl_penalty

    losses, mask = torch.ones(2, 3), torch.tensor([[1, 1, 0], [1, 0, 0]])
    found = {how: float(agg_loss(losses, mask, how)) for how in get_args(Aggregation)}
    assert found == pytest.approx(
        {"token-mean": 1, "token-sum": 3, "seq-mean-token-sum": 1.5, "seq-mean-token-mean": 1, "seq-mean-token-sum-norm": 0.5}
    )
    for how in get_args(KlEstimate):
        assert kl_penalty(torch.tensor([-1.0]), torch.tensor([-2.0]), how).isfinite().all()


@pytest.mark.parametrize("name", ABLE)
def test_advantages_over_rollouts_match_verl(name: Any):
    ours = advantages_here(trainer_settings(estimator=name, reward_weights=learning_tables.WEIGHTS))
    assert ours == pytest.approx(advantages_by_verl(name, "rollout"), abs=1e-6)
    assert len(set(ours)) > 1


# A turn that only one rollout reached counts in what verl knows of a batch, and not here: scope `batch` is left out.
@pytest.mark.parametrize(
    "name", [name for name in ABLE if learning.ESTIMATORS[name].scope not in {"batch", "greedy"} and name != "grpo_passk"]
)
def test_advantages_over_turns_match_verl(name: Any):
    settings = trainer_settings(estimator=name, credit__scheme="own", baseline="turn", reward_weights=learning_tables.WEIGHTS)
    calls = learning_tables.rollouts()
    alone = calls.select((calls.select("GroupId", "Turn").is_duplicated()).alias("shared"))["shared"].to_list()
    by_verl = advantages_by_verl(name, "turn")
    if learning.ESTIMATORS[name].scope == "group":  # verl leaves a value that stands alone as it is
        by_verl = [value if shared else 0.0 for value, shared in zip(by_verl, alone, strict=True)]
    assert advantages_here(settings) == pytest.approx(by_verl, abs=1e-6)


@pytest.mark.parametrize("name", [name for name in ABLE if learning.ESTIMATORS[name].needs is None and name != "gdpo"])
def test_advantages_over_transitions_match_verl(name: Any):
    settings = trainer_settings(estimator=name, baseline="transition", reward_weights=learning_tables.WEIGHTS)
    ours = advantages_here(settings)
    assert ours == pytest.approx(advantages_by_verl(name, "transition"), abs=1e-6)
    if name in {"grpo", "rloo"}:
        by_rollout = advantages_here(changed(settings, {"baseline": "rollout"}))
        assert ours != pytest.approx(by_rollout, abs=1e-3), "a rollout of three calls counts three times"


@pytest.mark.parametrize(
    ("facts", "observation"),
    [
        ({"estimator": "gae"}, 2),
        ({"estimator": "gae", "gamma": 0.9, "gae_lambda": 0.8}, 2),
        ({"estimator": "optimal_token_baseline"}, 0),  # verl's goes by columns, observations among them; a chain here has none
        ({"estimator": "tir_optimal_token_baseline"}, 2),
    ],
)
def test_advantages_over_tokens_match_verl(facts: dict[str, Any], observation: int):
    settings = trainer_settings(reward_weights=learning_tables.WEIGHTS, **facts)
    assert tokens_here(settings) == pytest.approx(tokens_by_verl(settings, observation=observation), abs=1e-6)


def chained(tiny_model: Path, count: int = 12) -> Any:
    """Rollouts of two turns, the second of which is paid when its first token is odd."""
    rows: list[dict[str, object]] = []
    for at, row in enumerate(sampled_rows(tiny_model, 2 * count, temperature=1.0, seed=5)):
        i, turn = divmod(at, 2)
        worth = float(turn and row["ResponseIds"][0] % 2)  # type: ignore[index]
        paid = transition_row(f"r{i:02}", turn, rewards=(worth,))
        rewards = {name: value for name, value in paid.items() if name.startswith("Rewards.")}
        rows.append({**row, "RolloutId": f"r{i:02}", "Turn": turn, "CallId": f"{i}-{turn}", "GroupId": "ab"[i >= count // 2], **rewards})
    frame, links = chains(pl.DataFrame(rows), pl.repeat(value=True, n=len(rows), eager=True), {})
    return replace(layout(separate(frame, pl.zeros(len(frame), eager=True)), lineage=[0]), chains=links)


@pytest.mark.parametrize("name", ["optimal_token_baseline", "tir_optimal_token_baseline"])
def test_optimal_token_baseline_uses_forward_pass(name: Any, tiny_model: Path):
    batch = chained(tiny_model)
    engine = VerlOptimizer(tiny_model, trainer_settings(estimator=name, learning_rate=RATE))
    seen = engine._estimated(batch)
    pairs = [(batch.prompts[i][batch.attention_mask[i, : batch.prompts.shape[1]] > 0], i) for i in range(batch.real_rows)]
    squared = np.zeros_like(batch.logprobs)
    for prompt, i in pairs:
        for at in range(int(batch.response_mask[i].sum())):
            squared[i, at] = float(
                distribution(tiny_model, [*prompt.tolist(), *batch.responses[i, :at].tolist()], 1.0).exp().square().sum()
            )
    expected, _ = over_tokens(engine.settings, batch, old_log_probs=batch.logprobs, sum_pi_squared=squared)
    assert seen.advantages == pytest.approx(expected, abs=1e-4)
    found = engine.step(batch)
    assert found["updated"] == 1
    assert found["logprob_gap_max"] < 1e-4
    assert np.array_equal(engine.token_advantages, seen.advantages), "what the loss used is kept"


def test_critic_learns_returns_and_resume_repeats_it(tiny_model: Path, tmp_path: Path):
    settings = trainer_settings(
        estimator="gae", learning_rate=1e-6, critic_learning_rate=3e-3, epochs=2, mini_batches=2, alarms__logprob=NO_ALARM
    )
    batch = chained(tiny_model)
    engine = VerlOptimizer(tiny_model, settings)
    losses = [engine.step(batch)["critic_loss"] for _ in range(10)]
    assert losses[-1] < 0.5 * losses[0]
    made = written(engine, tiny_model, tmp_path)
    expected = engine.step(batch)
    resumed = VerlOptimizer(made.path, settings)
    resumed.load_state(made.path)
    assert resumed.step(batch) == expected
    assert expected["critic_explained"] > 0
    assert expected["updated"] == 4


def test_load_state_without_critic_begins_one_silently(tiny_model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    save(VerlOptimizer(tiny_model, TrainerSettings()), tmp_path)
    batch = chained(tiny_model)
    capfd.readouterr()
    engine = VerlOptimizer(tiny_model, trainer_settings(estimator="gae"))
    engine.load_state(tmp_path)
    assert engine.step(batch)["updated"] == 1
    assert capfd.readouterr() == ("", "")


def test_norm_by_std_false_matches_dr_grpo():
    ours = advantages_here(trainer_settings(norm_by_std=False, reward_weights=learning_tables.WEIGHTS))
    assert ours == pytest.approx(advantages_by_verl("grpo", "rollout", norm_adv_by_std_in_grpo=False))


@pytest.mark.parametrize("name", list(learning.LOSSES))
def test_step_loss_matches_verl(name: Any, tiny_model: Path):
    settings = loss_settings(name, clip_ratio=0.02)
    assert loss_here(tiny_model, settings) == pytest.approx(loss_by_verl(tiny_model, settings), abs=2e-6)
    if name not in {"clip_cov", "kl_cov"}:  # these look at the tokens of one micro-batch
        split = loss_settings(name, clip_ratio=0.02, max_tokens_per_device=30)
        assert loss_here(tiny_model, split) == pytest.approx(loss_by_verl(tiny_model, settings), abs=2e-6)


@pytest.mark.parametrize("how", get_args(Aggregation))
def test_step_aggregation_matches_verl_for_any_micro_batches(how: Any, tiny_model: Path):
    options = {"loss__options": {"loss_scale_factor": 3}} if how.endswith("norm") else {}
    whole = trainer_settings(loss__aggregation=how, **options)
    split = trainer_settings(loss__aggregation=how, max_tokens_per_device=30, **options)
    expected = loss_by_verl(tiny_model, whole)
    assert loss_here(tiny_model, whole) == pytest.approx(expected, abs=2e-6)
    assert loss_here(tiny_model, split) == pytest.approx(expected, abs=2e-6)


def test_clip_ratio_settings_reach_verl(tiny_model: Path):
    """DAPO's clip-higher: verl's defaults of the two bounds must not win over what is set."""
    base = loss_here(tiny_model, trainer_settings(clip_ratio=0.2))
    found = {
        "narrow": loss_here(tiny_model, trainer_settings(clip_ratio=0.05)),
        "higher": loss_here(tiny_model, trainer_settings(clip_ratio=0.2, clip_ratio_high=0.4)),
        "lower": loss_here(tiny_model, trainer_settings(clip_ratio=0.2, clip_ratio_low=0.05)),
    }
    assert len({round(value, 6) for value in [base, *found.values()]}) == 4
    assert found["higher"] < base, "good responses may pull further"


def test_learning_tables_match_docs_page(tiny_model: Path):
    """`python -m tests.support.learning_tables` writes them."""
    page = learning_tables.PAGE.read_text()
    for table in (
        learning_tables.estimator_table(),
        learning_tables.baseline_table(),
        learning_tables.loss_table(tiny_model),
        learning_tables.aggregation_table(tiny_model),
    ):
        assert "\n".join(table) + "\n\n" in page


def test_step_recomputed_logprobs_and_corrections_match_verl(tiny_model: Path):
    """TIS, IcePop and rejection of responses that other weights sampled; ratios are against the trainer's logprobs at the start."""
    from verl.trainer.ppo.core_algos import get_policy_loss_fn
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_rejection_mask

    rows, worth = learning_tables.sampled(tiny_model)
    old = rows["Logprobs"].to_list()
    pairs = zip(rows["PromptIds"].to_list(), rows["ResponseIds"].to_list(), strict=True)
    trainers = padded([logprobs_of(tiny_model, prompt, response) for prompt, response in pairs])
    mask = padded([[1.0] * len(row) for row in old])
    advantages = padded([[value] * len(row) for value, row in zip(worth, old, strict=True)])
    cases: list[tuple[Correction, dict[str, Any]]] = [
        (Correction(), {}),
        (Correction(weights="token", threshold="1.2"), {"rollout_is": "token", "rollout_is_threshold": 1.2}),
        (Correction(weights="sequence", threshold="1.2"), {"rollout_is": "sequence", "rollout_is_threshold": 1.2}),
        (Correction(weights="token", threshold="0.8_1.2"), {"rollout_is": "token", "rollout_is_threshold": "0.8_1.2"}),
        (Correction(weights="token", normalise=True), {"rollout_is": "token", "rollout_is_batch_normalize": True}),
        (
            Correction(reject={"token_k1": "0.8_1.2", "seq_mean_k3": "0.2"}),
            {"rollout_rs": "token_k1,seq_mean_k3", "rollout_rs_threshold": "0.8_1.2,0.2"},
        ),
    ]
    for correction, facts in cases:
        settings = trainer_settings(recompute_logprobs=True, correction=correction)
        found = VerlOptimizer(tiny_model, settings).step(layout(separate(rows, worth), lineage=[0], divisor=8))
        weights, kept, told = compute_rollout_correction_and_rejection_mask(trainers, padded(old), mask, **facts)
        config = actor_config(settings, None)
        loss, _ = get_policy_loss_fn("vanilla")(
            old_log_prob=trainers,
            log_prob=trainers,
            advantages=advantages,
            response_mask=kept.bool(),
            config=config,
            rollout_is_weights=weights.batch["rollout_is_weights"] if weights else None,
        )
        assert found["loss"] == pytest.approx(float(loss), abs=2e-6)
        assert found["clip_fraction"] == 0, "at the start every ratio is 1"
        if correction.weights:
            assert found["correction_weight_mean"] == pytest.approx(told["rollout_corr/rollout_is_mean"], rel=1e-5)
        if correction.reject:
            assert found["correction_rejected"] == pytest.approx(told["rollout_corr/rollout_rs_masked_fraction"])
            assert 0 < found["correction_rejected"] < 1
        assert ("correction_kl" in found) == bool(facts)


def test_step_of_batch_rejected_whole_is_skipped(tiny_model: Path):
    rows, worth = learning_tables.sampled(tiny_model)
    settings = trainer_settings(recompute_logprobs=True, correction=Correction(reject={"seq_max_k2": "1e-12"}))
    found = VerlOptimizer(tiny_model, settings).step(layout(separate(rows, worth), lineage=[0]))
    assert (found["updated"], found["grad_norm"], found["correction_rejected"]) == (0, 0, 1)
    critic = trainer_settings(estimator="gae", recompute_logprobs=True, correction=settings.loss.correction)
    batch = chained(tiny_model)
    found = VerlOptimizer(tiny_model, critic).step(
        replace(batch, logprobs=batch.logprobs - batch.response_mask, staleness=0 * batch.staleness - 1)
    )
    assert (found["updated"], "critic_loss" in found) == (0, False)


def test_bypass_mode_loss_applies_correction(tiny_model: Path):
    settings = trainer_settings(loss__name="bypass_mode", correction=Correction(weights="token", threshold="1.1", objective="reinforce"))
    other = trainer_settings(loss__name="bypass_mode", correction=Correction(objective="reinforce"))
    found = loss_here(tiny_model, settings)
    assert found == pytest.approx(loss_by_verl(tiny_model, settings), abs=2e-6)
    assert found != pytest.approx(loss_here(tiny_model, other), abs=1e-3)
    rows, worth = learning_tables.sampled(tiny_model)
    tight = trainer_settings(**{**dict(settings), "max_tokens_per_device": 10})
    alone, among = (
        VerlOptimizer(tiny_model, tight).step(layout(separate(rows[:1], worth[:1]), lineage=[0], divisor=divisor)) for divisor in (1, 32)
    )
    assert among["loss"] == pytest.approx(alone["loss"], abs=1e-6), "micro-batches of no-op rows add nothing"


def test_logprob_alarm_precedes_correction(tiny_model: Path):
    rows, worth = learning_tables.sampled(tiny_model)
    current = layout(separate(sampled_by(rows, 0), worth), lineage=[0])
    correction = Correction(weights="token")
    with pytest.raises(TrainerError, match="so no step was taken"):
        VerlOptimizer(tiny_model, trainer_settings(recompute_logprobs=True, correction=correction)).step(current)
    tolerant = trainer_settings(recompute_logprobs=True, correction=correction, alarms__logprob=NO_ALARM)
    found = VerlOptimizer(tiny_model, tolerant).step(current)
    assert 0.1 < found["logprob_gap_mean"] < found["logprob_gap_max"] < 5


def fresh(tiny_model: Path) -> Any:
    """24 true samples, a batch of the current weights."""
    rows = pl.DataFrame(sampled_rows(tiny_model, 24, temperature=1.0, seed=1))
    return layout(separate(rows, pl.Series(np.linspace(-1, 1, 24))), lineage=[0])


@pytest.mark.parametrize("name", list(learning.LOSSES))
def test_step_with_each_loss_raises_better_over_worse(name: Any, tiny_model: Path):
    batch = layout(separate(pl.DataFrame(sampled_rows(tiny_model, 8, temperature=1.0, seed=1)), pl.Series([1.0, -1.0] * 4)), lineage=[0])
    engine = VerlOptimizer(
        tiny_model, trainer_settings(loss__name=name, loss__options={"dro_beta": 0.1} if name == "dro" else {}, learning_rate=RATE)
    )
    engine.step(batch)
    moved = engine._logprobs("policy", batch) - batch.logprobs
    assert (moved * batch.advantages).sum() > 0.1


def test_epochs_and_mini_batches_use_logprobs_of_batch_start(tiny_model: Path):
    batch = fresh(tiny_model)
    once = VerlOptimizer(tiny_model, trainer_settings(learning_rate=RATE)).step(batch)
    engine = VerlOptimizer(tiny_model, trainer_settings(learning_rate=RATE, epochs=3, mini_batches=4))
    found = engine.step(batch)
    assert (once["updated"], found["updated"]) == (1, 12)
    assert once["clip_fraction"] == 0, "one step is on policy"
    assert found["clip_fraction"] > 0, "the ratios moved away from the batch's start"
    assert abs(found["ppo_kl"]) > 100 * abs(once["ppo_kl"])
    assert found["logprob_gap_max"] == pytest.approx(once["logprob_gap_max"], abs=1e-6), "the gap is that before any update"


def test_step_of_2_epochs_equals_two_steps(tiny_model: Path):
    """Old logprobs stay those of the start: the second epoch equals a second step on the same rows, which are then stale."""
    batch = fresh(tiny_model)
    twice, one = (
        VerlOptimizer(tiny_model, trainer_settings(learning_rate=RATE, epochs=2)),
        VerlOptimizer(tiny_model, trainer_settings(learning_rate=RATE)),
    )
    twice.step(batch)
    one.step(batch)
    one.step(replace(batch, staleness=np.full_like(batch.staleness, -1)))
    for (name, ours), (_, theirs) in zip(twice.weights(), one.weights(), strict=True):
        assert np.array_equal(ours, theirs), name


def test_mini_batches_repeat_after_a_resume(tiny_model: Path, tmp_path: Path):
    settings = trainer_settings(learning_rate=RATE, mini_batches=3)
    batch = fresh(tiny_model)
    engine = VerlOptimizer(tiny_model, settings)
    engine._order.manual_seed(7)
    save(engine, tmp_path)
    expected = engine.step(batch)
    assert VerlOptimizer(tiny_model, settings).step(batch) != expected, "other mini-batches"
    resumed = VerlOptimizer(tiny_model, settings)
    resumed.load_state(tmp_path)
    assert resumed.step(batch) == expected


def test_load_state_keeps_moments_and_uses_own_learning_rate(tiny_model: Path, tmp_path: Path):
    """Who lowers the learning rate, because a gradient was not finite, gets the lower one; warm-up counts the steps that were made."""
    batch = fresh(tiny_model)
    stale = replace(batch, staleness=np.full_like(batch.staleness, -1))

    def furthest(engine: VerlOptimizer) -> float:
        before = {name: value.copy() for name, value in engine.weights()}
        assert engine.step(stale)["updated"] == 1
        return max(float(np.abs(value - before[name]).max()) for name, value in engine.weights())

    engine = VerlOptimizer(tiny_model, trainer_settings(learning_rate=RATE))
    engine.step(batch)
    made = written(engine, tiny_model, tmp_path)
    moved = furthest(engine)

    def resumed(**changes: Any) -> float:
        other = VerlOptimizer(made.path, trainer_settings(**{"learning_rate": RATE, **changes}))
        other.load_state(made.path)
        return furthest(other)

    assert resumed() == moved
    assert resumed(learning_rate=RATE / 1000) == pytest.approx(moved / 1000, rel=0.1)
    assert resumed(warmup_steps=4) == pytest.approx(moved / 4, rel=0.1)
    assert resumed(betas=(0.0, 0.999)) != pytest.approx(moved, rel=0.01)


def test_kl_reference_keeps_policy_near_it(tiny_model: Path, tmp_path: Path):
    """The KL term is verl's estimate from the weights of trainer.loss.reference, and a large weight keeps the policy near them."""
    from verl.trainer.ppo.core_algos import kl_penalty

    from examples.two_tools.model import build_model

    build_model(tmp_path, seed=1)
    rows = pl.DataFrame(sampled_rows(tiny_model, 24, temperature=1.0, seed=1))
    pairs = list(zip(rows["PromptIds"].to_list(), rows["ResponseIds"].to_list(), strict=True))
    policy, held = (padded([logprobs_of(model, prompt, response) for prompt, response in pairs]) for model in (tiny_model, tmp_path))
    mask = padded([[1.0] * len(response) for _, response in pairs])
    losses: dict[str, float] = {}
    for how in ("low_var_kl", "abs", "k3+"):
        settings = trainer_settings(kl_coef=0.5, kl_type=how, reference=tmp_path)
        found = VerlOptimizer(tiny_model, settings).step(fresh(tiny_model))
        expected = float((kl_penalty(policy, held, how) * mask).sum() / mask.sum())
        assert found["reference_kl"] == pytest.approx(expected, rel=1e-4)
        losses[how] = found["loss"] - 0.5 * expected
    plain = VerlOptimizer(tiny_model, TrainerSettings()).step(fresh(tiny_model))["loss"]
    assert list(losses.values()) == pytest.approx([plain] * 3, abs=1e-5)


def test_kl_reference_without_advantages_pulls_policy_back(tiny_model: Path, tmp_path: Path):
    from examples.two_tools.model import build_model

    build_model(tmp_path, seed=1)
    engine = VerlOptimizer(tiny_model, trainer_settings(learning_rate=RATE, kl_coef=1.0, reference=tmp_path))
    batch = fresh(tiny_model)
    still = replace(batch, advantages=np.zeros_like(batch.advantages), staleness=np.full_like(batch.staleness, -1))
    found = [engine.step(still) for _ in range(6)]
    assert found[0]["updated"] == 1
    assert found[-1]["reference_kl"] < 0.9 * found[0]["reference_kl"]


def test_entropy_coef_raises_entropy(tiny_model: Path):
    batch = fresh(tiny_model)
    stale = replace(batch, advantages=np.zeros_like(batch.advantages), staleness=np.full_like(batch.staleness, -1))
    engine = VerlOptimizer(tiny_model, trainer_settings(learning_rate=RATE, entropy_coef=1.0))
    found = [engine.step(stale) for _ in range(8)]
    assert found[0]["loss"] == pytest.approx(-found[0]["entropy"], abs=1e-6)
    assert found[-1]["entropy"] > found[0]["entropy"] + 0.1
    measured = VerlOptimizer(tiny_model, TrainerSettings()).step(batch)["entropy"]
    assert measured == pytest.approx(found[0]["entropy"], rel=1e-5), "it is measured where nothing rewards it, too"


def test_lora_adapters_are_trained_merged_and_resumed(tiny_model: Path, tmp_path: Path):
    settings = trainer_settings(learning_rate=1e-2, lora__rank=4, lora__alpha=8)
    batch = fresh(tiny_model)
    engine = VerlOptimizer(tiny_model, settings)
    before = {name: value.copy() for name, value in engine.weights()}
    assert all(np.array_equal(before[name], value) for name, value in VerlOptimizer(tiny_model, TrainerSettings()).weights()), (
        "B begins as 0"
    )
    first = engine.step(batch)
    assert (first["updated"], first["logprob_gap_max"] < 1e-4) == (1, True)
    made = written(engine, tiny_model, tmp_path)
    changed = {name for name, value in engine.weights() if not np.array_equal(before[name], value)}
    assert changed == {name for name in before if "proj" in name}, "every linear layer but the head"
    sampled = pl.DataFrame(sampled_rows(made.path, 24, temperature=1.0, seed=2))
    from_merged = layout(separate(sampled, pl.Series(np.linspace(-1, 1, 24))), lineage=[0])
    assert engine.step(replace(from_merged, advantages=0 * from_merged.advantages))["logprob_gap_max"] < 1e-4, (
        "what is served is what is trained"
    )
    expected = engine.step(from_merged)
    resumed = VerlOptimizer(made.path, settings)
    resumed.load_state(made.path)
    assert resumed.step(from_merged) == expected
    for (name, ours), (_, theirs) in zip(engine.weights(), resumed.weights(), strict=True):
        assert np.array_equal(ours, theirs), name


def test_load_state_with_other_adapters_raises(tiny_model: Path, tmp_path: Path):
    plain, adapted = VerlOptimizer(tiny_model, TrainerSettings()), VerlOptimizer(tiny_model, trainer_settings(lora__rank=4))
    (tmp_path / "plain").mkdir()
    (tmp_path / "adapted").mkdir()
    save(plain, tmp_path / "plain")
    save(adapted, tmp_path / "adapted")
    with pytest.raises(CheckpointError, match=r"without adapters, and trainer\.lora\.rank = 4.*begin a branch"):
        adapted.load_state(tmp_path / "plain")
    with pytest.raises(CheckpointError, match=r"with adapters, and trainer\.lora\.rank = 0"):
        plain.load_state(tmp_path / "adapted")
    with pytest.raises(CheckpointError, match=r"another shape than trainer\.lora\.rank = 2"):
        VerlOptimizer(tiny_model, trainer_settings(lora__rank=2)).load_state(tmp_path / "adapted")
    only = VerlOptimizer(tiny_model, trainer_settings(lora__rank=2, lora__modules=("q_proj",), learning_rate=1e-2))
    before = {name: value.copy() for name, value in only.weights()}
    only.step(fresh(tiny_model))
    assert {name.split(".")[-2] for name, value in only.weights() if not np.array_equal(before[name], value)} == {"q_proj"}
