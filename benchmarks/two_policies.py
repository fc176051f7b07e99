"""Two agents of one rollout, trained as two policies from the same spans.

In: seeds, how many steps. Out: a table, a picture, a line a run in a file, and as the last line one JSON object; exit code 1 when a check
fails. A planner and a writer work off tickets together (`two_policies_task`); each has a model, a trainer, a selection and versions of its
own. The trainers do not know of each other: both read the rollouts that one builder made of one stream of spans.

Invariant: a run that the file has is not run again, so that a killed benchmark goes on; several processes may share the file.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Any

from benchmarks.scratch import exit_code, scratch

if TYPE_CHECKING:
    from benchmarks.two_policies_run import Result

STEPS, SEEDS = 60, (0, 1, 2)
UNTAUGHT, LEARNED = 0.45, 0.85
"""Success of fresh rollouts: at most this before the first step, at least that after the last; of each agent, and of both together."""
RUNS, PICTURE = "runs.jsonl", "two_policies.png"


def main() -> int:
    """Run what was requested and is not in the file yet; report all of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", nargs="+", type=int, default=list(SEEDS), help="0 to 2 otherwise")
    parser.add_argument("--steps", type=int, default=STEPS, help="of each policy")
    parser.add_argument("--group", type=int, default=16, help="rollouts that share a baseline")
    parser.add_argument("--out", type=Path, default=Path("runs/two_policies"), help=f"directory of {RUNS} and {PICTURE}")
    arguments = parser.parse_args()

    results = list(_results(arguments.seeds, arguments.steps, arguments.group, arguments.out / RUNS))
    draw(arguments.out / PICTURE, results)
    summary = conclude(results, whole=arguments.steps >= STEPS)
    _print_table(results)
    print(f"picture: {arguments.out / PICTURE}")
    print(json.dumps(summary))
    return exit_code(summary["checked"])


def _results(seeds: Iterable[int], steps: int, group: int, file: Path) -> Iterable[Result]:
    """Yield each run's result: from the file, or from a new run, which is added to the file."""
    from benchmarks.two_policies_run import Result, run
    from benchmarks.two_policies_task import Desk

    file.parent.mkdir(parents=True, exist_ok=True)
    file.touch()
    for seed in seeds:
        # Read anew each time: another process may have run it meanwhile.
        there = [Result(**json.loads(line)) for line in file.read_text().splitlines()]
        result = next((one for one in there if (one.seed, one.group, one.steps) == (seed, group, steps)), None)
        if result is None:
            with scratch("two-policies") as directory:
                result = run(Desk(group=group), seed, steps, directory, _progress)
            with file.open("a") as out:
                print(json.dumps(result.json()), file=out)
        yield result


def _progress(result: Result) -> None:
    done = len(next(iter(result.success.values())))
    if done % 10 == 0:
        shares = ", ".join(f"{name} {mean(course[-10:]):.2f}" for name, course in result.success.items())
        print(f"seed {result.seed}, step {done}: {shares}", file=sys.stderr, flush=True)


def conclude(results: Sequence[Result], *, whole: bool) -> dict[str, Any]:
    """Return the JSON object of the last line.

    Args:
        results: results of all runs.
        whole: True if the runs are as long as those that the claims are about.
    """
    names = list(results[0].success)
    before = {name: [round(one.begun[name], 3) for one in results] for name in names}
    after = {name: [round(one.final[name], 3) for one in results] for name in names}
    checked = {name: sum(one.checked[name] for one in results) for name in results[0].checked}
    if whole:
        checked |= {f"{name}_taught": sum(share > UNTAUGHT for share in before[name]) for name in names}
        checked |= {f"{name}_not_learned": sum(share < LEARNED for share in after[name]) for name in names}
    steps = max(sum(len(one.success[names[0]]) for one in results), 1)
    return {
        "benchmark": "two_policies",
        "ours": {
            "final": after,
            "lineage": [one.lineage for one in results],
            "gap": max(one.gap for one in results),
            "seconds_a_step": round(sum(sum(one.seconds.values()) for one in results) / steps, 2),
        },
        "peer": {"final": before},
        "ratio": {name: round(mean(after[name]) / max(mean(before[name]), 1e-9), 2) for name in names},
        "checked": checked,
    }


def draw(path: Path, results: Sequence[Result]) -> None:
    """Plot success by step: a line is the mean over seeds, its shade reaches from the least to the greatest."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    from benchmarks.plots import shaded

    figure, axes = plt.subplots(figsize=(7, 4.2), layout="constrained")
    for name in results[0].success:
        shaded(axes, [one.success[name] for one in results], name)
    title = f"two agents of one rollout, two policies ({len(results)} seed{'s' if len(results) > 1 else ''})"
    axes.set(title=title, xlabel="step", ylabel="success of the batch", ylim=(-0.02, 1.02))
    axes.grid(alpha=0.3)
    axes.legend(loc="best")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _print_table(results: Sequence[Result]) -> None:
    names = list(results[0].success)
    print(f"{'seed':>4}" + "".join(f"{name:>18}" for name in names) + f"{'rollouts':>10}{'calls':>16}{'spans':>8}{'gap':>8}{'s/step':>8}")
    for result in results:
        led = result.lineage.values()
        shares = "".join(f"{f'{result.begun[name]:.3f} -> {result.final[name]:.3f}':>18}" for name in names)
        counts = (" ".join(str(of["rollouts"]) for of in led), " ".join(str(of["calls"]) for of in led), max(of["spans"] for of in led))
        pace = sum(result.seconds.values()) / max(len(result.success[names[0]]), 1)
        print(f"{result.seed:>4}{shares}{counts[0]:>10}{counts[1]:>16}{counts[2]:>8}{result.gap:>8.0e}{pace:>8.2f}")


if __name__ == "__main__":
    sys.exit(main())
