"""Context of a call: its rollout, attempt, run and mode, and the span that it continues.

In: the URL's prefix, the W3C headers `baggage` and `traceparent`, and what the runner announced. Out: a `CallContext`.
Invariant: the URL names the rollout before baggage does, and the request's own parent comes before the announced one;
what is malformed counts as absent, so that odd headers never break an agent.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import unquote

from spangrad import semconv
from spangrad.encoding.otlp import SpanIds
from spangrad.http.announcements import AnnouncedAttempt, AttemptKey

_ATTEMPT_NUMBER = re.compile(r"[0-9]{1,4}")
_TRACEPARENT = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-[0-9a-f]{2}(-.*)?")


@dataclass(frozen=True, slots=True)
class CallContext:
    """Rollout, run and mode of a call, and its place in a trace."""

    attempt: AttemptKey | None
    """None: the call belongs to no rollout that we know of."""
    run_id: str | None
    mode: str | None
    ids: SpanIds
    """The call's own span; without a parent, it is the root of a trace of its own."""


NOTHING_ANNOUNCED = AnnouncedAttempt(rollout_id="", attempt=0, run_id="", mode="")
"""Announcement of an attempt that was not announced."""


def parse_traceparent(text: str | None) -> SpanIds | None:
    """Read a W3C `traceparent`; None when it is absent or malformed."""
    match = _TRACEPARENT.fullmatch((text or "").strip().lower())
    return SpanIds(bytes.fromhex(match[1]), bytes.fromhex(match[2])) if match else None


def parse_baggage(text: str | None) -> dict[str, str]:
    """Read our keys of a W3C `baggage` header."""
    pairs = (member.split(";")[0].partition("=") for member in (text or "").split(","))
    return {key.strip(): unquote(value.strip()) for key, _, value in pairs if key.strip() in semconv.CONTEXT_KEYS}


def attempt_of(url: AttemptKey | None, baggage: Mapping[str, str]) -> AttemptKey | None:
    """Return the attempt that a call belongs to: from its URL, else from its baggage. None: neither names one."""
    if url is not None:
        return url
    rollout = baggage.get(semconv.ROLLOUT_ID)
    number = baggage.get(semconv.ROLLOUT_ATTEMPT, "0")
    return AttemptKey(rollout, int(number) if _ATTEMPT_NUMBER.fullmatch(number) else 0) if rollout else None


def call_context(
    attempt: AttemptKey | None, announced: AnnouncedAttempt, baggage: Mapping[str, str], traceparent: str | None
) -> CallContext:
    """Return the context of a call; its own span gets a fresh id."""
    parent = parse_traceparent(traceparent) or parse_traceparent(announced.traceparent)
    return CallContext(
        attempt=attempt,
        run_id=announced.run_id or baggage.get(semconv.RUN_ID),
        mode=announced.mode or baggage.get(semconv.ROLLOUT_MODE),
        ids=SpanIds(parent.trace, os.urandom(8), parent.span) if parent else SpanIds(os.urandom(16), os.urandom(8)),
    )
