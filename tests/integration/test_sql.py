"""`spangrad sql` at a store that asks for tokens: it changes nothing with any token, and a refusal says what to do instead."""

from __future__ import annotations

from pathlib import Path

import pytest

from commands.inspection.sql import sql
from spangrad.errors import StoreError
from spangrad.settings import StoreSettings
from spangrad.store.clickhouse import connect

CHANGES_NOTHING = "`spangrad sql` changes nothing: give one SELECT, SHOW or DESCRIBE, or send the statement with curl (docs/guides/sql.md)."


@pytest.fixture(params=["token=write", "read_token=read"])
def asked(request: pytest.FixtureRequest, guarded_store: StoreSettings, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """Settings of who writes, and of who reads."""
    monkeypatch.chdir(tmp_path)
    return [f"store.url={guarded_store.url}", f"store.{request.param}"]


@pytest.mark.parametrize(
    "statement",
    [
        "DROP TABLE spangrad_internal.calls",
        "DROP TABLE spangrad_internal.calls -- SELECT",
        "ALTER TABLE spangrad_internal.calls DROP COLUMN Model",
        "TRUNCATE TABLE spangrad_internal.calls",
        "CREATE TABLE spangrad.mine (a UInt8) ORDER BY a",
        "INSERT INTO spangrad_internal.claims SELECT * FROM spangrad_internal.claims",
    ],
)
def test_sql_command_changing_statement_is_refused_with_any_token(guarded_store: StoreSettings, asked: list[str], statement: str) -> None:
    client = connect(guarded_store)
    tables = "SELECT name, uuid, metadata_modification_time FROM system.tables WHERE database = 'spangrad_internal' ORDER BY name"
    before = client.query(tables).result_rows
    with pytest.raises(StoreError) as refused:
        sql(statement, set_=asked)
    assert str(refused.value) == CHANGES_NOTHING
    assert client.query(tables).result_rows == before
    client.close()


@pytest.mark.parametrize(
    ("statement", "printed"),
    [
        ("SELECT 1 AS one;", ["one", "1"]),
        ("WITH 2 AS x SELECT x", ["x", "2"]),
        ("SHOW TABLES FROM spangrad LIKE 'calls'", ["name", "calls"]),
        ("SELECT 'in readonly mode FORMAT CSV' AS text", ["text", "in readonly mode FORMAT CSV"]),
    ],
)
def test_sql_command_query_is_answered_with_any_token(
    asked: list[str], statement: str, printed: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    sql(statement, set_=asked)
    assert [line.strip() for line in capsys.readouterr().out.splitlines()] == printed


def test_sql_command_with_write_token_accepts_settings(guarded_store: StoreSettings, capsys: pytest.CaptureFixture[str]) -> None:
    sql("SELECT number FROM numbers(3) SETTINGS limit = 1", set_=[f"store.url={guarded_store.url}", "store.token=write"])
    assert capsys.readouterr().out.split() == ["number", "0"]


def test_sql_command_with_format_clause_raises(asked: list[str]) -> None:
    with pytest.raises(StoreError) as refused:
        sql("SELECT 1 format PrettyCompact", set_=asked)
    assert str(refused.value) == (
        "`spangrad sql` prints a table of its own. Leave FORMAT PrettyCompact out, or ask the store with curl (docs/guides/sql.md)."
    )


@pytest.mark.parametrize("shown", [[], ["store.token=other"]])
def test_sql_command_with_missing_or_wrong_token_names_setting(guarded_store: StoreSettings, shown: list[str]) -> None:
    with pytest.raises(StoreError) as refused:
        sql("SELECT 1", set_=[f"store.url={guarded_store.url}", *shown])
    assert str(refused.value) == (
        f"the span store at {guarded_store.url} asks for a token, and got none or a wrong one. Set store.token (SPANGRAD_STORE__TOKEN) to "
        "its token, or store.read_token where you only ask."
    )
