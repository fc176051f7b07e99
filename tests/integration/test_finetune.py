"""Training on files with real verl on a CPU: losses against values worked out by hand, resuming, learning, lineage from a real store."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from examples.two_tools.model import CITIES, TOOLS
from spangrad.settings import FinetuneSettings, Settings, StoreSettings
from spangrad.weights.checksums import checksum_directory, tokenizer_hash
from tests.support.built_rollouts import StoredRollouts, assistant, chat, user
from tests.support.policies import changed, distribution
from tests.support.trainers import EXAMPLES, PAIRS, finetuned, write_rows
from tests.support.trainers import finetune_settings as settings
from trainer.ledger.ledger import Ledger
from trainer.optim.workers import LocalWorkers
from trainer.sft.examples import LengthLimits, digest_of, read_examples
from trainer.sft.files import find_sources
from trainer.sft.optimizer import FileOptimizer
from trainer.sft.rendering import Renderer, TokenSequence
from trainer.sft.training import finetune
from transition_builder.export.formats import export
from transition_builder.export.reading import ExportSelection

RIGHT = {"paris": "weather", "oslo": "weather", "rome": "clock", "lima": "clock"}
"""Tool that serves each city."""


class FileRun:
    """A optimizer whose optimizer steps nothing: gradients stay to be looked at."""

    def __init__(self, model: Path, method: Any, **changes: Any) -> None:
        chosen = settings(model, model, **{"learning_rate": 1e-3, **changes})
        self.optimizer = FileOptimizer(model, chosen, method, 10)
        self.gradients: dict[str, np.ndarray] = {}
        inner = self.optimizer._workers._rank._models["policy"].engine

        def look() -> float:
            for name, value in inner.module.named_parameters():
                whole = value.grad.full_tensor() if hasattr(value.grad, "full_tensor") else value.grad
                self.gradients[name] = whole.detach().numpy().copy()
            return float(np.sqrt(sum(float((gradient**2).sum()) for gradient in self.gradients.values())))

        inner.optimizer_step = look


def by_hand(model: Path, sequences: Sequence[TokenSequence], loss_of: Any) -> tuple[float, dict[str, np.ndarray]]:
    """A loss of each sequence's logprobs, by transformers alone: no padding, no packing, one sequence at a time. And its gradients."""
    import torch
    from transformers import AutoModelForCausalLM

    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    logprobs = []
    for sequence in sequences:
        logits = policy(torch.tensor([sequence.ids])).logits[0, :-1]
        chosen = logits.log_softmax(-1)[torch.arange(len(sequence.ids) - 1), torch.tensor(sequence.ids[1:])]
        logprobs.append(chosen[torch.tensor(sequence.mask[1:], dtype=torch.bool)])
    loss = loss_of(logprobs)
    loss.backward()
    return loss.item(), {name: value.grad.numpy() for name, value in policy.named_parameters()}


