"""Rows sampled from a reshaped distribution: the gradient after the correction, and the bias that remains."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import polars as pl
import pytest
from numpy.typing import NDArray

from spangrad.errors import BadRowsError, SettingsError
from spangrad.settings import TrainerSettings
from tests.support.policies import NO_ALARM, trainer_settings, transition_row
from trainer.data.batch import Batch, layout, take
from trainer.data.merge import merge, separate
from trainer.monitor.row_check import RowCheck
from trainer.optim.losses.reshaped import corrected, truncated
from trainer.optim.phases import StepPhases
from trainer.optim.workers import Passed, PassKind

torch = pytest.importorskip("torch")

Floats = NDArray[np.float64]

LOGITS = np.array([2.0, 1.2, 0.4, -0.3, -1.0, -2.0])
ADVANTAGES = np.array([-0.5, 1.0, 0.6, -1.0, 0.8, 0.3])
"""Advantage of each token of a vocabulary of six, in a bandit of one step."""


def softmax(logits: Floats) -> Floats:
    raised = np.exp(logits - logits.max())
    return raised / raised.sum()


def nucleus(logits: Floats, top_p: float) -> Floats:
    """Return the distribution that top-p sampling draws from, as vLLM does: the fewest tokens that hold the mass, renormalised."""
    policy = softmax(logits)
    order = np.argsort(-policy)
    kept = order[: int(np.searchsorted(np.cumsum(policy[order]), top_p)) + 1]
    processed = np.zeros_like(policy)
    processed[kept] = policy[kept] / policy[kept].sum()
    return processed


def penalised(logits: Floats, penalty: float) -> Floats:
    """Return the distribution under a frequency penalty, tokens 0 and 1 having been said before."""
    return softmax(logits - penalty * np.array([2, 1, 0, 0, 0, 0]))


def of_tokens(policy: Floats, processed: Floats) -> tuple[Batch, NDArray[np.float32]]:
    """Return a batch of one row for each token that may be sampled, with the engine's logprobs, and the trainer's logprobs of it."""
    tokens = np.flatnonzero(processed > 0)
    rows = [
        transition_row(
            f"r{token}", 0, ResponseIds=[int(token)], Logprobs=[float(np.log(processed[token]))], Reshaping="top_p=0.8", GroupId=f"g{token}"
        )
        for token in tokens
    ]
    batch = layout(separate(pl.DataFrame(rows), pl.Series(ADVANTAGES[tokens])), lineage=[0])
    return batch, np.log(policy[tokens]).astype(np.float32)[:, None]


def expected_gradient(policy: Floats, processed: Floats, weights: Floats) -> Floats:
    """Return E over mu of w A grad log pi: each token that may be sampled counts as often as it is."""
    tokens = np.flatnonzero(processed > 0)
    scores = np.eye(len(policy))[tokens] - policy
    return (processed[tokens] * weights * ADVANTAGES[tokens]) @ scores


def exact_gradient(policy: Floats) -> Floats:
    return (policy * ADVANTAGES) @ (np.eye(len(policy)) - policy)


def estimates(policy: Floats, processed: Floats, threshold: str = "2.0") -> tuple[Floats, Floats]:
    """Return the expected gradients with the correction and without it, the PPO ratio being 1 at the step's start in both."""
    batch, logprobs = of_tokens(policy, processed)
    corrected_batch, _ = corrected(batch, logprobs, threshold)
    assert corrected_batch.old_logprobs is not None
    assert corrected_batch.weights is not None
    assert np.allclose(corrected_batch.old_logprobs, logprobs), "a ratio against mu would be what top-p did"
    weights = corrected_batch.weights[:, 0].astype(np.float64)
    return expected_gradient(policy, processed, weights), expected_gradient(policy, processed, np.ones(len(weights)))


