"""The dashboards' files, their panels, and the data source's expansion as the other tests use it."""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import yaml

from dashboards.files import DASHBOARDS, DIRECTORY, render
from spangrad.settings import StoreSettings
from spangrad.store.names import INTERNAL
from tests.support import grafana
from tests.support.grafana import (
    ALL,
    Choice,
    Window,
    complaints,
    conditional_all,
    expand,
    expand_macros,
    field_kind,
    panels,
    replace_variables,
)

ROOT = Path(__file__).parents[2]
MODELS = {name: json.loads(render(name)) for name in DASHBOARDS}
PANELS = [pytest.param(panel, id=f"{name}: {panel.title}") for name, model in MODELS.items() for panel in panels(model)]
WINDOW = Window(datetime(2014, 11, 12, 11, 45, 26, 371000, UTC), datetime(2015, 11, 12, 11, 45, 26, 371000, UTC), 20)


# --- the files ---


def test_dashboard_files_match_their_code() -> None:
    files = {path.name: path.read_text() for path in DIRECTORY.glob("*.json")}
    assert files == {f"{name}.json": render(name) for name in DASHBOARDS}, "run `python -m dashboards`"


def test_provisioning_names_store_token_and_dashboards() -> None:
    provisioning = ROOT / "dashboards" / "provisioning"
    (source,) = yaml.safe_load((provisioning / "datasources" / "spangrad.yaml").read_text())["datasources"]
    (provider,) = yaml.safe_load((provisioning / "dashboards" / "spangrad.yaml").read_text())["providers"]
    page = (ROOT / "docs" / "guides" / "dashboards.md").read_text()
    used = [model["templating"]["list"][0] for model in MODELS.values()]

    assert (source["type"], source["jsonData"]["protocol"]) == ("grafana-clickhouse-datasource", "http")
    assert source["jsonData"]["port"] == StoreSettings().clickhouse_port
    assert source["secureJsonData"] == {"password": "$SPANGRAD_STORE__READ_TOKEN"}
    assert {(variable["name"], variable["type"], variable["query"]) for variable in used} == {("datasource", "datasource", source["type"])}
    assert f"dashboards/json:{provider['options']['path']}:ro" in page


# --- the panels ---


@pytest.mark.parametrize("panel", PANELS)
def test_panel_has_description_unit_and_data_source(panel: grafana.Panel) -> None:
    assert len(panel.model["description"]) > 20
    assert panel.model["fieldConfig"]["defaults"]["unit"]
    assert panel.model["datasource"] == {"type": "grafana-clickhouse-datasource", "uid": "${datasource}"}


def test_dashboards_commands_read_models_and_guides_name_public_tables_only() -> None:
    """`spangrad_internal` may change with any version. The schema's own pages tell of it, and decisions of why it is as it is."""
    texts = {f"dashboard {name}": render(name) for name in DASHBOARDS}
    texts |= {str(page.relative_to(ROOT)): page.read_text() for page in sorted((ROOT / "docs").rglob("*.md"))}
    modules = [
        *(ROOT / "commands").rglob("*.py"),
        *(ROOT / "spangrad" / "store" / "rollout").glob("*.py"),
        ROOT / "spangrad/store/lineage.py",
    ]
    texts |= {str(module.relative_to(ROOT)): module.read_text() for module in modules}
    explained = {"docs/reference/tables.md", "docs/guides/schema.md", "docs/guides/sql.md"}
    internal = [name for name, text in texts.items() if INTERNAL in text and name not in explained and "/decisions/" not in name]
    assert internal == []
    blocks = re.findall(r"```.*?```", (ROOT / "docs" / "guides" / "sql.md").read_text(), re.DOTALL)
    assert [block for block in blocks if INTERNAL in block] == []


@pytest.mark.parametrize("panel", PANELS)
def test_panel_reads_narrow_tables_and_quotes_variables(panel: grafana.Panel) -> None:
    assert set(re.findall(r"otel\.(otel_\w+)", panel.sql)) == set()
    raw = re.findall(r"\$\{(\w+)\}", panel.sql)
    assert set(raw) <= {"success"}, "only a number stands in SQL as it was typed"


@pytest.mark.parametrize("panel", PANELS)
def test_panel_macro_without_arguments_is_parenthesized(panel: grafana.Panel) -> None:
    """Older data sources take the next parenthesis that opens for the macro's own."""
    assert re.findall(r"\$__(?:interval_s|fromTime|toTime)\b(?!\))", panel.sql) == []


def test_panels_do_not_overlap_and_links_name_variables() -> None:
    names = {model["uid"]: {variable["name"] for variable in model["templating"]["list"]} for model in MODELS.values()}
    for model in MODELS.values():
        cells = [
            (x, y)
            for panel in model["panels"]
            for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
            for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
        ]
        assert len(cells) == len(set(cells))
        assert max(x for x, _ in cells) < 24
        assert len({panel["id"] for panel in model["panels"]}) == len(model["panels"])
        links = re.findall(r"/d/([\w-]+)\?([^\"\\]*)", json.dumps(model))
        assert {uid for uid, _ in links} <= names.keys()
        assert [name for uid, query in links for name in re.findall(r"var-(\w+)=", query) if name not in names[uid]] == []


