"""Requests that name odd things: what they set ends with them, and each is answered with ClickHouse's code."""

from __future__ import annotations

from pathlib import Path

import clickhouse_connect
import pytest
from clickhouse_connect.driver.exceptions import DatabaseError

from collector.sql.sessions import MAX_IDLE
from spangrad.settings import StoreSettings
from tests.support.servers import ask, form, running_store, store_settings

# --- readonly, and other settings that nothing takes back ---


@pytest.mark.parametrize("setting", [{"readonly": 1}, {"readonly": 2}, {"allow_ddl": 0}])
def test_sql_setting_of_one_request_does_not_reach_another(store: StoreSettings, setting: dict[str, int]) -> None:
    assert ask(store, "SELECT 1", **setting).body == b"1\n"

    # Each has settings of its own, so that handles are set up anew.
    threads = range(1, 2 * MAX_IDLE)
    replies = [ask(store, "SELECT getSetting('max_threads')", max_threads=number) for number in threads]

    assert [(reply.code, reply.body) for reply in replies] == [(0, b"%d\n" % number) for number in threads]
    assert ask(store, "CREATE TABLE IF NOT EXISTS after_settings (a UInt8) ORDER BY a").code == 0


@pytest.mark.parametrize("session", [{}, {"session_id": "asks for readonly"}])
@pytest.mark.parametrize("readonly", [1, 2])
def test_sql_readonly_request_changes_nothing(store: StoreSettings, session: dict[str, str], readonly: int) -> None:
    assert ask(store, "CREATE TABLE IF NOT EXISTS untouched (a UInt8) ORDER BY a").code == 0
    body, headers = form(ext=("", b"7\n"))

    def code(sql: str) -> int:
        return ask(store, sql, readonly=readonly, max_threads=2, **session).code

    # Settings that stand beside it count, and external data come before it.
    assert ask(store, "SELECT getSetting('max_threads')", readonly=readonly, max_threads=3, **session).body == b"3\n"
    asked = {"query": "SELECT a FROM ext", "ext_structure": "a UInt8"}
    assert ask(store, body, headers=headers, readonly=readonly, **asked, **session).body == b"7\n"
    assert [code(sql) for sql in ("INSERT INTO untouched VALUES (1)", "INSERT INTO untouched FORMAT CSV\n1\n", "DROP TABLE untouched")] == [
        164
    ] * 3
    assert code("SET max_threads = 1") == (164 if readonly == 1 else 0)
    assert ask(store, "SELECT count() FROM untouched", **session).body == b"0\n"


def test_sql_session_after_readonly_request_writes_again(store: StoreSettings) -> None:
    client = clickhouse_connect.get_client(host="127.0.0.1", port=store.clickhouse_port, session_id="goes on")
    client.command("CREATE TEMPORARY TABLE kept (a UInt8)")

    assert client.query("SELECT count() FROM kept", settings={"readonly": 1}).result_rows == [(0,)]
    with pytest.raises(DatabaseError, match="readonly mode: the request asks for it"):
        client.insert("kept", [(1,)], column_names=["a"], settings={"readonly": 1})
    client.insert("kept", [(2,)], column_names=["a"])

    assert client.query("SELECT a FROM kept").result_rows == [(2,)]
    client.close()


def test_sql_request_without_session_leaves_nothing_to_others(store: StoreSettings) -> None:
    create = f"-- {'x' * 300}\nCREATE TEMPORARY TABLE left_over (a UInt8)"
    assert [ask(store, create).code for _ in range(2)] == [0, 0]
    assert ask(store, "# of MySQL\nSET max_threads = 7").code == 0
    assert [ask(store, "SELECT getSetting('max_threads')").body for _ in range(9)].count(b"7\n") == 0


# --- names ---


