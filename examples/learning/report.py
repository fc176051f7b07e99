"""The picture of a run, and where its time went.

In: success by step, held-out success before and after; the span store. Out: a PNG, seconds. Invariant: the seconds of building, training
and publishing are what the store says of the committed versions, not what the loop felt.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from commands.demo.report import BUILD_SECONDS, STEP_METRICS
from examples.learning.example import Example
from spangrad.settings import Settings
from spangrad.store.clickhouse import connect, store_errors


def seconds_by_part(settings: Settings) -> dict[str, float]:
    """Seconds of the whole run in the builder, in training, in checkpoints and publication; and the largest logprob gap (nats)."""
    client = connect(settings.store)
    with store_errors(client):
        run = {"run": settings.runner.run_id}
        train, publish, gap = client.query(STEP_METRICS, parameters=run).result_rows[0]
        build = client.query(BUILD_SECONDS, parameters=run).result_rows[0][0]
    return {
        "seconds_build": round(float(build), 1),
        "seconds_train": round(float(train), 1),
        "seconds_publish": round(float(publish), 1),
        "max_logprob_gap": float(gap),
    }


def draw(path: Path, example: Example, success: Sequence[float], before: float, after: float) -> None:
    """Draw success of the training batches by step, and held-out success at both ends."""
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    axes.plot(range(len(success)), success, color="#8b949e", linewidth=1, label="training questions, each step's own")
    axes.plot([0, len(success)], [before, after], "o", color="#1f6feb", label=f"held-out questions: {before:.2f} to {after:.2f}")
    axes.axhline(example.target, color="#2da44e", linestyle="--", linewidth=1, label=f"target {example.target:.2f}")
    axes.set(xlabel="training step", ylabel=example.measure, ylim=(0, 1.02), title=example.name.replace("_", " "))
    axes.grid(alpha=0.25)
    axes.legend(loc="lower right")
    figure.savefig(path, dpi=150)
    plt.close(figure)
