"""Spans of the trainer itself: one per training step, with its stages as children and links to the rollouts that it consumed.

In: steps. Out: spans of service `spangrad-trainer` and scope `spangrad.trainer`, to store.otlp_endpoint. Invariant: they name no rollout
and call no model, so that the builder does not take them for an agent's; their times are those at which the stages began and ended.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Link, SpanContext, TraceFlags

from span_processors.export import tracer_provider
from spangrad import semconv
from spangrad.http.service import bearer
from spangrad.store.clickhouse import LONG, batches, constant, store_errors
from trainer.monitor.watching import Watcher

if TYPE_CHECKING:
    from collections.abc import Sequence

    from clickhouse_connect.driver.client import Client

    from spangrad.settings import Settings
    from trainer.data.source import BatchRollout
    from trainer.monitor.watching import CommittedStep

SERVICE = "spangrad-trainer"
STEP_SPAN_NAME = "train step"

_ROOTS = """
SELECT RolloutId, Attempt, TraceId, SpanId FROM spangrad.attempts WHERE RunId = %(run)s AND RolloutId IN {rollouts}
"""
# Traces that no runner announced have no root of ours: their first call that was kept stands for them.
_CALLS = """
SELECT RolloutId, Attempt, argMin((TraceId, SpanId), (Turn, CallId)) AS first
FROM spangrad_internal.transitions WHERE RunId = %(run)s AND RolloutId IN {rollouts} GROUP BY RolloutId, Attempt
"""


class StepSpans(Watcher):
    """Sender of a span for each step."""

    def __init__(self, settings: Settings, client: Client) -> None:
        """Send to store.otlp_endpoint; find the rollouts' roots with `client`."""
        self._provider = tracer_provider(SERVICE, settings.store.otlp_endpoint, bearer(settings.store.token))
        self._tracer = self._provider.get_tracer(semconv.TRAINER_SCOPE)
        self._client = client

    def stepped(self, step: CommittedStep) -> None:
        """Send the step's span and its stages'."""
        if not step.stages:
            return
        version, facts = step.version, step.version.policy_version
        attributes: dict[str, str | int | float] = {
            semconv.POLICY_NAME: facts.policy,
            semconv.TRAINER_BRANCH: version.branch,
            semconv.TRAINER_VERSION: facts.version,
            semconv.TRAINER_BATCH: facts.batch_id or "",
            **({semconv.TRAINER_PARENT: facts.parent} if facts.parent is not None else {}),
            **{f"{semconv.TRAINER_METRIC}.{name}": value for name, value in sorted(version.metrics.items())},
        }
        span = self._tracer.start_span(
            STEP_SPAN_NAME,
            context=Context(),
            attributes=attributes,
            links=[Link(root, {semconv.TRAINER_CONSUMED: name}) for name, root in self._roots(step.rollouts)],
            start_time=step.stages[0].began,
        )
        within = trace.set_span_in_context(span, Context())
        for stage in step.stages:
            self._tracer.start_span(stage.name, context=within, start_time=stage.began).end(stage.ended)
        span.end(step.stages[-1].ended)

    def close(self) -> None:
        """Send what is queued, for a bounded time."""
        self._provider.shutdown()

    def _roots(self, rollouts: Sequence[BatchRollout]) -> list[tuple[str, SpanContext]]:
        """Return the root span of each rollout that has one, else its first call, with the rollout's id."""
        spans: dict[tuple[str, int], tuple[str, str]] = {}
        for run in {rollout.group.run_id for rollout in rollouts}:
            for rollout_ids in batches(rollout.rollout_id for rollout in rollouts if rollout.group.run_id == run):
                named = constant(rollout_ids)
                with store_errors(self._client):
                    calls, roots = (
                        self._client.query(sql.format(rollouts=named), parameters={"run": run}, settings=LONG).result_rows
                        for sql in (_CALLS, _ROOTS)
                    )
                spans |= {(name, attempt): tuple(first) for name, attempt, first in calls}
                spans |= {(name, attempt): (trace_id, span_id) for name, attempt, trace_id, span_id in roots}
        keys = [(rollout.rollout_id, rollout.attempt) for rollout in rollouts]
        contexts = ((key[0], _context(*spans[key])) for key in keys if key in spans)
        return [(name, context) for name, context in contexts if context]


def _context(trace_id: str, span_id: str) -> SpanContext | None:
    """Return a span's context by its ids. None: they are not valid; programs other than ours may write to the store, too."""
    try:
        return SpanContext(int(trace_id, 16), int(span_id, 16), is_remote=True, trace_flags=TraceFlags(TraceFlags.SAMPLED))
    except ValueError:
        return None
