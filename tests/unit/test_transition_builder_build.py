"""Transitions and drops that are built of hand-made spans: every call once, with any fault (law 2)."""

from __future__ import annotations

from collections import Counter
from typing import Any

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from polars.testing import assert_frame_equal

from spangrad.settings import AirRule, BuilderSettings, Selection
from spangrad.types import call_id, transition_id
from tests.support.spans import SpanFactory, versions
from transition_builder.build import build
from transition_builder.frames import Built, Frames, empty
from transition_builder.schemas import BUILT, DROPS, REWARDS, SAMPLING, TRANSITIONS
from transition_builder.source.sink import revise

SPEC = BuilderSettings()


def linked_call(spans: SpanFactory, parent: str, **facts: Any) -> str:
    where = {name: facts[name] for name in ("rollout", "attempt") if name in facts}
    return spans.call(spans.span("POST", spans.client(parent, **where), **where), **facts)


def kept(built: Built) -> list[tuple[Any, ...]]:
    return built.transitions.select("SpanId", "ChoiceIndex", "Turn", "AgentName", "Rewards.Value").rows()


def reasons(built: Built) -> dict[str, tuple[str, str]]:
    return {span: (reason, detail) for span, reason, detail in built.drops.select("SpanId", "Reason", "Detail").rows()}


def test_build_transition_has_fields_for_training() -> None:
    spans = SpanFactory()
    root = spans.root(calls=1, GroupId="g7", GroupSize=4, TaskId="task-1")
    spans.evaluation(root, 0.25)
    call = linked_call(spans, spans.span("solver", root, kind="AGENT"), RunId="", Mode="")
    built = build(spans.frames(), SPEC)
    name = call_id(SpanFactory.trace("run.r.0"), call, 0)
    assert built.drops.rows() == []
    assert built.transitions.schema == dict(TRANSITIONS)
    assert built.transitions.row(0, named=True) == {
        "RunId": "run",
        "Mode": "train",
        "BuildSpec": SPEC.spec,
        "GroupId": "g7",
        "GroupSize": 4,
        "TaskId": "task-1",
        "RolloutId": "r",
        "Attempt": 0,
        "Revision": 0,
        "Content": 0,
        "Turn": 0,
        "TransitionId": transition_id(name, SPEC.spec, 0),
        "CallId": name,
        "TraceId": SpanFactory.trace("run.r.0"),
        "SpanId": call,
        "ChoiceIndex": 0,
        "Timestamp": SpanFactory.time(5),
        "ParentCallId": "",
        "Branch": 0,
        "AgentName": "solver",
        "Components": ["solver"],
        "Tools": [],
        "Policy": "policy",
        "Version": 3,
        "Versions.Start": [0],
        "Versions.Version": [3],
        "Model": "policy",
        "TokenizerHash": "tok",
        "PromptIds": [1, 2, 3],
        "ResponseIds": [4, 5],
        "Logprobs": [-0.5, -0.25],
        "Temperature": 0.7,
        "Reshaping": "",
        "FinishReason": "stop",
        "Rewards.Name": ["reward"],
        "Rewards.Value": [0.25],
        "Rewards.Source": ["runner"],
        "Rewards.CallId": [""],
        "Rewards.Role": [""],
        "Rewards.Turn": [0],
    }


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        ({"Aborted": True, "ErrorType": "aborted", "HttpStatus": 499}, ("aborted", "")),
        ({"ErrorType": "APITimeoutError"}, ("call_failed", "HTTP 200 APITimeoutError")),
        ({"HttpStatus": 429, "PromptIds": []}, ("call_failed", "HTTP 429")),
        ({"HttpStatus": 404, "ErrorType": "404"}, ("call_failed", "HTTP 404")),
        ({"Redacted": True, "PromptIds": [], "ResponseIds": [], "Logprobs": []}, ("redacted", "")),
        ({"PromptIds": []}, ("no_token_ids", "")),
        (
            {"IdsSource": "retokenized", **versions(), "Logprobs": []},
            ("retokenized", "by tokenizer tok"),
        ),
        ({"ResponseIds": [], "Logprobs": []}, ("empty_response", "")),
        ({"Logprobs": [-1.0]}, ("no_logprobs", "1 logprobs for 2 tokens")),
        ({"TokenizerHash": "other"}, ("other_tokenizer", "other")),
        (versions((0, 3), (1, 4)), ("mixed_versions", "versions 3, 4")),
        (versions(), ("unknown_version", "")),
        (versions((1, 3)), ("unknown_version", "")),
        (versions((0, 3), (0, 4)), ("unknown_version", "")),
        (versions((0, 3), (2, 4)), ("unknown_version", "")),
        ({"TopP": 0.9}, ("other_distribution", "sampled with top_p=0.9")),
        ({"TopK": 5}, ("other_distribution", "sampled with top_k=5")),
        ({"MinP": 0.1}, ("other_distribution", "sampled with min_p=0.1")),
        ({"PresencePenalty": -0.5}, ("other_distribution", "sampled with presence_penalty=-0.5")),
        ({"FrequencyPenalty": 0.5}, ("other_distribution", "sampled with frequency_penalty=0.5")),
        ({"RepetitionPenalty": 1.1}, ("other_distribution", "sampled with repetition_penalty=1.1")),
        ({"Constrained": True, "TopP": 0.5}, ("other_distribution", "sampled with top_p=0.5, masked tokens")),
        ({"Temperature": None}, ("unknown_sampling", "")),
        ({"TopP": None}, ("unknown_sampling", "")),
        ({"Policy": "judge"}, ("not_selected", "policy judge")),
        ({"Policy": "", "Model": "judge", "HttpStatus": 500}, ("not_selected", "policy judge")),
    ],
)
def test_build_faulty_call_drops_with_its_reason(facts: dict[str, Any], expected: tuple[str, str]) -> None:
    spans = SpanFactory()
    root = spans.root(calls=2)
    spans.evaluation(root)
    faulty, good = linked_call(spans, root, **facts), linked_call(spans, root)
    built = build(spans.frames(), BuilderSettings(selection=Selection(policies="policy"), tokenizer_hash="tok", mixed_versions="drop"))
    assert reasons(built) == {faulty: expected}
    turn = (
        1
        if expected[0]
        in {"redacted", "no_token_ids", "retokenized", "empty_response", "no_logprobs"}
        | {"other_tokenizer", "mixed_versions", "unknown_version", "unknown_sampling", "other_distribution"}
        else 0
    )
    assert kept(built) == [(good, 0, turn, "agent", [1.0])]


