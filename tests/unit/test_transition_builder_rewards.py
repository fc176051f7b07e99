"""Choice of the rewards that count, and of the call that each is given to."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from spangrad.settings import AirRule, BuilderSettings, Selection
from spangrad.types import call_id
from tests.support.spans import SpanFactory
from transition_builder.build import build
from transition_builder.frames import Built
from transition_builder.rewards.air import rule_hash
from transition_builder.schemas import SQL_REWARDS


def rewards_of(built: Built) -> list[tuple[Any, ...]]:
    names = dict(built.transitions.select("CallId", "SpanId").rows()) | {"": ""}
    return [(names.get(call, "?"), *rest) for call, *rest in built.rewards.select("CallId", "Name", "Value", "Source", "SpanId").rows()]


def given(built: Built) -> list[list[tuple[str, float, str]]]:
    lists = built.transitions.select("Rewards.Name", "Rewards.Value", "Rewards.Source").rows()
    return [list(zip(*columns, strict=True)) for columns in lists]


def test_rewards_of_one_name_come_from_first_source() -> None:
    spans = SpanFactory()
    root = spans.root()
    work = spans.span("work", root)
    spans.call(work)
    spans.evaluation(root, 1)
    spans.evaluation(work, 2)
    spans.evaluation(work, 3, kind="evaluation_log")
    spans.evaluation(work, 4, name="style")
    spans.evaluation(work, 5, name="style", kind="evaluation_log")
    spans.evaluation(work, 6, name="tone", kind="evaluation_log")
    built = build(spans.frames(), BuilderSettings())
    assert rewards_of(built) == [
        ("", "reward", 1.0, "runner", root),
        ("", "style", 4.0, "evaluation_event", work),
        ("", "tone", 6.0, "evaluation_log", work),
    ]
    assert given(built) == [[("reward", 1.0, "runner"), ("style", 4.0, "evaluation_event"), ("tone", 6.0, "evaluation_log")]]


def test_rewards_sources_have_order_of_precedence(tmp_path: Path) -> None:
    spans = SpanFactory()
    root = spans.root()
    score = {f"spangrad.reward.{name}": "4" for name in "abcd"}
    work = spans.span("work", root, Attributes=score)
    spans.call(work, Duration=3 * 10**9)
    spans.evaluation(root, 1, name="a")
    spans.evaluation(work, 2, name="b")
    spans.evaluation(work, 3, name="c", kind="evaluation_log")
    built = by_sql(spans, tmp_path, *(sql_row(name, 5.0) for name in "abcde"))
    assert [(name, value, source) for _, name, value, source, _ in rewards_of(built)] == [
        ("a", 1.0, "runner"),
        ("b", 2.0, "evaluation_event"),
        ("c", 3.0, "evaluation_log"),
        ("d", 4.0, "span_attribute"),
        ("e", 5.0, "sql"),
    ]


def test_air_reward_counts_last_and_per_call_only() -> None:
    spans = SpanFactory()
    root = spans.root()
    spans.evaluation(root, 1, name="slow")
    judged, other = (spans.call(spans.span("POST", root), Duration=3 * 10**9) for _ in range(2))
    spans.evaluation(judged, 2, name="slow")
    rule = AirRule(name="slow", kind="latency", reward=-8, seconds=2)
    built = build(spans.frames(), BuilderSettings(rules=(rule,)))
    assert sorted(rewards_of(built)) == [
        ("", "slow", 1.0, "runner", root),
        (judged, "slow", 2.0, "evaluation_event", judged),
        (other, "slow", -8.0, "air", other),
    ]


def test_span_attribute_reward_belongs_to_call_or_rollout() -> None:
    spans = SpanFactory()
    root = spans.root()
    client = spans.client(root, Attributes={"spangrad.reward": "0.5"})
    call = spans.call(client)
    judge = spans.span("judge", root, Attributes={"spangrad.reward": "2", "spangrad.reward.style": "3"})
    assert sorted(rewards_of(build(spans.frames(), BuilderSettings()))) == [
        ("", "reward", 2.0, "span_attribute", judge),
        ("", "style", 3.0, "span_attribute", judge),
        (call, "reward", 0.5, "span_attribute", client),
    ]


def test_span_attribute_reward_not_a_number_drops_as_no_reward() -> None:
    spans = SpanFactory()
    root = spans.root()
    spans.call(spans.span("work", root, Attributes={"spangrad.reward": "good"}))
    assert build(spans.frames(), BuilderSettings()).drops.select("Reason", "Detail").rows() == [
        ("no_reward", "not a finite number: reward")
    ]


def sql_row(name: str, value: float | None, **changes: object) -> dict[str, object]:
    """Return a row that a reward's SQL file gives the rollout `r`."""
    row = {"Name": name, "RuleHash": f"hash of {name}", "PerCall": False, "RunId": "run", "RolloutId": "r", "Attempt": 0}
    return row | {"Role": "", "CallId": "", "TraceId": "", "SpanId": "", "Value": value} | changes


