"""One module a convention: each maps its spans to the builder's canonical calls, tools and agents.

In: resolved spans. Out: `describe` says of each what it is, whichever convention says so; `calls` makes canonical calls of those that are
calls and that nobody else answers for. Invariant: a row a span, in the same order; a span that no convention reads is nothing, or,
where it seems to have called a model, a suspect.
"""

from __future__ import annotations

from transition_builder.dialects.answers import ANSWER_SQL, holds_answer
from transition_builder.dialects.calls import asked_tools, calls
from transition_builder.dialects.describe import describe
from transition_builder.dialects.model_spans import MODEL_SPAN_SQL
from transition_builder.dialects.reading import attribute

__all__ = ["ANSWER_SQL", "MODEL_SPAN_SQL", "asked_tools", "attribute", "calls", "describe", "holds_answer"]