@pytest.mark.parametrize("penalty", [0.2, 0.3])
def test_corrected_gradient_of_penalty_is_exact(penalty: float) -> None:
    """A penalty leaves every token possible, so nothing is lost while no weight is truncated."""
    policy, processed = softmax(LOGITS), penalised(LOGITS, penalty)
    with_it, without = estimates(policy, processed)
    exact = exact_gradient(policy)
    assert np.abs(with_it - exact).max() < 1e-7
    assert np.abs(without - exact).max() > 0.015


@pytest.mark.parametrize("top_p", [0.7, 0.8, 0.9, 0.97])
def test_corrected_gradient_of_top_p_lacks_unsampled_tokens_only(top_p: float) -> None:
    policy, processed = softmax(LOGITS), nucleus(LOGITS, top_p)
    with_it, without = estimates(policy, processed)
    tail = processed == 0
    assert tail.any()
    never_sampled = (policy * ADVANTAGES * tail) @ (np.eye(len(policy)) - policy)
    exact = exact_gradient(policy)
    assert np.abs(exact - with_it - never_sampled).max() < 1e-7, "the bias that docs/guides/learning.md names"
    inside = exact - never_sampled
    mass = policy[~tail].sum()
    assert np.abs(without - inside / mass).max() < 1e-9, "uncorrected, what is sampled counts 1 / mass times too much"


def test_corrected_estimates_of_samples_converge() -> None:
    """The mean over 200,000 samples of the nucleus, drawn as in training, is the expected gradient."""
    policy, processed = softmax(LOGITS), nucleus(LOGITS, 0.9)
    batch, logprobs = of_tokens(policy, processed)
    weights = np.zeros(6)
    corrected_batch, metrics = corrected(batch, logprobs, "2.0")
    assert corrected_batch.weights is not None
    weights[np.flatnonzero(processed)] = corrected_batch.weights[:, 0]
    drawn = np.random.default_rng(0).choice(6, 200_000, p=processed)
    estimate = ((weights * ADVANTAGES)[drawn, None] * (np.eye(6)[drawn] - policy)).mean(axis=0)
    exact, (with_it, without) = exact_gradient(policy), estimates(policy, processed)
    assert np.abs(estimate - with_it).max() < 0.005
    assert np.linalg.norm(estimate - exact) < 0.85 * np.linalg.norm(without - exact)
    assert metrics["reshaped_share"] == 1
    assert metrics["reshaped_weight_mean"] == pytest.approx(policy[processed > 0].sum(), rel=1e-5), "the nucleus' mass"
    assert metrics["reshaped_truncated"] == 0


@pytest.mark.parametrize(
    ("threshold", "weights"), [("2.0", [0.1, 1.0, 2.0, 2.0]), ("0.5_5.0", [0.0, 1.0, 3.0, 0.0]), ("9", [0.1, 1.0, 3.0, 8.0])]
)
def test_truncated_weights_follow_the_threshold(threshold: str, weights: list[float]) -> None:
    assert truncated(np.array([0.1, 1.0, 3.0, 8.0], np.float32), threshold).tolist() == pytest.approx(weights)


def test_truncated_invalid_threshold_raises() -> None:
    with pytest.raises(SettingsError, match="neither UPPER nor LOWER_UPPER"):
        truncated(np.ones(1, np.float32), "much")


def rows() -> pl.DataFrame:
    """Two rollouts of two calls, whose second call continues the first; in the second rollout with top-p."""
    continued = [
        transition_row(rollout, turn, PromptIds=prompt, ResponseIds=[7, 8], Logprobs=[-0.1, -0.2], Reshaping=reshaping)
        for rollout, reshaping in (("a", ""), ("b", "top_p=0.9"))
        for turn, prompt in enumerate([[1, 2], [1, 2, 7, 8, 3]])
    ]
    return pl.DataFrame([*continued, transition_row("c", 0), transition_row("c", 1, PromptIds=[1, 2, 3, 4, 5], Reshaping="min_p=0.1")])