def agree(gradients: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert gradients.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(gradients[name], value, atol=2e-6, rtol=2e-4, err_msg=name)


@pytest.mark.parametrize("device", [16384, 19], ids=["one micro-batch", "several"])
def test_sft_loss_and_gradient_are_mean_over_trained_tokens(device: int, tiny_model: Path):
    import torch

    run = FileRun(tiny_model, "sft", trainer={"max_tokens_per_device": device})
    metrics = run.optimizer.step(EXAMPLES)
    loss, gradients = by_hand(tiny_model, [example.sequences[0] for example in EXAMPLES], lambda logprobs: -torch.cat(logprobs).mean())
    assert metrics["loss"] == pytest.approx(loss, abs=1e-6)
    assert metrics["tokens"] == 9
    agree(run.gradients, gradients)
    assert run.optimizer.measure(EXAMPLES, None)["loss"] == pytest.approx(loss, abs=1e-6), "held out rows are measured by the same loss"


@pytest.mark.parametrize(("beta", "smoothing", "device"), [(0.1, 0.0, 16384), (0.5, 0.2, 30)])
def test_dpo_loss_and_gradient_match_paper(beta: float, smoothing: float, device: int, tiny_model: Path):
    """Equation 7 of https://arxiv.org/abs/2305.18290, with the smoothing of https://ericmitchell.ai/cdpo.pdf, equation 3, by hand."""
    import torch

    run = FileRun(tiny_model, "dpo", beta=beta, label_smoothing=smoothing, trainer={"max_tokens_per_device": device})
    reference = np.array([-3.0, -9.5, -4.0, -2.5, -6.0, -1.0], np.float32)
    metrics = run.optimizer.step(PAIRS, reference)
    sequences = [sequence for pair in PAIRS for sequence in pair.sequences]
    margins: list[float] = []

    def loss_of(logprobs: list[torch.Tensor]) -> torch.Tensor:
        losses = []
        for at in range(0, len(logprobs), 2):
            margin = beta * ((logprobs[at].sum() - reference[at].item()) - (logprobs[at + 1].sum() - reference[at + 1].item()))
            margins.append(margin.item())
            right = 1 / (1 + torch.exp(-margin))
            losses.append(-(1 - smoothing) * torch.log(right) - smoothing * torch.log(1 - right))
        return sum(losses) / len(losses)  # type: ignore[return-value]

    loss, gradients = by_hand(tiny_model, sequences, loss_of)
    assert metrics["loss"] == pytest.approx(loss, abs=1e-5)
    assert metrics["preference_margin"] == pytest.approx(np.mean(margins), abs=1e-5)
    assert metrics["preference_accuracy"] == pytest.approx(np.mean([margin > 0 for margin in margins]))
    assert 0 < metrics["preference_accuracy"] < 1
    assert metrics["chosen_reward"] - metrics["rejected_reward"] == pytest.approx(metrics["preference_margin"], abs=1e-5)
    agree(run.gradients, gradients)
    held = run.optimizer.measure(PAIRS, reference)
    assert {name: metrics[name] for name in held} == pytest.approx(held, abs=1e-5), "held out pairs are measured by the same loss"


def test_dpo_reference_is_policy_at_start(tiny_model: Path):
    optimizer = FileRun(tiny_model, "dpo").optimizer
    sums = optimizer.logprobs(PAIRS)
    expected = [
        sum(
            float(distribution(tiny_model, sequence.ids[:at], 1.0)[sequence.ids[at]]) for at, trained in enumerate(sequence.mask) if trained
        )
        for pair in PAIRS
        for sequence in pair.sequences
    ]
    assert sums.tolist() == pytest.approx(expected, abs=1e-4)
    metrics = optimizer.step(PAIRS, sums)
    assert metrics["loss"] == pytest.approx(np.log(2), abs=1e-6)
    assert metrics["preference_margin"] == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("method", ["sft", "dpo"])
def test_finetune_no_op_rows_change_no_gradient(method: Any, tiny_model: Path, monkeypatch: pytest.MonkeyPatch):
    """The loss of several ranks, which need equally many rows, is that of one, times their number: verl takes the mean over ranks."""
    examples = EXAMPLES if method == "sft" else PAIRS
    alone, ranks = FileRun(tiny_model, method), FileRun(tiny_model, method)
    reference = None if method == "sft" else alone.optimizer.logprobs(examples)
    ranks.optimizer._workers._rank._models["policy"].engine.get_data_parallel_size = lambda: 4
    monkeypatch.setattr(LocalWorkers, "size", 4)
    assert len(ranks.optimizer._rows(examples, reference)["input_ids"].offsets()) - 1 == (4 if method == "sft" else 8)
    metrics = [run.optimizer.step(examples, reference) for run in (alone, ranks)]
    assert metrics[1]["loss"] == pytest.approx(4 * metrics[0]["loss"], rel=1e-6)
    agree({name: value / 4 for name, value in ranks.gradients.items()}, alone.gradients)


def replies(count: int) -> list[dict[str, Any]]:
    """Rows of messages: what to say to whom."""
    cities = [CITIES[at % 4] for at in range(count)]
    return [{"messages": [user(f"say {city}"), assistant(f"{RIGHT[city]} {city}")]} for city in cities]


class StoppedError(Exception):
    """Thrown into a run, as a crash would be."""


class Breaker:
    """StoppedError a run after a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def planned(self, plan: Any) -> None: ...

    def stepped(self, step: int, metrics: dict[str, float]) -> None:
        if step == self.step:
            raise StoppedError

    def committed(self, version: Any) -> None: ...


@pytest.mark.parametrize("method", ["sft", "dpo"])
def test_finetune_stopped_and_resumed_ends_with_same_weights(method: Any, tiny_model: Path, tmp_path: Path):
    rows = replies(8)
    pairs = [{"chosen": row["messages"], "rejected": [row["messages"][0], assistant("error")]} for row in rows]
    file = write_rows(tmp_path / "rows.jsonl", rows if method == "sft" else pairs)
    ends: list[str] = []
    for name, step in (("whole", 0), ("stopped", 4)):
        chosen = settings(tiny_model, tmp_path / name, epochs=3, batch_size=4, learning_rate=1e-3, warmup=0.3, held_out=0.2)
        if step:
            with pytest.raises(StoppedError):
                finetune(chosen, method, [file], observer=Breaker(step))
        last = finetuned(chosen, file, method=method).versions[-1]
        assert last.metrics["finetune_step"] == 6
        ends.append(last.policy_version.checksum)
        assert checksum_directory(Path(last.policy_version.path)) == ends[-1]
    assert ends[0] == ends[1], "bit by bit"


def test_finetune_lora_trains_adapters_only_and_merges(tiny_model: Path, tmp_path: Path):
    from safetensors.numpy import load_file

    file = write_rows(tmp_path / "rows.jsonl", replies(16))
    chosen = settings(tiny_model, tmp_path / "p", epochs=2, batch_size=8, learning_rate=1e-2, trainer={"lora__rank": 4})
    with pytest.raises(StoppedError):
        finetune(chosen, "sft", [file], observer=Breaker(3))
    last = finetuned(chosen, file).versions[-1]
    before, after = (load_file(Path(directory) / "model.safetensors") for directory in (tiny_model, last.policy_version.path))
    changed = {name for name in before if not np.array_equal(before[name], after[name])}
    assert before.keys() == after.keys()
    assert changed
    assert all("_proj" in name for name in changed), "embeddings and head have no adapters"


class Traces:
    """The two-tools example's rollouts of one turn, in a store: of each group one that called the right tool and one that did not."""

    def __init__(self, store: StoreSettings, model: Path, name: str, groups: int) -> None:
        self.world, self.model, self.name = StoredRollouts(store, name), model, name
        render = Renderer(model)
        for at in range(groups):
            city = CITIES[at % 4]
            wrong = next(tool for tool in TOOLS if tool != RIGHT[city])
            for rollout, tool, reward in ((f"good-{at}", RIGHT[city], 1.0), (f"bad-{at}", wrong, -0.2)):
                request, answer = chat([user(f"say {city}")], f"{tool} {city}")
                (sequence,) = render.conversation([user(f"say {city}"), assistant(f"{tool} {city}")], [False, True], None)
                ids = sequence.ids[:7], sequence.ids[7:]
                facts = {"Policy": name, "TokenizerHash": tokenizer_hash(model), "Logprobs": [-0.5] * len(ids[1])}
                self.world.call(rollout, request, answer, ids=ids, reward=reward, group=f"g{at}", task=city, **facts)
        self.world.commit()

    def export(self, form: str, out: Path, **conditions: Any) -> Path:
        export(self.world.client, form, ExportSelection(self.name, **conditions), out)
        return out


def success(model: Path) -> float:
    """The chance that the first reply names the right tool and the city, and ends."""
    render, chances = Renderer(model), []
    for city, tool in RIGHT.items():
        (sequence,) = render.conversation([user(f"say {city}"), assistant(f"{tool} {city}")], [False, True], None)
        chances.append(np.exp(sum(float(distribution(model, sequence.ids[:at], 1.0)[sequence.ids[at]]) for at in range(7, 10))))
    return float(np.mean(chances))


@pytest.fixture(scope="module")
def traces(store: StoreSettings, tiny_model: Path) -> Traces:
    return Traces(store, tiny_model, "finetune-traces", 40)


def run_settings(traces: Traces, directory: Path, **changes: Any) -> Settings:
    trainer = {"policy": traces.name, "branch": directory.name, **changes.pop("trainer", {})}
    return settings(traces.model, directory, traces.world.store, **{"held_out": 0.1, "batch_size": 9, **changes}, trainer=trainer)


def test_finetune_sft_on_successful_exports_raises_success(traces: Traces, tmp_path: Path):
    file = traces.export("sft-tokens", tmp_path / "best.jsonl", min_return=0.5)
    done = finetuned(run_settings(traces, tmp_path / "sft", epochs=10, learning_rate=3e-3), file)
    examples = done.plan.examples
    assert (len(examples.trained), len(examples.held_out), examples.with_ids, examples.rendered) == (36, 4, 40, 0)
    before, after = success(traces.model), success(Path(done.versions[-1].policy_version.path))
    assert before < 0.2
    assert after > 0.6
    first, last = done.versions[0].metrics, done.versions[-1].metrics
    assert last["held_out_loss"] < first["held_out_loss"] < first["held_out_loss_before"]


def test_finetune_examples_are_equal_for_all_export_formats(traces: Traces, tmp_path: Path):
    limits = LengthLimits.of(traces.model, tokenizer_hash(traces.model), FinetuneSettings(), 1000)
    by_form = {}
    for form in ("sft-tokens", "parquet", "huggingface", "sft", "verl-sft"):
        sources = find_sources([traces.export(form, tmp_path / form, min_return=0.5)])
        by_form[form] = read_examples(sources, "sft", Renderer(traces.model), limits, FinetuneSettings(held_out=0.1))
    assert len({digest_of([*examples.trained, *examples.held_out]) for examples in by_form.values()}) == 1
    assert {form: (examples.with_ids, examples.rendered) for form, examples in by_form.items()} == {
        **dict.fromkeys(("sft-tokens", "parquet", "huggingface"), (40, 0)),
        **dict.fromkeys(("sft", "verl-sft"), (0, 40)),
    }
    origins = [[example.origins for example in examples.trained] for examples in by_form.values()]
    assert all(origin == origins[0] for origin in origins), "each names the rollouts, their specification and revision"


def test_finetune_dpo_on_exported_preferences_raises_margin(traces: Traces, tmp_path: Path):
    file = traces.export("preferences", tmp_path / "pairs.jsonl")
    done = finetuned(run_settings(traces, tmp_path / "dpo", epochs=6, learning_rate=2e-3), file, method="dpo")
    assert (len(done.plan.examples.trained), done.plan.examples.with_ids) == (36, 40)
    metrics = [version.metrics for version in done.versions]
    assert metrics[0]["held_out_loss_before"] == pytest.approx(np.log(2), abs=1e-6)
    assert metrics[0]["held_out_preference_margin"] < metrics[-1]["held_out_preference_margin"]
    assert metrics[-1]["held_out_preference_margin"] > 0.5
    assert metrics[-1]["held_out_preference_accuracy"] == 1
    assert success(Path(done.versions[-1].policy_version.path)) > 1.5 * success(traces.model)


def test_lineage_of_finetuned_version_names_file_and_spans(traces: Traces, tmp_path: Path):
    from commands.inspection.lineage import version_text
    from spangrad.store import lineage

    file = traces.export("sft-tokens", tmp_path / "best.jsonl", min_return=0.5)
    chosen = run_settings(traces, tmp_path / "lineage", epochs=1, held_out=0.0)
    version = finetuned(chosen, file).versions[-1]
    version_lineage = lineage.of_version(traces.world.client, traces.name, version.version, "lineage", 1)
    first = version_lineage.ancestors[0]
    (source,) = find_sources([file])
    assert first.files == [lineage.TrainedFile("sft", 5, 5, "best.jsonl", source.checksum, file.stat().st_size, 40)]
    assert first.batch_rollouts is not None
    assert [(rollout.rollout, rollout.group) for rollout in first.batch_rollouts][:2] == [("good-0", "g0"), ("good-1", "g1")]
    assert {len(rollout.spans) for rollout in first.batch_rollouts} == {1}
    assert len(first.batch_rollouts) == 40
    text = version_text(version_lineage)
    origin = "sft on files, step 5 of 5, from 40 groups, 40 rollouts of run finetune-traces (train)"
    assert text[0] == f"{traces.name}@{version.version} on branch lineage, committed, from {traces.name}@0, batch {first.batch}: {origin}"
    assert text[2] == f"  file best.jsonl, sha256 {source.checksum}, {file.stat().st_size} bytes: 40 examples"
    span = first.batch_rollouts[0].spans[0]
    back = lineage.of_span(traces.world.client, span.trace, span.span)
    assert version.version in [earlier.version for earlier in back.versions]


def test_train_after_finetune_continues_and_skips_its_groups(store: StoreSettings, tiny_model: Path, tmp_path: Path):
    from tests.support.built_rollouts import SPEC
    from tests.support.built_rollouts import BuiltRollouts as Built
    from trainer.run import train

    own = {"run_id": "finetuned-run", "policy": "policy", "branch": "finetuned-run", "groups_per_batch": 1, "max_staleness": 5}
    chosen = settings(tiny_model, tmp_path / "p", store, epochs=1, trainer=own)
    world = Built(chosen, tiny_model)
    world.group("g", [1.0, 0.0])
    about = {"run": "finetuned-run", "mode": "train", "group": "g", "rollout": "g-0", "attempt": 0, "build_spec": SPEC, "revision": 0}
    rows = [{"messages": reply["messages"], "meta": about} for reply in replies(1)]
    finetuned(chosen, write_rows(tmp_path / "rows.jsonl", rows))
    train(chosen, follow=False)
    ledger = Ledger(chosen.trainer.directory, "policy", "finetuned-run")
    assert ledger.committed_versions() == [0, 1], "the group has trained this branch"
    asked = chosen.model_copy(update={"trainer": changed(chosen.trainer, {"retrain_finetuned": True})})
    train(asked, follow=False)
    newest = ledger.version(2).policy_version
    assert (newest.parent, [rollout.rollout_id for rollout in ledger.batch(newest.batch_id or "")]) == (1, ["g-0", "g-1"])
    train(asked, follow=False)
    assert ledger.committed_versions() == [0, 1, 2], "once"
    kinds = "SELECT Version, RolloutId FROM spangrad.batches WHERE Branch = %(run)s ORDER BY Version, RolloutId"
    assert world.rows(kinds) == [(1, "g-0"), (2, "g-0"), (2, "g-1")]


def test_finetune_command_prints_summary(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
):
    from commands.training.finetune import finetune as command

    rows = [*replies(9), {"messages": [user("say rome")]}, {"messages": [user("say rome"), assistant("clock rome")], "score": 1}]
    file = write_rows(tmp_path / "own.jsonl", rows)
    caplog.set_level(logging.INFO)
    places = [f"trainer.directory={tmp_path / 'p'}", "store.url=http://127.0.0.1:9"]
    command("sft", file, model=tiny_model, publish=False, epochs=2, held_out=0.0, set_=places)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split() for line in lines[1:5]] == [
        ["rows", "trained", "10"],
        ["rows", "held", "out", "0"],
        ["rows", "left", "out,", "no_reply", "1"],
        ["rows", "in", "all", "11"],
    ]
    assert lines[5:7] == [
        "10 tokenised by the policy's own tokenizer and chat template, the loss on the assistant's replies only",
        "columns that were not read: score",
    ]
    assert [line.partition(" ")[0] + line.partition(":")[1] for line in lines[7:9]] == ["version:", "version:"]
    assert lines[9] == "policy@0 -> policy@2. `spangrad lineage policy@2` names what it was trained on."
    assert "sft of policy@0 on 10 rows (0 held out): to step 2" in caplog.text
    assert "the ledger is not copied to the store now" in caplog.text
    command("sft", file, model=tiny_model, publish=False, epochs=2, held_out=0.0, set_=places)
    said_then = capsys.readouterr().out.splitlines()[-1]
    assert said_then == "nothing to do: these files were trained with these settings, up to step 2. --again trains them once more."
