"""Rewards that SQL files define, over a real store: the examples, errors that name the file, and a backfill that leaves the old alone."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from commands.data.rewards import rewards
from spangrad.errors import BuilderError
from spangrad.settings import AirRule, BuilderSettings, Settings, StoreSettings
from spangrad.store import datasets
from tests.support.built_rollouts import post
from tests.support.servers import client_of, running_store, store_settings
from tests.support.spans import SpanFactory
from transition_builder import loop
from transition_builder.rewards import sql
from transition_builder.source.queries import StoreReader

EXAMPLES = Path(__file__).parents[2] / "examples/rewards"


class World:
    """Two rollouts of one group: `A` answers with 2 tokens and its tool runs well, `B` with 4, cut off, and its tool fails."""

    def __init__(self, store: StoreSettings) -> None:
        self.run = f"rewards-{uuid.uuid4().hex[:8]}"
        self.store = store
        self.client = client_of(store)
        self.spans = SpanFactory(run=self.run)
        self.calls = dict[str, str]()
        for name, (tokens, finish, status) in {"A": (2, "stop", "Ok"), "B": (4, "length", "Error")}.items():
            rollout = f"{self.run}-{name}"
            root = self.spans.root(rollout, calls=1)
            ids: dict[str, Any] = {"ResponseIds": [7] * tokens, "Logprobs": [-0.5] * tokens, "FinishReason": finish}
            self.calls[name] = self.spans.call(self.spans.span("POST", root, rollout=rollout), rollout=rollout, **ids)
            self.spans.span("search", root, rollout=rollout, kind="TOOL", status=status)
            self.spans.evaluation(root, 1.0)
        # Span ids are counted, and the store is shared: a trace is the run's own.
        answer = httpx.post(
            f"{store.otlp_endpoint}/v1/traces", content=self.spans.otlp(), headers={"content-type": "application/json"}, timeout=30
        )
        answer.raise_for_status()

    def settings(self, **builder: Any) -> Settings:
        facts: dict[str, Any] = {"dataset": self.run, "rewards_directory": EXAMPLES, **builder}
        return Settings(store=self.store, builder=BuilderSettings(**facts))

    def rows(self, statement: str, **parameters: object) -> list[tuple[Any, ...]]:
        return [tuple(row) for row in self.client.query(statement, parameters={"run": self.run, **parameters}).result_rows]

    def transitions(self, dataset: str) -> list[tuple[str, list[tuple[str, float, str]]]]:
        """Return the last letter of each rollout's id in a dataset, with the rewards that its transitions carry."""
        spec = datasets.resolve(self.client, dataset).build_spec
        statement = (
            "SELECT right(RolloutId, 1), arrayZip(`Rewards.Name`, `Rewards.Value`, `Rewards.Source`) FROM spangrad.transitions "
            "WHERE RunId = %(run)s AND BuildSpec = %(spec)s ORDER BY RolloutId"
        )
        return [(name, [tuple(one) for one in given]) for name, given in self.rows(statement, spec=spec)]


@pytest.fixture
def world(store: StoreSettings) -> World:
    return World(store)


RUNNER = ("reward", 1.0, "runner")


def test_sql_reward_examples_are_evaluated_at_build(world: World) -> None:
    rule = AirRule(name="cut", kind="sql", reward=10, where="cut_off")
    loop.build_once(world.settings(sql_rewards=("brevity", "first_try", "cut_off"), rules=(rule,)))
    assert world.transitions(world.run) == [
        ("A", [RUNNER, ("brevity", -0.02, "sql"), ("first_try", 1.0, "sql")]),
        ("B", [RUNNER, ("brevity", -0.04, "sql"), ("cut_off", -0.1, "sql"), ("first_try", 0.0, "sql"), ("cut", -1.0, "air")]),
    ]
    given = "SELECT Name, Source, RuleHash, CallId != '' FROM spangrad.rewards WHERE RunId = %(run)s AND Name = 'cut_off'"
    assert world.rows(given) == [("cut_off", "sql", world.settings().builder.sql_hash("cut_off"), 1)]


