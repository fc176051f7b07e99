"""Attribution of calls with odd headers, detection of constrained sampling, and removal of old counts."""

from __future__ import annotations

import asyncio
import gc
import tracemalloc
from typing import Any

import pytest

from gateway.proxy import counts
from gateway.proxy.context import NOTHING_ANNOUNCED, attempt_of, parse_baggage, parse_traceparent
from spangrad import semconv
from spangrad.encoding.otlp import SpanIds
from spangrad.http.announcements import AnnouncedAttempt, AttemptKey, StartedStage
from spangrad.sampling import is_constrained
from spangrad.types import Stage


@pytest.mark.parametrize(
    ("header", "ids"),
    [
        (f"00-{'a' * 32}-{'b' * 16}-01", ("a" * 32, "b" * 16)),
        (f" 00-{'A' * 32}-{'B' * 16}-00 ", ("a" * 32, "b" * 16)),
        (f"01-{'a' * 32}-{'b' * 16}-01-later", ("a" * 32, "b" * 16)),
        (f"ff-{'a' * 32}-{'b' * 16}-01", None),
        (f"00-{'0' * 32}-{'b' * 16}-01", None),
        (f"00-{'a' * 32}-{'0' * 16}-01", None),
        (f"00-{'a' * 31}-{'b' * 16}-01", None),
        ("", None),
        (None, None),
    ],
)
def test_parse_traceparent_valid_or_none(header: str | None, ids: tuple[str, str] | None) -> None:
    context = parse_traceparent(header)
    assert context == (SpanIds(*map(bytes.fromhex, ids)) if ids else None)


@pytest.mark.parametrize(
    ("baggage", "attempt"),
    [
        ("spangrad.rollout.id=a%2Fb", AttemptKey("a/b", 0)),
        ("spangrad.rollout.id=a,spangrad.rollout.attempt=3", AttemptKey("a", 3)),
        ("spangrad.rollout.id=a,spangrad.rollout.attempt=-3", AttemptKey("a", 0)),
        ("spangrad.rollout.id=a , spangrad.rollout.attempt = 3;x=y", AttemptKey("a", 3)),
        ("spangrad.rollout.attempt=3", None),
        ("spangrad.rollout.id=", None),
        (",=,;", None),
        (None, None),
    ],
)
def test_attempt_of_baggage_gives_attempt_key_or_none(baggage: str | None, attempt: AttemptKey | None) -> None:
    assert attempt_of(None, parse_baggage(baggage)) == attempt


@pytest.mark.parametrize(
    ("request_", "constrained"),
    [
        ({}, False),
        ({"response_format": {"type": "text"}}, False),
        ({"response_format": {"type": "json_object"}}, True),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, True),
        ({"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "auto"}, False),
        ({"tools": [{"type": "function", "function": {"name": "f", "strict": True}}]}, True),
        ({"tools": [{"type": "function", "function": {"name": "f", "strict": True}}], "tool_choice": "none"}, False),
        ({"tool_choice": "required"}, True),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, True),
        ({"structured_outputs": {"choice": ["a"]}}, True),
        ({"guided_regex": "a*"}, True),
        ({"guided_regex": None, "structured_outputs": None, "bad_words": [], "min_tokens": 0}, False),
        ({"logit_bias": {"3": 1.0}}, True),
        ({"use_beam_search": True}, True),
        ({"thinking_token_budget": 0}, True),
        ({"thinking_token_budget": 64}, True),
        ({"thinking_token_budget": -1}, False),
        ({"thinking_token_budget": None}, False),
        ({"thinking": {"type": "enabled", "budget_tokens": 2048}}, True),
        ({"thinking": {"type": "adaptive"}}, False),
        ({"tools": 3, "response_format": 4, "tool_choice": 5, "thinking": 6}, False),
    ],
)
def test_is_constrained_by_request_fields(request_: dict[str, Any], constrained: bool) -> None:
    assert is_constrained(request_) is constrained


async def test_counts_forget_least_recent_attempts_without_calls_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counts, "ATTEMPTS_KEPT", 2)
    tally = counts.Counts()
    for name in ("busy", "old", "new"):
        tally.announce(AnnouncedAttempt(rollout_id=name, attempt=0, run_id="run", mode="train"))
        if name == "busy":
            tally.begin(AttemptKey("busy", 0))
    assert [tally.counted(AttemptKey(name, 0)).calls for name in ("busy", "old", "new")] == [1, None, 0]
    assert tally.announced(AttemptKey("old", 0)) == NOTHING_ANNOUNCED
    tally.end(AttemptKey("busy", 0))
    assert tally.counted(AttemptKey("busy", 0)).calls == 1


async def test_counts_of_attempts_without_calls_in_flight_take_little_memory() -> None:
    tally, count = counts.Counts(), 500
    tracemalloc.start()
    try:
        for number in range(count):
            attempt = AnnouncedAttempt(rollout_id=f"rollout-{number:024}", attempt=0, run_id="run", mode="train")
            tally.announce(attempt)
            for stage in Stage:
                tally.start_stage(StartedStage(rollout_id=attempt.rollout_id, attempt=0, stage=stage, seconds=60))
            tally.begin(attempt.key)
            async with tally.limit(attempt.key, 60):
                counting = asyncio.create_task(tally.wait_idle(attempt.key, 60))
                await asyncio.sleep(0)
            tally.end(attempt.key)
            await counting
        gc.collect()
        held = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert held / count < 1_000, "100,000 of them are remembered"


async def test_counts_of_attempt_not_announced_are_none() -> None:
    tally = counts.Counts()
    tally.begin(AttemptKey("before a restart", 0))
    tally.end(AttemptKey("before a restart", 0))
    assert tally.counted(AttemptKey("before a restart", 0)).calls is None


def test_attempt_of_number_out_of_range_is_0() -> None:
    numbers = {"7": 7, "9999": 9999, "70000": 0, "9" * 5000: 0, "-1": 0, "x": 0}
    attempts = {text: attempt_of(None, {semconv.ROLLOUT_ID: "r", semconv.ROLLOUT_ATTEMPT: text}) for text in numbers}
    assert attempts == {text: AttemptKey("r", number) for text, number in numbers.items()}
