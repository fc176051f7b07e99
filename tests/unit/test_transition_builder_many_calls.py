"""Attempts of many calls that do not extend each other: searches give what plain scans give, at a cost that grows with the calls."""

from __future__ import annotations

from cProfile import Profile
from typing import Any

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.spans import SpanFactory
from transition_builder.build import read
from transition_builder.calls import preceding, span_matching
from transition_builder.calls.branches import AnsweredChoice, PromptSearch, longest_prefixes
from transition_builder.calls.reconstruct import Reconstructed, reconstruct

SECOND = 10**9
IDS = st.text("ab", max_size=5).map(str.encode)


@given(st.lists(st.tuples(IDS, st.lists(IDS.filter(len), max_size=2)), max_size=12))
def test_longest_prefixes_of_any_calls_equal_plain_scan(calls: list[tuple[bytes, list[bytes]]]) -> None:
    conversations = [
        AnsweredChoice(prompt + response, call, 2 * call + choice)
        for call, (prompt, responses) in enumerate(calls)
        for choice, response in enumerate(responses)
    ]
    searches = [PromptSearch(b"".join([prompt, *responses[:1]]), call, len(prompt)) for call, (prompt, responses) in enumerate(calls)]
    scanned = dict[int, AnsweredChoice]()
    for call, (prompt, _) in enumerate(calls):
        earlier = [conversation for conversation in conversations if conversation.call < call and prompt.startswith(conversation.ids)]
        if earlier:
            scanned[call] = max(earlier, key=lambda conversation: (len(conversation.ids), conversation.row))
    assert dict(longest_prefixes(conversations, searches)) == scanned


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 9), st.sampled_from([0, 0, 1, 3, 9])), max_size=12))
def test_link_by_start_of_any_clock_equals_plain_scan(plans: list[tuple[bool, int, int]]) -> None:
    """Frameworks' spans beside clients' in one process, whose clock may be set back; a duration of 0 is not known."""
    spans, frameworks, requests = SpanFactory(), dict[str, tuple[int, int, int]](), dict[str, tuple[int, int]]()
    root = spans.root()
    for number, (is_framework, start, seconds) in enumerate(plans):
        facts: dict[str, Any] = {"Timestamp": SpanFactory.time(start), "Duration": seconds * SECOND}
        if is_framework:
            solver = spans.span(f"solver {number}", root, kind="AGENT")
            frameworks[spans.span("ChatOpenAI", solver, kind="LLM", **facts)] = number, start, seconds
        else:
            requests[spans.client(root, trace=f"trace {number}", **facts)] = number, start

    taken, agents = list[str](), dict[str, str]()
    for request, (place, begin) in requests.items():
        around = [
            span for span, (number, start, seconds) in frameworks.items() if number < place and (not seconds or begin <= start + seconds)
        ]
        free = [span for span in around if span not in taken]
        chosen = [*free[:1], *around[-1:]][:1]
        taken += chosen
        agents[request] = f"solver {frameworks[chosen[0]][0]}" if chosen else "agent"
    for span, (number, start, seconds) in frameworks.items():
        inside = [place for place, begin in requests.values() if not seconds or (number < place and begin <= start + seconds)]
        if not inside:
            agents[span] = f"solver {number}"

    frames = spans.frames()
    nodes, recorded = read(frames, frames.owners)
    calls = reconstruct(nodes, recorded, frames.answers, frames.dropped).calls
    assert dict(calls.select("SpanId", "AgentName").rows()) == agents


ASKED_ID = "llm.output_messages.0.message.tool_calls.0.tool_call.id"


def place(spans: SpanFactory) -> Reconstructed:
    frames = spans.frames()
    nodes, recorded = read(frames, frames.owners)
    return reconstruct(nodes, recorded, frames.answers, frames.dropped)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.sampled_from(["call_0", "call_1"]), st.sampled_from(["r", "s"])), max_size=14))
