"""Access to the span store for every part, by clickhouse-connect over HTTP only.

In: the URL of any ClickHouse HTTP interface (the embedded store's, a server's, a cluster's) and a token; texts from outside.
Out: clients, `StoreError` with a remedy instead of a driver's traceback, and those texts as constants of SQL statements.
Invariant: a statement with the name of a rollout, a session or a span is valid SQL, whatever the name contains.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING, cast
from urllib.parse import unquote, urlsplit

from spangrad.errors import StoreError
from spangrad.http.service import without_userinfo
from spangrad.settings import StoreSettings

if TYPE_CHECKING:
    from clickhouse_connect.driver.client import Client
    from clickhouse_connect.driver.httpclient import HttpClient

SHARDED = {"distributed_foreground_insert": 1, "distributed_product_mode": "global"}
"""Settings of statements over shards: an insert is acknowledged when the shards have it, and IN queries all of them."""
CONSISTENT = {"select_sequential_consistency": 1}
"""Settings of clients that draw conclusions from missing rows: a replica answers once it has every row that a quorum has acknowledged."""
LONG = {"max_query_size": 64 * 2**20}
"""Settings of statements with texts from outside, which may be longer than the 256 KiB that the database parses by default."""
SETTLED = "X-Spangrad-Settled"
"""Header of a statement: 1 where it may leave out spans that the store has acknowledged and not put into its tables yet. One without
it makes the store insert them first, few at a time where traffic is constant. Other databases ignore it."""
KEYS_A_STATEMENT = 500
_BYTES_A_STATEMENT = 48 * 2**10
"""Size limit of the keys of a statement, in bytes: two digits for each, and twice in a statement, fit the database's default."""
_NO_TOKEN = 516
_BETWEEN = b"\xff"
"""Separator of texts: a byte that UTF-8 does not use."""


def connect(store: StoreSettings, *, consistent: bool = False, settled: bool = False) -> Client:
    """Open a client of the store.

    Args:
        store: settings of the store.
        settled: True if its statements may leave out spans that are in no table yet (SETTLED), unless one says otherwise.
        consistent: True if the client draws conclusions from missing rows. Then its reads of a replicated store are sequentially
            consistent (`store.sequential_consistency`).

    Raises:
        StoreError: no store answers at the URL, or the token was refused.
    """
    import clickhouse_connect

    parts = urlsplit(store.url)
    with _errors(without_userinfo(store.url)):
        client = clickhouse_connect.get_client(
            host=parts.hostname or "",
            port=parts.port or (8443 if parts.scheme == "https" else 8123),
            interface=parts.scheme,
            username=unquote(parts.username or "default"),
            password=store.password,
            autogenerate_session_id=False,
            settings={**(SHARDED if store.sharded else {}), **(CONSISTENT if consistent and store.reads_in_sequence else {})},
        )
    if settled:
        cast("HttpClient", client).headers[SETTLED] = "1"
    return client


def read_only_settings(client: Client) -> dict[str, int]:
    """Return ClickHouse settings that make a statement read-only, while it may still have a SETTINGS clause."""
    held = client.server_settings.get("readonly")
    # A user who may only read is not permitted to change the setting.
    return {} if held and held.value != "0" else {"readonly": 2}


def batches(keys: Iterable[str | bytes]) -> Iterator[tuple[bytes, ...]]:
    """Yield distinct keys, as many at a time as fit a statement; one that is not UTF-8 is alone where `constant` needs it."""
    batch, size = list[bytes](), 0
    for key in dict.fromkeys(key.encode() if isinstance(key, str) else key for key in keys):
        alone = _BETWEEN in key
        if batch and (alone or len(batch) == KEYS_A_STATEMENT or size + len(key) > _BYTES_A_STATEMENT):
            yield tuple(batch)
            batch, size = [], 0
        batch.append(key)
        size += _BYTES_A_STATEMENT if alone else len(key)
    if batch:
        yield tuple(batch)


def constant(texts: Iterable[str | bytes]) -> str:
    """Return texts as a constant array in SQL: at least one; several only where all are UTF-8.

    The texts are hexadecimal, because the store refuses statements with certain words in them; there is no lambda, which the database would
    not evaluate early enough to use an index.
    """
    whole = [text.encode() if isinstance(text, str) else text for text in texts]
    if len(whole) == 1:
        return f"[unhex('{whole[0].hex()}')]"
    return f"splitByChar('\\xFF', unhex('{_BETWEEN.join(whole).hex()}'))"


def microseconds(time: datetime) -> int:
    """Return a time in microseconds since 1970, as statements write it. A time without a zone is UTC."""
    return round((time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp() * 1_000_000)


def moment(since_1970: int) -> datetime:
    """Return the time of microseconds since 1970, as the store returns them."""
    return datetime.fromtimestamp(since_1970 / 1_000_000, UTC)


@contextmanager
def executing(store: StoreSettings) -> Generator[Callable[[str], str]]:
    """Yield a function that runs a statement in the store and returns its answer, as text.

    Raises:
        StoreError: no store answers at the URL, or the token was refused; from the function also: the statement failed.
    """
    client = connect(store)

    def execute(sql: str) -> str:
        with store_errors(client):
            return client.raw_query(sql).decode()

    try:
        yield execute
    finally:
        client.close()


def store_url(client: Client) -> str:
    """Return the URL of a client's store, for messages: without a user's name and a password."""
    return cast("HttpClient", client).url


def store_errors(client: Client) -> AbstractContextManager[None]:
    """Turn the driver's errors into one sentence with a remedy, as `StoreError`."""
    return _errors(store_url(client))


@contextmanager
def _errors(url: str) -> Generator[None]:
    from clickhouse_connect.driver.exceptions import ClickHouseError, Error, OperationalError

    try:
        yield
    except OperationalError as error:
        raise StoreError(
            f"the span store at {url} does not answer ({_reason(error)}). Start it with `spangrad store`, or set store.url."
        ) from error
    except ClickHouseError as error:
        if isinstance(error, Error) and error.code == _NO_TOKEN:
            raise StoreError(
                f"the span store at {url} asks for a token, and got none or a wrong one. Set store.token (SPANGRAD_STORE__TOKEN) to its"
                " token, or store.read_token where you only ask."
            ) from error
        raise StoreError(f"the span store at {url} refused: {_first_line(error)}") from error


def _reason(error: Exception) -> str:
    """Return the reason for which the store does not answer: the system's message, where the driver's own contains it."""
    match = re.search(r"\[Errno -?\d+\] ([^'\")\]]+)", str(error))
    return match[1] if match else _first_line(error)


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0][:500] if str(error).strip() else type(error).__name__
