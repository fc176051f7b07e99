"""Columns of every table that flows through the builder, and their types; and the lists of columns that name things."""

from __future__ import annotations

from collections.abc import Mapping

import polars as pl

Schema = Mapping[str, pl.DataType]

_TEXT = pl.String()
_IDS = pl.List(pl.UInt32())
_LOGPROBS = pl.List(pl.Float32())
NANOSECONDS = pl.Datetime("ns", "UTC")
MICROSECONDS = pl.Datetime("us", "UTC")

ROLLOUT = ["RunId", "RolloutId"]
"""Columns that name a rollout."""
ATTEMPT = [*ROLLOUT, "Attempt"]
"""Columns that name an attempt."""
SPAN = ["TraceId", "SpanId"]
"""Columns that name a span."""
CHOICE = [*SPAN, "ChoiceIndex"]
"""Columns that name a choice of a call."""

_SPAN: Schema = dict.fromkeys(SPAN, _TEXT)
_CHOICE: Schema = {**_SPAN, "ChoiceIndex": pl.UInt16()}
_ATTEMPT: Schema = {"RunId": _TEXT, "Mode": _TEXT, "RolloutId": _TEXT, "Attempt": pl.UInt16()}
_TASK: Schema = {"GroupId": _TEXT, "GroupSize": pl.UInt32(), "TaskId": _TEXT}
_IDENTITY: Schema = {
    "RunId": _TEXT,
    "Mode": _TEXT,
    "RolloutKey": _TEXT,
    "RolloutKeySource": _TEXT,
    "Attempt": pl.UInt16(),
    "Timestamp": NANOSECONDS,
    **_CHOICE,
}

SPANS: Schema = {
    **{name: dtype for name, dtype in _IDENTITY.items() if name != "ChoiceIndex"},
    "EventIndex": pl.UInt64(),
    "RowKind": _TEXT,
    "ParentSpanId": _TEXT,
    "ProcessId": _TEXT,
    "Seq": pl.UInt64(),
    "SpanName": _TEXT,
    "ServiceName": _TEXT,
    "ScopeName": _TEXT,
    "Duration": pl.UInt64(),
    "StatusCode": _TEXT,
    "StatusMessage": _TEXT,
    "Attributes": pl.Map(pl.String(), pl.String()),
}
"""Rows of spangrad_internal.rollout_spans: spans, and evaluation events and logs, whose EventIndex tells those of one span apart. Duration
is 0 where the clock was set back inside the span."""

NAMING = ["RunId", "RolloutKey", "RolloutKeySource", "Attempt"]
"""Columns by which a row names its rollout."""
NAMES: Schema = {name: _IDENTITY[name] for name in (*NAMING, "TraceId")}
"""Columns that decide which rollout a row belongs to, beside its trace's OWNERS."""

ARRIVALS: Schema = {**SPANS, "IngestedAt": MICROSECONDS, "Dropped": pl.Boolean()}
"""SPANS as they arrived, possibly with duplicates by repeated delivery. Dropped: the sender withheld attributes of the span."""

VERSIONS: Schema = {"Versions.Start": pl.List(pl.UInt32()), "Versions.Version": pl.List(pl.UInt64())}
"""Response tokens at which a policy version begins, and the versions; empty: not known."""

