"""The store against clickhouse-go, the client inside Grafana's ClickHouse data source and the Collector's exporter.

Skipped where the binary is not there (`tests.support.servers.binary`).
"""

from __future__ import annotations

import json
import re
import struct
import subprocess
from collections.abc import Iterator
from datetime import datetime
from typing import Any

import pytest
from clickhouse_connect.driver.client import Client

from spangrad.settings import StoreSettings
from spangrad.store.clickhouse import connect
from spangrad.store.names import DATABASES, stored
from tests.support.servers import binary, running_store, store_settings

COMPRESSIONS = ["none", "lz4", "zstd", "gzip", "deflate"]
MOSTLY_SLOW = [pytest.param(name, marks=[] if name in {"none", "lz4"} else [pytest.mark.slow]) for name in COMPRESSIONS]
"""Compressions of tests whose every case takes long: without compression, and the one that the client uses by default."""
_BUILD = "'r' AS RunId, 'm' AS Mode, 'g' AS GroupId, 'o' AS RolloutId, 0 AS Attempt, 's' AS BuildSpec, 5 AS Content"
MATCHING = [
    (
        "rollout_spans",
        "'span' AS RowKind, 'rollout' AS SpanName, 'rollout' AS RolloutKeySource, map('spangrad.rollout.final', 'true') AS Attributes",
    ),
    ("policy_versions", "'p' AS Policy, 'b' AS Branch, 1 AS Version, 'x' AS BatchId, 'committed' AS Status"),
    ("transitions", f"'p' AS Policy, {_BUILD}, 0 AS Revision"),
    ("builds", f"{_BUILD}, 0 AS Revision"),
    (
        "batches",
        "'p' AS Policy, 'b' AS Branch, 1 AS Version, 'x' AS BatchId,"
        " 'r' AS RunId, 'm' AS Mode, 'g' AS GroupId, 'o' AS RolloutId, 0 AS Attempt, 's' AS BuildSpec, 0 AS Revision",
    ),
    ("builds", f"{_BUILD}, 1 AS Revision"),
    ("rewards", f"{_BUILD}, 1 AS Revision"),
]
"""Values, by table, of rows that the views which join or choose rows return."""


@pytest.fixture(scope="module")
def chgo() -> str:
    return binary("SPANGRAD_CHGO", "chgo")


def run_chgo(chgo: str, store: StoreSettings, sql: str, *flags: str, rows: str = "", token: str = "") -> subprocess.CompletedProcess[str]:
    url = f"http://default:{token}@127.0.0.1:{store.clickhouse_port}/default"
    return subprocess.run([chgo, *flags, url, sql], input=rows, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("compress", COMPRESSIONS)
def test_clickhouse_go_reads_and_writes(chgo: str, store: StoreSettings, compress: str) -> None:
    table = f"chgo_{compress}"
    assert run_chgo(chgo, store, f'CREATE TABLE "{table}" (a Int64, b String) ENGINE = MergeTree ORDER BY a').stderr == ""

    rows = "".join(f'[{number}, "text {number}"]\n' for number in range(2000))
    inserted = run_chgo(chgo, store, f"INSERT INTO {table} (a, b)", "-compress", compress, "-insert", rows=rows)
    assert (inserted.returncode, inserted.stderr) == (0, "")

    read = run_chgo(chgo, store, f"SELECT a, b FROM {table} ORDER BY a", "-compress", compress)
    assert read.stdout.splitlines()[0] == '[["a","Int64"],["b","String"]]'
    assert [json.loads(line) for line in read.stdout.splitlines()[1:]] == [[number, f"text {number}"] for number in range(2000)]


def test_clickhouse_go_passes_parameters_and_settings(chgo: str, store: StoreSettings) -> None:
    sql = "SELECT {x:String} AS x, getSetting('max_block_size') AS y, [toInt32(1), 2] AS a, map('k', 'v') AS m"

    read = run_chgo(chgo, store, sql, "-param", "x=it's", "-setting", "max_block_size=77")

    assert read.stdout.splitlines()[1:] == ['["it\'s",77,[1,2],{"k":"v"}]']


@pytest.mark.parametrize("compress", MOSTLY_SLOW)
def test_clickhouse_go_reads_answers_that_stream(chgo: str, store: StoreSettings, compress: str) -> None:
    read = run_chgo(chgo, store, "SELECT number FROM numbers(400000)", "-compress", compress)

    assert read.stdout.splitlines()[1:] == [f"[{number}]" for number in range(400_000)]


@pytest.mark.parametrize("compress", MOSTLY_SLOW)
@pytest.mark.parametrize(
    ("sql", "code"),
    [
        ("SELECT * FROM nowhere", 60),
        ("SELEC 1 1", 62),
        ("SELECT file('/etc/passwd')", 497),
        ("SELECT throwIf(number = 5000000) FROM numbers(10000000)", 395),
    ],
    ids=["table", "syntax", "guard", "half way"],
)
def test_clickhouse_go_sees_errors_with_their_code(chgo: str, store: StoreSettings, compress: str, sql: str, code: int) -> None:
    failed = run_chgo(chgo, store, sql, "-compress", compress)

    assert (failed.returncode, f"Code: {code}. DB::Exception: " in failed.stderr) == (1, True)


@pytest.mark.parametrize("compress", COMPRESSIONS)
def test_clickhouse_go_with_wrong_token_is_refused(chgo: str, guarded_store: StoreSettings, compress: str) -> None:
    wrong = run_chgo(chgo, guarded_store, "SELECT 1", "-compress", compress, token="other")
    read = run_chgo(chgo, guarded_store, "SELECT 1 AS a", "-compress", compress, "-setting", "max_execution_time=600", token="read")
    refused = run_chgo(chgo, guarded_store, "CREATE TABLE t (a UInt8) ORDER BY a", "-compress", compress, token="read")

    assert (wrong.returncode, "Code: 516. DB::Exception: " in wrong.stderr) == (1, True)
    assert (read.stdout, read.stderr) == ('[["a","UInt8"]]\n[1]\n', "")
    assert (refused.returncode, "Code: 164. DB::Exception: " in refused.stderr) == (1, True)


# --- every column of the schema ---


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoreSettings]:
    """A store with rows of every kind in every table of the schema."""
    directory = tmp_path_factory.mktemp("filled")
    settings = store_settings(directory / "data")
    with running_store(settings, directory / "log"):
        client = connect(settings)
        for table, columns in _tables(client, "engine NOT LIKE '%View'"):
            insertable = [(name, kind) for name, kind, default in columns if default not in {"MATERIALIZED", "ALIAS", "EPHEMERAL"}]
            structure = ", ".join(f"`{name}` {kind}" for name, kind in insertable)
            names = ", ".join(f"`{name}`" for name, _ in insertable)
            # Claims of another day are not kept.
            known = {"IngestedAt": "now64(6)"} if table == "spangrad_internal.claims" else {}
            values = ", ".join(known.get(name) or _finite(name, kind) for name, kind in insertable)
            query = f"SELECT {values} FROM generateRandom('{structure.replace(chr(39), chr(92) + chr(39))}', 7, 12, 4) LIMIT 3"
            client.command(f"INSERT INTO {table} ({names}) {query}")
        for table, replaced in MATCHING:
            client.command(f"INSERT INTO {stored(table)} SELECT * REPLACE ({replaced}) FROM {stored(table)} LIMIT 1")
        client.close()
        yield settings