def by_sql(spans: SpanFactory, directory: Path, *rows: dict[str, object]) -> Built:
    """A build with the rows that files have given."""
    names = tuple(sorted({str(row["Name"]) for row in rows}))
    for name in names:
        (directory / f"{name}.sql").write_text("SELECT")
    frames = replace(spans.frames(), sql_rewards=pl.DataFrame(list(rows), schema=dict(SQL_REWARDS)))
    return build(frames, BuilderSettings(sql_rewards=names, rewards_directory=directory))


@pytest.mark.parametrize(
    ("value", "detail"),
    [
        (None, "no value by SQL: short"),
        (float("nan"), "not a finite number, by SQL: short"),
        (float("inf"), "not a finite number, by SQL: short"),
    ],
)
def test_sql_reward_without_finite_value_drops_as_no_reward(tmp_path: Path, value: float | None, detail: str) -> None:
    spans = SpanFactory()
    root = spans.root()
    spans.evaluation(root, 1)
    spans.call(root)
    built = by_sql(spans, tmp_path, sql_row("short", value))
    assert built.drops.select("Reason", "Detail").rows() == [("no_reward", detail)]
    assert built.rewards["Name"].to_list() == ["reward"]


def test_sql_reward_is_final_reward(tmp_path: Path) -> None:
    spans = SpanFactory()
    spans.call(spans.root())
    built = by_sql(spans, tmp_path, sql_row("short", 0.0))
    assert built.rewards.select("CallId", "Name", "Value", "Source", "RuleHash").rows() == [("", "short", 0.0, "sql", "hash of short")]
    assert given(built) == [[("short", 0.0, "sql")]]


def test_sql_reward_row_names_call_by_id_span_or_caused_tool(tmp_path: Path) -> None:
    spans = SpanFactory()
    root = spans.root()
    spans.evaluation(root, 1)
    agent = spans.span("agent", root, kind="AGENT")
    client = spans.client(agent)
    first = spans.call(client)
    tool = spans.span("search", agent, kind="TOOL")
    second = spans.call(spans.span("POST", agent))
    trace = str(spans.spans[0]["TraceId"])
    rows = [
        sql_row("id", 2.0, PerCall=True, CallId=call_id(trace, second, 0)),
        sql_row("span", 4.0, PerCall=True, TraceId=trace, SpanId=client),
        sql_row("tool", 8.0, PerCall=True, SpanId=tool),
        sql_row("gone", 16.0, PerCall=True, CallId=call_id(trace, "0" * 16, 0)),
        sql_row("none", None, PerCall=True, CallId=call_id(trace, second, 0)),
    ]
    assert sorted(
        (name, span, value) for span, name, value, source, _ in rewards_of(by_sql(spans, tmp_path, *rows)) if source == "sql"
    ) == [
        ("id", second, 2.0),
        ("span", first, 4.0),
        ("tool", first, 8.0),
    ]


