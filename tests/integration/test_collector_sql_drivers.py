"""Features of clickhouse-connect, sync and async, against the real store, with each of its compressions."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from datetime import UTC, date, datetime
from decimal import Decimal
from ipaddress import IPv4Address
from typing import Any

import clickhouse_connect
import pandas
import polars
import pyarrow
import pytest
from clickhouse_connect.driver.asyncclient import AsyncClient
from clickhouse_connect.driver.client import Client
from clickhouse_connect.driver.exceptions import DatabaseError, StreamFailureError
from clickhouse_connect.driver.external import ExternalData

from spangrad.settings import StoreSettings

COMPRESSIONS = [False, "lz4", "zstd", "gzip"]
COLUMNS: dict[str, tuple[str, list[Any]]] = {
    "id": ("UInt32", [1, 2]),
    "wide": ("UInt256", [2**200, 0]),
    "negative": ("Int64", [-(2**63), 5]),
    "float": ("Float64", [0.1, -1e300]),
    "text": ("String", ["é\n\0", ""]),
    "low": ("LowCardinality(String)", ["a", "b"]),
    "low_null": ("LowCardinality(Nullable(String))", [None, "b"]),
    "fixed": ("FixedString(3)", [b"abc", b"\0\1\2"]),
    "nullable": ("Nullable(Int32)", [None, -7]),
    "array": ("Array(Array(Nullable(UInt8)))", [[[1, None], []], []]),
    "map": ("Map(LowCardinality(String), Array(UInt8))", [{"k": [1, 2]}, {}]),
    "tuple": ("Tuple(a UInt8, b String)", [{"a": 1, "b": "x"}, {"a": 2, "b": ""}]),
    "moment": ("DateTime64(9, 'UTC')", [datetime(2026, 1, 2, 3, 4, 5, 678901, UTC), datetime(1970, 1, 1, tzinfo=UTC)]),
    "day": ("Date32", [date(2026, 1, 2), date(1950, 1, 1)]),
    "uuid": ("UUID", [uuid.UUID(int=5), uuid.UUID(int=2**127)]),
    "decimal": ("Decimal(38, 10)", [Decimal("12345678901234567890.1234567891"), Decimal("-1.0000000000")]),
    "enum": ("Enum8('a' = 1, 'b''c' = 2)", ["a", "b'c"]),
    "flag": ("Bool", [True, False]),
    "address": ("IPv4", [IPv4Address("127.0.0.1"), IPv4Address("1.2.3.4")]),
}


def open_client(store: StoreSettings, compress: str | bool, **more: Any) -> Client:
    return clickhouse_connect.get_client(host="127.0.0.1", port=store.clickhouse_port, compress=compress, **more)


@pytest.fixture(params=COMPRESSIONS, ids=str)
def client(store: StoreSettings, request: pytest.FixtureRequest) -> Iterator[Client]:
    client = open_client(store, request.param)
    yield client
    client.close()


@pytest.fixture(params=COMPRESSIONS, ids=str)
def new_async_client(store: StoreSettings, request: pytest.FixtureRequest) -> Any:
    async def opened() -> AsyncClient:
        return await clickhouse_connect.get_async_client(host="127.0.0.1", port=store.clickhouse_port, compress=request.param)

    return opened


def new_table(client: Client, columns: str, order: str) -> str:
    name = f"drivers_{uuid.uuid4().hex}"
    client.command(f"CREATE TABLE {name} ({columns}) ORDER BY {order}")
    return name


def test_clickhouse_connect_reads_back_every_column_type(client: Client) -> None:
    table = new_table(client, ", ".join(f"`{name}` {kind}" for name, (kind, _) in COLUMNS.items()), "id")
    rows = [tuple(row) for row in zip(*(values for _, values in COLUMNS.values()), strict=True)]

    client.insert(table, rows, column_names=list(COLUMNS))

    assert [tuple(row) for row in client.query(f"SELECT * FROM {table} ORDER BY id", tz_mode="aware").result_rows] == rows


def test_clickhouse_connect_data_frames_and_arrow_round_trip(client: Client) -> None:
    columns = "a UInt32, b String, c Array(Float32), d Nullable(Float64)"
    table = new_table(client, columns, "a")
    arrow = pyarrow.table({"a": [1, 2], "b": ["x", "y"], "c": [[0.5], []], "d": [None, 2.5]})
    client.insert_arrow(table, arrow)
    client.insert_df(table, pandas.DataFrame({"a": [3], "b": ["z"], "c": [[1.5]], "d": [0.25]}))
    expected = [
        {"a": 1, "b": "x", "c": [0.5], "d": None},
        {"a": 2, "b": "y", "c": [], "d": 2.5},
        {"a": 3, "b": "z", "c": [1.5], "d": 0.25},
    ]
    sql = f"SELECT * FROM {table} ORDER BY a"

    assert client.query_arrow(sql, use_strings=True).to_pylist() == expected
    frame = client.query_df_arrow(sql, dataframe_library="polars")
    assert isinstance(frame, polars.DataFrame)
    assert frame.to_dicts() == expected
    assert list(client.query_df(f"SELECT a, b FROM {table} ORDER BY a").itertuples(index=False, name=None)) == [
        (1, "x"),
        (2, "y"),
        (3, "z"),
    ]
    assert client.query_np(f"SELECT a FROM {table} ORDER BY a").tolist() == [[1], [2], [3]]


def test_clickhouse_connect_large_answers_stream_in_every_form(client: Client) -> None:
    sql, rows = "SELECT number AS n, toString(number) AS s FROM numbers(500000)", 500_000

    with client.query_row_block_stream(sql) as blocks:
        assert sum(len(block) for block in blocks) == rows
    with client.query_column_block_stream(sql) as blocks:
        assert sum(len(block[0]) for block in blocks) == rows
    with client.query_rows_stream(sql) as stream:
        assert sum(row[0] for row in stream) == sum(range(rows))
    with client.query_df_stream(sql) as frames:
        assert sum(len(frame) for frame in frames) == rows
    with client.query_arrow_stream(sql) as batches:
        assert sum(batch.num_rows for batch in batches) == rows
    with client.raw_stream(sql, fmt="CSV") as stream:
        assert sum(piece.count(b"\n") for piece in stream) == rows
    assert client.raw_query(sql, fmt="CSV").count(b"\n") == rows
    assert client.query(sql).row_count == rows


def test_clickhouse_connect_failing_stream_raises_reason(client: Client) -> None:
    sql = "SELECT number, throwIf(number = 3000000, 'half way') FROM numbers(10000000)"

    with pytest.raises(StreamFailureError, match=r"Code: 395\. DB::Exception: half way"), client.query_row_block_stream(sql) as blocks:
        for _ in blocks:
            pass
    with pytest.raises(DatabaseError, match="half way") as caught:
        client.query(sql)
    assert caught.value.code == 395
    with pytest.raises(DatabaseError, match="nowhere"):
        client.query("SELECT * FROM nowhere")


def test_clickhouse_connect_external_data_is_joined(client: Client) -> None:
    data = ExternalData(file_name="people.csv", data=b"1,ann\n2,bob\n", fmt="CSV", structure="id UInt32, name String")
    data.add_file(file_name="more", data=b"2\n", types="UInt32")

    sql = "SELECT name, {x:String} FROM people WHERE id IN (SELECT _1 FROM more)"
    assert client.query(sql, parameters={"x": "it's"}, external_data=data).result_rows == [("bob", "it's")]
    assert client.raw_query("SELECT count() FROM people", external_data=data) == b"2\n"


def test_clickhouse_connect_client_methods_work(client: Client) -> None:
    table = new_table(client, "a UInt8", "a")
    assert client.ping()
    assert client.command("SELECT 1 + 1") == 2
    assert client.query(f"SELECT * FROM {table} LIMIT 0").column_names == ("a",)
    assert client.insert(table, [(1,), (2,)], column_names=["a"]).written_rows == 2
    assert client.command(f"SELECT count() FROM {table} WHERE a = {{a:UInt8}}", parameters={"a": 2}) == 1
    assert client.query(f"SELECT a FROM {table} ORDER BY a", settings={"max_block_size": 1}).result_rows == [(1,), (2,)]
    assert client.query("SELECT 1", transport_settings={"X-Extra": "1"}).summary["read_rows"] == "1"
    assert client.query("SELECT 1", settings={"query_id": f"tool-{table}"}).query_id == f"tool-{table}"


@pytest.mark.parametrize("given", [{"username": "default"}, {"username": "grafana", "password": ""}, {"access_token": "any"}])
def test_clickhouse_connect_without_store_token_accepts_any_user(store: StoreSettings, given: dict[str, str]) -> None:
    client = open_client(store, False, **given)
    assert client.query("SELECT 1").result_rows == [(1,)]
    client.close()


async def test_clickhouse_connect_async_client_reads_and_writes(new_async_client: Any) -> None:
    client = await new_async_client()
    table = f"drivers_{uuid.uuid4().hex}"
    await client.command(f"CREATE TABLE {table} (a UInt32, b String) ORDER BY a")
    await client.insert(table, [(1, "x"), (2, "y")], column_names=["a", "b"])
    await client.insert_arrow(table, pyarrow.table({"a": [3], "b": ["z"]}))

    assert (await client.query(f"SELECT * FROM {table} WHERE b = {{b:String}}", parameters={"b": "y"})).result_rows == [(2, "y")]
    assert (await client.query_arrow(f"SELECT a FROM {table} ORDER BY a")).to_pylist() == [{"a": 1}, {"a": 2}, {"a": 3}]
    assert list((await client.query_df(f"SELECT a FROM {table} ORDER BY a"))["a"]) == [1, 2, 3]
    stream = await client.query_row_block_stream("SELECT number FROM numbers(300000)")
    async with stream:
        assert sum([len(block) async for block in stream]) == 300_000
    data = ExternalData(file_name="ids", data=b"3\n", structure="id UInt32")
    asked = f"SELECT b FROM {table} WHERE a IN ids"
    assert (await client.query(asked, external_data=data)).result_rows == [("z",)]
    with pytest.raises(DatabaseError, match="UNKNOWN_TABLE"):
        await client.query("SELECT * FROM nowhere")
    failing = await client.query_row_block_stream("SELECT throwIf(number = 3000000, 'half way') FROM numbers(10000000)")
    with pytest.raises(StreamFailureError, match="half way"):
        await _read(failing)
    await client.close()


async def _read(stream: Any) -> None:
    async with stream:
        async for _ in stream:
            pass
