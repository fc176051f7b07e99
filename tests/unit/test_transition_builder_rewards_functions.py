"""Rules that are Python functions: what they get, what they may return, and what becomes of one that fails."""

from __future__ import annotations

import os
import re
import tomllib
from dataclasses import replace
from pathlib import Path

import polars as pl
import pytest

from spangrad.errors import BuilderError, RuleError, SettingsError
from spangrad.settings import AirRule, BuilderSettings
from tests.support.spans import SpanFactory
from transition_builder.build import build
from transition_builder.frames import Built
from transition_builder.rewards.air import check, rule_hash
from transition_builder.rewards.rules.columns import COLUMNS, IDENTITY
from transition_builder.schemas import TOOL_EVENTS

HEAD = "import numpy as np\nimport polars as pl\n"


@pytest.fixture
def rules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The source file of a module in the working directory; its name is the test's own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path / f"rules_{os.urandom(4).hex()}.py"


def rule_of(file: Path, body: str, **changes: object) -> AirRule:
    """A rule that is the function `rule` of a file, which is written."""
    file.write_text(f"{HEAD}\ndef rule(calls):\n    {body}\n")
    facts: dict[str, object] = {"name": "own", "kind": "python", "reward": 1.0, "where": f"{file.stem}:rule", **changes}
    return AirRule.model_validate(facts)


def two_rollouts() -> SpanFactory:
    """Return spans of two rollouts, of two calls and of one, which take 1, 3 and 5 seconds; each rollout is worth 1 by its runner."""
    spans = SpanFactory()
    for rollout, seconds in (("a", (1, 3)), ("b", (5,))):
        root = spans.root(rollout)
        spans.evaluation(root, 1)
        for duration in seconds:
            spans.call(spans.span("POST", root, rollout=rollout), rollout=rollout, Duration=duration * 10**9)
    return spans


def built(rule: AirRule) -> Built:
    return build(two_rollouts().frames(), BuilderSettings(rules=(rule,)))


def values(result: Built) -> list[tuple[str, int, float]]:
    """Rollout, turn and value of each reward that a rule gave."""
    turns = result.transitions.select("CallId", "Turn")
    rows = result.rewards.filter(pl.col("Source") == "air").join(turns, on="CallId").select("RolloutId", "Turn", "Value")
    return sorted(rows.rows())


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("return calls['Seconds'] * 2", [2, 6, 10]),
        ("return pl.Series([1, None, 0])", [1, None, 0]),
        ("return [0.5, None, 2]", [0.5, None, 2]),
        ("return (True, False, True)", [1, 0, 1]),
        ("return np.array([1.5, 2.5, 3.5])", [1.5, 2.5, 3.5]),
        ("return pl.col('Seconds') > 2", [0, 1, 1]),
        ("return pl.col('Seconds') - pl.col('Seconds').mean()", [-1, 1, 0]),
        ("return calls.select(pl.col('Seconds').mean().over('RolloutId')).to_series()", [2, 2, 5]),
        ("return [None] * calls.height", [None, None, None]),
    ],
)
def test_python_rule_gives_a_value_per_call_and_null_is_no_reward(rules: Path, body: str, expected: list[float | None]) -> None:
    given = values(built(rule_of(rules, body, reward=10)))
    calls = [("a", 0), ("a", 1), ("b", 0)]
    assert given == [(*call, 10 * value) for call, value in zip(calls, expected, strict=True) if value is not None]


def test_python_rule_is_called_once_per_build_with_columns_of_all_calls(rules: Path) -> None:
    rule = rule_of(rules, f"open('{rules}.log', 'a').write(','.join(calls.columns) + str(calls.height) + ';'); return [0] * calls.height")
    built(rule)
    assert (rules.parent / f"{rules.name}.log").read_text() == ",".join([*IDENTITY, *COLUMNS]) + "3;"
    built(rule.model_copy(update={"columns": ("Seconds", "Text")}))
    assert (rules.parent / f"{rules.name}.log").read_text().split(";")[1] == "RunId,RolloutId,Attempt,CallId,Seconds,Text3"


def test_python_rule_agents_selects_calls(rules: Path) -> None:
    spans = SpanFactory()
    root = spans.root()
    spans.evaluation(root, 1)
    for name in ("planner", "writer"):
        spans.call(spans.span(name, root, kind="AGENT"))
    result = build(spans.frames(), BuilderSettings(rules=(rule_of(rules, "return calls['Place'] + 1", agents="writer"),)))
    assert [value for *_, value in values(result)] == [2]


def test_python_rule_not_finite_drops_as_no_reward(rules: Path) -> None:
    result = built(rule_of(rules, "return [1.0, float('nan'), 1.0]"))
    assert result.drops.select("RolloutId", "Reason", "Detail").unique().rows() == [("a", "no_reward", "not a finite number: own")]
    assert result.transitions["RolloutId"].to_list() == ["b"]