def test_reward_on_inner_span_of_tool_call_belongs_to_tool_call(tmp_path: Path) -> None:
    """AutoGen's tools have a span of OpenInference's and a native one inside it."""
    spans = SpanFactory()
    root = spans.root()
    spans.evaluation(root, 1)
    agent = spans.span("agent", root, kind="AGENT")
    call = spans.call(spans.client(agent))
    outer = spans.span("search", agent, kind="TOOL")
    native = {"gen_ai.operation.name": "execute_tool", "gen_ai.tool.name": "search"}
    inner = spans.span("execute_tool search", outer, Attributes=native)
    spans.evaluation(inner, 2, "found")
    built = by_sql(spans, tmp_path, sql_row("rated", 4.0, PerCall=True, SpanId=inner))
    assert built.tool_calls.select("SpanId", "Reward").rows() == [(outer, 6.0)]
    assert ("rated", call) in {(name, target) for target, name, *_ in rewards_of(built)}


def test_evaluations_of_one_span_last_counts_and_different_spans_sum() -> None:
    spans = SpanFactory()
    root = spans.root()
    first, second = spans.span("step", root), spans.span("step", root)
    spans.call(root)
    spans.evaluation(first, 1)
    spans.evaluation(first, 2)
    spans.evaluation(second, 4)
    built = build(spans.frames(), BuilderSettings())
    assert rewards_of(built) == [("", "reward", 2.0, "evaluation_event", first), ("", "reward", 4.0, "evaluation_event", second)]
    assert [sum(value for _, value, _ in rewards) for rewards in given(built)] == [6.0]


@pytest.mark.parametrize("ahead", [-30, 0, 30])
def test_evaluations_of_judges_in_several_processes_lowest_last_one_counts(ahead: int) -> None:
    """The lowest of the judges' last values counts; the last one is by each judge's own sequence number."""
    spans = SpanFactory()
    root = spans.root()
    spans.call(root)
    rollout_texts = [("a", 1, 0.0), ("a", 2, 0.5), ("b", 1, 1.0)]
    for at, (judge, seq, value) in enumerate(rollout_texts):
        own: dict[str, Any] = {"ProcessId": judge, "Seq": seq, "Timestamp": spans.time(100 - at + (ahead if judge == "b" else 0))}
        spans.evaluation(root, value, kind="evaluation_log", **own)
    assert rewards_of(build(spans.frames(), BuilderSettings())) == [("", "reward", 0.5, "evaluation_log", root)]
    spans.evaluation(root, "NaN", kind="evaluation_log", ProcessId="c", Timestamp=spans.time(ahead))
    built = build(spans.frames(), BuilderSettings())
    assert built.drops.select("Reason", "Detail").rows() == [("no_reward", "not a finite number: reward")]


def test_evaluation_on_span_of_call_belongs_to_call() -> None:
    spans = SpanFactory()
    root = spans.root()
    client = spans.client(root)
    spans.call(client, HttpStatus=500)
    call_with_retries = spans.call(client, choices=2)
    plain = spans.client(root)
    spans.answer(plain)
    last = spans.call(root)
    spans.evaluation(client, 1)
    spans.evaluation(plain, 2)
    spans.evaluation(last, 4)
    spans.evaluation(root, 8)
    spans.evaluation(root, 16, name="named", kind="evaluation_log")
    spans.spans[-1]["Attributes"]["gen_ai.response.id"] = f"id-{plain}"  # type: ignore[index]
    built = build(spans.frames(), BuilderSettings())
    assert built.transitions.select("SpanId", "ChoiceIndex").rows() == [
        (call_with_retries, 0),
        (call_with_retries, 1),
        (plain, 0),
        (last, 0),
    ]
    assert given(built) == [
        [("reward", 1.0, "evaluation_event")],
        [],
        [("reward", 2.0, "evaluation_event"), ("named", 16.0, "evaluation_log")],
        [("reward", 8.0, "runner"), ("reward", 4.0, "evaluation_event")],
    ]


