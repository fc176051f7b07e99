"""verl itself, on a CPU: the gap, the alarm, what a step does, and that a resume repeats it exactly."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from spangrad.errors import BadRowsError, CheckpointError, LedgerError
from spangrad.settings import TrainerSettings
from tests.support.policies import (
    NO_ALARM,
    PROMPT,
    changed,
    group_relative,
    logprobs_of,
    sample,
    sampled_by,
    sampled_rows,
    trainer_settings,
    transition_row,
)
from tests.support.trainers import save, written
from trainer.credit import assignment
from trainer.data.batch import Batch, layout
from trainer.data.merge import merge, separate
from trainer.optim.optimizer import VerlOptimizer
from trainer.publish import checkpoint

SETTINGS = trainer_settings(learning_rate=1e-3)


@pytest.fixture
def engine(tiny_model: Path) -> VerlOptimizer:
    return VerlOptimizer(tiny_model, SETTINGS)


@pytest.fixture(scope="module")
def rows(tiny_model: Path) -> pl.DataFrame:
    """24 true samples: half at temperature 1, half at 0.7."""
    return pl.DataFrame(sampled_rows(tiny_model, 12, temperature=1.0, seed=1) + sampled_rows(tiny_model, 12, temperature=0.7, seed=2))


ADVANTAGES = pl.Series(np.linspace(-1, 1, 24))


def batch(rows: pl.DataFrame, advantages: pl.Series = ADVANTAGES, *, version: int = 0, divisor: int = 1) -> Batch:
    return layout(separate(rows, advantages), lineage=[version], divisor=divisor)


def weights(engine: VerlOptimizer) -> dict[str, np.ndarray]:
    return {name: value.copy() for name, value in engine.weights()}


def differences(left: dict[str, np.ndarray], right: dict[str, np.ndarray]) -> float:
    assert list(left) == list(right)
    return max(float(np.abs(left[name] - right[name]).max()) for name in left)


def test_step_on_sampled_rows_has_small_logprob_gap(engine: VerlOptimizer, rows: pl.DataFrame):
    metrics = engine.step(batch(rows))
    assert metrics["logprob_gap_max"] < 1e-4
    assert 0 < metrics["logprob_gap_mean"] < metrics["logprob_gap_max"]
    assert metrics["grad_norm"] > 0
    assert metrics["clip_fraction"] == 0
    assert metrics["updated"] == 1


def test_step_reports_seconds_of_forward_and_backward_passes(engine: VerlOptimizer, rows: pl.DataFrame):
    began = time.perf_counter()
    engine.step(batch(rows))
    took = time.perf_counter() - began
    seconds = engine.pass_seconds
    assert seconds.keys() == {"seconds_forward", "seconds_backward"}
    assert min(seconds.values()) > 0
    assert sum(seconds.values()) < took


def test_step_of_wrong_logprobs_names_its_rows_and_touches_nothing(engine: VerlOptimizer, rows: pl.DataFrame):
    before = weights(engine)
    logprobs = rows["Logprobs"].to_list()
    wrong = [*logprobs[:-1], [value - 3 for value in logprobs[-1]]]
    broken = [[float("nan")] * len(logprobs[0]), *logprobs[1:]]
    faults = [
        (rows.with_columns(Logprobs=pl.Series(wrong)), {23: "logprob_gap"}),
        (rows.with_columns(Logprobs=pl.Series(broken)), {0: "not_finite"}),
        (
            rows.with_columns(Logprobs=pl.Series([[value - 0.2 for value in row] for row in logprobs])),
            dict.fromkeys(range(24), "logprob_gap"),
        ),
    ]
    for fault, named in faults:
        for advantages in (ADVANTAGES, pl.Series(np.zeros(24))):
            with pytest.raises(BadRowsError, match="so no step was taken") as raised:
                engine.step(batch(fault, advantages))
            assert raised.value.rows == named
    assert "temperature of calls" in str(raised.value), "every row differs"
    assert differences(before, weights(engine)) == 0
    assert engine.step(batch(rows))["logprob_gap_max"] < 1e-4, "the refused steps left something behind"


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"epochs": 2, "mini_batches": 2},
        {"recompute_logprobs": True},
        {"loss__name": "bypass_mode"},
        {"loss__name": "gspo", "loss__aggregation": "seq-mean-token-mean"},
        {"max_tokens_per_device": 40},
    ],
    ids=str,
)
def test_step_of_reshaped_rows_passes_check_and_trains_by_truncated_weight(
    tiny_model: Path, rows: pl.DataFrame, changes: dict[str, object]
) -> None:
    """Processed logprobs 0.3 nats above the policy's, as under top-p, train like advantages exp(-0.3) times as large."""
    above = np.where(np.arange(24) % 2, 0.3, 0.0)
    processed = rows.with_columns(
        Logprobs=pl.Series([[value + offset for value in one] for one, offset in zip(rows["Logprobs"].to_list(), above, strict=True)]),
        Reshaping=pl.Series(["top_p=0.9" if offset else "" for offset in above]),
    )
    settings = changed(SETTINGS, changes)
    reshaped, plain = VerlOptimizer(tiny_model, settings), VerlOptimizer(tiny_model, settings)
    start = weights(plain)
    metrics = reshaped.step(batch(processed))
    expected = plain.step(batch(rows, pl.Series(ADVANTAGES.to_numpy() * np.exp(-above))))
    # AdamW's first steps are the gradient's sign, which a last bit may turn where the gradient is all but 0.
    apart, moved = (
        sum(float(np.sum((left[name] - right[name]) ** 2)) for name in start)
        for left, right in ((weights(reshaped), weights(plain)), (weights(plain), start))
    )
    assert apart < 1e-3 * moved
    assert metrics["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-3)
    assert metrics["logprob_gap_max"] < 1e-4, "reshaped rows have no part in the check"
    assert metrics["reshaped_weight_mean"] == pytest.approx(np.exp(-0.3), rel=1e-3)
    assert 0.3 < metrics["reshaped_share"] < 0.7
    assert metrics["reshaped_truncated"] == 0
    with pytest.raises(BadRowsError, match="so no step was taken"):
        plain.step(batch(processed.with_columns(Reshaping=pl.lit(""))))


def test_step_with_positive_advantage_raises_logprob_of_response(
    engine: VerlOptimizer, tiny_model: Path, tmp_path: Path, rows: pl.DataFrame
):
    chosen = pl.Series([1.0] + [0.0] * 23)
    before = sum(logprobs_of(tiny_model, rows["PromptIds"][0].to_list(), rows["ResponseIds"][0].to_list()))
    engine.step(batch(rows, chosen))
    stored = written(engine, tiny_model, tmp_path)
    assert sum(logprobs_of(stored.path, rows["PromptIds"][0].to_list(), rows["ResponseIds"][0].to_list())) > before


def test_warmup_steps_raise_learning_rate_from_0(tiny_model: Path, rows: pl.DataFrame):
    def distances_moved(settings: TrainerSettings) -> list[float]:
        """Return the largest change of a weight in each of two steps; Adam's first step is as long as its rate."""
        engine, distances = VerlOptimizer(tiny_model, settings), list[float]()
        for version in range(2):
            before = weights(engine)
            engine.step(batch(rows, version=version))
            distances.append(differences(before, weights(engine)))
        return distances

    steady, warmed = distances_moved(SETTINGS), distances_moved(changed(SETTINGS, {"warmup_steps": 2}))
    assert steady[0] == pytest.approx(1e-3, rel=0.1)
    assert warmed == [0, pytest.approx(0.5e-3, rel=0.1)]


def test_cosine_schedule_falls_to_0_at_max_steps_and_stays_there(tiny_model: Path, rows: pl.DataFrame):
    engine = VerlOptimizer(tiny_model, changed(SETTINGS, {"schedule": "cosine", "max_steps": 2}))
    moved = list[float]()
    for version in range(4):
        before = weights(engine)
        engine.step(batch(rows, version=version))
        moved.append(differences(before, weights(engine)))
    assert moved == [pytest.approx(1e-3, rel=0.1), pytest.approx(0.5e-3, rel=0.2), 0, 0]


@pytest.mark.parametrize(
    ("changes", "rollouts", "worth", "expected"),
    [
        ({"max_steps": 2}, 24, 0, [0, 0.5e-3, 0]),  # no advantage in the first step
        ({"max_steps": 1, "mini_batches": 3}, 2, 1, [1.75e-3, 0, 0]),  # fewer rollouts than mini-batches, at rates of 1 and 0.75
        ({"warmup_steps": 2, "schedule": "constant"}, 24, 0, [0, 0.5e-3, 1e-3]),
    ],
    ids=str,
)
def test_schedule_follows_steps_of_which_parts_have_no_gradient(
    tiny_model: Path, rows: pl.DataFrame, changes: dict[str, object], rollouts: int, worth: float, expected: list[float]
):
    settings = changed(SETTINGS, {"schedule": "cosine", "alarms__logprob": NO_ALARM, **changes})
    engine, moved, part = VerlOptimizer(tiny_model, settings), list[float](), rows[:rollouts]
    for version, factor in enumerate((worth, 1, 1)):
        before = weights(engine)
        engine.step(batch(part, ADVANTAGES[:rollouts] * factor, version=version))
        moved.append(differences(before, weights(engine)))
    assert moved == [pytest.approx(distance, rel=0.2) for distance in expected]


def test_step_refused_after_resume_leaves_rate_of_schedule(tiny_model: Path, tmp_path: Path, rows: pl.DataFrame):
    """Half of the cosine is done; a refused step of two parts goes back to the rate that the schedule has there."""

    def refuse() -> None:
        raise LedgerError("the lease is lost")

    settings = changed(SETTINGS, {"schedule": "cosine", "max_steps": 4, "epochs": 2, "alarms__logprob": NO_ALARM})
    first = VerlOptimizer(tiny_model, settings)
    for version in range(2):
        first.step(batch(rows, version=version))
    stored = written(first, tiny_model, tmp_path)
    moved = list[dict[str, np.ndarray]]()
    for refused in (False, True):
        engine = VerlOptimizer(stored.path, settings)
        engine.load_state(stored.path)
        if refused:
            with pytest.raises(LedgerError):
                engine.step(batch(rows, version=2), refuse)
        engine.step(batch(rows, version=2))
        moved.append(weights(engine))
    assert differences(*moved) == 0


def test_step_for_the_entropy_alone_counts_in_the_warm_up(tiny_model: Path, rows: pl.DataFrame):
    """Steps without an advantage, for entropy or a reference, raise the rate like any other."""
    engine = VerlOptimizer(tiny_model, changed(SETTINGS, {"warmup_steps": 2, "entropy_coef": 0.1, "alarms__logprob": NO_ALARM}))
    start, moved = weights(engine), list[float]()
    for version in range(3):
        metrics = engine.step(batch(rows, ADVANTAGES * 0, version=version))
        assert metrics["updated"] == 1
        moved.append(differences(start, weights(engine)))
    assert moved[0] == 0, "the rate begins at 0"
    assert 0 < moved[1] < moved[2]


def test_step_with_no_op_rows_or_micro_batches_is_unchanged(tiny_model: Path, rows: pl.DataFrame):
    plain, padded = VerlOptimizer(tiny_model, SETTINGS), VerlOptimizer(tiny_model, SETTINGS)
    split = VerlOptimizer(tiny_model, trainer_settings(learning_rate=1e-3, max_tokens_per_device=40))
    metrics = [
        plain.step(batch(rows)),
        padded.step(batch(rows, divisor=32)),
        split.step(batch(rows)),
    ]
    for other in metrics[1:]:
        assert other["loss"] == pytest.approx(metrics[0]["loss"], abs=1e-6)
        assert other["grad_norm"] == pytest.approx(metrics[0]["grad_norm"], rel=1e-5)
        assert other["logprob_gap_mean"] == pytest.approx(metrics[0]["logprob_gap_mean"], rel=0.5)
    # AdamW's first step is the gradient's sign: a last bit may turn where the gradient is all but 0.
    assert differences(weights(plain), weights(padded)) < 1e-4
    assert differences(weights(plain), weights(split)) < 1e-4


def test_step_with_zero_advantages_is_skipped(engine: VerlOptimizer, rows: pl.DataFrame):
    engine.step(batch(rows))
    before = weights(engine)
    metrics = engine.step(batch(sampled_by(rows, 0), pl.Series(np.zeros(24)), version=1))
    assert (metrics["updated"], metrics["grad_norm"]) == (0, 0)
    assert differences(before, weights(engine)) == 0, "AdamW's moments moved the weights"


def test_load_state_resumed_optimizer_repeats_step_exactly(engine: VerlOptimizer, tiny_model: Path, tmp_path: Path, rows: pl.DataFrame):
    engine.step(batch(rows))
    stored = written(engine, tiny_model, tmp_path)
    expected = engine.step(batch(rows, version=1))
    resumed = VerlOptimizer(stored.path, SETTINGS)
    resumed.load_state(stored.path)
    assert resumed.step(batch(rows, version=1)) == expected
    assert differences(weights(engine), weights(resumed)) == 0
    forgetful = VerlOptimizer(stored.path, SETTINGS)
    forgetful.step(batch(rows, version=1))
    assert differences(weights(engine), weights(forgetful)) > 0, "the optimizer's state matters"


def test_load_state_damaged_file_raises(engine: VerlOptimizer, tmp_path: Path):
    save(engine, tmp_path)
    files = sorted((tmp_path / checkpoint.STATE).iterdir())
    assert [file.name for file in files] == [".metadata", "__0_0.distcp"]
    for file in reversed(files):
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
        with pytest.raises(CheckpointError, match=r"optimizer cannot be read \(.+\)\. Restore .* from a copy"):
            engine.load_state(tmp_path)
    shutil.rmtree(tmp_path / checkpoint.STATE)
    with pytest.raises(CheckpointError, match="optimizer cannot be read"):
        engine.load_state(tmp_path)


def test_advantages_with_group_relative_normalise_over_rollouts():
    rows = [transition_row("win", turn, rewards=(1.0,) if turn == 8 else ()) for turn in range(9)] + [
        transition_row("loss", rewards=(0.0,))
    ]
    frame = pl.DataFrame(rows, schema_overrides={"Rewards.Value": pl.List(pl.Float64)})
    advantages = assignment.advantages(frame, frame["Policy"] == "policy", normalise=group_relative)
    assert advantages.to_list() == pytest.approx([0.7071] * 9 + [-0.7071], abs=1e-4)


def conversations(model: Path, *, version: int = 0) -> pl.DataFrame:
    """24 rollouts of up to 5 turns: histories that grow, one break in five, two choices a call here and there, two temperatures."""
    generator = np.random.default_rng(3)
    rows: list[dict[str, object]] = []
    for i in range(24):
        history = [*PROMPT[:3], PROMPT[3] + i % 4, *PROMPT[4:]]
        temperature = 1.0 if i % 3 else 0.7
        for turn in range(1 + i % 5):
            for choice in range(2 if (i + turn) % 4 == 0 else 1):
                response, logprobs = sample(model, history, 1 + (i + turn) % 3, temperature, seed=100 * i + 10 * turn + choice)
                facts = {
                    "PromptIds": history,
                    "ResponseIds": response,
                    "Logprobs": logprobs,
                    "Temperature": temperature,
                    "Version": version,
                }
                rows.append(transition_row(f"r{i:02}", turn, **{**facts, "CallId": f"{i}-{turn}-{choice}"}))
            observation = generator.integers(1, 12, generator.integers(0, 6)).tolist()
            history = [*history, *response, *observation]
            if generator.random() < 0.2:
                history = [*history[:2], *history[3:]]  # the agent rewrote its history
    return pl.DataFrame(rows)


def test_merge_sequences_train_as_separate_sequences(tiny_model: Path):
    rows = conversations(tiny_model)
    worth = pl.Series(np.linspace(-1, 1, len(rows)))
    alone, together = separate(rows, worth), merge(rows, worth)
    assert together.trained_tokens == alone.trained_tokens
    assert len(alone) == len(rows) > len(together) > 24, "calls were merged, and breaks and choices forked"
    assert together.merge_ratio > 1.5
    plain, merging = VerlOptimizer(tiny_model, SETTINGS), VerlOptimizer(tiny_model, SETTINGS)
    results = [plain.step(layout(alone, lineage=[0])), merging.step(layout(together, lineage=[0], divisor=8))]
    for metrics in results:
        assert metrics["logprob_gap_max"] < 1e-4, "merged, each token still has the logprob that it was sampled with"
        assert (metrics["clip_fraction"], metrics["updated"]) == (0, 1)
    assert results[1]["loss"] == pytest.approx(results[0]["loss"], abs=1e-6)
    assert results[1]["grad_norm"] == pytest.approx(results[0]["grad_norm"], rel=1e-5)
    # AdamW's first step is the gradient's sign: a last bit may turn where the gradient is all but 0.
    assert differences(weights(plain), weights(merging)) < 1e-4


def test_merge_sequences_of_older_weights_train_as_separate_sequences(tiny_model: Path):
    """Off-policy: ratios other than 1, some of them clipped."""
    rows = conversations(tiny_model)
    off = np.random.default_rng(5)
    rows = rows.with_columns(pl.Series("Logprobs", [[one + off.normal(0, 0.3) for one in row] for row in rows["Logprobs"].to_list()]))
    worth = pl.Series(np.linspace(-1, 1, len(rows)))
    metrics = [VerlOptimizer(tiny_model, SETTINGS).step(layout(make(rows, worth), lineage=[1])) for make in (separate, merge)]
    assert metrics[0]["clip_fraction"] > 0.1
    assert metrics[1]["loss"] == pytest.approx(metrics[0]["loss"], abs=1e-6)
    assert metrics[1]["grad_norm"] == pytest.approx(metrics[0]["grad_norm"], rel=1e-5)
    assert metrics[1]["clip_fraction"] == pytest.approx(metrics[0]["clip_fraction"], abs=1e-6)
    assert metrics[1]["ppo_kl"] == pytest.approx(metrics[0]["ppo_kl"], abs=1e-6)


def test_step_of_a_merged_sequence_with_wrong_logprobs_names_its_row(engine: VerlOptimizer, tiny_model: Path):
    rows = conversations(tiny_model)
    wrong = rows["Logprobs"].to_list()
    last = max(range(len(rows)), key=lambda i: (rows["Turn"][i], i))
    wrong[last] = [wrong[last][0] - 3, *wrong[last][1:]]
    sequences = merge(rows.with_columns(pl.Series("Logprobs", wrong)), pl.Series(np.ones(len(rows))))
    (row,) = [row for row, calls in enumerate(sequences.calls.to_list()) if rows["CallId"][last] in calls]
    assert len(sequences.calls[row]) > 1
    with pytest.raises(BadRowsError, match="so no step was taken") as raised:
        engine.step(layout(sequences, lineage=[0]))
    assert raised.value.rows == {row: "logprob_gap"}


def test_step_in_one_process_starts_no_ray_and_prints_nothing(engine: VerlOptimizer, rows: pl.DataFrame, capfd: pytest.CaptureFixture[str]):
    import ray

    engine.step(batch(rows))
    assert not ray.is_initialized()
    assert capfd.readouterr() == ("", "")