@pytest.mark.parametrize(
    ("body", "what"),
    [
        ("return calls['Seconds'].head(2)", "returned 2 values for 3 calls"),
        ("return [1.0]", "returned 1 values for 3 calls"),
        ("return pl.Series(['a', 'b', 'c'])", "returned values of type String"),
        ("return ['a', 'b', 'c']", "returned values of type String"),
        ("return [1.0, 'b', 2.0]", "returned a list that holds other than numbers"),
        ("return calls['Tools']", "returned values of type List(String)"),
        ("return 1.0", "returned float"),
        ("return None", "returned NoneType"),
        ("return calls", "returned DataFrame"),
        ("return pl.col('Second')", "raised ColumnNotFoundError"),
        ("return {}['missing']", "raised KeyError: 'missing' (line 5 of "),
    ],
)
def test_python_rule_with_wrong_result_raises_rule_error(rules: Path, body: str, what: str) -> None:
    rule = rule_of(rules, body)
    with pytest.raises(RuleError) as error:
        built(rule)
    assert str(error.value).startswith(f"the rule 'own' is the function {rule.where!r}, which {what}")
    assert "Fix it: it must return" in str(error.value)


@pytest.mark.parametrize(
    ("where", "error", "says"),
    [
        ("nowhere_at_all:rule", SettingsError, "there is no module 'nowhere_at_all' in "),
        ("nowhere_at_all.py:rule", SettingsError, "'nowhere_at_all.py' has no source file in Python"),
        ("itertools:chain", SettingsError, "'itertools' has no source file in Python"),
    ],
)
def test_build_spec_of_rule_without_source_raises(where: str, error: type[Exception], says: str) -> None:
    rule = AirRule(name="own", kind="python", reward=1, where=where)
    with pytest.raises(error, match=r"builder\.rules names the function") as raised:
        _ = BuilderSettings(rules=(rule,)).spec
    assert says in str(raised.value)


@pytest.mark.parametrize(
    ("where", "columns", "says"),
    [
        ("{module}:missing", None, "has no attribute 'missing'"),
        ("{module}", None, "does not name a callable: give it as module:function"),
        ("{module}:HEAD", None, "which cannot be called: name a function"),
        ("{module}:rule", ("Second",), "a call has no Second. Name columns among AgentName"),
    ],
)
def test_check_python_rule_that_cannot_be_used_raises(
    rules: Path, where: str, columns: tuple[str, ...] | None, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    rules.write_text("HEAD = 1\ndef rule(calls):\n    return calls['Seconds']\n")
    rule = AirRule(name="own", kind="python", reward=1, where=where.format(module=rules.stem), columns=columns)
    with pytest.raises(BuilderError) as error:
        check(BuilderSettings(rules=(rule,)))
    assert says in str(error.value)


def test_python_rule_edited_changes_build_spec_and_runs(rules: Path) -> None:
    rule = rule_of(rules, "return [1.0] * 3")
    spec = BuilderSettings(rules=(rule,))
    before = spec.spec, rule_hash(rule, spec)
    assert [value for *_, value in values(built(rule))] == [1, 1, 1]
    rules.write_text(rules.read_text().replace("[1.0]", "[2.0]"))
    assert [value for *_, value in values(built(rule))] == [2, 2, 2]
    assert (spec.spec != before[0], rule_hash(rule, spec) != before[1]) == (True, True)
    assert set(built(rule).rewards.filter(pl.col("Source") == "air")["RuleHash"]) == {rule_hash(rule, spec)}


def test_python_rule_is_loaded_from_file_and_package_of_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    package = tmp_path / f"package_{os.urandom(4).hex()}"
    (package / "deep").mkdir(parents=True)
    for directory in (package, package / "deep"):
        (directory / "__init__.py").write_text("")
    (package / "deep" / "rules.py").write_text("def rule(calls):\n    return calls['Seconds']\n")
    for where in (f"{package.name}.deep.rules:rule", f"{package.name}/deep/rules.py:rule"):
        result = built(AirRule(name="own", kind="python", reward=1, where=where))
        assert [value for *_, value in values(result)] == [1, 3, 5]


def test_build_spec_is_computed_without_running_rule_module(rules: Path) -> None:
    rules.write_text("raise SystemExit('a trainer that asks for the specification runs no rules')\n")
    assert len(BuilderSettings(rules=(AirRule(name="own", kind="python", reward=1, where=f"{rules.stem}:rule"),)).spec) == 16


def test_python_rule_example_of_docs_rewards_retries_and_last_timeout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parents[2] / "docs" / "guides" / "rewards.md").read_text()
    blocks = re.findall(r"```(python|toml)\n(.*?)```", page, re.DOTALL)
    (code,) = (text for kind, text in blocks if kind == "python")
    (settings,) = (text for kind, text in blocks if kind == "toml" and 'kind = "python"' in text)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_rules.py").write_text(code)
    (rule,) = tomllib.loads(settings)["builder"]["rules"]
    spans = SpanFactory()
    root = spans.root()
    spans.evaluation(root, 1)
    agent = spans.span("agent", root, kind="AGENT")
    rows = list[dict[str, object]]()
    for events in (("retry", "retry", "exception"), ("exception",)):
        spans.call(spans.span("POST", agent))
        tool = spans.span("search", agent, kind="TOOL", Attributes={"tool.name": "search"})
        trace = str(spans.spans[-1]["TraceId"])
        kinds = {"retry": "", "exception": "TimeoutError"}
        rows += [{"TraceId": trace, "SpanId": tool, "Name": name, "ExceptionType": kinds[name], "Attributes": []} for name in events]
    frames = replace(spans.frames(), tool_events=pl.DataFrame(rows, schema=dict(TOOL_EVENTS)))
    result = build(frames, BuilderSettings(rules=(AirRule.model_validate(rule),)))
    assert [value for *_, value in values(result)] == pytest.approx([0.2, -0.5])