def test_evaluation_on_client_belongs_to_the_retry_that_was_used() -> None:
    """The client kept the first answer, as its response id says, though it had asked once more."""
    spans = SpanFactory()
    root = spans.root()
    client = spans.client(root)
    used, unused = spans.call(client), spans.call(client)
    spans.spans[1]["Attributes"]["gen_ai.response.id"] = f"id-{used}"  # type: ignore[index]
    spans.evaluation(client, 1)
    built = build(spans.frames(), BuilderSettings())
    assert built.drops.select("SpanId", "Reason").rows() == [(unused, "retried")]
    assert rewards_of(built) == [(used, "reward", 1.0, "evaluation_event", client)]


def test_evaluation_of_call_recorded_twice_belongs_to_outer_recording() -> None:
    spans = SpanFactory()
    root = spans.root()
    client = spans.client(root)
    outer = spans.call(client)
    inner = spans.call(outer, process="inner")
    spans.evaluation(client, 1)
    spans.evaluation(inner, 2, "style")
    built = build(spans.frames(), BuilderSettings())
    assert built.drops.select("SpanId", "Reason").rows() == [(inner, "duplicate")]
    assert rewards_of(built) == [(outer, "reward", 1.0, "evaluation_event", client), (outer, "style", 2.0, "evaluation_event", inner)]


def test_rewards_of_dropped_calls_move_to_nearest_earlier_kept_call_or_first() -> None:
    spans = SpanFactory()
    root = spans.root()
    spans.evaluation(root, 1)
    for value, fault in [(2, True), (4, False), (8, True), (16, False), (32, True)]:
        spans.evaluation(spans.call(root, Logprobs=[] if fault else [-1, -1]), value)
    built = build(spans.frames(), BuilderSettings())
    assert [sorted(value for _, value, _ in rewards) for rewards in given(built)] == [[2, 4, 8], [1, 16, 32]]
    assert built.rewards["Value"].sum() == 63
    earned = built.transitions.select("CallId", "Turn", "Rewards.Value", "Rewards.CallId", "Rewards.Turn").rows()
    by_value = {
        value: (call == earner, earner == "", turn) for call, _, *lists in earned for value, earner, turn in zip(*lists, strict=True)
    }
    assert by_value == {
        1: (False, True, 3),
        2: (False, False, 0),
        4: (True, False, 1),
        8: (False, False, 2),
        16: (True, False, 3),
        32: (False, False, 4),
    }


def test_reward_of_call_without_turn_has_turn_of_next_call() -> None:
    spans = SpanFactory()
    root = spans.root()
    spans.evaluation(root, 1)
    helper = {"Policy": "helper", "Model": "helper"}
    for value, facts in ((2, helper), (4, {}), (8, helper), (16, {}), (32, helper)):
        spans.evaluation(spans.call(root, **facts), value)
    built = build(spans.frames(), BuilderSettings(selection=Selection(policies="policy")))
    lists = built.transitions.select("Turn", "Rewards.Value", "Rewards.Turn").rows()
    by_turn = [(turn, dict(zip(values, turns, strict=True))) for turn, values, turns in lists]
    assert by_turn == [(0, {2: 0, 4: 0, 8: 1}), (1, {1: 1, 16: 1, 32: 2})]


@pytest.mark.parametrize("score", ["NaN", "inf", "-Infinity", "1e999", "good", ""])
def test_evaluation_score_not_finite_drops_as_no_reward(score: str) -> None:
    spans = SpanFactory()
    root = spans.root()
    spans.evaluation(root, 1, name="fine")
    spans.evaluation(root, score, name="odd")
    spans.call(root)
    built = build(spans.frames(), BuilderSettings())
    assert built.drops.select("Reason", "Detail").rows() == [("no_reward", "not a finite number: odd")]
    assert built.rewards.select("Name", "Value").rows() == [("fine", 1.0)]


def test_evaluation_score_not_finite_of_overridden_source_is_ignored() -> None:
    spans = SpanFactory()
    root = spans.root()
    spans.evaluation(root, 1)
    spans.evaluation(spans.span("judge", root), "NaN")
    spans.call(root)
    assert given(build(spans.frames(), BuilderSettings())) == [[("reward", 1.0, "runner")]]