# --- variables and macros, after the documentation's own examples ---


@pytest.mark.parametrize(
    ("sql", "expanded"),
    [
        ("$__fromTime", "toDateTime(1415792726)"),
        ("$__toTime", "toDateTime(1447328726)"),
        ("$__fromTime_ms", "fromUnixTimestamp64Milli(1415792726371)"),
        ("$__toTime_ms", "fromUnixTimestamp64Milli(1447328726371)"),
        ("$__timeFilter(time)", "time >= toDateTime(1415792726) AND time <= toDateTime(1447328726)"),
        ("$__timeFilter(cast(a as b) )", "cast(a as b) >= toDateTime(1415792726) AND cast(a as b) <= toDateTime(1447328726)"),
        (
            "$__timeFilter_ms(time)",
            "time >= fromUnixTimestamp64Milli(1415792726371) AND time <= fromUnixTimestamp64Milli(1447328726371)",
        ),
        ("$__dateFilter(day)", "day >= toDate('2014-11-12') AND day <= toDate('2015-11-12')"),
        (
            "$__dateTimeFilter(day, time)",
            "(day >= toDate('2014-11-12') AND day <= toDate('2015-11-12'))"
            " AND (time >= toDateTime(1415792726) AND time <= toDateTime(1447328726))",
        ),
        ("$__timeInterval(col)", "toStartOfInterval(toDateTime(col), INTERVAL 20 second)"),
        ("$__timeInterval_ms(col)", "toStartOfInterval(toDateTime64(col, 3), INTERVAL 20000 millisecond)"),
        ("count() / ($__interval_s)", "count() / (20)"),
        ("( a >= $__fromTime ) and ( a <= $__toTime )", "( a >= toDateTime(1415792726) ) and ( a <= toDateTime(1447328726) )"),
        ("$__timeInterval($__fromTime)", "toStartOfInterval(toDateTime(toDateTime(1415792726)), INTERVAL 20 second)"),
        ("$__timeFilters(a) $__unknown", "$__timeFilters(a) $__unknown"),
    ],
)
def test_expand_macros_matches_documentation(sql: str, expanded: str) -> None:
    assert expand_macros(sql, WINDOW) == expanded


def test_expand_macros_interval_is_at_least_one_second() -> None:
    fast = Window(WINDOW.start, WINDOW.end, 0.25)
    assert expand_macros("$__interval_s $__timeInterval_ms(t)", fast) == (
        "1 toStartOfInterval(toDateTime64(t, 3), INTERVAL 250 millisecond)"
    )


@pytest.mark.parametrize(
    ("choice", "sql", "expanded"),
    [
        (Choice("it's"), "a = ${x:singlequote}", r"a = 'it\'s'"),
        (Choice("it's"), "a = ${x:sqlstring}", "a = 'it''s'"),
        (Choice(["a", "b"]), "a IN (${x:singlequote})", "a IN ('a','b')"),
        (Choice(["a", "b"]), "a IN ($x)", "a IN ('a','b')"),
        (Choice("7"), "a > $x AND b > [[x]] AND c > ${x}", "a > 7 AND b > 7 AND c > 7"),
        (Choice([ALL], ["a", "b"]), "a IN (${x:singlequote})", "a IN ('a','b')"),
        (Choice("7"), "$xy ${y} $__x", "$xy ${y} $__x"),
    ],
)
def test_replace_variables_matches_documentation(choice: Choice, sql: str, expanded: str) -> None:
    assert replace_variables(sql, {"x": choice}) == expanded


@pytest.mark.parametrize(
    ("choice", "expanded"),
    [
        (Choice([ALL], ["a"]), "1=1"),
        (Choice(ALL, ["a"]), "1=1"),
        (Choice(""), "1=1"),
        (Choice(["a"]), "f(a, b) IN ($x)"),
    ],
)
def test_conditional_all_with_all_selected_is_true(choice: Choice, expanded: str) -> None:
    query = "$__conditionalAll(f(a, b) IN ($x), $x) AND $__conditionalAll(f(a, b) IN ($x), ${x})"
    assert conditional_all(query, {"x": choice}) == f"{expanded} AND {expanded}"


def test_expand_applies_browser_macros_before_backend_macros() -> None:
    sql = "WHERE $__conditionalAll($__timeFilter(t) AND a IN (${x:singlequote}), $x)"
    assert expand(sql, {"x": Choice(["a"])}, WINDOW) == "WHERE t >= toDateTime(1415792726) AND t <= toDateTime(1447328726) AND a IN ('a')"
    assert expand(sql, {"x": Choice([ALL], ["a"])}, WINDOW) == "WHERE 1=1"


# --- what panels can draw ---