def test_build_keeps_retokenized_calls_when_asked() -> None:
    spans = SpanFactory()
    root = spans.root(calls=1)
    spans.evaluation(root)
    linked_call(spans, root, IdsSource="retokenized", Temperature=None, Logprobs=[], **versions())
    built = build(spans.frames(), BuilderSettings(retokenized=True))
    assert built.drops.rows() == []
    assert built.transitions.select("PromptIds", "ResponseIds", "Logprobs", "Version", "TokenizerHash").rows() == [
        ([1, 2, 3], [4, 5], [], 0, "tok")
    ]


def test_build_call_of_several_versions_has_version_per_token() -> None:
    spans = SpanFactory()
    spans.evaluation(root := spans.root(calls=2))
    linked_call(spans, root, choices=1, ResponseIds=[4, 5, 6], Logprobs=[-1.0, -2.0, -3.0], **versions((0, 3), (1, 4), (2, 9)))
    linked_call(spans, root)
    built = build(spans.frames(), SPEC)
    assert reasons(built) == {}
    assert built.transitions.select("Turn", "Version", "Versions.Start", "Versions.Version").rows() == [
        (0, 3, [0, 1, 2], [3, 4, 9]),
        (1, 3, [0], [3]),
    ]


def test_build_neutral_sampling_parameters_drop_nothing() -> None:
    spans = SpanFactory()
    spans.evaluation(root := spans.root(calls=1))
    call = linked_call(spans, root, TopK=-1)
    built = build(spans.frames(), SPEC)
    assert (kept(built), reasons(built)) == ([(call, 0, 0, "agent", [1.0])], {})


