"""`python -m examples`: every example with several seeds, one after the other, and a picture of each in docs/.

In: names and seeds. Out: a directory a run under runs/examples, docs/images/example_NAME.png with a line a seed, a table on standard
output. Invariant: pictures and table show every run that lies there, those of earlier commands too, and each run is the
example's own command.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

CHECKOUT = Path(__file__).resolve().parents[1]
RUNS = CHECKOUT / "runs" / "examples"
PICTURES = CHECKOUT / "docs" / "images"
VARIANTS = {
    "calculator": ("calculator",),
    "from_scratch": ("from_scratch",),
    "gomoku": ("gomoku",),
    "league": ("league",),
    "math_lora": ("math_lora",),
    "maze": ("maze",),
    "two_gomoku": ("two_gomoku",),
    "code_repair": ("code_repair",),
    "retrieval_qa": ("retrieval_qa",),
    "text_to_sql": ("text_to_sql",),
    "text_to_sql_oracle": ("text_to_sql", "--checker", "oracle"),
}
"""Name of a picture -> the example's module, and its options."""


def main() -> None:
    """Run what was asked for, then draw and tell what there is."""
    parser = argparse.ArgumentParser(prog="python -m examples", description="Run the examples and draw their curves.")
    parser.add_argument("names", nargs="*", help=f"which (default all): {', '.join(VARIANTS)}")
    parser.add_argument("--seeds", type=int, nargs="*", default=[1, 2, 3])
    arguments = parser.parse_args()
    if unknown := sorted(set(arguments.names) - set(VARIANTS)):
        parser.error(f"no example is called {', '.join(unknown)}: there are {', '.join(VARIANTS)}")
    asked = [(name, seed) for name in arguments.names or VARIANTS for seed in arguments.seeds]
    failed = [f"{name} {seed}" for name, seed in asked if not _ran(name, seed, RUNS / f"{name}-{seed}")]
    for name in VARIANTS:
        _show(name, sorted(RUNS.glob(f"{name}-[0-9]*/report.json")))
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


def _ran(name: str, seed: int, directory: Path) -> bool:
    module, *options = VARIANTS[name]
    command = [sys.executable, "-m", f"examples.{module}", *options, "--seed", str(seed), "--directory", str(directory)]
    return subprocess.run(command, cwd=CHECKOUT, check=False).returncode == 0


def _show(name: str, reports: Sequence[Path]) -> None:
    """Draw the runs of one picture, and print a row of the table each."""
    runs: list[dict[str, Any]] = [json.loads(report.read_text()) for report in reports]
    if not runs:
        return
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    for number, (report, run) in enumerate(zip(reports, runs, strict=True)):
        steps = [json.loads(line) for line in report.with_name("steps.jsonl").read_text().splitlines()]
        by_role: dict[str, list[tuple[int, float]]] = run.get("held_out") or {"": [(0, run["before"]), (len(steps), run["after"])]}
        for (role, points), marker in zip(by_role.items(), ("o", "s"), strict=False):
            before, after = points[0][1], points[-1][1]
            of_role = f"seed {run['seed']} {role}".rstrip()
            label = f"{of_role}: held out {before:.2f} to {after:.2f}"
            (line,) = axes.plot(*zip(*points, strict=True), marker, color=f"C{number}", label=label)
            if role:
                line.set_linestyle("-" if marker == "o" else "--")
            print(f"| {name} {role} | {run['seed']} | {before:.2f} | {after:.2f} | {run['steps']} | {run['seconds']:.0f} |")
        if "" in by_role:
            axes.plot([step["number"] for step in steps], [step["success"] for step in steps], color=f"C{number}", linewidth=1, alpha=0.6)
    axes.axhline(runs[0]["target"], color="black", linestyle="--", linewidth=1, label=f"target {runs[0]['target']:.2f}")
    axes.set(xlabel="training step", ylabel=runs[0].get("measure", "answered right"), ylim=(0, 1.02), title=name.replace("_", " "))
    axes.grid(alpha=0.25)
    axes.legend(loc="lower right")
    PICTURES.mkdir(parents=True, exist_ok=True)
    figure.savefig(PICTURES / f"example_{name}.png", dpi=110)
    plt.close(figure)


if __name__ == "__main__":
    main()
