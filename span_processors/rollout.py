"""Span processor that records on every span of an agent its rollout, and its place in the process's order.

In: a span that starts, with the context that it starts in. Out: the same span with `spangrad.run.id`, `spangrad.rollout.id`,
`spangrad.rollout.mode`, `spangrad.rollout.attempt`, `spangrad.process.id` and `spangrad.seq`.
Invariant: the span's own context takes precedence over what the process was started with.
"""

from __future__ import annotations

from collections.abc import Mapping

from opentelemetry.context import Context

from span_processors.context import rollout_attributes
from span_processors.export import SequenceSpanProcessor


class RolloutSpanProcessor(SequenceSpanProcessor):
    """Span processor that stamps each span at its start."""

    def __init__(self, process: Mapping[str, str]) -> None:
        """`process` holds the attributes that the process was started with; see `context.process_attributes`."""
        self._process = dict(process)

    def context_attributes(self, context: Context | None) -> Mapping[str, str | int]:
        """Return the attributes of the rollout."""
        return rollout_attributes(context, self._process)
