"""A rollout as its view draws it: sentences on its fate, its spans as a tree with times, and of each call what became of it.

In: the `Record` of a rollout. Out: plain values for JSON. Invariant: a span occurs once, below its parent; times are relative to the first
span, by the clock of each span's host.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

from page.reading import PageStore
from spangrad import semconv
from spangrad.settings import Settings
from spangrad.store.rollout.record import Build, Call, Conclusion, Record, Span, titled
from spangrad.store.rollout.tree import children
from spangrad.store.rollout.why import explain
from spangrad.types import remedy

ATTRIBUTE_CHARACTERS = 20_000
"""Characters of an attribute's value that are shown; the rest is counted."""
_SPAN = """
SELECT SpanName, SpanKind, ServiceName, ScopeName, ScopeVersion, Duration, StatusCode, StatusMessage,
    arrayMap((k, v) -> (k, substringUTF8(v, 1, {most:UInt32}), lengthUTF8(v)), mapKeys(SpanAttributes), mapValues(SpanAttributes))
        AS Attributes,
    arrayMap((k, v) -> (k, substringUTF8(v, 1, {most:UInt32}), lengthUTF8(v)), mapKeys(ResourceAttributes), mapValues(ResourceAttributes))
        AS Resource,
    arrayMap((n, a) -> (n, toString(a)), Events.Name, Events.Attributes) AS Events
FROM otel.otel_traces WHERE TraceId = {trace:String} AND SpanId = {span:String} LIMIT 1
"""


def rollout_view(record: Record, settings: Settings) -> dict[str, Any]:
    """Return what the view of a rollout shows."""
    spans = {span.key: span for span in reversed(record.spans)}
    roots = sorted((span for span in spans.values() if span.is_root), key=lambda span: span.attempt)
    last = roots[-1].attributes if roots else {}
    return {
        "rollout": record.rollout,
        "runs": sorted({span.run for span in spans.values()} - {""}),
        "modes": sorted({span.mode for span in spans.values()} - {""}),
        "task": last.get(semconv.TASK_ID, ""),
        "group": last.get(semconv.GROUP_ID, ""),
        "failure": last.get(semconv.ROLLOUT_FAILURE, ""),
        "sentences": [line for line in explain(record, settings) if line and not line.startswith("- ")],
        "rewards": [_reward(reward.title, reward.value, reward.source) for reward in dict.fromkeys(record.rewards)],
        "builds": [_build(build) for build in record.builds],
        "trained": [
            {"policy": batch.policy, "branch": batch.branch, "version": batch.version, "status": batch.status} for batch in record.trained
        ],
        "spans": list(_spans(record, spans)),
    }


def span_view(store: PageStore, trace: str, span: str) -> dict[str, Any] | None:
    """Return all that was received of a span: attributes, resource and events; long values are cut. None: there is no such span."""
    rows = store.rows(_SPAN, {"trace": trace, "span": span, "most": ATTRIBUTE_CHARACTERS})
    if not rows:
        return None
    (row,) = rows[:1]
    row["Events"] = [(name, text[:ATTRIBUTE_CHARACTERS], len(text)) for name, text in row["Events"]]
    return row


def _spans(record: Record, spans: Mapping[tuple[str, str], Span]) -> Iterator[dict[str, Any]]:
    """Yield the spans in the order of the tree."""
    below = children(spans)
    first = min((span.started for span in spans.values()), default=0)
    calls, conclusions, rewards = defaultdict[Any, list[Any]](list), defaultdict[Any, list[Any]](list), defaultdict[Any, list[Any]](list)
    for call in {(call.trace, call.span, call.choice): call for call in record.calls}.values():
        calls[call.trace, call.span].append(_call(call))
    for conclusion in (conclusion for build in record.builds for conclusion in build.conclusions):
        conclusions[conclusion.trace, conclusion.span].append(_conclusion(conclusion))
    for reward in dict.fromkeys(record.rewards):
        rewards[reward.trace, reward.span].append(_reward(reward.title, reward.value, reward.source))
    waiting = [(span, 0) for span in reversed(below[None])]
    while waiting:
        span, depth = waiting.pop()
        waiting += [(child, depth + 1) for child in reversed(below.get(span.key, ()))]
        yield {
            "trace": span.trace,
            "span": span.span,
            "depth": depth,
            "name": span.name,
            "kind": "attempt" if span.is_root else span.kind,
            "agent": span.agent,
            "tool": span.tool,
            "attempt": span.attempt,
            "start": (span.started - first) / 1e6,
            "startedNs": str(span.started),
            "duration": span.duration / 1e6,
            "status": span.status,
            "message": span.message,
            "failure": span.attributes.get(semconv.ROLLOUT_FAILURE, ""),
            "calls": calls[span.key],
            "rewards": rewards[span.key],
            "conclusions": conclusions[span.key],
        }


def _call(call: Call) -> dict[str, Any]:
    return {
        "choice": call.choice,
        "versions": list(call.versions),
        "promptTokens": call.prompt_tokens,
        "responseTokens": call.response_tokens,
        "error": call.error,
        "httpStatus": call.http_status,
        "aborted": call.aborted,
    }


def _reward(title: str, value: object, source: str) -> dict[str, Any]:
    return {"title": title, "value": value, "source": source}


def _build(build: Build) -> dict[str, Any]:
    return {
        "title": build.title,
        "transitions": build.transitions,
        "drops": [{"reason": reason, "detail": detail, "count": count} for (reason, detail), count in build.drops.items()],
    }


def _conclusion(conclusion: Conclusion) -> dict[str, Any]:
    return {
        "choice": conclusion.choice,
        "turn": conclusion.turn,
        "reason": conclusion.reason,
        "detail": conclusion.detail,
        "remedy": remedy(conclusion.reason),
        "rewards": [_reward(titled(name, role), value, source) for name, value, source, role in conclusion.rewards],
    }
