"""Benchmark of credit assignment: two small tasks, learned through our own store, builder, credit and trainer.

In: tasks, arms, seeds, how many steps. Out: a table, a picture, a line a run in a file, and as the last line one JSON object; exit code 1
when a check fails. `ours` is the credit that docs/concepts/credit.md advises: on `flow` (one reward at the end) a rule that pays for tools
that went well, and reward-to-go; on `inbox` (a reward for each call) each call's own. The peer is identical credit for all calls of a
rollout.

Three more arms, of one seed each, show what goes wrong: `gamed` pays for any tool where one only reads, and must raise the alarm; `named`
pays, in the same task, for the tools that advance; `retokenized` trains on ids that were made from text again, and must be refused.

Invariant: a run that the file has is not run again, so that a killed benchmark goes on; several processes may share the file.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import mean, median
from typing import TYPE_CHECKING, Any

from benchmarks.scratch import exit_code, scratch

if TYPE_CHECKING:
    from benchmarks.credit_run import Arm, Result

STEPS = 60
LEARNED = 0.95
"""Success, of fresh rollouts, that ours must end at in every seed."""
CONTRAST_STEP, CONTRAST = 40, 0.2
"""Step, and least difference of mean success over seeds from the peer's at this step, on flow."""
HIT, SPEED = 0.8, 2 / 3
"""Success to reach on inbox, and largest share of the peer's median number of steps in which ours must reach it."""
ARMS = ("air", "own", "identical", "gamed", "named", "retokenized")
OF_ONE_SEED = ("gamed", "named", "retokenized")
OURS = {"flow": "air", "inbox": "own"}
RUNS, PICTURE = "runs.jsonl", "credit.png"

Runs = Mapping[tuple[str, str], Sequence["Result"]]
"""Results by task and arm, ordered by seed."""


def main() -> int:
    """Run what was requested and is not in the file yet; report all of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", choices=OURS, default=list(OURS))
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--seeds", nargs="+", type=int, default=list(range(5)), help="0 to 4 otherwise")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--group", type=int, help="rollouts that share a baseline; 64 on flow and 16 on inbox otherwise")
    parser.add_argument("--out", type=Path, default=Path("runs/credit"), help=f"directory of {RUNS} and {PICTURE}")
    arguments = parser.parse_args()

    from benchmarks.credit_plot import draw

    asked = [
        (arm, seed)
        for arm in arms(arguments.group)
        if arm.task.name in arguments.tasks and arm.name in arguments.arms
        for seed in (arguments.seeds[:1] if arm.name in OF_ONE_SEED else arguments.seeds)
    ]
    results = list(_results(asked, arguments.steps, arguments.out / RUNS))
    draw(arguments.out / PICTURE, results)
    summary = conclude(results, whole=arguments.steps >= STEPS and arguments.group is None)
    _print_table(results)
    print(f"picture: {arguments.out / PICTURE}")
    print(json.dumps(summary))
    return exit_code(summary["checked"])


def arms(group: int | None = None) -> list[Arm]:
    """Return all arms, with `group` rollouts a group in place of the task's own number."""
    from benchmarks.credit_run import Arm
    from benchmarks.credit_tasks import TOOLS, Flow, Inbox
    from spangrad.settings import AirRule

    changed = {} if group is None else {"group": group}
    flow, inbox, look = Flow(**changed), Inbox(**changed), Flow(look=True, **changed)
    named, any_tool = (AirRule(name="progress", kind="tool_ok", reward=0.1, tools=tools) for tools in (TOOLS, ("*",)))
    return [
        Arm("air", flow, "reward_to_go", "turn", (named,)),
        Arm("identical", flow),
        Arm("own", inbox, "own", "turn"),
        Arm("identical", inbox),
        Arm("gamed", look, "reward_to_go", "turn", (any_tool,)),
        Arm("named", look, "reward_to_go", "turn", (named,)),
        Arm("retokenized", Flow(respelled=True, **changed), retokenized=True),
    ]


def _results(asked: Iterable[tuple[Arm, int]], steps: int, file: Path) -> Iterable[Result]:
    """Yield each run's result: from the file, or from a new run, which is added to the file."""
    from benchmarks.credit_run import Result, run

    file.parent.mkdir(parents=True, exist_ok=True)
    file.touch()
    for arm, seed in asked:
        # Read anew each time: another process may have run it meanwhile.
        there = [Result(**json.loads(line)) for line in file.read_text().splitlines()]
        known = {(result.task, result.arm, result.seed, result.group, result.steps): result for result in there}
        result = known.get((arm.task.name, arm.name, seed, arm.task.group, steps))
        if result is None:
            with scratch("credit") as directory:
                result = run(arm, seed, steps, directory, _progress)
            with file.open("a") as out:
                print(json.dumps(result.json()), file=out)
            _print_progress(result, f"final {result.final:.3f}" if not result.refused else result.refused)
        yield result


def _progress(result: Result) -> None:
    if len(result.success) % 10 == 0:
        _print_progress(
            result, f"step {len(result.success)}: success {mean(result.success[-10:]):.2f}, return {mean(result.mean_return[-10:]):.2f}"
        )


def _print_progress(result: Result, what: str) -> None:
    print(f"{result.task} {result.arm} seed {result.seed}: {what}", file=sys.stderr, flush=True)