@pytest.mark.parametrize(
    ("type_", "kind"),
    [
        ("DateTime", "time"), ("DateTime('UTC')", "time"), ("DateTime64(9)", "time"),
        ("Date", "time"), ("Nullable(DateTime64(3))", "time?"),
        ("UInt64", "number"), ("Nullable(Float64)", "number?"), ("Decimal(9, 2)", "number"), ("Bool", "bool"),
        ("LowCardinality(String)", "text"), ("LowCardinality(Nullable(String))", "text?"), ("Enum8('a' = 1)", "text"),
        ("Array(UInt32)", "json"), ("Map(LowCardinality(String), String)", "json"),
        ("FixedString(4)", ""), ("AggregateFunction(sum, UInt8)", ""), ("Nothing", ""),
    ],
)  # fmt: skip
def test_field_kind_matches_data_source(type_: str, kind: str) -> None:
    assert field_kind(type_) == kind


def of(kind: str, **changes: Any) -> grafana.Panel:
    model = {"fieldConfig": {"overrides": []}, "options": {"xField": "x"}, **changes}
    return grafana.Panel("a panel", kind, "", model)


TIME, NUMBER, WORD = ("time", "DateTime"), ("n", "UInt64"), ("w", "String")


@pytest.mark.parametrize(
    ("kind", "columns", "rows", "complaint"),
    [
        ("timeseries", [TIME, NUMBER], [["1", 1], ["2", 2]], None),
        ("timeseries", [TIME, WORD, NUMBER], [["1", "a", 1], ["1", "b", 1]], None),
        ("timeseries", [TIME, NUMBER], [], "no rows"),
        ("timeseries", [("time", "String"), NUMBER], [["1", 1]], "one column of DateTime"),
        ("timeseries", [("time", "Nullable(DateTime)"), NUMBER], [["1", 1]], "one column of DateTime"),
        ("timeseries", [("version", "UInt64"), NUMBER], [[1, 1]], "one column of DateTime"),
        ("timeseries", [TIME, ("n", "String")], [["1", "2"]], "has a column of numbers"),
        ("timeseries", [TIME, NUMBER, ("a", "Array(UInt8)")], [["1", 1, []]], "draws numbers and names"),
        ("timeseries", [TIME, NUMBER], [["2", 1], ["1", 1]], "do not ascend"),
        ("timeseries", [TIME, WORD, NUMBER], [["1", "a", 1], ["1", "a", 2]], "two values at one time"),
        ("timeseries", [TIME, ("n", "Nullable(Float64)")], [["1", None]], "n has no value in any row"),
        ("trend", [("x", "UInt64"), NUMBER], [[1, 1], [2, 1]], None),
        ("trend", [("x", "String"), NUMBER], [["1", 1]], "x is no column of numbers"),
        ("trend", [("x", "Nullable(UInt64)"), NUMBER], [[1, 1]], "x is no column of numbers"),
        ("trend", [("x", "UInt64"), NUMBER], [[2, 1], [1, 1]], "x does not ascend"),
        ("trend", [("x", "UInt64"), NUMBER], [[1, 1], [1, 1]], "x does not ascend"),
        ("trend", [("x", "UInt64")], [[1]], "nothing to draw"),
        ("trend", [("x", "UInt64"), NUMBER, WORD], [[1, 1, "a"]], "w is String"),
        ("stat", [NUMBER], [[1]], None),
        ("stat", [WORD], [["a"]], "one column of a number"),
        ("stat", [NUMBER], [[1], [2]], "2 rows"),
        ("barchart", [("x", "String"), NUMBER], [["a", 1]], None),
        ("barchart", [("x", "UInt8"), NUMBER], [[1, 1]], "not the one column of words"),
        ("barchart", [("x", "String"), WORD], [["a", "b"]], "no column of numbers"),
        ("table", [NUMBER, WORD, TIME], [[1, "a", "1"]], None),
        ("table", [NUMBER, NUMBER], [[1, 1]], "two columns are named n"),
        ("table", [("m", "Map(String, String)")], [[{}]], "flat values"),
        ("table", [("f", "FixedString(4)")], [["a"]], "cannot convert"),
        ("traces", [("traceID", "String")], [["a"]], "spanID is not text"),
    ],
)  # fmt: skip
def test_complaints_of_wrong_column_types(kind: str, columns: list[tuple[str, str]], rows: list[list[Any]], complaint: str | None) -> None:
    reported = complaints(of(kind), columns, rows)
    assert reported == [] if complaint is None else any(complaint in text for text in reported), reported


def test_complaints_of_overrides_and_links_to_missing_columns() -> None:
    link = {"id": "links", "value": [{"url": "/d/x?var-a=${__data.fields.gone}"}]}
    override = {"matcher": {"id": "byName", "options": "lost"}, "properties": [link]}
    reported = complaints(of("table", fieldConfig={"overrides": [override]}), [NUMBER], [[1]])
    assert reported == ["an override speaks of lost, which is no column", "a link speaks of gone, which is no column"]