@pytest.mark.parametrize(
    ("reported", "dropped"),
    [
        ({"TopP": 0.9}, ("other_distribution", "sampled with top_p=0.9")),
        ({"Constrained": True}, ("other_distribution", "sampled with masked tokens")),
        (dict.fromkeys(SAMPLING), ("unknown_sampling", "")),
        ({"Temperature": None}, ("unknown_sampling", "")),
        ({"Temperature": 0.3}, None),
    ],
    ids=str,
)
def test_build_direct_mode_uses_sampling_reported_by_engine(reported: dict[str, Any], dropped: tuple[str, str] | None) -> None:
    spans = SpanFactory()
    spans.evaluation(root := spans.root())
    call = spans.client(root, Attributes={"llm.invocation_parameters": '{"temperature": 0.7, "top_p": 1}'})
    spans.answer(call, **reported)
    built = build(spans.frames(), SPEC)
    if dropped:
        assert (kept(built), reasons(built)) == ([], {call: dropped})
    else:
        assert (kept(built), reasons(built)) == ([(call, 0, 0, "agent", [1.0])], {})
        assert built.transitions["Temperature"].to_list() == [0.3]


def test_build_redacted_call_with_ids_is_kept() -> None:
    spans = SpanFactory()
    spans.evaluation(root := spans.root(calls=1))
    call = linked_call(spans, root, Redacted=True)
    assert kept(build(spans.frames(), SPEC)) == [(call, 0, 0, "agent", [1.0])]


def test_build_selection_keeps_and_counts_turns_of_selected_agents_only() -> None:
    spans = SpanFactory()
    spans.evaluation(root := spans.root(calls=3))
    planner = spans.span("planner", root, kind="AGENT")
    first = linked_call(spans, planner)
    other = linked_call(spans, spans.span("writer", root, kind="AGENT"))
    second = linked_call(spans, planner)
    built = build(spans.frames(), BuilderSettings(selection=Selection(agents="plan.*")))
    assert kept(built) == [(first, 0, 0, "planner", []), (second, 0, 1, "planner", [1.0])]
    assert reasons(built) == {other: ("not_selected", "agent writer")}


def test_build_fault_of_rollout_drops_all_its_calls() -> None:
    spans = SpanFactory()
    failed = linked_call(spans, spans.root("failed", calls=1, failure="timeout"), rollout="failed")
    late = linked_call(spans, spans.root("late", calls=2, Verdict="incomplete", Detail="1 of 2"), rollout="late")
    mute = linked_call(spans, spans.root("mute", calls=1), rollout="mute")
    spans.evaluation(root := spans.root("nan", calls=1), "NaN", name="style")
    nan = linked_call(spans, root, rollout="nan")
    spans.evaluation(root, 1.0)
    old = linked_call(spans, spans.root("twice", attempt=0, calls=1, final=False, failure="crash"), rollout="twice", attempt=0)
    spans.evaluation(root := spans.root("twice", attempt=1, calls=1))
    new = linked_call(spans, root, rollout="twice", attempt=1)
    built = build(spans.frames(), SPEC)
    assert reasons(built) == {
        failed: ("attempt_failed", "timeout"),
        late: ("incomplete", "1 of 2"),
        mute: ("no_reward", "no evaluation result with a score arrived"),
        nan: ("no_reward", "not a finite number: style"),
        old: ("superseded_attempt", "attempt 1 counts"),
    }
    assert kept(built) == [(new, 0, 0, "agent", [1.0])]


def test_build_of_failed_attempt_with_runner_reward_keeps_its_calls() -> None:
    spans = SpanFactory()
    spans.evaluation(root := spans.root("slow", calls=3, failure="timeout"), -1.0)
    agent = spans.span("planner", root, rollout="slow", kind="AGENT")
    first = linked_call(spans, agent, rollout="slow")
    spans.evaluation(first, 0.25, name="step")
    second = linked_call(spans, agent, rollout="slow")
    in_flight = linked_call(spans, agent, rollout="slow", Aborted=True)
    built = build(spans.frames(), SPEC)
    assert kept(built) == [(first, 0, 0, "planner", [0.25]), (second, 0, 1, "planner", [-1.0])]
    assert reasons(built) == {in_flight: ("aborted", "")}
    assert built.rewards.select("Name", "Value", "Source").sort("Name").rows() == [
        ("reward", -1.0, "runner"),
        ("step", 0.25, "evaluation_event"),
    ]
    builds = revise(built, spans.frames().rollouts, empty(BUILT), "spec").builds
    assert builds.select("Failure", "Transitions", "Drops", "Rewards").rows() == [("timeout", 2, 1, 2)]