def test_evaluation_without_score_is_no_reward() -> None:
    spans = SpanFactory()
    root = spans.root()
    spans.evaluation(root)
    spans.spans[-1]["Attributes"] = {"gen_ai.evaluation.name": "reward", "gen_ai.evaluation.score.label": "pass"}
    spans.call(root)
    assert build(spans.frames(), BuilderSettings()).drops["Reason"].to_list() == ["no_reward"]


AIR = BuilderSettings(rules=(AirRule(name="tool_error", kind="tool_error", reward=-0.5, tools=("*",)),))


def blamed(spans: SpanFactory, spec: BuilderSettings = AIR) -> list[str]:
    """The spans of the calls that failed tools are blamed on, in the order of the tools."""
    built = build(spans.frames(), spec)
    spans_of = {str(row["CallId"]): str(row["SpanId"]) for row in spans.calls}
    errors = [row for row in built.rewards.iter_rows(named=True) if row["Name"] == "tool_error"]
    return [spans_of[row["CallId"]] for row in sorted(errors, key=lambda row: row["SpanId"])]


def test_tool_error_rule_rewards_causing_call() -> None:
    spans = SpanFactory()
    root = spans.root()
    spans.evaluation(root, 1)
    agent = spans.span("agent", root, kind="AGENT")
    spans.span("early", agent, kind="TOOL", status="Error")  # nothing caused it
    first = spans.call(spans.span("POST", agent))
    spans.span("fine", agent, kind="TOOL")
    second = spans.call(spans.span("POST", agent))
    broken = [spans.span("broken", agent, kind="TOOL", status="Error") for _ in range(2)]
    third = spans.call(spans.span("POST", agent))
    built = build(spans.frames(), AIR)
    assert built.rewards.filter(built.rewards["Source"] == "air").select("Name", "Value", "RuleHash", "SpanId").rows() == [
        ("tool_error", -0.5, rule_hash(AIR.rules[0], AIR), span) for span in broken
    ]
    assert built.transitions.select("SpanId", "Rewards.Name", "Rewards.Value").rows() == [
        (first, [], []),
        (second, ["tool_error", "tool_error"], [-0.5, -0.5]),
        (third, ["reward"], [1.0]),
    ]
    assert build(spans.frames(), BuilderSettings()).rewards["Name"].to_list() == ["reward"]


def test_tool_error_rule_counts_named_tools_only() -> None:
    spans = SpanFactory()
    root = spans.root()
    spans.evaluation(root, 1)
    call = spans.call(spans.span("POST", root))
    spans.span("run search", root, kind="TOOL", status="Error", Attributes={"tool.name": "search"})
    spans.span("write", root, kind="TOOL", status="Error")
    assert blamed(spans, BuilderSettings(rules=(AirRule(name="tool_error", kind="tool_error", reward=-1, tools=("search",)),))) == [call]
    assert blamed(spans) == [call, call]


def test_tool_error_of_parallel_agents_rewards_call_of_same_agent() -> None:
    spans = SpanFactory()
    root = spans.root()
    spans.evaluation(root, 1)
    agents = [spans.span("worker", root, kind="AGENT") for _ in range(2)]  # the same name
    calls = [spans.call(spans.span("POST", agent)) for agent in agents]
    for agent in agents:
        spans.span("broken", agent, kind="TOOL", status="Error")
    assert blamed(spans) == calls


def test_tool_error_without_ordered_call_rewards_none() -> None:
    spans = SpanFactory()
    root = spans.root()
    spans.evaluation(root, 1)
    spans.call(spans.span("POST", root))
    spans.span("idle", root, process="worker")
    spans.span("broken", root, kind="TOOL", status="Error", process="worker")
    assert blamed(spans) == []


def test_tool_error_skips_calls_within_other_tools() -> None:
    spans = SpanFactory()
    root = spans.root()
    spans.evaluation(root, 1)
    outer = spans.span("outer", root, kind="AGENT")
    asked = spans.call(spans.span("POST", outer))
    helper = spans.span("ask helper", outer, kind="TOOL", status="Error")
    spans.call(spans.span("POST", spans.span("outer", helper, kind="AGENT")))
    spans.span("broken", outer, kind="TOOL", status="Error")
    assert blamed(spans) == [asked, asked]


