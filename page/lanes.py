"""Lanes over time: what trainer, backends and rollouts did beside each other during some steps of a branch.

In: a branch, a number of steps. Out: plain values for JSON; times in milliseconds after the first step's begin. Invariant: the trainer's
stages are its own spans; calls of each backend and rollouts under way are counted over equal parts of the time, each as long as it lasted.
"""

from __future__ import annotations

from typing import Any

from page.reading import PageStore
from spangrad import semconv
from spangrad.store.backend_calls import backend_calls_sql

STEPS_MOST = 50
"""Largest number of steps that are shown beside each other."""
PARTS = 240
"""Number of equal parts of the time, over which calls and rollouts are counted."""
_STEPS = f"""
SELECT TraceId, SpanId, toUInt64OrZero(SpanAttributes['{semconv.TRAINER_VERSION}']) AS Version, toUnixTimestamp64Nano(Timestamp) AS Began,
    Duration
FROM otel.otel_traces
WHERE ServiceName = 'spangrad-trainer' AND SpanName = 'train step' AND SpanAttributes['{semconv.POLICY_NAME}'] = {{policy:String}}
    AND SpanAttributes['{semconv.TRAINER_BRANCH}'] = {{branch:String}} AND Version <= {{newest:UInt64}}
ORDER BY Version DESC LIMIT 1 BY Version LIMIT {{most:UInt32}}
"""
_STAGES = """
SELECT ParentSpanId, SpanName, toUnixTimestamp64Nano(Timestamp) AS Began, Duration FROM otel.otel_traces
WHERE ServiceName = 'spangrad-trainer' AND TraceId IN {traces:Array(String)} AND ParentSpanId IN {spans:Array(String)}
ORDER BY Began LIMIT 1 BY ParentSpanId, SpanName, Began
"""
_WINDOW = """Timestamp > fromUnixTimestamp64Nano({begin:Int64}) - INTERVAL 1 DAY
        AND Timestamp < fromUnixTimestamp64Nano({end:Int64}) AND Duration > 0
        AND toUnixTimestamp64Nano(Timestamp) + toInt64(Duration) > {begin:Int64}"""
_UNDER_WAY = """
SELECT lane, part,
    sum(least(ended, {{begin:Int64}} + (part + 1) * {{width:Int64}}) - greatest(began, {{begin:Int64}} + part * {{width:Int64}}))
        / {{width:Int64}} AS UnderWay
FROM (
    SELECT {lane} AS lane, toUnixTimestamp64Nano(Timestamp) AS began, began + toInt64(Duration) AS ended,
        arrayJoin(range(toUInt32(greatest(intDiv(began - {{begin:Int64}}, {{width:Int64}}), 0)),
            toUInt32(least(intDiv(ended - {{begin:Int64}}, {{width:Int64}}), {{parts:UInt32}} - 1) + 1))) AS part
    FROM {table} AS t
    WHERE {condition}
)
GROUP BY lane, part
"""
_CALLS = _UNDER_WAY.format(lane="Backend", table=backend_calls_sql(_WINDOW), condition="Policy = {policy:String}")
_ATTEMPTS = _UNDER_WAY.format(lane="''", table="spangrad.attempts", condition=_WINDOW)


def lanes_view(store: PageStore, policy: str, branch: str, newest: int, most: int) -> dict[str, Any]:
    """Return the stages of so many steps of a branch up to a version, and calls by backend and rollouts under way meanwhile."""
    steps = store.rows(_STEPS, {"policy": policy, "branch": branch, "newest": newest, "most": min(most, STEPS_MOST)})[::-1]
    if not steps:
        return {"steps": [], "stages": [], "backends": [], "rollouts": [], "seconds": 0}
    begin, end = steps[0]["Began"], max(step["Began"] + step["Duration"] for step in steps)
    places = {"traces": sorted({step["TraceId"] for step in steps}), "spans": [step["SpanId"] for step in steps]}
    versions = {step["SpanId"]: step["Version"] for step in steps}
    width = max(1, -(-(end - begin) // PARTS))
    of_time = {"policy": policy, "begin": begin, "end": end, "width": width, "parts": PARTS}
    return {
        "steps": [_bar(step, begin) | {"version": step["Version"]} for step in steps],
        "stages": [
            _bar(stage, begin) | {"stage": stage["SpanName"], "version": versions[stage["ParentSpanId"]]}
            for stage in store.rows(_STAGES, places)
        ],
        "backends": [{"backend": name, "calls": counts} for name, counts in sorted(_lanes(store.rows(_CALLS, of_time)).items())],
        "rollouts": _lanes(store.rows(_ATTEMPTS, of_time)).get("", [0.0] * PARTS),
        "seconds": (end - begin) / 1e9,
    }


def _bar(span: dict[str, Any], begin: int) -> dict[str, float]:
    return {"start": (span["Began"] - begin) / 1e6, "duration": span["Duration"] / 1e6}


def _lanes(rows: list[dict[str, Any]]) -> dict[str, list[float]]:
    """Return how many were under way in each part of the time, by lane."""
    lanes: dict[str, list[float]] = {}
    for row in rows:
        lanes.setdefault(row["lane"], [0.0] * PARTS)[row["part"]] = row["UnderWay"]
    return lanes