def test_sql_reward_examples_see_calls_without_rollout_id(store: StoreSettings) -> None:
    world = World(store)
    spans = SpanFactory(run=world.run)
    root = spans.root(f"{world.run}-C", calls=0, trace=f"{world.run}-C")
    named = len(spans.spans)
    spans.call(root, trace=f"{world.run}-C", FinishReason="length")
    spans.span("search", root, trace=f"{world.run}-C", kind="TOOL", status="Error")
    spans.evaluation(root, 1.0)
    for row in (*spans.spans[named:-1], *spans.calls):
        row |= {"RunId": "", "Mode": "", "RolloutKey": row["TraceId"], "RolloutKeySource": "trace"}
    post(store, spans.otlp())
    loop.build_once(world.settings(sql_rewards=("brevity", "first_try", "cut_off")))
    assert world.transitions(world.run)[-1] == (
        "C",
        [RUNNER, ("brevity", -0.02, "sql"), ("cut_off", -0.1, "sql"), ("first_try", 0.0, "sql")],
    )


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[World]:
    """A world in a store of its own: a backfill takes whatever a store holds."""
    settings = store_settings(tmp_path / "store")
    with running_store(settings, tmp_path / "store.log"):
        yield World(settings)


def test_rewards_backfill_makes_new_revision_and_keeps_old(alone: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    world = alone
    loop.build_once(world.settings())
    before = world.transitions(f"{world.run}@1")
    assert before == [("A", [RUNNER]), ("B", [RUNNER])]
    (tmp_path / "brevity.sql").write_text((EXAMPLES / "brevity.sql").read_text())
    command = ["backfill", "--since", "1d", "--reward", "brevity", *flags(world, tmp_path)]
    call(command)
    printed = capsys.readouterr().out
    assert f"{world.run}@2: 2 rollouts: 2 transitions, 0 drops, 4 rewards" in printed
    after = [("A", [RUNNER, ("brevity", -0.02, "sql")]), ("B", [RUNNER, ("brevity", -0.04, "sql")])]
    assert (world.transitions(f"{world.run}@1"), world.transitions(f"{world.run}@2"), world.transitions(world.run)) == (
        before,
        after,
        after,
    )

    why = {str(dataset): dataset.reason for dataset in datasets.known(world.client)}
    assert why[f"{world.run}@1"] == "the first"
    version = Settings(builder=BuilderSettings(rewards_directory=tmp_path)).builder.sql_hash("brevity")
    backfill, changed = why[f"{world.run}@2"].split("; ")
    assert re.fullmatch(rf"backfill of brevity@{version} over all runs since \d{{4}}-\d\d-\d\dT[\d:]+\+00:00", backfill)
    assert changed == f"other than {world.run}@1: sql_rewards.brevity = {version} (was none)"

    call(command)
    assert f"{world.run}@2: nothing new" in capsys.readouterr().out
    loop.build_once(world.settings())
    call(command)
    assert [str(dataset) for dataset in datasets.known(world.client) if dataset.name == world.run] == [
        f"{world.run}@1",
        f"{world.run}@2",
    ]
    revisions = "SELECT uniqExact(BuildSpec), max(Revision), count() FROM spangrad_internal.builds FINAL WHERE RunId = %(run)s"
    assert world.rows(revisions) == [(2, 0, 4)]

    # Another version of the file is another revision.
    (tmp_path / "brevity.sql").write_text("SELECT DISTINCT RolloutKey AS RolloutId, 7 AS Value FROM spangrad.calls")
    call(command)
    assert world.transitions(f"{world.run}@3") == [(name, [RUNNER, ("brevity", 7.0, "sql")]) for name in "AB"]
    assert world.transitions(f"{world.run}@2") == after


def test_rewards_backfill_of_one_run_leaves_others(alone: World, tmp_path: Path) -> None:
    other = World(alone.store)
    (tmp_path / "brevity.sql").write_text((EXAMPLES / "brevity.sql").read_text())
    command = ["backfill", "--since", "1d", "--reward", "brevity", *flags(alone, tmp_path)]
    call([*command, "--run-id", other.run])
    dataset = f"{alone.run}@2"
    assert (alone.transitions(dataset), [name for name, _ in other.transitions(dataset)]) == ([], ["A", "B"])
    call(command)
    assert ([name for name, _ in alone.transitions(dataset)], len(other.transitions(dataset))) == (["A", "B"], 2)


def test_sql_reward_without_value_drops_rollout_as_no_reward(alone: World, tmp_path: Path) -> None:
    query = (
        "SELECT RolloutKey AS RolloutId, any(if(length(ResponseIds) = 2, 1., nan)) AS Value FROM spangrad.calls WHERE {} GROUP BY RolloutId"
    )
    (tmp_path / "some.sql").write_text(query.format("length(ResponseIds) = 2"))
    (tmp_path / "nan.sql").write_text(query.format("true"))
    loop.build_once(alone.settings(sql_rewards=("some", "nan"), rewards_directory=tmp_path))
    assert [name for name, _ in alone.transitions(alone.run)] == ["A"]
    drops = "SELECT right(RolloutId, 1), Reason, Detail FROM spangrad.drops WHERE RunId = %(run)s"
    assert alone.rows(drops) == [("B", "no_reward", "no value by SQL: some; not a finite number, by SQL: nan")]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("SELECT RolloutKey AS RolloutId FROM spangrad.calls", "selects RolloutId: a reward lacks Value. It selects RolloutId and Value"),
        ("SELECT 'r' AS RolloutId, 1 AS Value, 2 AS Valeu", "a reward knows no Valeu"),
        ("SELECT 'r' AS RolloutId, 'high' AS Value", "gives Value the type String, which is no number"),
        ("SELECT 'r' AS RolloutId, toInt128(1) AS Value", "gives Value the type Int128, which is no number that a reward can hold"),
        ("SELECT 'r' AS RolloutId, toDecimal256(1, 2) AS Value", "gives Value the type Decimal(76, 2), which is no number"),
        ("SELECT RolloutId, 1 AS Value FROM otel.nowhere", "does not take"),
        ("DROP TABLE spangrad_internal.calls", "is not one SELECT: it begins with 'DROP TABLE spangrad_'"),
        ("-- only a comment", "is not one SELECT"),
    ],
)
def test_sql_reward_file_invalid_raises_before_build(world: World, tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "odd.sql").write_text(text)
    with pytest.raises(BuilderError) as error:
        loop.build_once(world.settings(sql_rewards=("odd",), rewards_directory=tmp_path))
    assert str(tmp_path / "odd.sql") in str(error.value)
    assert message in str(error.value)
    assert world.rows("SELECT count() FROM spangrad_internal.builds WHERE RunId = %(run)s") == [(0,)]


