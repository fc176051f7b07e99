"""The inbox of the credit benchmark in plain PyTorch: the same models, tickets and samples, and a step from the textbook.

In: an arm's credit, seeds, how many kinds of tickets. Out: a line a seed, and as the last line one JSON object. Invariant: no store, no
builder, no trainer and no verl, so that a run takes seconds. Seed by seed it follows the benchmark's own run to within rounding, as a test
checks: so it shows how often a seed falls short without hours of machine time.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, median

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.credit import LEARNED, STEPS, steps_to
from benchmarks.credit_run import FRESH_ROLLOUTS, GROUPS, Result, success
from benchmarks.credit_sampling import REPLY_TOKENS, Sampled, Sampler, write_model
from benchmarks.credit_tasks import KINDS, Inbox
from benchmarks.scratch import scratch

CREDITS = ("own", "identical")


def main() -> None:
    """Run the seeds one after the other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--credits", nargs="+", choices=CREDITS, default=list(CREDITS))
    parser.add_argument("--seeds", nargs="+", type=int, default=list(range(25)), help="0 to 24 otherwise")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--kinds", type=int, default=len(KINDS), help="of tickets")
    parser.add_argument("--entropy", type=float, default=Inbox.entropy, help="bonus; that of the benchmark otherwise")
    arguments = parser.parse_args()
    summary: dict[str, object] = {"benchmark": "credit_plain", "kinds": arguments.kinds, "entropy": arguments.entropy}
    for credit in arguments.credits:
        results: list[Result] = []
        for seed in arguments.seeds:
            with scratch("credit-plain") as directory:
                results.append(run(Inbox(kinds=arguments.kinds, entropy=arguments.entropy), credit, seed, arguments.steps, directory))
            print(f"{credit:12}seed {seed:3}  final {results[-1].final:.3f}  to 0.8: {steps_to(results[-1].success)}", flush=True)
        hits = [steps_to(result.success) for result in results]
        summary[credit] = {
            "seeds": len(results),
            "learned": sum(result.final >= LEARNED for result in results),
            "final": [round(result.final, 3) for result in results],
            "final_mean": round(mean(result.final for result in results), 3),
            "steps_to_hit": hits,
            "steps_to_hit_median": median(arguments.steps if hit is None else hit for hit in hits),
        }
    print(json.dumps(summary))


def run(task: Inbox, credit: str, seed: int, steps: int, directory: Path) -> Result:
    """Train like `credit_run.run`, with GRPO's advantages and PPO's loss written out."""
    write_model(directory / "model", task, seed)
    result = Result(task.name, credit, seed, task.group, steps)
    sampler, rng = Sampler(directory / "model", seed + 77), random.Random(seed + 1000)
    model = sampler.model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.0)
    for _ in range(steps):
        rollouts = sampler.rollouts(task, task.goals(rng, GROUPS))
        result.success.append(success(task, rollouts))
        calls = [call for rollout in rollouts for call in rollout.calls]
        # Calls that are alike are computed once: the same loss and gradient.
        different, place = torch.tensor([call.prompt + call.reply for call in calls]).unique(dim=0, return_inverse=True)
        logits = model(different[:, :-1]).logits[:, -REPLY_TOKENS:].log_softmax(-1)
        logprobs = logits.gather(2, different[:, -REPLY_TOKENS:, None])[..., 0][place]
        ratio = (logprobs - torch.tensor([call.logprobs for call in calls])).exp()
        advantage = torch.from_numpy(_advantages(rollouts, credit)).float()[:, None]
        entropy = -(logits.exp() * logits).sum(-1)[place]
        loss = -(torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage) + task.entropy * entropy).mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    goals = task.goals(random.Random(seed + 5), FRESH_ROLLOUTS // task.group)
    result.final = success(task, sampler.rollouts(task, goals))
    return result


def _advantages(rollouts: Sequence[Sampled], credit: str) -> NDArray[np.float64]:
    """Return the advantage of each call: of its grade among its group's calls at the same turn, or of its rollout's sum of grades."""
    if credit == "own":
        graded = [(call.turn.grade or 0.0, (rollout.group, turn)) for rollout in rollouts for turn, call in enumerate(rollout.calls)]
        return _among([value for value, _ in graded], [place for _, place in graded])
    sums = _among([sum(call.turn.grade or 0.0 for call in rollout.calls) for rollout in rollouts], [rollout.group for rollout in rollouts])
    return np.repeat(sums, [len(rollout.calls) for rollout in rollouts])


def _among(values: Sequence[float], places: Sequence[object]) -> NDArray[np.float64]:
    """Return each value's distance from the mean of its place, in standard deviations; 0 for the only value of a place."""
    given, result = np.asarray(values), np.zeros(len(values))
    by_place: dict[object, list[int]] = {}
    for index, place in enumerate(places):
        by_place.setdefault(place, []).append(index)
    for indexes in by_place.values():
        if len(indexes) > 1:
            result[indexes] = (given[indexes] - given[indexes].mean()) / (given[indexes].std(ddof=1) + 1e-6)
    return result


if __name__ == "__main__":
    main()
