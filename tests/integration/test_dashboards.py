"""Every question that the dashboards ask, as Grafana asks it, of a store that a training run has filled.

The data source is clickhouse-go over HTTP with the read token: tests/support/grafana.py expands as Grafana does, `chgo` asks. Where
the binary is not there those tests skip, and the same statements run through clickhouse-connect all the same.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr

from dashboards.files import DASHBOARDS, render
from spangrad.settings import BuilderSettings, Settings, StoreSettings
from spangrad.store.clickhouse import connect
from spangrad.weights.checksums import tokenizer_hash
from tests.support.grafana import ALL, Choice, Choices, Panel, Window, complaints, expand, field_kind, panels
from tests.support.policies import PROMPT, sample, trainer_settings
from tests.support.servers import binary, post, running_store, store_settings
from tests.support.spans import SpanFactory, versions
from trainer.run import train
from transition_builder.loop import build_once

READ_TOKEN = "read"
ELSEWHERE = """
INSERT INTO spangrad_internal.policy_versions
SELECT * REPLACE (
    mapUpdate(
        map('seconds_publish', 0.25, 'engine_idle', 0.5, 'seconds_idle', 0.5, 'seconds_load', 0.125, 'seconds_credit', 0.0625,
            'validate_success', 1., 'mfu', 0.25),
        Metrics) AS Metrics,
    now64(6) AS IngestedAt)
FROM spangrad_internal.policy_versions FINAL WHERE BatchId != ''
"""
"""Metrics of a trainer that follows, publishes, evaluates and has a GPU; this one's stay."""

MODELS = {name: json.loads(render(name)) for name in DASHBOARDS}
WINDOW = Window(datetime(2025, 12, 31, tzinfo=UTC), datetime.now(UTC) + timedelta(days=1), 3600)


@dataclass(frozen=True)
class Answer:
    """Answer of the store to a statement."""

    columns: list[tuple[str, str]]
    rows: list[list[Any]]

    @property
    def named(self) -> list[dict[str, Any]]:
        """Rows by the names of their columns."""
        return [dict(zip((name for name, _ in self.columns), row, strict=True)) for row in self.rows]


Ask = Callable[[str], Answer]


@contextmanager
def store_of_a_run(directory: Path, model: Path) -> Generator[StoreSettings]:
    """The store, which asks readers for READ_TOKEN."""
    store = store_settings(directory / "store", token="write", read_token=READ_TOKEN)
    with running_store(store, directory / "store.log"):
        settings = Settings(
            store=store,
            builder=BuilderSettings(incomplete_after_seconds=0),
            trainer=trainer_settings(
                run_id="run",
                model=model,
                directory=directory / "policies",
                groups_per_batch=2,
                max_staleness=9,
                learning_rate=1e-3,
                publish=False,
            ),
        )

        def sent(body: bytes) -> None:
            assert post(f"{store.otlp_endpoint}/v1/traces", body, "application/json", Authorization="Bearer write") == 200

        trained = _trained(model)
        sent(trained.otlp())
        # Delivered again without one of them, so that it is another request: each span must be counted once.
        sent(trained.otlp(*[str(row["SpanId"]) for row in trained.spans[:-1]]))
        sent(_held_out(model).otlp())
        build_once(settings)
        train(settings, follow=False)
        client = connect(store)
        client.command(ELSEWHERE)
        client.close()
        yield store


