"""Dialects, one module a convention: each maps its spans to the builder's canonical calls, tools, agents and texts.

`describe` classifies each span, in a row of its own and in the same order; `calls` makes canonical calls of those without a gateway record;
`texts` reads what was asked and answered. A span that no convention reads has no kind, or is a suspect
where it seems to have called a model.
"""

from __future__ import annotations

from transition_builder.dialects.answers import holds_answer
from transition_builder.dialects.calls import asked_tools, calls
from transition_builder.dialects.describe import describe
from transition_builder.dialects.model_spans import MODEL_SPAN_SQL

__all__ = ["MODEL_SPAN_SQL", "asked_tools", "calls", "describe", "holds_answer"]
