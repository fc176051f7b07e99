"""Report at the end of the demo: a table, a reward curve, three example queries, and `report.json` with the same numbers.

Invariant: every count is the result of a query on the span store, never a counter that the demo kept itself.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from spangrad.errors import SpangradError
from spangrad.settings import Settings
from spangrad.store.clickhouse import connect, store_errors

if TYPE_CHECKING:
    from clickhouse_connect.driver.client import Client

    from commands.demo.services import TrainingSupervisor

BUILD_TIMEOUT_SECONDS = 60

COUNTS = {
    "spans": "SELECT count() FROM spangrad.rollout_spans WHERE RowKind = 'span' AND RunId = {run:String}",
    "calls": "SELECT sum(Calls) FROM spangrad.rollouts WHERE RunId = {run:String}",
    "transitions": "SELECT count() FROM spangrad.transitions WHERE RunId = {run:String}",
    "rollouts": "SELECT count() FROM spangrad.attempts WHERE RunId = {run:String} AND Final",
    "policy_versions": "SELECT count() FROM spangrad.policy_versions WHERE RunId = {run:String} AND Status = 'committed'",
}
DROPS = "SELECT Reason, count() FROM spangrad.drops WHERE RunId = {run:String} AND CallId != '' GROUP BY Reason ORDER BY Reason"
UNBUILT = """
SELECT count() FROM spangrad.attempts
WHERE RunId = {run:String} AND Final AND RolloutId NOT IN (SELECT RolloutId FROM spangrad.builds WHERE RunId = {run:String})"""
STEP_METRICS = """
SELECT sum(Metrics['seconds_train']), sum(Metrics['seconds_checkpoint']) + sum(Metrics['seconds_publish']), max(Metrics['logprob_gap_max'])
FROM spangrad.policy_versions WHERE RunId = {run:String} AND Status = 'committed' AND BatchId != ''"""
STAGES = ("build", "idle", "load", "credit", "lease", "forward", "backward", "settle", "collect", "checkpoint", "publish")
"""Stages of a step that the picture shows, by their metrics' names without `seconds_`."""
STEP_SECONDS = f"""
SELECT Version, {", ".join(f"Seconds['seconds_{stage}']" for stage in STAGES)}
FROM spangrad.steps WHERE RunId = {{run:String}} ORDER BY Version"""
IDLE = """
SELECT sum(Seconds['seconds_idle']) / sum(Seconds['seconds_idle'] + Seconds['seconds_step']),
    avgOrNullIf(Metrics['engine_idle'], mapContains(Metrics, 'engine_idle'))
FROM spangrad.steps WHERE RunId = {run:String}"""
BUILD_SECONDS = """
SELECT sum(seconds) FROM (
    SELECT b.Version, (max(t.IngestedAt) - max(r.IngestedAt))::Float64 AS seconds
    FROM spangrad.batches AS b
    INNER JOIN spangrad.transitions AS t ON t.RolloutId = b.RolloutId AND t.Attempt = b.Attempt
    INNER JOIN spangrad.attempts AS r ON r.RolloutId = b.RolloutId AND r.Attempt = b.Attempt
    WHERE b.RunId = {run:String}
    GROUP BY b.Version)"""

QUESTIONS = {
    "which spans made the last policy version": (
        "SELECT Version, RolloutId, TraceId, SpanId FROM spangrad.lineage"
        " WHERE Version = (SELECT max(Version) FROM spangrad.policy_versions) LIMIT 10"
    ),
    "how the mean return rose, version by version": (
        "SELECT Version, round(avg(Return), 3) AS MeanReturn FROM"
        " (SELECT RolloutId, max(Version) AS Version, sum(arraySum(Rewards.Value)) AS Return FROM spangrad.transitions GROUP BY RolloutId)"
        " GROUP BY Version ORDER BY Version"
    ),
    "which tools failed, and how often": (
        "SELECT SpanName, StatusCode, count() AS Spans FROM spangrad.rollout_spans"
        " WHERE RowKind = 'span' AND Attributes['openinference.span.kind'] = 'TOOL' GROUP BY ALL ORDER BY SpanName, StatusCode"
    ),
}


@dataclass(frozen=True)
class DemoStep:
    """One batch: the rollouts that one version sampled, up to the version that was trained on them."""

    number: int
    version: int
    """Policy version that sampled the batch."""
    success: float
    """Share of rollouts whose final reward is 1, from 0 to 1."""
    mean_reward: float
    rollouts: int
    calls: int | None
    """Number of model calls that the gateway counted. None: the calls did not go through the gateway."""
    seconds_rollout: float
    seconds_until_served: float
    """Seconds from the end of the last rollout until the gateway served the new version: build, train, reload."""

    def line(self, clock: str) -> str:
        """Return one line of text about the step; `clock` is the time at its beginning."""
        calls = "" if self.calls is None else f"  calls {self.calls}"
        return (
            f"{clock} step {self.number:3d}  success {self.success:.2f}  reward {self.mean_reward:+.2f}  rollouts {self.rollouts}"
            f"{calls}  rollout {self.seconds_rollout:.1f} s  build, train, reload {self.seconds_until_served:.1f} s"
        )