@pytest.mark.parametrize("how", [merge, separate])
def test_layout_marks_reshaped_rows_and_merge_keeps_them_apart(how: type[object]) -> None:
    sequences = how(rows(), pl.Series(np.ones(6)))  # type: ignore[call-arg]
    batch = layout(sequences, lineage=[0], divisor=4)  # type: ignore[arg-type]
    held = dict(zip([*sequences.calls.list.first()], batch.reshaped.tolist(), strict=False))  # type: ignore[attr-defined]
    reshaped = {"call-b-0", "call-b-1", "call-c-1"}
    assert held == {call: call in reshaped for call in held}
    assert len(sequences) == (4 if how is merge else 6)  # type: ignore[arg-type]
    check, wrong = RowCheck(TrainerSettings(), "fp32", "fp32"), batch.logprobs - np.float32(5) * batch.reshaped[:, None]
    assert check.compare(batch, wrong, lambda chosen, behind: None)["logprob_gap_max"] == 0
    with pytest.raises(BadRowsError, match="were sampled with differ"):
        check.compare(replace(batch, reshaped=np.zeros_like(batch.reshaped)), wrong, lambda chosen, behind: None)
    last = batch.real_rows - 1
    assert take(batch, np.array([last, 0]), divisor=4).reshaped.tolist() == [*batch.reshaped[[last, 0]].tolist(), False, False]


def test_corrected_leaves_other_rows_unchanged() -> None:
    batch = layout(separate(rows(), pl.Series(np.ones(6))), lineage=[0])
    corrected_batch, metrics = corrected(batch, np.full_like(batch.logprobs, -1.0), "2.0")
    others = ~batch.reshaped
    assert corrected_batch.old_logprobs is not None
    assert corrected_batch.weights is not None
    assert (corrected_batch.old_logprobs[others] == batch.logprobs[others]).all()
    assert (corrected_batch.weights[others] == 1).all()
    assert (corrected_batch.old_logprobs[batch.reshaped] == -1).all()
    assert corrected_batch.weights[2].tolist() == pytest.approx([np.exp(-0.9), np.exp(-0.8)])
    assert metrics["reshaped_share"] == 0.5


class ForwardPasses:
    """Workers whose policy has the logprob -1 for every token, and that count their passes."""

    size = 1

    def __init__(self) -> None:
        self.count = 0

    def pass_batch(self, kind: PassKind, batch: Batch, role: str, *outputs: str, **flags: bool | int) -> Passed:
        self.count += 1
        return Passed({}, {name: np.full_like(batch.logprobs, -1) for name in outputs})


@pytest.mark.parametrize("mini_batches", [1, 2])
def test_phases_pass_reshaped_rows_forward_once(mini_batches: int) -> None:
    """The pass that checks the rows of a batch that is stepped more than once has their logprobs."""
    batch, workers = layout(separate(rows(), pl.Series(np.ones(6))), lineage=[0]), ForwardPasses()
    settings = trainer_settings(mini_batches=mini_batches, alarms__logprob=NO_ALARM)
    check = RowCheck(settings, "fp32", "fp32")
    phases = StepPhases(batch.numbered(), settings, workers, check, torch.Generator(), 0, None)  # type: ignore[arg-type]
    phases.compute_old_logprobs()
    phases.compute_advantages()
    assert workers.count == 1
    assert phases.batch.old_logprobs is not None
    assert (phases.batch.old_logprobs[batch.reshaped] == -1).all()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_corrected_rows_with_infinite_or_nan_logprobs_raise(value: float) -> None:
    batch = layout(separate(rows(), pl.Series(np.ones(6))), lineage=[0])
    batch.logprobs[3, 0] = value
    with pytest.raises(BadRowsError, match="no finite numbers") as refused:
        corrected(batch, np.zeros_like(batch.logprobs), "2.0")
    assert refused.value.rows == {3: "not_finite"}
