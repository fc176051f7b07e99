"""A rollout drawn as a tree: the whole text, for spans made by hand."""

from __future__ import annotations

import io
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console

from commands.inspection.rollout_tree import _duration, draw
from spangrad.store.rollout.record import Build, Conclusion, Record, Span
from spangrad.store.rollout.tree import children

# Two attempts, a tool, and two calls, of which one has two choices. The clock of a client's span is an hour slow: that does not matter.
WHOLE = msgspec.json.decode((Path(__file__).parents[1] / "fixtures/rollout.json").read_bytes(), type=Record)
TEAM = next(span for span in WHOLE.spans if span.name == "agent")


def span(name: str, own: str, parent: str = "", **facts: Any) -> Span:
    plain = {"attempt": 0, "trace": "t0", "seq": int(own, 16), "duration": 5_000_000, "kind": "", "agent": ""}
    return replace(TEAM, name=name, span=own, parent=parent, **{**plain, **facts})


def text(record: Record) -> str:
    out = io.StringIO()
    Console(file=out, width=180, color_system=None).print(draw(record))
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


def test_draw_whole_rollout() -> None:
    assert text(WHOLE) == (
        """\
rollout rollout-1
run run-1 · mode train · task paris · group g7 of 8 · 2 attempts · 1.52 s · 9 spans · 2 calls 1212→150 tokens
agents researcher (2 calls) · tools search (1 failed)
built: 1 transition, 2 dropped as mixed_versions (versions 3, 4), 1 dropped as superseded_attempt (attempt 1 counts)
├── rollout · attempt 0 · tried again · 20 ms · error: crash: exit code 1
├── rollout · attempt 1 · final · 1.5 s · ok · reward = 1 (event)
│   ├── agent · researcher · 1.4 s
│   │   ├── ChatCompletion · llm · 700 ms · 512→100 tokens · ok
│   │   │   └── chat policy · gateway · 690 ms · 512→100 tokens · policy v3 · stop · → transition, turn 0 of researcher, \
reward = 1 (evaluation_event), tool = -0.1 (air)
│   │   ├── search · tool · 40 µs · error: ValueError('no such page') · tool_error = -0.1 (air)
│   │   └── ChatCompletion · 300 ms
│   │       └── chat policy · gateway · 200 ms · 700→50 tokens · 2 choices · policy v3→v4 · length · stop · \
→ dropped as mixed_versions (versions 3, 4) x2
│   └── lost · 5 ms · parent span is not here
├── of the whole rollout · brevity = 0.2 (sql)
├── of no span here · style = 0.5 (log)
└── span a1 is not here · → dropped as superseded_attempt (attempt 1 counts)
"""
    )


def test_draw_rootless_trace() -> None:
    spans = [
        span("ChatCompletion", "2", "1", run="", mode="", names_rollout=False, process="", seq=0, started=1, service="app"),
        span("chat", "3", "2", run="", mode="", names_rollout=False, kind="gateway", process="g", duration=0),
    ]
    failed = {"error": "500", "http_status": 500, "prompt_tokens": 0, "response_tokens": 0, "policy": "", "versions": ()}
    calls = [replace(WHOLE.calls[0], span="3", trace="t0", finish_reason="", **failed)]
    assert text(Record("trace-1", spans, calls, [], [])) == (
        """\
rollout trace-1
5 ms · 2 spans · 1 call 0→0 tokens
not built yet
└── ChatCompletion · 5 ms · parent span is not here
    └── chat · gateway · 0 s · 0→0 tokens · error: HTTP 500
"""
    )


def test_draw_spans_in_a_cycle_terminates() -> None:
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


class CountedText(str):
    """A text that counts how often it is compared or hashed, and fails when that is too often."""

    __slots__ = ()
    steps_left = 0

    def __eq__(self, other: object) -> bool:
        self.step()
        return str.__eq__(self, other)

    def __hash__(self) -> int:
        self.step()
        return str.__hash__(self)

    @classmethod
    def step(cls) -> None:
        cls.steps_left -= 1
        assert cls.steps_left > 0


@pytest.mark.parametrize(
    ("count", "parent"), [(10_000, lambda _: "lost"), (5_000, lambda n: f"{n - 1:x}"), (5_000, lambda n: f"{n + 1:x}")]
)
def test_children_of_orphans_or_a_long_chain_takes_linear_steps(count: int, parent: Callable[[int], str]) -> None:
    facts = {"trace": CountedText("t0"), "name": CountedText("tool")}
    spans = [span(own=f"{n:x}", parent=parent(n), **facts) for n in range(1, count + 1)]
    root = next(replace(span, attempt=0) for span in WHOLE.spans if span.is_root)
    CountedText.steps_left = 100 * count
    below = children({span.key: span for span in [root, *spans]})
    assert sum(map(len, below.values())) == count + 1
    assert below[None] == [root]


def test_children_of_orphans_take_time_that_grows_with_their_number() -> None:
    root = next(span for span in WHOLE.spans if span.is_root)

    def seconds(count: int) -> float:
        spans = {orphan.key: orphan for orphan in [root, *(span("tool", f"{n:x}", "lost") for n in range(1, count + 1))]}
        begin = time.thread_time()
        children(spans)
        return time.thread_time() - begin

    # Ten times as many spans take some 12 times as long, and 70 times where the cost of each grows with their number.
    assert min(seconds(20_000) for _ in range(3)) < 35 * min(seconds(2_000) for _ in range(3))


def test_draw_spans_without_sequence_orders_by_time() -> None:
    facts = {"run": "", "mode": "", "process": "~instance", "seq": 0}
    spans = [span("later", "1", "9", started=2, **facts), span("first", "2", "9", started=1, **facts), span("team", "9", **facts)]
    drawn = text(Record("foreign", spans, [], [], [])).splitlines()[3:]
    assert [line.split(" · ")[0] for line in drawn] == ["└── team", "    ├── first", "    └── later"]


def test_draw_several_builds_names_each() -> None:
    kept = Conclusion(0, "t0", "2", 0, "", "policy", 3, 0)
    dropped = Conclusion(0, "t0", "2", 0, "", "policy", reason="over_length", detail="9 tokens")
    builds = [Build("0123456789abcdef", conclusions=[kept], dataset="default@1"), Build("fedcba9876543210", conclusions=[dropped])]
    assert text(Record("two", [span("chat", "2", kind="llm")], [], [], builds)) == (
        """\
rollout two
run run-1 · mode train · 5 ms · 1 span
built as default@1: 1 transition
built as fedcba9876543210: 0 transitions, 1 dropped as over_length (9 tokens)
└── chat · llm · 5 ms · → transition, turn 0 in default@1 · → dropped as over_length (9 tokens) in fedcba9876543210
"""
    )


@pytest.mark.parametrize(
    ("nanoseconds", "shown"),
    [
        (0, "0 s"), (7, "0.007 µs"), (999_499, "999 µs"), (999_600, "1000 µs"), (999_600_000, "1000 ms"), (59_960_000_000, "60 s"),
        (61_000_000_000, "1.02 min"), (3600 * 999_700_000_000, "1000 h"), (3600 * 12_345_000_000_000, "12345 h"),
    ],
)  # fmt: skip
def test_duration_has_three_digits_and_no_exponent(nanoseconds: int, shown: str) -> None:
    assert _duration(nanoseconds) == shown