def test_build_of_failed_attempt_with_agent_reward_only_drops_its_calls() -> None:
    spans = SpanFactory()
    agent = spans.span("planner", spans.root("crashed", calls=1, failure="crash"), rollout="crashed", kind="AGENT")
    spans.evaluation(agent, 1.0)
    call = linked_call(spans, agent, rollout="crashed")
    spans.evaluation(root := spans.root("broken", calls=1, failure="exception"), "nan")
    unworthy = linked_call(spans, root, rollout="broken")
    built = build(spans.frames(), SPEC)
    assert reasons(built) == {call: ("attempt_failed", "crash"), unworthy: ("attempt_failed", "exception")}
    assert (built.transitions.height, built.rewards.height) == (0, 0)


def test_build_rollout_without_calls_has_one_drop() -> None:
    spans = SpanFactory()
    spans.evaluation(quiet := spans.root("quiet", calls=0))
    spans.evaluation(slow := spans.root("slow", calls=0, failure="timeout"))
    failed = spans.root("failed", calls=0, failure="exit_code")
    late = spans.root("late", calls=2, Verdict="incomplete", Detail="0 of 2")
    linked_call(spans, spans.root("retried", attempt=0, calls=1, final=False, failure="crash"), rollout="retried", attempt=0)
    call_with_retries = spans.root("retried", attempt=1, calls=0, failure="timeout")
    built = build(spans.frames(), SPEC)
    alone = built.drops.filter(pl.col("CallId") == "")
    assert alone.select("RolloutId", "Attempt", "SpanId", "Reason", "Detail").rows() == [
        ("failed", 0, failed, "attempt_failed", "exit_code"),
        ("late", 0, late, "incomplete", "0 of 2"),
        ("quiet", 0, quiet, "no_calls", ""),
        ("retried", 1, call_with_retries, "attempt_failed", "timeout"),
        ("slow", 0, slow, "no_calls", ""),
    ]
    assert built.drops.height == 6
    assert built.transitions.height == 0


def test_build_span_delivered_twice_counts_once() -> None:
    spans = SpanFactory()
    spans.evaluation(root := spans.root(calls=1))
    linked_call(spans, root, choices=2)
    once = build(spans.frames(), SPEC)
    spans.spans *= 2
    spans.calls *= 2
    repeated = build(spans.frames(), SPEC)
    for left, right in ((once.transitions, repeated.transitions), (once.drops, repeated.drops), (once.rewards, repeated.rewards)):
        assert_frame_equal(left, right)
    assert once.transitions.height == 2


def test_build_of_retries_does_not_depend_on_the_order_of_choices() -> None:
    spans = SpanFactory()
    spans.evaluation(root := spans.root(calls=2))
    client = spans.client(root)
    retries = [spans.call(spans.span("POST", client), choices=2) for _ in range(2)]
    for row in spans.calls:
        row["Aborted"] = (row["SpanId"] == retries[0]) == (row["ChoiceIndex"] == 1)
    ordered = build(spans.frames(), SPEC)
    spans.calls.reverse()
    reversed_choices = build(spans.frames(), SPEC)
    assert kept(ordered) == [(retries[0], 0, 0, "agent", [1.0])]
    assert_frame_equal(ordered.transitions, reversed_choices.transitions)
    assert_frame_equal(ordered.drops, reversed_choices.drops)


def test_build_call_without_row_in_rollout_spans_is_built() -> None:
    spans = SpanFactory()
    spans.evaluation(root := spans.root(calls=1))
    call = linked_call(spans, spans.span("solver", root, kind="AGENT"))
    spans.spans = [row for row in spans.spans if row["SpanId"] != call]
    assert kept(build(spans.frames(), SPEC)) == [(call, 0, 0, "solver", [1.0])]


