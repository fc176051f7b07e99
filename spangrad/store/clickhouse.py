"""How every part reads and writes the span store: clickhouse-connect over HTTP, and nothing else.

In: the URL of any ClickHouse HTTP interface (the embedded store's, a server's, a cluster's) and a token; texts that others gave.
Out: clients, `StoreError` with a remedy instead of a driver's traceback, and those texts as constants that statements may hold.
Invariant: whatever somebody names a rollout, a session or a span, a statement that asks for it is understood.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from spangrad.errors import StoreError
from spangrad.settings import StoreSettings

if TYPE_CHECKING:
    from clickhouse_connect.driver.client import Client

SHARDED = {"distributed_foreground_insert": 1, "distributed_product_mode": "global"}
"""Settings of statements over shards: an insert is acknowledged when the shards have it, and IN asks all of them."""
CONSISTENT = {"select_sequential_consistency": 1}
"""Settings of clients that conclude from what they do not see: a replica answers once it has every row that a quorum has acknowledged."""
LONG = {"max_query_size": 64 * 2**20}
"""Settings of statements that hold texts of others, of which a single one may be longer than the 256 KiB that the engine parses unasked."""
KEYS_A_STATEMENT = 500
_BYTES_A_STATEMENT = 48 * 2**10
"""Of keys: two digits a byte, and twice in a statement, are what the engine parses unasked."""
_NO_TOKEN = 516
_BETWEEN = b"\xff"
"""Stands between texts: UTF-8 has no use for it."""


def connect(store: StoreSettings, *, consistent: bool = False) -> Client:
    """Open a client of the store.

    Args:
        store: where it is.
        consistent: whether the client concludes from rows that it does not see. Then its reads of a replicated store are sequentially
            consistent (`store.sequential_consistency`).

    Raises:
        StoreError: nobody answers at the URL, or the token was refused.
    """
    import clickhouse_connect

    parts = urlsplit(store.url)
    token = store.token or store.read_token
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        raise StoreError(f"store.url = {store.url!r} is not an http(s) URL. Give it as http://HOST:PORT.")
    with store_errors(store.url):
        return clickhouse_connect.get_client(
            host=parts.hostname,
            port=parts.port or (8443 if parts.scheme == "https" else 8123),
            interface=parts.scheme,
            username=unquote(parts.username or "default"),
            password=unquote(parts.password or "") or (token.get_secret_value() if token else ""),
            autogenerate_session_id=False,
            settings={**(SHARDED if store.sharded else {}), **(CONSISTENT if consistent and store.reads_in_sequence else {})},
        )


def batches(keys: Iterable[str | bytes]) -> Iterator[tuple[bytes, ...]]:
    """Distinct keys, as many at a time as fit a statement; one that is no UTF-8 may be alone, as `constant` needs it."""
    some, size = list[bytes](), 0
    for key in dict.fromkeys(key.encode() if isinstance(key, str) else key for key in keys):
        alone = _BETWEEN in key
        if some and (alone or len(some) == KEYS_A_STATEMENT or size + len(key) > _BYTES_A_STATEMENT):
            yield tuple(some)
            some, size = [], 0
        some.append(key)
        size += _BYTES_A_STATEMENT if alone else len(key)
    if some:
        yield tuple(some)


def constant(texts: Iterable[str | bytes]) -> str:
    """Texts as a constant array in SQL: at least one; several only where all are UTF-8.

    In hexadecimal, because the store refuses statements with certain words in them; and without a lambda, which the engine would not
    evaluate in time to look the texts up in an index.
    """
    whole = [text.encode() if isinstance(text, str) else text for text in texts]
    if len(whole) == 1:
        return f"[unhex('{whole[0].hex()}')]"
    return f"splitByChar('\\xFF', unhex('{_BETWEEN.join(whole).hex()}'))"


def microseconds(time: datetime) -> int:
    """A time as statements give it: since 1970. One without a zone is UTC."""
    return round((time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp() * 1_000_000)


def moment(since_1970: int) -> datetime:
    """The time that microseconds tell, as the store answers them."""
    return datetime.fromtimestamp(since_1970 / 1_000_000, UTC)


@contextmanager
def store_errors(url: str) -> Generator[None]:
    """Turn the driver's errors into one sentence with a remedy."""
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
    """Why nobody answers: the system's words, where the driver has buried them in its own."""
    found = re.search(r"\[Errno -?\d+\] ([^'\")\]]+)", str(error))
    return found[1] if found else _first_line(error)


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0][:500] if str(error).strip() else type(error).__name__
