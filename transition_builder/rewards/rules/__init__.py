"""Kinds of AIR rules, a file for each subject: `tools` that ran, `tool_requests` of responses, `calls` themselves, users' `functions`.

A rule reads the `rule_input` and returns its findings, a row each: CallId of the call that is rewarded, TraceId and SpanId of the span that
shows why, and Value, the reward. Invariant: unrecorded data is not judged: it gives neither a reward nor a penalty.
"""
