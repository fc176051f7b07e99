"""Plot of success by step in the runs of the credit benchmark.

In: results. Out: a PNG, a panel each task and one for the reward that was gamed. Invariant: a line is the mean over seeds, and its shade
reaches from the least to the greatest.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks.credit_run import Result
from benchmarks.plots import shaded

GAMED = "gamed"
_WITH_LOOK = (GAMED, "named")
"""Arms of the task with a tool that only reads."""
_TITLES = {
    "flow": "flow: one reward at the end, tool calls seen",
    "inbox": "inbox: a reward for each call",
    GAMED: "flow with a tool that only reads, rule for any tool",
}


def draw(path: Path, results: Sequence[Result]) -> None:
    """Plot the success of all results, and save the picture."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    panels: dict[str, dict[str, list[Result]]] = {}
    for result in results:
        if result.success and not result.refused:
            panels.setdefault(GAMED if result.arm in _WITH_LOOK else result.task, {}).setdefault(result.arm, []).append(result)
    figure, all_axes = plt.subplots(1, max(len(panels), 1), figsize=(6 * max(len(panels), 1), 4.2), layout="constrained", squeeze=False)
    for axes, (panel, arms) in zip(all_axes[0], panels.items(), strict=False):
        for arm, runs in arms.items():
            shaded(axes, [result.success for result in runs], f"{arm}, {len(runs)} seed{'s' if len(runs) > 1 else ''}")
            if arm == GAMED:
                shaded(axes, [result.mean_return for result in runs], f"{arm}: mean return")
                for result in runs:
                    axes.axvline(result.alarms[0], color="black", linestyle="--", label="alarm") if result.alarms else None
        axes.set(title=_TITLES[panel], xlabel="step", ylabel="success of the batch", ylim=(-0.02, 1.02))
        axes.grid(alpha=0.3)
        axes.legend(loc="best")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)
