"""Search for a text in what rollouts recorded: messages, tool calls, errors, evaluations.

In: rollouts, a text. Out: those of which a span contains it. Invariant: spans of the given rollouts are read and no others, so that a
search of the list costs what it has gone through.
"""

from __future__ import annotations

import json
from collections.abc import Collection

from page.reading import PageStore

_TRACES = """
SELECT TraceId, groupUniqArray(RolloutId) AS Rollouts FROM spangrad.rollout_traces WHERE RolloutId IN {ids:Array(String)} GROUP BY TraceId
"""
_TRACES_A_STATEMENT = 400
_HAS_TEXT = "multiSearchAnyCaseInsensitiveUTF8(value, {texts:Array(String)}) > 0"
_MATCHES = f"""
SELECT DISTINCT
    TraceId, coalesce(nullIf(SpanAttributes['spangrad.rollout.id'], ''), ResourceAttributes['spangrad.rollout.id']) AS RolloutId
FROM otel.otel_traces
WHERE TraceId IN {{traces:Array(String)}} AND arrayExists(value -> {_HAS_TEXT}, arrayConcat(
    mapValues(SpanAttributes), [StatusMessage], arrayFlatten(arrayMap(attributes -> mapValues(attributes), Events.Attributes))))
"""


def rollouts_with(store: PageStore, ids: Collection[str], text: str) -> set[str]:
    """Return those rollouts of which a span has a text in an attribute, an event or its status, in upper or lower case."""
    traces = {row["TraceId"]: row["Rollouts"] for row in store.rows(_TRACES, {"ids": list(ids)})}
    names, matching = list(traces), set[str]()
    for first in range(0, len(names), _TRACES_A_STATEMENT):
        chosen = names[first : first + _TRACES_A_STATEMENT]
        for row in store.rows(_MATCHES, {"traces": chosen, "texts": _spellings(text)}):
            matching |= {row["RolloutId"]} if row["RolloutId"] else set(traces[row["TraceId"]])
    return matching & set(ids)


def _spellings(text: str) -> list[str]:
    """Return a text as it is and as it stands in JSON, with and without escapes of what is not ASCII."""
    return list(dict.fromkeys([text, *(json.dumps(text, ensure_ascii=ascii_)[1:-1] for ascii_ in (False, True))]))