def test_tool_error_is_matched_by_tool_call_id() -> None:
    spans = SpanFactory()
    root = spans.root()
    spans.evaluation(root, 1)
    asks = {"llm.output_messages.0.message.tool_calls.1.tool_call.id": "call_7"}
    asked = spans.call(spans.span("POST", spans.client(root, Attributes=asks)))
    spans.call(spans.span("POST", spans.client(root)))
    spans.span("broken", root, kind="TOOL", status="Error", Attributes={"tool_call.id": "call_7"})
    assert blamed(spans) == [asked]


@pytest.mark.parametrize("ahead", [-30, 0, 30])
def test_tool_error_of_two_gateway_calls_below_one_span_rewards_later(ahead: int) -> None:
    spans = SpanFactory(clocks={"first gateway": ahead})
    root = spans.root()
    spans.evaluation(root, 1)
    asks = {"llm.output_messages.0.message.tool_calls.0.tool_call.id": "call_7"}
    framework = spans.span("ChatOpenAI", root, kind="LLM", scope="openinference.instrumentation.langchain", Attributes=asks)
    spans.call(spans.span("POST", framework), process="first gateway")
    asked = spans.call(spans.span("POST", framework), process="second gateway")
    spans.span("broken", root, kind="TOOL", status="Error", Attributes={"tool_call.id": "call_7"})
    assert blamed(spans) == [asked]


def test_failed_attempt_has_no_rewards() -> None:
    spans = SpanFactory()
    root = spans.root(failure="crash")
    spans.call(spans.span("POST", root))
    spans.span("broken", root, kind="TOOL", status="Error")
    assert build(spans.frames(), AIR).rewards.rows() == []


def roles(built: Built) -> list[tuple[Any, ...]]:
    return sorted(built.rewards.select("Name", "Role", "Value", "Source").rows())


def test_rewards_of_one_name_and_several_roles_are_different_rewards(tmp_path: Path) -> None:
    spans = SpanFactory()
    root = spans.root()
    for role, value in {"white": 1.0, "black": -1.0}.items():
        spans.evaluation(root, value, role=role)
    white, black = (spans.span(name, root, kind="AGENT") for name in ("white", "black"))
    calls = [spans.call(white), spans.call(black)]
    spans.evaluation(white, 9.0, role="white")  # the runner is believed before it
    spans.evaluation(black, 0.5, kind="evaluation_log")
    spans.span("judge", root, Attributes={"spangrad.reward.style": "0.25", "spangrad.reward.role": "black"})
    sql = [sql_row("elo", value, Role=role) for role, value in {"white": 10.0, "black": -10.0}.items()]
    built = by_sql(spans, tmp_path, *sql)
    assert roles(built) == [
        ("elo", "black", -10.0, "sql"),
        ("elo", "white", 10.0, "sql"),
        ("reward", "", 0.5, "evaluation_log"),
        ("reward", "black", -1.0, "runner"),
        ("reward", "white", 1.0, "runner"),
        ("style", "black", 0.25, "span_attribute"),
    ]
    assert built.drops.height == 0
    assert built.transitions["SpanId"].to_list() == calls
    last = built.transitions.select("Rewards.Name", "Rewards.Role", "Rewards.Value").row(1)
    assert sorted(zip(*last, strict=True)) == sorted((name, role, value) for name, role, value, _ in roles(built))


def test_air_rule_with_role_gives_reward_of_that_role() -> None:
    spans = SpanFactory()
    root = spans.root()
    spans.evaluation(root, 1.0)
    slow = spans.call(spans.span("black", root, kind="AGENT"), Duration=3 * 10**9)
    rule = AirRule(name="slow", kind="latency", reward=-1.0, seconds=2.0, agents="black", role="black")
    built = build(spans.frames(), BuilderSettings(rules=(rule,)))
    assert built.rewards.filter(pl.col("Name") == "slow").select("SpanId", "Role", "Value").rows() == [(slow, "black", -1.0)]
