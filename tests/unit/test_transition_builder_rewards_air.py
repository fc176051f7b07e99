"""AIR rules: the spans that each kind of rule finds, and those that it leaves alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from spangrad.errors import BuilderError, RuleError, SettingsError
from spangrad.settings import AirRule, BuilderSettings
from spangrad.settings.sources import load_settings
from spangrad.types import DropReason, call_id, remedy
from tests.support.spans import SpanFactory
from transition_builder.build import build
from transition_builder.frames import Built
from transition_builder.rewards.air import RULES, check, rule_hash
from transition_builder.schemas import RESPONSES, SQL_REWARDS

Answer = tuple[str, str, list[tuple[str, str]]]
"""The span of a call, what it said, and the tool calls that it asked for."""


def spec_of(*rules: AirRule, **changes: Any) -> BuilderSettings:
    return BuilderSettings(rules=rules, **changes)


def built(spans: SpanFactory, *rules: AirRule, answers: Sequence[Answer] = (), sql: Sequence[dict[str, Any]] = ()) -> Built:
    trace = {str(row["SpanId"]): str(row["TraceId"]) for row in spans.spans}
    rows = [
        {
            "TraceId": trace[span],
            "SpanId": span,
            "ChoiceIndex": 0,
            "Text": text,
            "ToolCalls": [{"Name": n, "Arguments": a} for n, a in calls],
        }
        for span, text, calls in answers
    ]
    frames = replace(
        spans.frames(), responses=pl.DataFrame(rows, schema=dict(RESPONSES)), sql_rewards=pl.DataFrame(list(sql), schema=dict(SQL_REWARDS))
    )
    return build(frames, spec_of(*rules))


def air(output: Built) -> list[tuple[str, str, float]]:
    """Span of the call, name and value of each AIR reward, in the order of the calls."""
    names = {
        call_id(trace, span, choice): span for trace, span, choice in output.transitions.select("TraceId", "SpanId", "ChoiceIndex").rows()
    }
    rows = output.rewards.filter(pl.col("Source") == "air").select("CallId", "Name", "Value").rows()
    return sorted((names[call], name, value) for call, name, value in rows)


def agent_of_two_tools() -> tuple[SpanFactory, list[str]]:
    """An agent whose first call reads, whose second writes well, whose third writes in vain."""
    spans = SpanFactory()
    root = spans.root()
    spans.evaluation(root, 1)
    agent = spans.span("agent", root, kind="AGENT")
    calls = list[str]()
    for name, status in (("read", "Ok"), ("write", "Ok"), ("write", "Error")):
        calls.append(spans.call(spans.span("POST", agent)))
        spans.span(name, agent, kind="TOOL", status=status, Attributes={"tool.name": name})
    return spans, calls


def test_tool_ok_rule_rewards_named_tools_only() -> None:
    """The gaming of docs/guides/rewards.md: paid for every ok, a policy calls the tool that is always ok and never advances."""
    spans, (read, write, _) = agent_of_two_tools()
    named = AirRule(name="progress", kind="tool_ok", reward=0.1, tools=("write",))
    assert air(built(spans, named)) == [(write, "progress", 0.1)]
    assert air(built(spans, named.model_copy(update={"tools": ("*",)}))) == [(read, "progress", 0.1), (write, "progress", 0.1)]


def test_air_rules_of_several_kinds_and_names_all_apply() -> None:
    spans, (_, write, failed) = agent_of_two_tools()
    rules = (
        AirRule(name="tool", kind="tool_ok", reward=0.25, tools=("write",)),
        AirRule(name="tool", kind="tool_error", reward=-0.5, tools=("write",)),
        AirRule(name="tool", kind="tool_error", reward=-1, tools=("*",)),
    )
    output = built(spans, *rules)
    assert air(output) == [(write, "tool", 0.25), (failed, "tool", -1.0), (failed, "tool", -0.5)]
    assert set(output.rewards.filter(pl.col("Source") == "air")["RuleHash"]) == {rule_hash(rule, spec_of(rule)) for rule in rules}
    assert sorted(output.transitions["Rewards.Value"].to_list()[-1]) == [-1.0, -0.5, 1.0]


def test_air_rule_agents_selects_calls() -> None:
    spans = SpanFactory()
    root = spans.root()
    spans.evaluation(root, 1)
    calls = {name: spans.call(spans.span(name, root, kind="AGENT"), Duration=3 * 10**9) for name in ("planner", "writer", "writer-2")}
    slow = AirRule(name="slow", kind="latency", reward=-1, seconds=2)
    assert [span for span, *_ in air(built(spans, slow))] == sorted(calls.values())
    assert [span for span, *_ in air(built(spans, slow.model_copy(update={"agents": "writer"})))] == [calls["writer"]]


def test_latency_rule_counts_call_once_and_skips_failed_retries() -> None:
    spans = SpanFactory()
    root = spans.root()
    spans.evaluation(root, 1)
    spans.call(root, HttpStatus=500, Duration=9 * 10**9)
    slow = spans.call(root, choices=2, Duration=2 * 10**9 + 1)
    spans.call(root, Duration=2 * 10**9)
    assert air(built(spans, AirRule(name="slow", kind="latency", reward=-1, seconds=2))) == [(slow, "slow", -1.0)]


def test_empty_result_rule_matches_empty_successful_results() -> None:
    spans = SpanFactory()
    root = spans.root()
    spans.evaluation(root, 1)
    agent = spans.span("agent", root, kind="AGENT")
    empty = list[str]()
    for result, status, counts in (
        ("[]", "Ok", True),
        (" ", "Ok", True),
        ("[1]", "Ok", False),
        (None, "Ok", False),
        ("[]", "Error", False),
    ):
        call = spans.call(spans.span("POST", agent))
        attributes = {} if result is None else {"output.value": result}
        spans.span("search", agent, kind="TOOL", status=status, Attributes={"tool.name": "search", **attributes})
        empty += [call] * counts
    assert [span for span, *_ in air(built(spans, AirRule(name="empty", kind="empty_result", reward=-1, tools=("search",))))] == empty


def test_malformed_arguments_rule_counts_arguments_that_are_no_json_object() -> None:
    spans = SpanFactory()
    root = spans.root()
    spans.evaluation(root, 1)
    calls = [spans.call(spans.span("POST", root)) for _ in range(5)]
    answers: list[Answer] = [
        (calls[0], "", [("search", '{"q": 1}'), ("search", "{}")]),
        (calls[1], "", [("search", '{"q": 1'), ("search", ""), ("search", "[1]")]),
        (calls[2], "", [("other", "{")]),
        (calls[3], "text", []),
    ]  # nobody recorded what the last one answered
    rule = AirRule(name="malformed", kind="malformed_arguments", reward=-0.5, tools=("search",))
    assert air(built(spans, rule, answers=answers)) == [(calls[1], "malformed", -1.5)]


def test_repeated_call_rule_matches_same_tool_call_right_after_by_same_agent() -> None:
    spans = SpanFactory()
    root = spans.root()
    spans.evaluation(root, 1)
    agent = spans.span("agent", root, kind="AGENT")
    calls = [spans.call(spans.span("POST", agent)) for _ in range(6)]
    same, other = ("search", '{"a": 1, "b": 2}'), ("search", '{"a": 2}')
    answers: list[Answer] = [
        (calls[0], "", [same]),
        (calls[1], "", [("search", '{"b":2,"a":1}'), other]),
        (calls[2], "", [("read", "{}")]),
        (calls[3], "", [same]),
        (calls[4], "", [("read", "{}")]),
        (calls[5], "", [same, same]),
    ]
    rule = AirRule(name="again", kind="repeated_call", reward=-1, tools=("search",))
    assert air(built(spans, rule, answers=answers)) == [(calls[1], "again", -1.0), (calls[5], "again", -1.0)]


def test_repeated_call_rule_ignores_parallel_workers() -> None:
    spans = SpanFactory()
    root = spans.root()
    spans.evaluation(root, 1)
    workers = [spans.span("worker", root, kind="AGENT") for _ in range(2)]
    calls = [spans.call(spans.span("POST", worker, Duration=10**11)) for worker in workers]
    answers: list[Answer] = [(call, "", [("search", "{}")]) for call in calls]
    assert air(built(spans, AirRule(name="again", kind="repeated_call", reward=-1, tools=("*",)), answers=answers)) == []


def test_repeated_call_rule_without_recorded_answers_uses_tool_spans() -> None:
    spans = SpanFactory()
    root = spans.root()
    spans.evaluation(root, 1)
    agent = spans.span("agent", root, kind="AGENT")
    calls = list[str]()
    for arguments in ('{"q": 1}', '{"q":1}', '{"q": 2}'):
        calls.append(spans.call(spans.span("POST", agent)))
        spans.span("search", agent, kind="TOOL", Attributes={"tool.name": "search", "input.value": arguments})
    assert air(built(spans, AirRule(name="again", kind="repeated_call", reward=-1, tools=("*",)))) == [(calls[1], "again", -1.0)]


DEEP = "[" * 100_000


def test_rules_on_json_nested_too_deep_take_it_for_no_json() -> None:
    spans = SpanFactory()
    root = spans.root()
    spans.evaluation(root, 1)
    agent = spans.span("agent", root, kind="AGENT")
    first, second = (spans.call(spans.span("POST", agent)) for _ in range(2))
    answers: list[Answer] = [(first, DEEP, [("search", DEEP)]), (second, "", [("search", DEEP)])]
    rules = (
        AirRule(name="form", kind="unparsable_output", reward=-1, form="json"),
        AirRule(name="malformed", kind="malformed_arguments", reward=-1, tools=("*",)),
        AirRule(name="repeated", kind="repeated_call", reward=-1, tools=("*",)),
    )
    given = [(first, "form"), (first, "malformed"), (second, "malformed"), (second, "repeated")]
    assert air(built(spans, *rules, answers=answers)) == [(*reward, -1.0) for reward in given]


@pytest.mark.parametrize(("form", "wrong"), [("json", [1, 2]), (r"(?s)Answer: .*", [0, 2]), (r"\{.*\}", [1, 2])])
def test_unparsable_output_rule_matches_text_not_of_form(form: str, wrong: list[int]) -> None:
    spans = SpanFactory()
    root = spans.root()
    spans.evaluation(root, 1)
    calls = [spans.call(spans.span("POST", root)) for _ in range(5)]
    answers: list[Answer] = [
        (calls[0], '{"a": 1}', []),
        (calls[1], "Answer: 7\n8", []),
        (calls[2], "", []),
        (calls[3], "", [("search", "{}")]),
    ]
    rule = AirRule(name="form", kind="unparsable_output", reward=-1, form=form)
    assert air(built(spans, rule, answers=answers)) == [(calls[at], "form", -1.0) for at in wrong]


@pytest.mark.parametrize(
    ("where", "values"),
    [
        ("ResponseTokens - 3", [-1, 1]),
        ("Seconds > 1", [0, 1]),
        ("CASE WHEN FinishReason = 'length' THEN -1 END", [0, -1]),
        ("FailedTools", [1, 0]),
        ("ARRAY_LENGTH(Tools) * 2 + Place", [2, 1]),
        ("Seconds - AVG(Seconds)", [-1, 1]),
        ("Calls + Version + PromptTokens", [8, 8]),
        ("LENGTH(Text)", [5, 0]),
        ("ARRAY_CONTAINS(AskedTools, 'search')", [1, 0]),
    ],
)
def test_expression_rule_reads_columns_of_call(where: str, values: list[float]) -> None:
    spans = SpanFactory()
    root = spans.root()
    spans.evaluation(root, 1)
    first = spans.call(spans.span("POST", root), Duration=5 * 10**8)
    spans.span("broken", root, kind="TOOL", status="Error")
    second = spans.call(spans.span("POST", root), Duration=25 * 10**8, FinishReason="length", ResponseIds=[1] * 4, Logprobs=[-1.0] * 4)
    output = built(spans, AirRule(name="e", kind="expression", reward=2, where=where), answers=[(first, "hello", [("search", "{}")])])
    rewards = {span: value for span, _, value in air(output)}
    assert [rewards.get(span, 0) for span in (first, second)] == [2 * value for value in values]


def test_expression_rule_that_cannot_be_evaluated_raises() -> None:
    spans = SpanFactory()
    root = spans.root()
    spans.evaluation(root, 1)
    calls = [spans.call(spans.span("POST", root)) for _ in range(2)]
    answers: list[Answer] = [(calls[0], "0.5", []), (calls[1], "half", [])]
    cast, try_cast = (AirRule(name="e", kind="expression", reward=1, where=f"{name}(Text AS DOUBLE)") for name in ("CAST", "TRY_CAST"))
    with pytest.raises(RuleError, match=r"the rule 'e' has where = 'CAST\(Text AS DOUBLE\)', which cannot be .* Use TRY_CAST"):
        built(spans, cast, answers=answers)
    assert air(built(spans, try_cast, answers=answers)) == [(calls[0], "e", 0.5)]
    check(spec_of(try_cast))


def test_expression_rule_not_finite_drops_as_no_reward() -> None:
    spans = SpanFactory()
    root = spans.root()
    spans.evaluation(root, 1)
    spans.call(spans.span("POST", root), Duration=10**9)
    output = built(spans, AirRule(name="e", kind="expression", reward=1, where="Seconds / 0"))
    assert output.drops.select("Reason", "Detail").rows() == [("no_reward", "not a finite number: e")]
    assert output.rewards["Name"].to_list() == ["reward"]


def test_sql_rule_multiplies_value_of_file_by_reward(tmp_path: Path) -> None:
    spans = SpanFactory()
    root = spans.root()
    spans.evaluation(root, 1)
    call = spans.call(spans.span("POST", root))
    (tmp_path / "long.sql").write_text("SELECT 1")
    rule = AirRule(name="length", kind="sql", reward=-2, where="long")
    row = {"Name": "long", "RuleHash": "h", "PerCall": True, "RunId": "run", "RolloutId": "r", "Attempt": 0, "TraceId": "", "SpanId": ""}
    named = row | {"CallId": call_id(str(spans.calls[0]["TraceId"]), call, 0), "Value": 0.5}
    frames = replace(spans.frames(), sql_rewards=pl.DataFrame([named], schema=dict(SQL_REWARDS)))
    output = build(frames, spec_of(rule, rewards_directory=tmp_path))
    assert output.rewards.select("Name", "Value", "Source").rows() == [("reward", 1.0, "runner"), ("length", -1.0, "air")]


SLOW = AirRule(name="slow", kind="latency", reward=-1, seconds=2)


def test_air_rewards_without_final_reward_drop_as_no_reward() -> None:
    spans = SpanFactory()
    spans.call(spans.span("POST", spans.root()), Duration=9 * 10**9)
    output = built(spans, SLOW)
    assert output.drops.select("Reason", "Detail").rows() == [("no_reward", "no evaluation result with a score arrived")]
    assert "builder.rewards_from = 'rules'" in remedy(DropReason.NO_REWARD)


def test_rewards_from_rules_keeps_rollouts_without_final_reward() -> None:
    spans = SpanFactory()
    slow, fast, judged = spans.root("slow"), spans.root("fast"), spans.root("judged")
    spans.call(spans.span("POST", slow, rollout="slow"), rollout="slow", Duration=9 * 10**9)
    spans.call(spans.span("POST", fast, rollout="fast"), rollout="fast", Duration=10**9)
    spans.call(spans.span("POST", judged, rollout="judged"), rollout="judged", Duration=9 * 10**9)
    spans.evaluation(judged, 0.5)
    output = build(spans.frames(), spec_of(SLOW, rewards_from="rules"))
    kept = output.transitions.sort("RolloutId").select("RolloutId", "Rewards.Name", "Rewards.Value")
    assert output.drops.is_empty()
    assert kept.rows() == [("fast", [], []), ("judged", ["reward", "slow"], [0.5, -1.0]), ("slow", ["slow"], [-1.0])]
    assert kept["Rewards.Value"].list.sum().to_list() == [0.0, -0.5, -1.0], "what nothing was found for is worth 0"
    assert build(spans.frames(), spec_of(SLOW)).transitions["RolloutId"].to_list() == ["judged"]


def test_rewards_from_rules_with_non_finite_reward_drops_as_no_reward() -> None:
    spans = SpanFactory()
    root = spans.root()
    spans.evaluation(root, float("nan"))
    spans.call(spans.span("POST", root), Duration=9 * 10**9)
    output = build(spans.frames(), spec_of(SLOW, rewards_from="rules"))
    assert output.drops.select("Reason", "Detail").rows() == [("no_reward", "not a finite number: reward")]


def test_rewards_from_changes_build_spec_and_needs_a_rule() -> None:
    assert spec_of(SLOW).spec != spec_of(SLOW, rewards_from="rules").spec
    with pytest.raises(SettingsError, match=r"rewards_from = 'rules' needs a rule of builder\.rules or a name of builder\.sql_rewards"):
        load_settings({"builder.rewards_from": "rules"}, env={})


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ({"kind": "tool_ok", "reward": 1}, 'names no tools. Name those that count, or tools = ["*"] for all'),
        ({"kind": "repeated_call", "reward": 1}, "names no tools"),
        ({"kind": "latency", "reward": -1}, "needs seconds. Give it."),
        ({"kind": "latency", "reward": -1, "seconds": 0}, "greater than 0"),
        ({"kind": "latency", "reward": -1, "seconds": 1, "tools": ["a"]}, "applies to calls, not to tools. Leave out tools"),
        ({"kind": "unparsable_output", "reward": -1}, "needs form. Give it."),
        ({"kind": "expression", "reward": -1}, "needs where. Give it."),
        ({"kind": "sql", "reward": -1}, "needs where. Give it."),
        ({"kind": "tool_ok", "reward": 1, "tools": ["a"], "seconds": 2}, "does not use seconds. Leave it out."),
        ({"kind": "tool_ok", "tools": ["a"]}, "its reward is 0"),
        ({"kind": "tool_ok", "tools": ["a"], "reward": float("nan")}, "finite number"),
    ],
)
def test_air_rule_with_contradictory_fields_raises(rule: dict[str, object], message: str) -> None:
    with pytest.raises(SettingsError) as error:
        load_settings({"builder.rules": [{"name": "r", **rule}]}, env={})
    assert str(error.value).startswith("setting builder.rules.0")
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (AirRule(name="r", kind="latency", reward=1, seconds=1, agents="("), "has agents = '(', which is no regular expression"),
        (AirRule(name="r", kind="unparsable_output", reward=1, form="["), "has form = '[', which is no regular expression"),
        (AirRule(name="r", kind="expression", reward=1, where="Second > 1"), "no number over the columns of a call"),
        (AirRule(name="r", kind="expression", reward=1, where="SELECT"), "no number over the columns of a call"),
        (AirRule(name="r", kind="expression", reward=1, where="Tools"), "no number over the columns of a call"),
        (AirRule(name="r", kind="expression", reward=1, where="CAST(Text AS DOUBLE)"), "Use TRY_CAST, which gives null"),
    ],
)
def test_check_rule_that_cannot_be_evaluated_raises(rule: AirRule, message: str) -> None:
    with pytest.raises(BuilderError) as error:
        check(spec_of(rule))
    assert message in str(error.value)


EVERY_KIND: dict[str, dict[str, Any]] = {
    **{kind: {"tools": ("search",)} for kind in ("tool_ok", "tool_error", "malformed_arguments", "repeated_call", "empty_result")},
    "tool_exception": {"tools": ("search",), "types": ".*"},
    "unparsable_output": {"form": "json"},
    "latency": {"seconds": 2},
    "expression": {"where": "ARRAY_LENGTH(AskedTools)"},
    "sql": {"where": "long"},
    "python": {"where": "rules_of_nothing.py:rule"},
}


@pytest.mark.parametrize("calls", ["none", "with texts", "not recorded"])
@pytest.mark.parametrize("kind", list(RULES))
def test_rules_of_every_kind_without_tool_calls_find_nothing(
    kind: str, calls: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rules_of_nothing.py").write_text("def rule(calls):\n    return [None] * calls.height\n")
    (tmp_path / "rewards").mkdir()
    (tmp_path / "rewards/long.sql").write_text("SELECT 1")
    spans = SpanFactory()
    root = spans.root()
    spans.evaluation(root, 1)
    tool_free_calls = [spans.call(spans.span("POST", root)) for _ in range(0 if calls == "none" else 2)]
    answers: list[Answer] = [(call, "{}", []) for call in tool_free_calls if calls == "with texts"]
    rule = AirRule(name="r", reward=-1, kind=kind, **EVERY_KIND[kind])  # type: ignore[arg-type]
    output = built(spans, rule, answers=answers)
    assert (air(output), output.transitions.height) == ([], len(tool_free_calls))