def _trained(model: Path) -> SpanFactory:
    """Four groups of two rollouts, one of which won; tools and a call that fail, an attempt that crashes, a reward that never came."""
    spans = SpanFactory(run="run")
    for group in ("a", "b", "c", "d"):
        for at in range(2):
            rollout = f"{group}-{at}"
            if rollout == "d-1":
                spans.root(rollout, attempt=0, calls=0, final=False, failure="crash", GroupId=group)
            attempt = int(rollout == "d-1")
            root = spans.root(rollout, attempt=attempt, calls=1, GroupId=group, GroupSize=2, TaskId=f"task-{group}")
            agent = spans.span("agent", root, rollout=rollout, attempt=attempt, kind="AGENT")
            _call(spans, agent, model, rollout=rollout, attempt=attempt, seed=at + 10 * ord(group))
            tool = {"rollout": rollout, "attempt": attempt, "kind": "TOOL", "status": "Error" if at else "Ok"}
            spans.span("search", agent, **tool, Attributes={"tool.name": "search"})
            spans.evaluation(root, 1.0 - at)
    failed = spans.root("failed", calls=1, GroupId="e", GroupSize=1)
    spans.call(failed, rollout="failed", ErrorType="APIError", HttpStatus=500, ResponseIds=[], Logprobs=[])
    spans.evaluation(failed, 0.0)
    mute = spans.root("mute", calls=1, GroupId="f", GroupSize=1)
    spans.call(mute, rollout="mute")
    return spans


def _held_out(model: Path) -> SpanFactory:
    """A group that is measured and never trained."""
    spans = SpanFactory(run="run")
    for at in range(2):
        root = spans.root(f"held-out-{at}", calls=1, GroupId="v", GroupSize=2)
        _call(spans, root, model, rollout=f"held-out-{at}", seed=at)
        spans.evaluation(root, 1.0)
    for row in (*spans.spans, *spans.calls, *spans.roots):
        row["Mode"] = "validate"
    return spans


def _call(spans: SpanFactory, parent: str, model: Path, *, seed: int, **where: Any) -> str:
    """A call that the model itself answered, as version 0."""
    response, logprobs = sample(model, list(PROMPT), 2, 1.0, seed=seed)
    facts = {"PromptIds": list(PROMPT), "ResponseIds": response, "Logprobs": logprobs, "Temperature": 1.0}
    return spans.call(parent, **facts, TokenizerHash=tokenizer_hash(model), **versions((0, 0)), **where)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory, tiny_model: Any) -> Iterator[StoreSettings]:
    with store_of_a_run(tmp_path_factory.mktemp("dashboards"), tiny_model) as store:
        yield store


@pytest.fixture(scope="module", params=["clickhouse-go", "clickhouse-connect"])
def ask(request: pytest.FixtureRequest, world: StoreSettings) -> Iterator[Ask]:
    if request.param == "clickhouse-go":
        chgo, url = binary("SPANGRAD_CHGO", "chgo"), f"http://default:{READ_TOKEN}@127.0.0.1:{world.clickhouse_port}/otel"

        def by_go(sql: str) -> Answer:
            # The data source packs with gzip over HTTP.
            done = subprocess.run([chgo, "-compress", "gzip", url, sql], capture_output=True, text=True, timeout=60, check=False)
            assert (done.returncode, done.stderr) == (0, ""), f"{done.stderr}\n{sql}"
            head, *rows = (json.loads(line) for line in done.stdout.splitlines())
            return Answer([(name, type_) for name, type_ in head], rows)

        yield by_go
    else:
        client = connect(world.model_copy(update={"token": SecretStr(READ_TOKEN)}))

        def by_python(sql: str) -> Answer:
            result = client.query(sql)
            types = [type_.name for type_ in result.column_types]
            return Answer(list(zip(result.column_names, types, strict=True)), [list(row) for row in result.result_rows])

        yield by_python
        client.close()


@cache
def opened(name: str, ask: Ask) -> Mapping[str, Choice]:
    """Return the variables of a dashboard that is just opened: all options where that is the default, else the query's first answer."""
    choices: dict[str, Choice] = {}
    for variable in MODELS[name]["templating"]["list"]:
        current = variable.get("current", {}).get("value")
        if variable["type"] == "query":
            answer = ask(expand(variable["query"], choices, WINDOW))
            options = [str(row[0]) for row in answer.rows]
            assert options, f"nothing to choose for {variable['name']}"
            assert len(set(options)) == len(options)
            assert [field_kind(type_) for _, type_ in answer.columns] in (["text"], ["text", "text"])
            choices[variable["name"]] = Choice(current if current == [ALL] else options[0], options)
        else:
            choices[variable["name"]] = Choice(current or "spangrad")
    return choices