def test_sql_reward_with_two_values_for_one_rollout_raises(alone: World, tmp_path: Path) -> None:
    (tmp_path / "twice.sql").write_text(
        "SELECT RolloutId, 1 AS Value FROM spangrad.rollout_spans WHERE RowKind = 'span' AND RolloutId IN {rollouts:Array(String)}"
    )
    with pytest.raises(BuilderError, match=r"twice.sql gives \d values for RunId .*Give one: aggregate, with GROUP BY."):
        loop.build_once(alone.settings(sql_rewards=("twice",), rewards_directory=tmp_path))


def test_sql_reward_of_unusable_attempt_raises_builder_error(world: World, tmp_path: Path) -> None:
    columns = "RolloutId, 1 AS Value, toInt16(-1) AS Attempt"
    (tmp_path / "typed.sql").write_text(f"SELECT DISTINCT {columns} FROM spangrad.rollout_spans WHERE RunId = '{world.run}'")
    settings = world.settings(sql_rewards=("typed",), rewards_directory=tmp_path)
    frames, reader = world.spans.frames(), StoreReader(world.client, settings)
    sql.check(world.client, settings.builder)
    with pytest.raises(BuilderError, match=r"typed\.sql gives values that a reward cannot have: .*Convert them in the SELECT\."):
        sql.read(reader, settings.builder, frames.rollouts, frames.spans, frames.calls)