def steps_to(success: Sequence[float], least: float = HIT) -> int | None:
    """Return the first step at which the mean success over three steps is at least `least`. None: no step."""
    return next((step for step in range(2, len(success)) if mean(success[step - 2 : step + 1]) >= least), None)


def conclude(results: Sequence[Result], *, whole: bool) -> dict[str, Any]:
    """Return the JSON object of the last line.

    Args:
        results: results of all runs.
        whole: True if the runs are as long and as large as those that the claims are about.
    """
    runs: dict[tuple[str, str], list[Result]] = {}
    for result in sorted(results, key=lambda result: result.seed):
        runs.setdefault((result.task, result.arm), []).append(result)
    ours, peer = ({task: _figures(runs.get((task, name or ours), [])) for task, ours in OURS.items()} for name in ("", "identical"))
    return {
        "benchmark": "credit",
        "ours": ours,
        "peer": peer,
        "ratio": _ratios(ours, peer),
        "others": {
            arm: _figures(of_arm) | {"alarms": of_arm[0].alarms, "refused": bool(of_arm[0].refused)}
            for (_, arm), of_arm in runs.items()
            if arm in OF_ONE_SEED
        },
        "checked": _checked(results, runs) | (_claims(ours, peer, runs) if whole else {}),
    }


def _figures(results: Sequence[Result]) -> dict[str, Any]:
    """Return the figures of one arm over its seeds; empty if it was not run."""
    if not results:
        return {}
    hits = [steps_to(result.success) for result in results]
    at = [result.success[CONTRAST_STEP] for result in results if len(result.success) > CONTRAST_STEP]
    return {
        "final": [round(result.final, 3) for result in results],
        "final_mean": round(mean(result.final for result in results), 3),
        f"at_{CONTRAST_STEP}": [round(success, 3) for success in at],
        f"at_{CONTRAST_STEP}_mean": round(mean(at), 3) if at else None,
        "steps_to_hit": hits,
        "steps_to_hit_median": median(result.steps if hit is None else hit for result, hit in zip(results, hits, strict=True)),
        "gap": max(result.gap for result in results),
        "seconds_a_step": round(
            sum(sum(result.seconds.values()) for result in results) / max(sum(len(result.success) for result in results), 1), 2
        ),
    }


def _ratios(ours: Mapping[str, dict[str, Any]], peer: Mapping[str, dict[str, Any]]) -> dict[str, float]:
    ratios: dict[str, float] = {}
    for task in OURS:
        for name in ("final_mean", f"at_{CONTRAST_STEP}_mean", "steps_to_hit_median"):
            own, peer_value = ours[task].get(name), peer[task].get(name)
            if own and peer_value:
                ratios[f"{task}_{name}"] = round(peer_value / own if name.startswith("steps") else own / peer_value, 2)
    return ratios


def _checked(results: Sequence[Result], runs: Runs) -> dict[str, int]:
    """Return counts that must be 0 in any run."""
    trained = [result for result in results if not result.refused]
    return {
        "untrained": sum(abs(result.sampled - result.trained) for result in trained),
        "unaccounted": sum(result.unaccounted for result in results),
        "drops": sum(result.drops for result in results),
        "false_alarms": sum(len(result.alarms) for result in results if result.arm != "gamed"),
        "false_refusals": sum(bool(result.refused) for result in results if result.arm != "retokenized"),
        "unseen_retokenized": sum(not result.refused for result in runs.get(("flow", "retokenized"), [])),
    }


def _claims(ours: Mapping[str, dict[str, Any]], peer: Mapping[str, dict[str, Any]], runs: Runs) -> dict[str, int]:
    """Return the claims on whole runs that do not hold: counts of seeds, or 1."""
    failures = {f"{task}_not_learned": sum(final < LEARNED for final in ours[task].get("final", [])) for task in OURS}
    failures["unseen_gaming"] = sum(not result.alarms for result in runs.get(("flow", "gamed"), []))
    at, hit = f"at_{CONTRAST_STEP}_mean", "steps_to_hit_median"
    if ours["flow"] and peer["flow"]:
        failures["flow_no_contrast"] = int(ours["flow"][at] - peer["flow"][at] < CONTRAST)
    if ours["inbox"] and peer["inbox"]:
        failures["inbox_not_faster"] = int(ours["inbox"][hit] > SPEED * peer["inbox"][hit])
    return failures


def _print_table(results: Sequence[Result]) -> None:
    heads = ("final", f"at {CONTRAST_STEP}", f"to {HIT}", "return", "alarm", "gap", "s/step")
    print(f"{'task':8}{'arm':14}{'seed':>5}" + "".join(f"{head:>10}" for head in heads))
    for result in results:
        hit = steps_to(result.success)
        cells = [
            "refused" if result.refused else f"{result.final:.3f}",
            f"{result.success[CONTRAST_STEP]:.3f}" if len(result.success) > CONTRAST_STEP else "",
            "" if hit is None else str(hit),
            f"{result.mean_return[-1]:.3f}" if result.mean_return else "",
            str(result.alarms[0]) if result.alarms else "",
            f"{result.gap:.0e}",
            f"{sum(result.seconds.values()) / len(result.success):.2f}",
        ]
        print(f"{result.task:8}{result.arm:14}{result.seed:5}" + "".join(f"{cell:>10}" for cell in cells))


if __name__ == "__main__":
    sys.exit(main())