def narrowed(choices: Choices) -> dict[str, Choice]:
    """One value, where all were chosen."""
    return {name: replace(choice, value=[choice.options[0]]) if choice.value == [ALL] else choice for name, choice in choices.items()}


def judged(panel: Panel, ask: Ask, choices: Choices) -> list[str]:
    answer = ask(expand(panel.sql, choices, WINDOW))
    return complaints(panel, answer.columns, answer.rows)


@pytest.mark.parametrize("name", MODELS)
def test_dashboards_every_panel_has_drawable_rows(name: str, ask: Ask) -> None:
    choices = opened(name, ask)
    for chosen in (choices, narrowed(choices)):
        assert {panel.title: faults for panel in panels(MODELS[name]) if (faults := judged(panel, ask, chosen))} == {}


@pytest.mark.parametrize(
    ("title", "right", "wrong", "complaint"),
    [
        ("Logprob gap", "SELECT Version AS version", "SELECT toString(Version) AS version", "version is no column of numbers"),
        ("Logprob gap", "ORDER BY version", "ORDER BY version DESC", "version does not ascend"),
        ("Logprob gap", "'logprob_gap_max'", "'gap_of_another_name'", "largest has no value in any row"),
        ("Drops by reason", "$__timeInterval(IngestedAt) AS time", "toString(IngestedAt) AS time", "one column of DateTime"),
        ("Drops by reason", "count() AS drops", "toString(count()) AS drops", "a column of numbers"),
        ("Drops by reason", "ORDER BY time", "HAVING drops < 0 ORDER BY time", "no rows"),
        ("Newest version", "max(Version)", "groupArray(Version)", "one column of a number"),
    ],
)
def test_dashboards_panel_with_wrong_column_type_is_reported(title: str, right: str, wrong: str, complaint: str, ask: Ask) -> None:
    choices = opened("training", ask)
    (panel,) = (panel for panel in panels(MODELS["training"]) if panel.title == title)
    assert right in panel.sql
    assert judged(panel, ask, choices) == []
    faults = judged(replace(panel, sql=panel.sql.replace(right, wrong)), ask, choices)
    assert any(complaint in fault for fault in faults), faults


# --- the figures are right ---


def answers(name: str, ask: Ask, **chosen: str | Sequence[str]) -> Callable[[str], list[dict[str, Any]]]:
    """The rows that panels of a dashboard draw, by their titles; floats are rounded."""
    choices = dict(opened(name, ask))
    for variable, value in chosen.items():
        choices[variable] = replace(choices[variable], value=value if isinstance(value, str) else list(value))
    by_title = {panel.title: panel for panel in panels(MODELS[name])}

    def rows(title: str) -> list[dict[str, Any]]:
        named = ask(expand(by_title[title].sql, choices, WINDOW)).named
        return [{key: round(value, 3) if isinstance(value, float) else value for key, value in row.items()} for row in named]

    return rows


def only(rows: list[dict[str, Any]], *names: str) -> list[tuple[Any, ...]]:
    return [tuple(row[name] for name in names) for row in rows]


