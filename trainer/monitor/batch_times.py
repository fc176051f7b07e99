"""Times of a batch's rollouts before they reached the trainer: how long they took, and how long the builder took after their last span.

In: the rollouts of a step, the span store. Out: metrics of the step. Invariant: each duration is measured by one clock, that of the agent's
host or the store's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

from spangrad.store.clickhouse import batches, constant, store_errors
from trainer.data.source import BatchRollout

if TYPE_CHECKING:
    from clickhouse_connect.driver.client import Client

BatchTimes = Callable[[Sequence[BatchRollout]], Mapping[str, float]]
"""Function that returns metrics of a step's rollouts."""

_BUILDS = """
SELECT b.Seconds, toFloat64(b.IngestedAt) - toFloat64(b.Watermark)
FROM spangrad_internal.builds AS b
WHERE b.RunId = %(run)s AND b.BuildSpec = %(spec)s AND b.RolloutId IN {rollouts} AND b.Revision = 0
LIMIT 1 BY b.RolloutId
"""


def batch_times(client: Client, rollouts: Sequence[BatchRollout]) -> dict[str, float]:
    """Return metrics: seconds_rollout (mean duration of the rollouts) and seconds_build (median time from the last span to the build).

    Rollouts that were built again later count by their first build. Empty where none is known.

    Raises:
        StoreError: the store failed.
    """
    rows: list[Any] = []
    for run, spec in {(rollout.group.run_id, rollout.group.build_spec) for rollout in rollouts}:
        for keys in batches(rollout.rollout_id for rollout in rollouts if (rollout.group.run_id, rollout.group.build_spec) == (run, spec)):
            with store_errors(client):
                rows += client.query(_BUILDS.format(rollouts=constant(keys)), parameters={"run": run, "spec": spec}).result_rows
    if not rows:
        return {}
    seconds, waits = ([float(value) for value in column] for column in zip(*rows, strict=True))
    return {"seconds_rollout": fmean(seconds), "seconds_build": max(median(waits), 0.0)}