def test_sql_reward_of_many_rollouts_is_read_in_batches(world: World, tmp_path: Path) -> None:
    (tmp_path / "one.sql").write_text(
        "SELECT arrayJoin({rollouts:Array(String)}) AS RolloutId, 1 AS Value WHERE {since:DateTime64(6)} <= {until:DateTime64(6)};  "
    )
    settings = world.settings(sql_rewards=("one",), rewards_directory=tmp_path)
    frames = world.spans.frames()
    names = [f"{'é' * 100}-{at}" for at in range(1000)]
    rollouts = frames.rollouts.head(1).select("RunId", "Attempt").join(_names(names), how="cross").select("RunId", "RolloutId", "Attempt")
    read = sql.read(StoreReader(world.client, settings), settings.builder, rollouts, frames.spans, frames.calls)
    assert read["RolloutId"].to_list() == names
    assert read["Value"].sum() == 1000


@pytest.mark.parametrize("columns", ["RolloutId, 1 AS Value, 2 AS Score", "RolloutId", "RolloutId, 'much' AS Value"])
def test_sql_reward_edited_since_check_raises_builder_error(world: World, tmp_path: Path, columns: str) -> None:
    file, rollouts = tmp_path / "edited.sql", "FROM (SELECT arrayJoin({rollouts:Array(String)}) AS RolloutId)"
    file.write_text(f"SELECT RolloutId, 1 AS Value {rollouts}")
    settings = world.settings(sql_rewards=("edited",), rewards_directory=tmp_path)
    reader, frames = StoreReader(world.client, settings), world.spans.frames()
    sql.check(world.client, settings.builder)
    file.write_text(f"SELECT {columns} {rollouts}")
    with pytest.raises(BuilderError, match="was changed since the builder began"):
        sql.read(reader, settings.builder, frames.rollouts, frames.spans, frames.calls)


def test_rewards_list_shows_rewards_and_files(world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    loop.build_once(world.settings(sql_rewards=("brevity",)))
    call(["list", *flags(world, EXAMPLES)])
    printed = capsys.readouterr().out
    words = [line.split() for line in printed.splitlines()]
    assert any(line[:2] == ["brevity", "sql"] for line in words)
    (file,) = (line for line in words if line[:1] == ["brevity.sql"])
    assert file[1] == world.settings().builder.sql_hash("brevity")
    assert f"{world.run}@1" in printed


@pytest.mark.parametrize(
    ("scope", "name", "attributes", "output"),
    [
        ("mlflow.tracing.provider", "Completions", {"mlflow.spanType": '"CHAT_MODEL"'}, "mlflow.spanOutputs"),
        ("agentlightning", "openai.chat.completion", {"agentlightning.operation.name": "chat"}, "agentlightning.operation.output"),
    ],
    ids=["mlflow", "agent lightning"],
)
def test_rules_read_direct_mode_answers_of_each_convention(
    store: StoreSettings, scope: str, name: str, attributes: dict[str, str], output: str
) -> None:
    run = f"rewards-{uuid.uuid4().hex[:8]}"
    spans = SpanFactory(run=run)
    root = spans.root()
    spans.evaluation(root)
    choice = {"index": 0, "finish_reason": "stop", "token_ids": [4], "message": {"content": "no"}}
    answer = json.dumps({"id": "a", "object": "chat.completion", "choices": [choice], "prompt_token_ids": [1]})
    spans.span(name, root, scope=scope, Attributes={**attributes, output: answer})
    post(store, spans.otlp())
    rule = AirRule(name="form", kind="unparsable_output", reward=-1.0, form="yes")
    loop.build_once(Settings(store=store, builder=BuilderSettings(dataset=run, quiet_seconds=0, rules=(rule,))))
    given = client_of(store).query(f"SELECT Name, Value FROM spangrad.rewards WHERE RunId = '{run}' ORDER BY Name").result_rows
    assert [tuple(row) for row in given] == [("form", -1.0), ("reward", 1.0)]


def _names(names: Sequence[str]) -> Any:
    import polars as pl

    return pl.DataFrame({"RolloutId": names})


def flags(world: World, directory: Path) -> list[str]:
    """Options that lead a command to the store and the files."""
    chosen = {"store.url": world.store.url, "builder.dataset": world.run, "builder.rewards_directory": directory}
    return [word for name, value in chosen.items() for word in ("--set", f"{name}={value}")]


def call(words: list[str]) -> None:
    """Run `spangrad rewards ...` in this process."""
    rewards(words, result_action="return_value")