_ANSWER: Schema = {
    "Policy": _TEXT,
    **VERSIONS,
    "Model": _TEXT,
    "ResponseId": _TEXT,
    "TokenizerHash": _TEXT,
    "PromptIds": _IDS,
    "ResponseIds": _IDS,
    "Logprobs": _LOGPROBS,
    "FinishReason": _TEXT,
    "Modality": _TEXT,
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
"""Sampling parameters of a call; null: not known."""

CALLS: Schema = {
    **_IDENTITY,
    "CallId": _TEXT,
    "ParentSpanId": _TEXT,
    "ProcessId": _TEXT,
    "Seq": pl.UInt64(),
    "Duration": pl.UInt64(),
    "IdsSource": _TEXT,
    **_ANSWER,
    **SAMPLING,
    "ErrorType": _TEXT,
    "HttpStatus": pl.UInt16(),
    "Aborted": pl.Boolean(),
    "Redacted": pl.Boolean(),
}
"""Rows of spangrad_internal.calls: a choice of a call that the gateway recorded."""

ANSWERS: Schema = {**_CHOICE, **_ANSWER, **SAMPLING}
"""Answers in `output.value` of openai-level spans in direct mode, a row a choice; empty where there is none."""

ROOTS: Schema = {
    **_ATTEMPT,
    **_TASK,
    "Calls": pl.UInt32(),
    "Final": pl.Boolean(),
    "Failure": _TEXT,
    **_SPAN,
    "IngestedAt": MICROSECONDS,
}
"""The root span of an attempt. Calls is null when there was no gateway to ask; IngestedAt is its first arrival."""

PRESENCE: Schema = {**NAMES, "Rows": pl.UInt64(), "Evaluations": pl.UInt64(), "LastArrival": MICROSECONDS}
"""Arrivals of a rollout, a row a trace: the numbers of rows and of evaluations with a score, and the arrival time of the newest span."""

COUNTS: Schema = {**NAMES, "Calls": pl.UInt64()}
"""Number of arrived calls that a gateway counts, a row a trace."""

ROOTLESS: Schema = {
    **{name: dtype for name, dtype in _IDENTITY.items() if name not in {"Timestamp", "SpanId", "ChoiceIndex"}},
    "IngestedAt": MICROSECONDS,
}
"""Unconcluded rows with the rollout that they name, a row a trace; IngestedAt: of the newest."""

ARRIVED: Schema = {**ROOTLESS, "HasRoot": pl.Boolean()}
"""Rows of any kind that have arrived, with the rollout that they name, a row a trace. HasRoot: an attempt's root span is among them."""

PENDING: Schema = {**dict.fromkeys(("RunId", "Mode", "RolloutId", "TraceId"), _TEXT), "IngestedAt": MICROSECONDS}
"""Rollouts that wait to be built, by their root; IngestedAt: its arrival."""

OWNERS: Schema = {
    "TraceId": _TEXT,
    **_ATTEMPT,
    "Attempts": pl.UInt8(),
}
"""Rows of spangrad_internal.trace_owners: whose the spans of a trace are that name no rollout. Attempts: how many its spans name (2: or
more). RolloutId is that of the first of them; of 0 the session, the conversation, or empty."""

ACTIVITY: Schema = {"RunId": _TEXT, "Mode": _TEXT, "RolloutId": _TEXT, "Rows": pl.UInt64(), "LastArrival": MICROSECONDS}
"""Number of rows that name a rollout, and arrival time of the newest, a row for each run that they name."""

TRACES: Schema = {"TraceId": _TEXT, "Rows": pl.UInt64(), "LastArrival": MICROSECONDS, "HasOpenSpan": pl.Boolean()}
"""Number of a trace's rows, and arrival time of the newest; HasOpenSpan: the parent of some span has not arrived."""

BUILT: Schema = {
    "RunId": _TEXT,
    "RolloutId": _TEXT,
    "Revision": pl.UInt32(),
    "Content": pl.UInt64(),
    "Watermark": MICROSECONDS,
    "RowsRead": pl.UInt64(),
    "IngestedAt": MICROSECONDS,
}
"""The newest revisions of rollouts that were built, and when they were written."""

TALLY: Schema = {**{name: dtype for name, dtype in NAMES.items() if name != "Attempt"}, "Rows": pl.UInt64()}
"""Number of arrived rows of spangrad_internal.rollout_spans without duplicates, by the rollout key that they name and by trace."""

DROPPED: Schema = _SPAN
"""Spans whose sender withheld attributes."""

ROLLOUTS: Schema = {
    **{name: dtype for name, dtype in ROOTS.items() if name != "Final"},
    "Verdict": _TEXT,
    "Detail": _TEXT,
    "LastArrival": MICROSECONDS,
    "ChangesAt": MICROSECONDS,
    "Rows": pl.UInt64(),
}
"""One row a rollout: the facts of its final attempt's root (SpanId is empty where none arrived), the verdict on building it, the arrival
time of its newest known row, the time at which its age changes the verdict (null: it does not wait), and the number of its rows: about as
many as have arrived, and when they are read, those that were."""

_REVISION: Schema = {
    "RunId": _TEXT,
    "Mode": _TEXT,
    "BuildSpec": _TEXT,
    **_TASK,
    "RolloutId": _TEXT,
    "Attempt": pl.UInt16(),
    "Revision": pl.UInt32(),
    "Content": pl.UInt64(),
}

TRANSITIONS: Schema = {
    **_REVISION,
    "Turn": pl.UInt32(),
    "TransitionId": _TEXT,
    "CallId": _TEXT,
    **_CHOICE,
    "Timestamp": NANOSECONDS,
    "ParentCallId": _TEXT,
    "Branch": pl.UInt32(),
    "AgentName": _TEXT,
    "Components": pl.List(pl.String()),
    "Tools": pl.List(pl.String()),
    "Policy": _TEXT,
    "Version": pl.UInt64(),
    **VERSIONS,
    "Model": _TEXT,
    "TokenizerHash": _TEXT,
    "PromptIds": _IDS,
    "ResponseIds": _IDS,
    "Logprobs": _LOGPROBS,
    "Temperature": pl.Float64(),
    "Reshaping": _TEXT,
    "FinishReason": _TEXT,
    "Rewards.Name": pl.List(pl.String()),
    "Rewards.Value": pl.List(pl.Float64()),
    "Rewards.Source": pl.List(pl.String()),
    "Rewards.CallId": pl.List(pl.String()),
    "Rewards.Role": pl.List(pl.String()),
    "Rewards.Turn": pl.List(pl.UInt32()),
}

DROPS: Schema = {
    **_REVISION,
    "CallId": _TEXT,
    **_CHOICE,
    "Timestamp": NANOSECONDS,
    "AgentName": _TEXT,
    "Policy": _TEXT,
    "Model": _TEXT,
    "Convention": _TEXT,
    "Reason": _TEXT,
    "Detail": _TEXT,
}

GIVEN: Schema = {
    **_ATTEMPT,
    "CallId": _TEXT,
    "Name": _TEXT,
    "Role": _TEXT,
    "Value": pl.Float64(),
    "Source": _TEXT,
    "RuleHash": _TEXT,
    **_SPAN,
}
"""Reward that a source gives to a call, or to a rollout (CallId is empty)."""

REWARDS: Schema = {**GIVEN, "BuildSpec": _TEXT, "Revision": pl.UInt32(), "Content": pl.UInt64()}

SQL_REWARDS: Schema = {
    "Name": _TEXT,
    "RuleHash": _TEXT,
    "PerCall": pl.Boolean(),
    "RunId": _TEXT,
    "RolloutId": _TEXT,
    "Attempt": pl.UInt16(),
    "Role": _TEXT,
    "CallId": _TEXT,
    **_SPAN,
    "Value": pl.Float64(),
}
"""Results of the files of builder.sql_rewards for the final attempts. Name: of the file, RuleHash: of its content. PerCall: the file's rows
are of calls, named by CallId or by a span; where they are not, CallId, TraceId and SpanId are empty and each rollout has a row. Value is
null where the file gives none."""

RESPONSES: Schema = {
    **_CHOICE,
    "Text": _TEXT,
    "ToolCalls": pl.List(pl.Struct({"Name": pl.String(), "Arguments": pl.String()})),
}
"""Response of a call: its text, and the tool calls that it requests. A call without a recorded response has no row."""

_ATTRIBUTES = pl.List(pl.Struct({"Key": pl.String(), "Value": pl.String()}))

TOOL_EVENTS: Schema = {**_SPAN, "Name": _TEXT, "ExceptionType": _TEXT, "Attributes": _ATTRIBUTES}
"""Events of tools' spans, in the order of each span. ExceptionType: empty where the event is no exception."""

TOOL_LOGS: Schema = {
    **_SPAN,
    "Severity": pl.Int64(),
    "Body": _TEXT,
    "ExceptionType": _TEXT,
    "Attributes": _ATTRIBUTES,
}
"""Log records that were written inside tools' spans, by time. Severity: OpenTelemetry's number, 0 where the record has none."""

TOOL_CALLS: Schema = {
    **_REVISION,
    "Position": pl.UInt32(),
    "ToolName": _TEXT,
    "ToolCallId": _TEXT,
    "Arguments": _TEXT,
    "Result": _TEXT,
    "Failed": pl.Boolean(),
    "Error": _TEXT,
    "Timestamp": NANOSECONDS,
    "Duration": pl.UInt64(),
    "AgentName": _TEXT,
    "CallId": _TEXT,
    "Requested": pl.Boolean(),
    "Reward": pl.Float64(),
    **_SPAN,
}
"""Tool calls of every attempt, each once, however many spans record it. Position: among the tool calls of its attempt, from 0. CallId: of
the call that caused it, empty where none did; Requested: that call asked for it by its id. Reward: sum of the rewards that its spans gave;
null where they gave none."""

TIMES: Schema = {
    "RunId": _TEXT,
    "RolloutId": _TEXT,
    "Attempts": pl.UInt16(),
    "StartedAt": NANOSECONDS,
    "Seconds": pl.Float64(),
    "StageSeconds.Name": pl.List(pl.String()),
    "StageSeconds.Value": pl.List(pl.Float64()),
}
"""A row a rollout with a root span: its attempts, begin and duration of the last, and the durations of all stages, summed by name."""

BUILDS: Schema = {
    **_REVISION,
    "Calls": pl.UInt32(),
    "Transitions": pl.UInt32(),
    "Drops": pl.UInt32(),
    "Rewards": pl.UInt32(),
    "InputTokens": pl.UInt64(),
    "OutputTokens": pl.UInt64(),
    "ToolCalls": pl.UInt32(),
    "FailedToolCalls": pl.UInt32(),
    "AgentNames": pl.List(pl.String()),
    "Models": pl.List(pl.String()),
    "PolicyVersions": pl.List(pl.UInt64()),
    "RewardTotals.Name": pl.List(pl.String()),
    "RewardTotals.Role": pl.List(pl.String()),
    "RewardTotals.Value": pl.List(pl.Float64()),
    **{name: dtype for name, dtype in TIMES.items() if name not in ROLLOUT},
    "Failure": _TEXT,
    "Watermark": MICROSECONDS,
    "RowsRead": pl.UInt64(),
    "Builder": _TEXT,
}
"""A revision of a rollout that was built. Revision and Content of TRANSITIONS, DROPS, REWARDS and TOOL_CALLS are those of its row here;
`build` leaves them 0, and the sink fills them in. Tokens are those of its transitions."""

NODES: Schema = {
    **SPANS,
    "RolloutId": _TEXT,
    "Convention": _TEXT,
    "IsClient": pl.Boolean(),
    "IsModel": pl.Boolean(),
    "IsEngine": pl.Boolean(),
    "IsTool": pl.Boolean(),
    "IsChain": pl.Boolean(),
    "IsSuspect": pl.Boolean(),
    "ResponseId": _TEXT,
    "Model": _TEXT,
    "InputTokens": pl.Int64(),
    "OutputTokens": pl.Int64(),
    "AgentName": _TEXT,
    "ToolName": _TEXT,
    "ToolFailed": pl.Boolean(),
    "ToolCallId": _TEXT,
    "ToolArguments": _TEXT,
    "ToolResult": _TEXT,
    "Scores": pl.List(pl.Struct({"Name": pl.String(), "Value": pl.Float64()})),
}
"""Described, resolved spans with what each is, by any convention (`dialects.describe`). At least these columns.

Convention: the dialect that read the span; empty where none did. IsClient: a call, recorded by the library that speaks to the model's
server. IsModel: a call, recorded by a framework above it. IsEngine: a call, recorded by the server itself (vLLM's own span). IsSuspect: the
span seems to be a call of a model, and no dialect reads it. ResponseId, Model, InputTokens, OutputTokens: of those four kinds; null where
the span has none, and on every other span. AgentName, ToolCallId, ToolArguments, ToolResult: null where the span has none. Scores: rewards
in the span's own attributes."""