def _finite(name: str, kind: str) -> str:
    """A column's random values, but for floats that JSON, in which chgo answers, has no words for."""
    if kind.startswith("Array(Float"):
        return f"arrayMap(one -> if(isFinite(one), one, 1.5), `{name}`)"
    return f"if(isFinite(`{name}`), `{name}`, 1.5)" if kind in {"Float64", "Nullable(Float64)"} else f"`{name}`"


def _tables(client: Client, which: str) -> list[tuple[str, list[tuple[str, str, str]]]]:
    of_ours = f"SELECT concat(database, '.', name) FROM system.tables WHERE database IN {DATABASES} AND {which} ORDER BY ALL"
    named = client.query(of_ours).result_rows
    columns = "SELECT name, type, default_kind FROM system.columns WHERE concat(database, '.', table) = {t:String} ORDER BY position"
    return [(name, [tuple(row) for row in client.query(columns, parameters={"t": name}).result_rows]) for (name,) in named]


def _exact(value: Any, kind: str) -> Any:
    """A value of either client, by its bits: times as nanoseconds (Go writes text, Python was asked for ticks), floats as bytes."""
    if isinstance(value, list | tuple):
        return [_exact(element, kind) for element in value]
    if isinstance(value, dict):
        return {key: _exact(element, kind) for key, element in value.items()}
    if match := re.search(r"DateTime(?:64\((\d))?", kind):
        if isinstance(value, int):
            return value * 10 ** (9 - int(match[1] or 0))
        whole, _, fraction = value.removesuffix("Z").partition(".")
        return int(datetime.fromisoformat(f"{whole}+00:00").timestamp()) * 10**9 + int(fraction.ljust(9, "0") or 0)
    if "Float" in kind and isinstance(value, int | float):
        return struct.pack("<f" if "Float32" in kind else "<d", value)
    return value


@pytest.mark.parametrize("compress", MOSTLY_SLOW)
def test_clickhouse_go_reads_every_schema_column_as_clickhouse_connect(chgo: str, filled: StoreSettings, compress: str) -> None:
    client = connect(filled)
    # A Null table passes its rows on and keeps none.
    tables = _tables(client, "engine NOT IN ('MaterializedView', 'Null')")
    read_types: set[str] = set()
    empty: list[str] = []
    for table, columns in tables:
        sql = f"SELECT {', '.join(f'`{name}`' for name, _, _ in columns)} FROM {table} ORDER BY ALL"
        answer = run_chgo(chgo, filled, sql, "-compress", compress)
        assert answer.stderr == "", table
        head, *rows = (json.loads(line) for line in answer.stdout.splitlines())
        expected = client.query(sql, query_formats={"DateTime*": "int"})
        kinds = [kind.name for kind in expected.column_types]
        assert head == [list(pair) for pair in zip(expected.column_names, kinds, strict=True)], table
        by_go, by_python = (
            [[_exact(value, kind) for value, kind in zip(row, kinds, strict=True)] for row in given]
            for given in (rows, expected.result_rows)
        )
        assert by_go == by_python, table
        read_types |= {kind for _, kind, _ in columns}
        empty += [table] if not rows else []
    client.close()
    assert len(read_types) > 10
    assert empty == []