def test_training_dashboard_shows_steps_of_run(ask: Ask) -> None:
    rows = answers("training", ask)
    assert rows("Newest version") == [{"version": 2}]
    assert rows("Rollouts trained") == [{"rollouts": 8}]
    assert rows("Success, by the version that sampled") == [{"version": 0, "success": 0.6, "rollouts": 10}]
    assert rows("Return of the batch that made the version") == [
        {"version": version, "mean": 0.5, "p10": 0.0, "p90": 1.0} for version in (1, 2)
    ]
    assert rows("Advantage of calls") == [{"version": version, "advantage": 0.707, "flat": 0} for version in (1, 2)]
    assert rows("Staleness of the calls") == [{"version": 1, "mean": 0, "largest": 0}, {"version": 2, "mean": 1, "largest": 1}]
    assert only(rows("Seconds by stage"), "version", "publish") == [(1, 0.25), (2, 0.25)]
    assert rows("Drops in the chosen time") == [{"reason": "call_failed", "drops": 1}, {"reason": "no_reward", "drops": 1}]
    assert only(rows("Versions"), "version", "rollouts", "return") == [(2, 4, 0.5), (1, 4, 0.5)]
    held_out = answers("training", ask, mode=["validate"])
    assert held_out("Success, by the version that sampled") == [{"version": 0, "success": 1, "rollouts": 2}]


def test_rollouts_dashboard_with_duplicate_spans_counts_once(ask: Ask) -> None:
    assert ask(
        "SELECT (SELECT count() FROM otel.otel_traces) > (SELECT count() FROM spangrad.rollout_spans WHERE RowKind = 'span') AS twice"
    ).rows == [[1]]
    rows = answers("rollouts", ask, mode=["train"])
    assert rows("Attempts") == [{"attempts": 11}]
    assert rows("Failed attempts") == [{"failed": 0.091}]
    assert rows("Calls") == [{"calls": 10}]
    assert rows("Failed calls") == [{"failed": 0.1}]
    assert only(rows("Failed tool runs"), "tool", "failed") == [("search", 0.5)]
    table = {(row["rollout"], row["attempt"]): row for row in rows("Newest rollouts")}
    assert len(table) == 11
    shown = ("outcome", "return", "calls", "prompts", "responses", "tools", "errors")
    assert only([table["a-0", 0], table["a-1", 0], table["d-1", 0], table["failed", 0]], *shown) == [
        ("Ok", 1, 1, 7, 2, 1, 0),
        ("Ok", 0, 1, 7, 2, 1, 1),
        ("crash", None, 0, 0, 0, 0, 0),
        ("Ok", 0, 1, 0, 0, 0, 0),
    ]


def test_lineage_dashboard_links_version_and_rollout_both_ways(ask: Ask) -> None:
    rows = answers("lineage", ask, version="1", rollout="a-1")
    assert only(rows("Versions"), "version", "parent", "status") == [(2, 1, "committed"), (1, 0, "committed"), (0, None, "committed")]
    assert only(rows("Groups of its batch"), "group", "rollouts", "return", "oldest") == [("a", 2, 0.5, 0), ("b", 2, 0.5, 0)]
    assert only(rows("Rollouts of its batch"), "rollout", "return") == [("a-0", 1), ("a-1", 0), ("b-0", 1), ("b-1", 0)]
    (transition,) = rows("Spans of rollout $rollout that trained version $version")
    assert (transition["prompt"], transition["response"], transition["reward"]) == (7, 2, 0)
    spans = rows("Spans of rollout $rollout")
    assert [row["name"] for row in spans] == ["rollout", "agent", "chat", "search"]
    assert transition["span"] == spans[2]["span"]
    assert only(rows("Versions that rollout $rollout trained"), "policy", "branch", "version") == [("policy", "main", 1)]
    assert only(rows("What became of each call of rollout $rollout"), "became", "span") == [("transition", transition["span"])]
    assert [row["operationName"] for row in rows("Rollout $rollout")] == ["rollout", "agent", "chat", "search"]

    dropped = answers("lineage", ask, rollout="failed")
    assert only(dropped("What became of each call of rollout $rollout"), "became") == [("call_failed",)]


def test_dashboard_variable_with_quote_is_escaped(ask: Ask) -> None:
    rows = answers("lineage", ask, rollout="x' OR 1 = 1 OR '")
    assert rows("Spans of rollout $rollout") == []
    assert re.search(r"RolloutId = 'x\\' OR", expand("RolloutId = ${r:singlequote}", {"r": Choice("x' OR")}, WINDOW))
