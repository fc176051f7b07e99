"""A rollout drawn as a tree: the whole text, for spans made by hand."""

from __future__ import annotations

import io
from typing import Any

from rich.console import Console

from commands.rollout_tree import Build, Call, Record, Reward, Span, draw

MS = 1_000_000


def span(name: str, own: str, parent: str = "", **facts: Any) -> Span:
    known: dict[str, Any] = {
        "run": "run-1",
        "mode": "train",
        "attempt": 0,
        "names_rollout": True,
        "started": 0,
        "trace": "t0",
        "process": "agent",
        "seq": int(own, 16),
        "service": "agent",
        "scope": "",
        "duration": 5 * MS,
        "status": "Unset",
        "message": "",
        "attributes": {},
    }
    return Span(name=name, span=own, parent=parent, **{**known, **facts})


def root(own: str, *, final: bool, **facts: Any) -> Span:
    said = {
        "spangrad.task.id": "paris",
        "spangrad.group.id": "g7",
        "spangrad.group.size": "8",
        "spangrad.rollout.final": str(final).lower(),
    }
    attributes = said | facts.pop("attributes", {})
    return span("rollout", own, process="runner", service="spangrad-runner", attributes=attributes, **facts)


def call(of: str, **facts: Any) -> Call:
    known: dict[str, Any] = {
        "trace": "t1",
        "choice": 0,
        "policy": "policy",
        "version_start": 3,
        "version_end": 3,
        "prompt_tokens": 512,
        "response_tokens": 100,
        "finish_reason": "stop",
        "error": "",
        "http_status": 200,
        "aborted": False,
    }
    return Call(span=of, **{**known, **facts})


def text(record: Record) -> str:
    out = io.StringIO()
    Console(file=out, width=140, color_system=None).print(draw(record))
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


FAILED = root(
    "a0", final=False, trace="t0", duration=20 * MS, status="Error", message="exit code 1", attributes={"spangrad.rollout.failure": "crash"}
)
SECOND = {"trace": "t1", "attempt": 1}
KEPT = root("b0", final=True, status="Ok", duration=1500 * MS, **SECOND)
AGENT = span("agent", "b1", "b0", duration=1400 * MS, attributes={"openinference.span.kind": "AGENT", "agent.name": "researcher"}, **SECOND)
LLM = {"openinference.span.kind": "LLM", "llm.token_count.prompt": "512", "llm.token_count.completion": "100"}
CLIENT = span("ChatCompletion", "b2", "b1", duration=700 * MS, status="Ok", attributes=LLM, **SECOND)
GATEWAY = {"process": "gateway", "service": "spangrad-gateway", "scope": "spangrad.gateway", **SECOND}
FIRST_CALL = span("chat policy", "b3", "b2", duration=690 * MS, seq=7, **GATEWAY)
TOOL = span(
    "search",
    "b4",
    "b1",
    duration=40_000,
    status="Error",
    message="ValueError('no  such\npage')Traceback (most recent call last): ...",
    attributes={"openinference.span.kind": "TOOL", "tool.name": "search"},
    **SECOND,
)
# Its clock is an hour slow, and it came first: neither matters.
SECOND_CLIENT = span("ChatCompletion", "b5", "b1", started=-3600 * 10**9, **SECOND, duration=300 * MS)
SECOND_CALL = span("chat policy", "b6", "b5", duration=200 * MS, seq=8, **GATEWAY)
ORPHAN = span("lost", "b7", "ffff", names_rollout=False, process="", service="other", **SECOND | {"attempt": 0})

WHOLE = Record(
    "rollout-1",
    [SECOND_CALL, SECOND_CLIENT, KEPT, AGENT, CLIENT, FIRST_CALL, TOOL, ORPHAN, FAILED, CLIENT, FIRST_CALL],
    [
        call("b3"),
        call("b3"),
        call("b6", prompt_tokens=700, response_tokens=30, version_end=4, finish_reason="length"),
        call("b6", choice=1, prompt_tokens=700, response_tokens=20),
    ],
    [
        Reward("t1", "b0", "reward", "1", "event"),
        Reward("t1", "b4", "tool_error", "-0.1", "air"),
        Reward("t9", "c0", "style", "0.5", "log"),
    ],
    [Build("0123456789abcdef", 2, {("superseded_attempt", "attempt 1 counts"): 1, ("mixed_versions", "from 3 to 4"): 2})],
)


def test_a_whole_rollout() -> None:
    assert text(WHOLE) == (
        """\
rollout rollout-1
run run-1 · mode train · task paris · group g7 of 8 · 2 attempts · 1.52 s · 9 spans · 2 calls 1212→150 tokens
built: 2 transitions, 2 dropped as mixed_versions (from 3 to 4), 1 dropped as superseded_attempt (attempt 1 counts)
├── rollout · attempt 0 · tried again · 20 ms · error: crash: exit code 1
├── rollout · attempt 1 · final · 1.5 s · ok · reward = 1 (event)
│   ├── agent · researcher · 1.4 s
│   │   ├── ChatCompletion · llm · 700 ms · 512→100 tokens · ok
│   │   │   └── chat policy · gateway · 690 ms · 512→100 tokens · policy v3 · stop
│   │   ├── search · tool · 40 µs · error: ValueError('no such page') · tool_error = -0.1 (air)
│   │   └── ChatCompletion · 300 ms
│   │       └── chat policy · gateway · 200 ms · 700→50 tokens · 2 choices · policy v3→v4 · length · stop
│   └── lost · 5 ms · parent span is not here
└── of no span here · style = 0.5 (log)
"""
    )


def test_nothing_but_a_trace_of_its_own() -> None:
    spans = [
        span("ChatCompletion", "2", "1", run="", mode="", names_rollout=False, process="", seq=0, started=1, service="app"),
        span("chat", "3", "2", run="", mode="", names_rollout=False, scope="spangrad.gateway", process="g", duration=0),
    ]
    calls = [
        call(
            "3",
            trace="t0",
            error="500",
            http_status=500,
            prompt_tokens=0,
            response_tokens=0,
            policy="",
            version_start=None,
            version_end=None,
            finish_reason="",
        )
    ]
    assert text(Record("trace-1", spans, calls, [], [])) == (
        """\
rollout trace-1
5 ms · 2 spans · 1 call 0→0 tokens
not built yet
└── ChatCompletion · 5 ms · parent span is not here
    └── chat · gateway · 0 s · 0→0 tokens · error: HTTP 500
"""
    )


def test_spans_that_are_their_own_ancestors_end_somewhere() -> None:
    spans = [span("one", "1", "2"), span("two", "2", "1"), span("below", "3", "2")]
    assert text(Record("circle", spans, [], [], [])) == (
        """\
rollout circle
run run-1 · mode train · 5 ms · 3 spans
not built yet
├── one · 5 ms · parent span is not here
└── two · 5 ms · parent span is not here
    └── below · 5 ms
"""
    )
