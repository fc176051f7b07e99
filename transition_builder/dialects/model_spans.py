"""SQL condition for rows of spangrad_internal.rollout_spans that are, or may be, calls of a model.

It holds for every span that `describe` classifies as a call, an engine's call or a suspect, and for some others, since it checks names
before values. Keys come first: they are few, and read at little cost.
"""

from __future__ import annotations

from spangrad import semconv
from transition_builder.dialects import suspects
from transition_builder.dialects.conventions import gen_ai, others
from transition_builder.dialects.describe import MARKS


def literal(text: str) -> str:
    """Return a text as a SQL literal."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


_OWN_MARKS = (mark for name, marks in MARKS.items() if name != "openinference" for mark in marks)
_KEYS = ", ".join(literal(mark) for mark in (*_OWN_MARKS, *(words.mark for words in others.VOCABULARIES.values())))
_CALLS = ", ".join(literal(name) for name in gen_ai.CALLS)
_NAMES = (suspects.NAMES, *(words.named for words in others.VOCABULARIES.values() if words.named))
_OPERATION = f"lower(Attributes['{semconv.GEN_AI_OPERATION}'])"
_URL = "concat(Attributes['url.full'], if(Attributes['url.full'] = '', Attributes['http.url'], ''))"

MODEL_SPAN_SQL = f"""(
    RowKind = 'span' AND (
        upper(Attributes['{semconv.OPENINFERENCE_KIND}']) = 'LLM'
        OR (arrayExists(key -> startsWith(key, 'gen_ai.'), mapKeys(Attributes))
            AND ({_OPERATION} IN ({_CALLS}) OR NOT match({_OPERATION}, {literal(gen_ai.OTHERS)})))
        OR hasAny(mapKeys(Attributes), [{_KEYS}])
        OR match({_URL}, {literal(suspects.PATHS)})
        OR {" OR ".join(f"match(SpanName, {literal(names)})" for names in _NAMES)}
        OR arrayExists(key -> match(key, {literal(suspects.KEYS)}), mapKeys(Attributes))
        OR match(ScopeName, '^(agentlightning|agentops)')
    )
)"""
"""Condition over RowKind, SpanName, ScopeName and Attributes of spangrad_internal.rollout_spans."""
