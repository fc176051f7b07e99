"""Dialects, one module a convention: each maps its spans to the builder's canonical calls, tools and agents.

In: resolved spans. Out: `describe` classifies each span by its convention; `calls` makes canonical calls of those that are
calls without a gateway record. Invariant: a row a span, in the same order; a span that no convention reads has no kind, or,
where it seems to have called a model, is a suspect.
"""

from __future__ import annotations

from transition_builder.dialects.answers import ANSWER_SQL, holds_answer
from transition_builder.dialects.calls import asked_tools, calls
from transition_builder.dialects.describe import describe
from transition_builder.dialects.model_spans import MODEL_SPAN_SQL
from transition_builder.dialects.reading import attribute

__all__ = ["ANSWER_SQL", "MODEL_SPAN_SQL", "asked_tools", "attribute", "calls", "describe", "holds_answer"]