def test_build_of_nothing_gives_empty_frames() -> None:
    built = build(SpanFactory().frames(), BuilderSettings(rules=(AirRule(name="tool_error", kind="tool_error", reward=-1, tools=("*",)),)))
    assert built.transitions.schema == dict(TRANSITIONS)
    assert built.drops.schema == dict(DROPS)
    assert built.rewards.schema == dict(REWARDS)
    assert built.transitions.height + built.drops.height + built.rewards.height == 0


FAULTS: dict[str, dict[str, Any]] = {
    "": {},
    "call_failed": {"HttpStatus": 500, "PromptIds": [], "ResponseIds": [], "Logprobs": []},
    "aborted": {"Aborted": True},
    "no_token_ids": {"PromptIds": []},
    "no_logprobs": {"Logprobs": []},
    "unknown_version": versions(),
    "not_selected": {"Policy": "judge"},
}
CALLS = st.tuples(
    st.sampled_from(sorted(FAULTS)), st.sampled_from(["linked", "root", "missing", "loop"]), st.integers(1, 2), st.booleans(), st.booleans()
)
ATTEMPTS = st.lists(st.lists(CALLS, max_size=4), min_size=1, max_size=3)
ENDS = st.sampled_from(["", "", "", "failed", "counted failure", "incomplete", "nan", "mute"])


def random_rollout(spans: SpanFactory, rollout: str, attempts: list[list[tuple[Any, ...]]], end: str) -> dict[str, str]:
    """Make a rollout; returns each call's reason to drop, empty for those that must become transitions."""
    expected: dict[str, str] = {}
    for attempt, calls in enumerate(attempts):
        last = attempt == len(attempts) - 1
        failure = "timeout" if last and end == "counted failure" else "crash" if not last or end == "failed" else ""
        root = spans.root(
            rollout, attempt=attempt, final=last, failure=failure, Verdict="incomplete" if last and end == "incomplete" else "complete"
        )
        if last and end in {"", "nan", "counted failure"}:
            spans.evaluation(root, 1.0)
        if last and end == "nan":
            spans.evaluation(root, "inf", name="other")
        attempt_facts = {"rollout": rollout, "attempt": attempt}
        agent = spans.span("agent", root, kind="AGENT", **attempt_facts)
        for fault, link, choices, rewarded, tool_fails in calls:
            client = spans.client(agent, **attempt_facts)
            parent = {"linked": spans.span("POST", client, **attempt_facts), "root": root, "missing": "dead", "loop": "loop"}[link]
            call = spans.call(parent, choices=choices, **attempt_facts, **FAULTS[fault])
            if link == "loop":
                spans.spans[-1]["ParentSpanId"] = spans.calls[-1]["ParentSpanId"] = call
            if link != "linked":  # without a parent link, the answer's id tells that the two are one call
                spans.answer(client, ResponseId=f"id-{call}")
            if rewarded:
                spans.evaluation(call, 0.5)
            if tool_fails:
                spans.span("search", agent, kind="TOOL", status="Error", **attempt_facts)
            of_rollout = {"failed": "attempt_failed", "incomplete": "incomplete"}.get(end, "")
            reason = (of_rollout or fault or ("no_reward" if end == "nan" else "")) if last else "superseded_attempt"
            for choice in range(choices):
                expected[call_id(SpanFactory.trace(f"run.{rollout}.{attempt}"), call, choice)] = reason
    return expected


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(ATTEMPTS, ENDS), min_size=1, max_size=4))
def test_build_any_rollouts_conclude_every_call_once_and_keep_rewards(rollouts: list[tuple[list[list[tuple[Any, ...]]], str]]) -> None:
    spans = SpanFactory()
    expected: dict[str, str] = {}
    without_calls = set[str]()
    for number, (attempts, end) in enumerate(rollouts):
        name = f"r{number}"
        calls = random_rollout(spans, name, attempts, end)
        if end == "mute" and not any(rewarded for _, _, _, rewarded, _ in attempts[-1]):
            final = SpanFactory.trace(f"run.{name}.{len(attempts) - 1}")
            ours = {row["CallId"] for row in spans.calls if row["TraceId"] == final}
            calls |= {call: fault or "no_reward" for call, fault in calls.items() if call in ours}
        expected |= calls
        if not attempts[-1]:
            without_calls.add(name)
    spec = BuilderSettings(
        selection=Selection(policies="policy"), rules=(AirRule(name="tool_error", kind="tool_error", reward=-0.125, tools=("*",)),)
    )
    frames = spans.frames()
    built = build(frames, spec)

    for frame in (built.transitions, built.drops, built.rewards):
        assert frame.null_count().sum_horizontal().to_list() == [0]
    dropped = built.drops.filter(pl.col("CallId") != "")
    left = Counter([*built.transitions["CallId"], *dropped["CallId"]])
    assert left == Counter(list(expected))
    assert dict(dropped.select("CallId", "Reason").rows()) == {call: reason for call, reason in expected.items() if reason}
    assert Counter(built.drops.filter(pl.col("CallId") == "")["RolloutId"]) == Counter(without_calls)

    trained = built.transitions.group_by("RolloutId").agg(pl.col("Rewards.Value").list.sum().sum().alias("return"))
    rewarded = built.rewards.group_by("RolloutId").agg(pl.col("Value").sum().alias("return"))
    assert_frame_equal(trained.sort("RolloutId"), rewarded.join(trained, on="RolloutId", how="semi").sort("RolloutId"))

    # What else is in a batch changes nothing.
    alone = [build(only(frames, row["RolloutId"]), spec) for row in frames.rollouts.iter_rows(named=True)]
    by = ["RolloutId", "Attempt", "CallId"]
    assert_frame_equal(pl.concat([single.transitions for single in alone]).sort(by), built.transitions.sort(by))
    assert_frame_equal(pl.concat([single.drops for single in alone]).sort(by), built.drops.sort(by))


