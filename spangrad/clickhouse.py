"""How every part reads and writes the span store: clickhouse-connect over HTTP, and nothing else.

In: the URL of any ClickHouse HTTP interface (the embedded store's, a server's, a cluster's) and a token.
Out: clients, and `StoreError` with a remedy instead of a driver's traceback.
"""

from __future__ import annotations

import re
from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from spangrad.errors import StoreError
from spangrad.settings import StoreSettings

if TYPE_CHECKING:
    from clickhouse_connect.driver.client import Client

SHARDED = {"distributed_foreground_insert": 1, "distributed_product_mode": "global"}
"""Settings of statements over shards: an insert is acknowledged when the shards have it, and IN asks all of them."""


def connect(store: StoreSettings) -> Client:
    """Open a client of the store.

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
            settings=SHARDED if store.sharded else {},
        )


@contextmanager
def store_errors(url: str) -> Generator[None]:
    """Turn the driver's errors into one sentence with a remedy."""
    from clickhouse_connect.driver.exceptions import ClickHouseError, OperationalError

    try:
        yield
    except OperationalError as error:
        raise StoreError(
            f"the span store at {url} does not answer ({_reason(error)}). Start it with `spangrad store`, or set store.url."
        ) from error
    except ClickHouseError as error:
        raise StoreError(f"the span store at {url} refused: {_first_line(error)}") from error


def _reason(error: Exception) -> str:
    """Why nobody answers: the system's words, where the driver has buried them in its own."""
    found = re.search(r"\[Errno -?\d+\] ([^'\")\]]+)", str(error))
    return found[1] if found else _first_line(error)


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0][:500] if str(error).strip() else type(error).__name__
