"""The tables that flow through the builder, as Polars frames with fixed schemas.

In: rows of the span store (`Frames`). Out: rows for it (`Built`). Invariant: every frame has exactly the
columns of its schema, in its order, so that stages can be tested with hand-made rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

import polars as pl

Schema = Mapping[str, pl.DataType]

_TEXT = pl.String()
_IDS = pl.List(pl.UInt32())
_LOGPROBS = pl.List(pl.Float32())
NANOSECONDS = pl.Datetime("ns", "UTC")
MICROSECONDS = pl.Datetime("us", "UTC")

_IDENTITY: Schema = {
    "RunId": _TEXT,
    "Mode": _TEXT,
    "RolloutKey": _TEXT,
    "RolloutKeySource": _TEXT,
    "Attempt": pl.UInt16(),
    "Timestamp": NANOSECONDS,
    "TraceId": _TEXT,
    "SpanId": _TEXT,
    "Choice": pl.UInt16(),
}

SPANS: Schema = {
    **_IDENTITY,
    "RowKind": _TEXT,
    "ParentSpanId": _TEXT,
    "ProcessId": _TEXT,
    "Seq": pl.UInt64(),
    "SpanName": _TEXT,
    "ServiceName": _TEXT,
    "ScopeName": _TEXT,
    "StatusCode": _TEXT,
    "StatusMessage": _TEXT,
    "Attributes": pl.Map(pl.String(), pl.String()),
}
"""Rows of otel.rollout_spans: spans, evaluation events and evaluation logs."""

ARRIVALS: Schema = {**SPANS, "IngestedAt": MICROSECONDS}
"""SPANS as they arrived: one that was delivered twice may be there twice."""

_ANSWER: Schema = {
    "Policy": _TEXT,
    "VersionStart": pl.UInt64(),
    "VersionEnd": pl.UInt64(),
    "Model": _TEXT,
    "ResponseId": _TEXT,
    "TokenizerHash": _TEXT,
    "PromptIds": _IDS,
    "ResponseIds": _IDS,
    "Logprobs": _LOGPROBS,
    "FinishReason": _TEXT,
}

SAMPLING: Schema = {
    "Temperature": pl.Float64(),
    "TopP": pl.Float64(),
    "TopK": pl.Int64(),
    "MinP": pl.Float64(),
    "PresencePenalty": pl.Float64(),
    "FrequencyPenalty": pl.Float64(),
    "RepetitionPenalty": pl.Float64(),
    "Constrained": pl.Boolean(),
}
"""How a call was sampled; null: not known."""

CALLS: Schema = {
    **_IDENTITY,
    "CallId": _TEXT,
    "ParentSpanId": _TEXT,
    "ProcessId": _TEXT,
    "Seq": pl.UInt64(),
    "IdsSource": _TEXT,
    **_ANSWER,
    **SAMPLING,
    "ErrorType": _TEXT,
    "HttpStatus": pl.UInt16(),
    "Aborted": pl.Boolean(),
    "Redacted": pl.Boolean(),
}
"""Rows of otel.calls: a choice of a call that the gateway recorded."""

ANSWERS: Schema = {"TraceId": _TEXT, "SpanId": _TEXT, "Choice": pl.UInt16(), **_ANSWER}
"""What openai-level spans of the plain road hold in `output.value`: a row a choice; empty where it held none."""

ROOTS: Schema = {
    "RunId": _TEXT,
    "Mode": _TEXT,
    "RolloutId": _TEXT,
    "Attempt": pl.UInt16(),
    "GroupId": _TEXT,
    "GroupSize": pl.UInt32(),
    "TaskId": _TEXT,
    "Calls": pl.UInt32(),
    "Final": pl.Boolean(),
    "Failure": _TEXT,
    "TraceId": _TEXT,
    "SpanId": _TEXT,
    "IngestedAt": MICROSECONDS,
}
"""The root span of an attempt. Calls is null when there was no gateway to ask; IngestedAt is its first arrival."""

PRESENCE: Schema = {
    "RunId": _TEXT,
    "RolloutKey": _TEXT,
    "RolloutKeySource": _TEXT,
    "Attempt": pl.UInt16(),
    "TraceId": _TEXT,
    "Evaluations": pl.UInt64(),
    "LastArrival": MICROSECONDS,
}
"""What of a rollout has arrived, a row for each trace: evaluations with a score, and when the newest span came."""

COUNTS: Schema = {
    "RunId": _TEXT,
    "RolloutKey": _TEXT,
    "RolloutKeySource": _TEXT,
    "Attempt": pl.UInt16(),
    "TraceId": _TEXT,
    "Calls": pl.UInt64(),
}
"""How many distinct gateway spans have arrived, a row for each trace."""

LOOSE: Schema = {
    **{name: dtype for name, dtype in _IDENTITY.items() if name not in {"Timestamp", "SpanId", "Choice"}},
    "CallId": _TEXT,
    "IngestedAt": MICROSECONDS,
}
"""Calls of otel.calls, the plain road's among them, that have neither a transition nor a drop, and when they arrived."""

OWNERS: Schema = {
    "TraceId": _TEXT,
    "RunId": _TEXT,
    "Mode": _TEXT,
    "RolloutId": _TEXT,
    "SessionId": _TEXT,
    "ConversationId": _TEXT,
    "Attempt": pl.UInt16(),
}
"""Rows of otel.trace_rollouts: what any span of a trace says of all of it; empty where none does."""