def test_tool_calls_of_repeated_ids_have_the_call_of_a_plain_scan(steps: list[tuple[bool, str, str]]) -> None:
    spans = SpanFactory()
    roots = {rollout: spans.root(rollout) for rollout in ("r", "s")}
    calls, tools = list[tuple[int, str, str, str]](), list[tuple[int, str, str, str]]()
    for number, (is_call, asked_id, rollout) in enumerate(steps):
        if is_call:
            client = spans.client(roots[rollout], rollout=rollout, Duration=SECOND // 2, Attributes={ASKED_ID: asked_id})
            calls.append((number, asked_id, rollout, spans.call(client, rollout=rollout, PromptIds=[number])))
        else:
            tool = spans.span("run", roots[rollout], rollout=rollout, kind="TOOL", Attributes={"tool_call.id": asked_id})
            tools.append((number, asked_id, rollout, tool))
    expected = dict[str, str]()
    for number, asked_id, rollout, tool in tools:
        asking = [(at < number, at, call) for at, of_id, of_rollout, call in calls if (of_id, of_rollout) == (asked_id, rollout)]
        if asking:
            expected[tool] = max(asking)[2]
    placed = place(spans)
    names = dict(placed.calls.select("CallId", "SpanId").rows())
    caused = placed.caused.filter("Asked").select("SpanId", "CallId").rows()
    assert {tool: names[call] for tool, call in caused} == expected


KINDS = st.sampled_from(["AGENT", "CHAIN", "TOOL", "client", "call"])


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(KINDS, st.integers(0, 9), st.sampled_from(["agent", "worker"]), st.integers(0, 9)), max_size=25))
def test_calls_before_each_event_are_those_of_a_search_without_bounds(shape: list[tuple[str, int, str, int]]) -> None:
    spans = SpanFactory()
    span_ids = [spans.root()]
    for number, (kind, back, process, seconds) in enumerate(shape):
        above = span_ids[-1 - back % len(span_ids)]
        facts: dict[str, Any] = {"process": process, "Duration": seconds * SECOND}
        if kind == "call":
            span_ids.append(spans.call(above, PromptIds=[7, number]))
        elif kind == "client":
            span_ids.append(spans.client(above, **facts))
        else:
            span_ids.append(spans.span(f"{kind} {number % 3}", above, kind=kind, **facts))

    def unbounded(forest: Any, agents: Any, events: Any) -> Any:
        return np.full(len(events.node), np.iinfo(np.int64).max)

    frames = spans.frames()
    described = read(frames, frames.owners)
    bounded = reconstruct(*described, frames.answers, frames.dropped)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(preceding, "_bound", unbounded)
        scanned = reconstruct(*described, frames.answers, frames.dropped)
    assert bounded.calls.rows() == scanned.calls.rows()
    assert bounded.caused.rows() == scanned.caused.rows()


def call_spans(number: int, **facts: Any) -> span_matching.CallSpans:
    plain: dict[str, Any] = {
        "name": number, "innermost": number, "top": 0, "bottom": 0, "start_key": ("process", number, ""), "start": number, "end": number,
        "convention": "", "failed": False, "engine": False, "responses": frozenset(), "ids": frozenset(), "model": None, "tokens": None,
        "inside": frozenset(),
    }  # fmt: skip
    return span_matching.CallSpans(**plain | facts)


DISTANCES = st.tuples(st.integers(0, 4), st.integers(0, 4)).map(sorted)
CALL_SPANS = st.tuples(DISTANCES, st.sampled_from("ab"), st.sets(st.sampled_from("xy")), st.sets(st.integers(0, 7), max_size=3))


@given(st.lists(CALL_SPANS, max_size=10))
def test_link_by_repeated_response_ids_equals_plain_scan(plans: list[tuple[list[int], str, set[str], set[int]]]) -> None:
    groups = [
        call_spans(number, top=top, bottom=bottom, convention=convention, responses=frozenset(responses), inside=frozenset(inside))
        for number, ((bottom, top), convention, responses, inside) in enumerate(plans)
    ]
    scanned = list[tuple[int, int]]()
    for response in dict.fromkeys(response for group in groups for response in sorted(group.responses)):
        sharing = [group for group in groups if response in group.responses]
        for lower in sharing:
            if candidates := [group for group in sharing if span_matching._fits(lower, group)]:  # pyright: ignore[reportPrivateUsage]
                scanned.append((lower.name, min(candidates, key=lambda group: group.bottom).name))
    pairs = span_matching._by_response(groups, {})  # pyright: ignore[reportPrivateUsage]
    assert [(lower.name, upper.name) for lower, upper in pairs] == scanned


