"""Benchmark of an optimizer step: tokens a second of verl's engine on rows of long rollouts, call by call and merged, and of a plain loop.

In: a model's size, rollouts of many turns. Out: a table, and as the last line one JSON object; exit code 1 when a check fails. Invariant:
all three train the same tokens with the same advantages from the same weights, and their losses and gradients are compared at each step.

Each turn's prompt is all that came before and an observation, as of an agent that sends its history again. Ours is a whole step of the
trainer: checks of rows and logprobs, copies of weights for later checks, forward, backward, AdamW. The peer (`benchmarks.step_plain`) is
the loop that would be written with transformers alone. Tokens are those of all calls, prompt and response, for merged rows as well: the
figure says how soon the same calls are trained.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np
import polars as pl

from benchmarks.random_model import write_model
from benchmarks.scratch import exit_code, scratch
from benchmarks.step_plain import PlainLoop, load, logprobs_of
from spangrad.settings import TrainerSettings
from spangrad.settings.trainer_learning import OptimSettings
from trainer.data.batch import layout
from trainer.data.merge import Sequences, merge, separate
from trainer.optim.optimizer import VerlOptimizer

LEARNING_RATE = 1e-6
RELATIVE = {"cpu": 1e-3, "cuda": 3e-2}
"""Largest relative difference of a loss or a gradient's norm that sums in another order explain: in float32, and in bfloat16."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of the rows."""

    rollouts: int
    turns: int
    prompt: int
    """Tokens of the first prompt."""
    response: int
    """Tokens of each response."""
    observation: int
    """Tokens that each further prompt adds."""


@dataclass(frozen=True, slots=True)
class Timed:
    """Steps of one kind."""

    seconds: list[float] = field(default_factory=list[float])
    """Seconds of each measured step."""
    losses: list[float] = field(default_factory=list[float])
    norms: list[float] = field(default_factory=list[float])
    mfu: list[float] = field(default_factory=list[float])
    """Model FLOP utilisation. Empty: the device has no known peak."""