ACTIVITY: Schema = {"RunId": _TEXT, "Mode": _TEXT, "RolloutId": _TEXT, "LastArrival": MICROSECONDS}
"""When the newest span came that names a rollout, a row for each run that such spans name."""

TRACES: Schema = {"TraceId": _TEXT, "LastArrival": MICROSECONDS, "Torn": pl.Boolean()}
"""When a trace's newest span came, and whether the parent of some span has not arrived."""

BUILT: Schema = {name: ROOTS[name] for name in ("RunId", "Mode", "RolloutId", "Attempt", "GroupId", "GroupSize", "TaskId")}
"""Rollouts that have transitions or drops, and the newest attempt among those."""

ROLLOUTS: Schema = {
    **{name: dtype for name, dtype in ROOTS.items() if name != "Final"},
    "Verdict": _TEXT,
    "Detail": _TEXT,
}
"""One row a rollout: the facts of its final attempt's root (SpanId is empty where none arrived), and whether it may be built."""

TRANSITIONS: Schema = {
    "RunId": _TEXT,
    "Mode": _TEXT,
    "BuildSpec": _TEXT,
    "GroupId": _TEXT,
    "GroupSize": pl.UInt32(),
    "TaskId": _TEXT,
    "RolloutId": _TEXT,
    "Attempt": pl.UInt16(),
    "Revision": pl.UInt32(),
    "Turn": pl.UInt32(),
    "TransitionId": _TEXT,
    "CallId": _TEXT,
    "TraceId": _TEXT,
    "SpanId": _TEXT,
    "Choice": pl.UInt16(),
    "Timestamp": NANOSECONDS,
    "AgentName": _TEXT,
    "Policy": _TEXT,
    "Version": pl.UInt64(),
    "Model": _TEXT,
    "TokenizerHash": _TEXT,
    "PromptIds": _IDS,
    "ResponseIds": _IDS,
    "Logprobs": _LOGPROBS,
    "Temperature": pl.Float64(),
    "FinishReason": _TEXT,
    "Rewards.Name": pl.List(pl.String()),
    "Rewards.Value": pl.List(pl.Float64()),
    "Rewards.Source": pl.List(pl.String()),
}

DROPS: Schema = {
    "RunId": _TEXT,
    "Mode": _TEXT,
    "BuildSpec": _TEXT,
    "GroupId": _TEXT,
    "GroupSize": pl.UInt32(),
    "TaskId": _TEXT,
    "RolloutId": _TEXT,
    "Attempt": pl.UInt16(),
    "Revision": pl.UInt32(),
    "CallId": _TEXT,
    "TraceId": _TEXT,
    "SpanId": _TEXT,
    "Choice": pl.UInt16(),
    "Policy": _TEXT,
    "Reason": _TEXT,
    "Detail": _TEXT,
}

REWARDS: Schema = {
    "RunId": _TEXT,
    "Mode": _TEXT,
    "RolloutId": _TEXT,
    "Attempt": pl.UInt16(),
    "CallId": _TEXT,
    "Name": _TEXT,
    "Value": pl.Float64(),
    "Source": _TEXT,
    "RuleHash": _TEXT,
    "TraceId": _TEXT,
    "SpanId": _TEXT,
}


class Verdict(StrEnum):
    """Whether a rollout may be built."""

    WAITING = "waiting"
    """Something is missing and may still arrive."""
    COMPLETE = "complete"
    """Everything that can be known to exist has arrived."""
    INCOMPLETE = "incomplete"
    """Calls that the gateway answered, or the final root, did not arrive in time."""


@dataclass(frozen=True, slots=True)
class Facts:
    """What completeness is decided from: no ids, no attributes."""

    roots: pl.DataFrame
    """ROOTS, of every attempt."""
    presence: pl.DataFrame
    """PRESENCE."""
    counts: pl.DataFrame
    """COUNTS."""


@dataclass(frozen=True, slots=True)
class Frames:
    """Everything that is known of the rollouts to build."""

    rollouts: pl.DataFrame
    """ROLLOUTS, none of them waiting."""
    spans: pl.DataFrame
    """SPANS."""
    calls: pl.DataFrame
    """CALLS."""
    answers: pl.DataFrame
    """ANSWERS."""


@dataclass(frozen=True, slots=True)
class Built:
    """What became of them."""

    transitions: pl.DataFrame
    """TRANSITIONS."""
    drops: pl.DataFrame
    """DROPS."""
    rewards: pl.DataFrame
    """REWARDS."""


def empty(schema: Schema) -> pl.DataFrame:
    """A frame of no rows."""
    return pl.DataFrame(schema=dict(schema))


def conform(frame: pl.DataFrame, schema: Schema) -> pl.DataFrame:
    """The columns of a schema, in its order and of its types.

    Raises:
        polars.exceptions.PolarsError: a column is missing, or a value does not fit its type.
    """
    return frame.select(pl.col(name).cast(dtype) for name, dtype in schema.items())


def concat(frames: Iterable[pl.DataFrame], schema: Schema) -> pl.DataFrame:
    """Rows of several frames, conformed to a schema."""
    return pl.concat([empty(schema), *(conform(frame, schema) for frame in frames)])