def only(frames: Frames, rollout: str) -> Frames:
    of_rollout = pl.col("RolloutKey") == rollout
    traces = frames.spans.filter(of_rollout)["TraceId"].unique()
    answers = frames.answers.filter(pl.col("TraceId").is_in(traces.implode()))
    return Frames(
        frames.rollouts.filter(pl.col("RolloutId") == rollout), frames.spans.filter(of_rollout), frames.calls.filter(of_rollout), answers
    )


@settings(max_examples=30, deadline=None)
@given(st.lists(CALLS, min_size=1, max_size=5), st.dictionaries(st.sampled_from(["agent", "gateway", "runner"]), st.floats(-1e5, 1e5)))
def test_build_is_independent_of_clocks(calls: list[tuple[Any, ...]], clocks: dict[str, float]) -> None:
    def outcome(factory: SpanFactory) -> Built:
        random_rollout(factory, "r", [calls], "")
        return build(factory.frames(), BuilderSettings(rules=(AirRule(name="tool_error", kind="tool_error", reward=-1, tools=("*",)),)))

    right, skewed = outcome(SpanFactory()), outcome(SpanFactory(clocks=clocks))
    assert_frame_equal(right.transitions.drop("Timestamp"), skewed.transitions.drop("Timestamp"))
    assert_frame_equal(right.drops.drop("Timestamp"), skewed.drops.drop("Timestamp"))
    assert_frame_equal(right.rewards, skewed.rewards)


def test_build_call_of_shared_trace_is_trained_in_no_rollout() -> None:
    spans = SpanFactory()
    for rollout in ("a", "b"):
        root = spans.root(rollout, trace="shared")
        spans.evaluation(root)
        spans.call(root, rollout=rollout, trace="shared")
    nobodys = spans.call("", trace="shared")
    for row in (spans.spans[-1], spans.calls[-1]):
        row |= {"RunId": "", "Mode": "", "RolloutKey": row["TraceId"], "RolloutKeySource": "trace"}
    built = build(spans.frames(), BuilderSettings())
    assert built.transitions["RolloutId"].to_list() == ["a", "b"]
    expected = ("run", "train", "a", 0, nobodys, "gateway", "", "shared_trace", f"trace {spans.trace('shared')}")
    columns = ["RunId", "Mode", "RolloutId", "Attempt", "SpanId", "Convention", "AgentName", "Reason", "Detail"]
    assert built.drops.select(columns).rows() == [expected]