@pytest.mark.parametrize("name", ["dataframe", "DataStore", "ArrowTable", "a\r\nX: y", "\0", ""])
@pytest.mark.parametrize("sql", ["SELECT 1", "SHOW TABLES", "KILL QUERY WHERE 0"])
def test_sql_unknown_default_format_is_refused(store: StoreSettings, sql: str, name: str) -> None:
    reply = ask(store, sql, default_format=name)

    assert (reply.status, reply.code) == ((404, 73) if name else (200, 0))


def test_sql_python_only_format_in_statement_is_refused(store: StoreSettings) -> None:
    assert ask(store, "SELECT 1 FORMAT dataframe").code == 73
    assert ask(store, "SELECT 1", headers={"X-ClickHouse-Format": "arrowtable"}).code == 73


@pytest.mark.parametrize(
    ("query_id", "returned"), [("my-id", "my-id"), ("an id's text", "an id's text"), ("a\r\nX: y", None), ("a\nb", None), ("\0", None)]
)
def test_sql_query_id_is_returned_if_valid_in_header(store: StoreSettings, query_id: str, returned: str | None) -> None:
    reply = ask(store, "SELECT 1", query_id=query_id)

    assert (reply.status, reply.body, reply.headers["X-ClickHouse-Query-Id"], reply.headers["X"]) == (200, b"1\n", returned, None)
    assert ask(store, "SELECT 1 x x", query_id=query_id).code == 62


def test_sql_text_of_invalid_utf8_is_refused(store: StoreSettings) -> None:
    body, headers = form(query=(None, b"SELECT 1"), session_timezone=(None, b"\xff"))

    assert ask(store, body, headers=headers).code == 36
    body, headers = form(query=(None, b"SELECT {x:String}"), param_x=(None, b"\xff"))
    assert ask(store, body, headers=headers).code == 36
    assert ask(store, body.replace(b"param_x", b"param_\xff"), headers=headers).code == 36
    assert ask(store, "SELECT 1", headers={"X-ClickHouse-Database": "\xff"}).code == 36


@pytest.mark.parametrize(
    ("text", "invalid"),
    [(b"TSV", b"TS\xff"), (b"a String", b"\xff String"), (b'name="t"', b'name="\xff"')],
    ids=["format", "structure", "file"],
)
def test_sql_external_data_of_invalid_utf8_is_refused(store: StoreSettings, text: bytes, invalid: bytes) -> None:
    body, headers = form(query=(None, b"SELECT 1"), t=("file", b"1\n"), t_structure=(None, b"a String"), t_format=(None, b"TSV"))

    assert ask(store, body, headers=headers).body == b"1\n"
    reply = ask(store, body.replace(text, invalid), headers=headers)
    assert (reply.code, b"parameter '" in reply.body) == (36, True)


def test_sql_inserts_into_stage_table_follow_its_changes(tmp_path: Path) -> None:
    own = store_settings(tmp_path / "store")
    with running_store(own, tmp_path / "log"):
        head = "INSERT INTO spangrad_internal.claims (BuildSpec, RolloutId) FORMAT CSV"
        added = "INSERT INTO spangrad_internal.claims FORMAT JSONEachRow"
        assert ask(own, f"{head}\nspec,a\nspec,b\n").code == 0
        assert ask(own, f"{head}\nspec,c\n").code == 0
        assert ask(own, f'{added}\n{{"RolloutId": "d"}}\n').code == 0
        assert ask(own, f'{added}\n{{"RolloutId": ').code != 0
        assert ask(own, "ALTER TABLE spangrad_internal.claims ADD COLUMN Note String DEFAULT 'none'").code == 0
        assert ask(own, f'{added}\n{{"RolloutId": "e", "Note": "new"}}\n').code == 0
        assert ask(own, f"{head}\nspec,f\n").code == 0

        rows = ask(own, "SELECT RolloutId, Note FROM spangrad_internal.claims ORDER BY RolloutId").body
        assert rows == b"a\tnone\nb\tnone\nc\tnone\nd\tnone\ne\tnew\nf\tnone\n"