def conclude(
    directory: Path,
    settings: Settings,
    services: TrainingSupervisor,
    steps: Sequence[DemoStep],
    held_out: float,
    seed: int,
    started: float,
    console: Console,
) -> None:
    """Wait until every rollout is built, then write the report and the curve and show both."""
    client = connect(settings.store)
    _wait_until_built(client, settings, services)
    services.stop("train")
    report = measure(client, settings, steps, held_out, seed)
    report["seconds"]["total"] = round(time.monotonic() - started, 1)
    (directory / "report.json").write_text(json.dumps(report, indent=2) + "\n")
    plot(directory / "curve.png", steps, held_out, report["stages"])
    console.print()
    console.print(table(report))
    console.print(f"\nreport  {directory / 'report.json'}\ncurve   {directory / 'curve.png'}\n\nQuestions to ask, now or later:")
    for title, query in QUESTIONS.items():
        console.print(f'\n  # {title}\n  .venv/bin/spangrad sql --config {directory / "spangrad.toml"} "{query}"', soft_wrap=True)


def measure(client: Client, settings: Settings, steps: Sequence[DemoStep], held_out: float, seed: int) -> dict[str, Any]:
    """Return the numbers of the report, queried from the span store."""

    def ask(query: str) -> Sequence[Sequence[Any]]:
        with store_errors(client):
            return client.query(query, parameters={"run": settings.runner.run_id}).result_rows

    seconds_train, seconds_reload, gap = ask(STEP_METRICS)[0]
    trainer_idle, engine_idle = ask(IDLE)[0]
    drops = {str(reason): int(count) for reason, count in ask(DROPS)}
    return {
        "seed": seed,
        "success_first": round(steps[0].success, 4),
        "success_last": round(held_out, 4),
        "steps": len(steps),
        **{name: int(ask(query)[0][0]) for name, query in COUNTS.items()},
        "drops": drops,
        "dropped_calls": sum(drops.values()),
        "max_logprob_gap": float(gap),
        "idle": {"trainer": round(float(trainer_idle), 3), "engine": None if engine_idle is None else round(float(engine_idle), 3)},
        "seconds": {
            "rollout": round(sum(step.seconds_rollout for step in steps), 1),
            "build": round(float(ask(BUILD_SECONDS)[0][0]), 1),
            "train": round(float(seconds_train), 1),
            "reload": round(float(seconds_reload), 1),
        },
        "curve": [asdict(step) for step in steps],
        "stages": ask(STEP_SECONDS),
    }


def table(report: dict[str, Any]) -> Table:
    """Return the report as a table for a terminal."""
    out = Table("what", "value", title="The demo in figures", title_justify="left")
    out.add_row("success, first batch", f"{report['success_first']:.2f}")
    out.add_row("success, last version, held-out rollouts", f"{report['success_last']:.2f}")
    for name in ("steps", "rollouts", "spans", "calls", "transitions", "policy_versions"):
        out.add_row(name.replace("_", " "), f"{report[name]:,}")
    for reason, count in report["drops"].items() or {"none": 0}.items():
        out.add_row(f"drops: {reason}", f"{count:,}")
    out.add_row("largest |rollout logprob - trainer logprob|", f"{report['max_logprob_gap']:.1e}")
    for name, share in report["idle"].items():
        out.add_row(f"idle share: {name}", "not counted" if share is None else f"{share:.0%}")
    for name, seconds in report["seconds"].items():
        out.add_row(f"seconds: {name}", f"{seconds:,.1f}")
    return out


def plot(path: Path, steps: Sequence[DemoStep], held_out: float, stages: Sequence[Sequence[float]]) -> None:
    """Plot success rate and mean reward by step, below them the seconds of each step by stage, and save the image.

    `held_out` is the success rate of the last version on held-out rollouts. Of each version, `stages` has its number and the seconds of
    each of STAGES.
    """
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot as plt

    numbers = [step.number for step in steps]
    figure, (axes, times) = plt.subplots(2, figsize=(8, 7), layout="constrained", height_ratios=(3, 2), sharex=True)
    axes.plot(numbers, [step.success for step in steps], color="#1f6feb", label="success rate")
    axes.plot(numbers, [step.mean_reward for step in steps], color="#8b949e", linewidth=1, label="mean final reward")
    axes.axhline(held_out, color="#2da44e", linestyle="--", linewidth=1, label=f"last version, held-out rollouts: {held_out:.2f}")
    versions, *columns = zip(*stages, strict=True) if stages else ((),)
    bottom = [0.0] * len(versions)
    for stage, seconds in zip(STAGES, columns, strict=False):
        times.bar([version - 1 for version in versions], seconds, bottom=bottom, label=stage, width=0.8)
        bottom = [below + each for below, each in zip(bottom, seconds, strict=True)]
    times.set(xlabel="training step", ylabel="seconds by stage")
    times.legend(ncols=4, fontsize="small")
    axes.set(ylim=(min(-1.0, *(step.mean_reward for step in steps)), 1.05), title="From spans to gradients")
    axes.grid(alpha=0.25)
    axes.legend(loc="lower right")
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _wait_until_built(client: Client, settings: Settings, services: TrainingSupervisor) -> None:
    """Wait until every rollout of the run is built, held-out ones included, so that every call is accounted for."""
    end = time.monotonic() + BUILD_TIMEOUT_SECONDS
    while True:
        with store_errors(client):
            missing = client.query(UNBUILT, parameters={"run": settings.runner.run_id}).result_rows[0][0]
        if not missing:
            return
        services.check()
        if time.monotonic() > end:
            raise SpangradError(
                f"rollouts not built after {BUILD_TIMEOUT_SECONDS} s: {missing}. Look into {services.directory}/logs/build.log."
            )
        time.sleep(0.2)