TAKEN = st.tuples(st.sampled_from([None, (1, 1), (2, 1)]), st.sampled_from([None, "a", "b"]), st.sets(st.sampled_from("xy")))


@given(st.lists(TAKEN, max_size=8), st.lists(TAKEN, max_size=8))
def test_groups_taken_by_token_counts_equal_plain_scan(
    plans: list[tuple[Any, str | None, set[str]]], takers: list[tuple[Any, str | None, set[str]]]
) -> None:
    def groups_of(facts: list[tuple[Any, str | None, set[str]]]) -> list[span_matching.CallSpans]:
        return [
            call_spans(number, tokens=tokens, model=model, responses=frozenset(responses))
            for number, (tokens, model, responses) in enumerate(facts)
        ]

    left = groups_of(plans)
    untaken = span_matching._UntakenGroups(left)  # pyright: ignore[reportPrivateUsage]
    for taker in groups_of(takers):
        agreeing = [group for group in left if span_matching._agree(taker, group)]  # pyright: ignore[reportPrivateUsage]
        left = [group for group in left if group not in agreeing[:1]]
        assert untaken.take(taker) == bool(agreeing)
    assert [*untaken._all.values()] == left  # pyright: ignore[reportPrivateUsage]


def independent(kind: str, size: int) -> SpanFactory:
    """Return calls of which none extends another, one after the other."""
    spans = SpanFactory()
    root = spans.root()
    for number in range(size):
        usage = {"llm.token_count.prompt": str(number + 1), "llm.token_count.completion": "1"}
        facts: dict[str, Any] = {
            "Timestamp": SpanFactory.time(number),
            "Duration": size * SECOND if "parallel" in kind else SECOND // 2,
            "Attributes": usage,
        }
        if "nested" in kind:
            root = spans.span("step", root)
        tokens: dict[str, Any] = {"PromptIds": [7, number, *range(number % 9)], "ResponseIds": [1], "Logprobs": [-1.0]}
        tokens |= {"ResponseId": "repeated"} if "repeated" in kind else {}
        if "framework" in kind:
            spans.span("ChatOpenAI", root, kind="LLM", **facts)
        if "recorded call" in kind:
            spans.call(root, **tokens)
        if "client" in kind:
            client = spans.client(root, **facts)
            if "gateway" in kind:
                spans.call(client, **tokens)
            else:
                spans.answer(client, **tokens)
    return spans


def function_calls(spans: SpanFactory) -> int:
    """Return how many functions are called to reconstruct the calls: a cost that no machine changes."""
    frames = spans.frames()
    nodes, recorded = read(frames, frames.owners)
    with Profile() as profile:
        reconstruct(nodes, recorded, frames.answers, frames.dropped)
    return sum(entry.callcount for entry in profile.getstats())


@pytest.mark.parametrize(
    "kind",
    [
        "client and gateway",
        "client",
        "parallel client",
        "framework",
        "framework and client",
        "parallel framework and client",
        "framework and client of repeated responses",
        "nested client and gateway",
        "framework beside recorded call",
    ],
)
def test_reconstruct_cost_of_independent_calls_grows_with_their_number(kind: str) -> None:
    assert function_calls(independent(kind, 1000)) < 8 * function_calls(independent(kind, 250))


def test_tool_calls_of_a_repeated_id_are_not_joined_in_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some servers count the ids of tool calls from 0 in each answer."""
    join, heights = pl.DataFrame.join, list[int]()

    def counted(self: pl.DataFrame, *arguments: Any, **options: Any) -> pl.DataFrame:
        joined = join(self, *arguments, **options)
        heights.append(joined.height)
        return joined

    monkeypatch.setattr(pl.DataFrame, "join", counted)
    spans, size = SpanFactory(), 60
    root = spans.root()
    for number in range(size):
        spans.call(spans.client(root, Duration=SECOND // 2, Attributes={ASKED_ID: "call_0"}), PromptIds=[7, number])
        spans.span("run", root, kind="TOOL", Attributes={"tool_call.id": "call_0"})
    place(spans)
    assert max(heights) < 6 * size  # three spans a step