def main() -> int:
    """Measure all three in turns, compare, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, default=4)
    parser.add_argument("--turns", type=int, default=32, help="calls of a rollout")
    parser.add_argument("--prompt", type=int, default=48, help="tokens of the first prompt")
    parser.add_argument("--response", type=int, default=8, help="tokens of each response")
    parser.add_argument("--observation", type=int, default=8, help="tokens that each further prompt adds")
    parser.add_argument("--hidden", type=int, default=256, help="hidden size of the random model")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--words", type=int, default=4096, help="tokens of the vocabulary")
    parser.add_argument("--device-tokens", type=int, default=8192, help="trainer.max_tokens_per_device, of the peer as well")
    parser.add_argument("--rounds", type=int, default=3, help="measured steps of each, after one that is not")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    sizes = Sizes(given.rollouts, given.turns, given.prompt, given.response, given.observation)
    with scratch("bench-step") as directory:
        model = directory / "model"
        write_model(model, hidden=given.hidden, layers=given.layers, words=given.words, seed=given.seed)
        rows = random_rows(model, sizes, given.words, given.seed)
        worth = pl.Series(np.random.default_rng(given.seed).normal(size=len(rows)))
        calls, merged = separate(rows, worth), merge(rows, worth)
        device, timed = measure(model, calls, merged, given.device_tokens, given.rounds)
    figures = {name: {"tokens_per_s": round(calls.tokens / median(each.seconds))} for name, each in timed.items()}
    for name, each in timed.items():
        print(f"{name:10}{figures[name]['tokens_per_s']:>10} tokens/s   seconds {' '.join(f'{second:.2f}' for second in each.seconds)}")
    print(f"merging leaves {merged.tokens} of {calls.tokens} tokens ({merged.merge_ratio:.1f} times fewer) in {len(merged)} sequences")
    peer = figures.pop("plain")
    checked = {
        "different": sum(different(timed["plain"], timed[name], RELATIVE[device]) for name in ("unmerged", "merged")),
        "unmerged_calls": len(merged) - sizes.rollouts,
        "untrained_tokens": 2 * sizes.rollouts * sizes.turns * sizes.response - calls.trained_tokens - merged.trained_tokens,
    }
    report = {
        "benchmark": "step",
        "ours": {
            **{f"{name}_tokens_per_s": figure["tokens_per_s"] for name, figure in figures.items()},
            "merge_ratio": round(merged.merge_ratio, 2),
            "mfu": next(reversed(timed["merged"].mfu), None),
        },
        "peer": peer,
        "ratio": {name: round(figure["tokens_per_s"] / peer["tokens_per_s"], 3) for name, figure in figures.items()},
        "checked": checked,
    }
    print(json.dumps(report))
    return exit_code(checked)


def random_rows(model: Path, sizes: Sizes, words: int, seed: int) -> pl.DataFrame:
    """Return transitions of rollouts of random tokens, with the logprobs that the model gives them."""
    random = np.random.default_rng(seed)
    rows = list[dict[str, object]]()
    added = sizes.response + sizes.observation
    loaded = load(model)
    for rollout in range(sizes.rollouts):
        whole = random.integers(3, words, sizes.prompt + sizes.turns * added - sizes.observation).tolist()
        logprobs = logprobs_of(loaded, whole)
        for turn in range(sizes.turns):
            begin = sizes.prompt + turn * added
            end = begin + sizes.response
            rows.append(
                {
                    "RunId": "run", "Mode": "train", "GroupId": f"group-{rollout // 2}", "RolloutId": f"rollout-{rollout}", "Attempt": 0,
                    "Turn": turn, "CallId": f"{rollout}-{turn}", "TransitionId": f"{rollout}-{turn}", "Policy": "policy",
                    "TokenizerHash": "words", "Temperature": 1.0, "Reshaping": "", "Version": 0, "Versions.Start": [0],
                    "Versions.Version": [0], "PromptIds": whole[:begin], "ResponseIds": whole[begin:end], "Logprobs": logprobs[begin:end],
                }
            )  # fmt: skip
    return pl.DataFrame(rows)


def measure(model: Path, calls: Sequences, merged: Sequences, device_tokens: int, rounds: int) -> tuple[str, dict[str, Timed]]:
    """Take steps of each kind in turns, of which the first is not measured; return the device, and the steps by kind."""
    settings = TrainerSettings(model=model, max_tokens_per_device=device_tokens, optim=OptimSettings(learning_rate=LEARNING_RATE))
    plain = PlainLoop(model, calls, learning_rate=LEARNING_RATE, device_tokens=device_tokens, clip_grad=settings.optim.clip_grad)
    unmerged, as_merged = VerlOptimizer(model, settings), VerlOptimizer(model, settings)
    kinds: dict[str, Callable[[], dict[str, float]]] = {
        "plain": plain.step,
        "unmerged": partial(unmerged.step, layout(calls, lineage=[0])),
        "merged": partial(as_merged.step, layout(merged, lineage=[0])),
    }
    timed = {name: Timed() for name in kinds}
    for at in range(rounds + 1):
        for name, step in kinds.items():
            began = time.perf_counter()
            metrics = step()
            seconds = time.perf_counter() - began
            each = timed[name]
            if at:
                each.seconds.append(seconds)
            each.losses.append(metrics["loss"])
            each.norms.append(metrics["grad_norm"])
            if "mfu" in metrics:
                each.mfu.append(metrics["mfu"])
            print(f"step {at} {name}: {seconds:.2f} s", file=sys.stderr)
    return unmerged.device, timed


def different(peer: Timed, ours: Timed, relative: float) -> int:
    """Return the number of losses and gradients' norms of all steps that differ by more than a relative difference."""
    pairs = zip([*peer.losses, *peer.norms], [*ours.losses, *ours.norms], strict=True)
    return sum(not np.isclose(first, second, rtol=relative, atol=1e-6) for first, second in pairs)


if __name__ == "__main__":
    sys.exit(main())
