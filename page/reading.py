"""Reads of the span store for the page: one read-only client, statements with parameters, rows as mappings.

In: settings of the store, SQL. Out: rows. Invariant: no statement of the page can change the store, whatever its token permits, and none
runs longer than `STATEMENT_SECONDS`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from spangrad.settings import StoreSettings
from spangrad.store.clickhouse import connect, read_only_settings, store_errors

if TYPE_CHECKING:
    from clickhouse_connect.driver.client import Client

T = TypeVar("T")
STATEMENT_SECONDS = 30
"""Time limit of a statement, in seconds."""


class PageStore:
    """The store as the page reads it. It connects with the first read, so that the page starts without a store."""

    def __init__(self, store: StoreSettings) -> None:
        """Store the settings; of two tokens the one that may only read is used."""
        self.settings = store.model_copy(update={"token": None}) if store.read_token else store
        self._client: Client | None = None
        self._lock = threading.Lock()

    def rows(self, sql: str, parameters: Mapping[str, Any] | None = None) -> list[dict[str, Any]]:
        """Return the rows of a statement, by the names of their columns.

        Raises:
            StoreError: the store does not answer, or refuses.
        """
        return self.read(lambda client: list(client.query(sql, parameters=dict(parameters or {})).named_results()))

    def read(self, work: Callable[[Client], T]) -> T:
        """Return the result of a function of the client.

        Raises:
            StoreError: the store does not answer, or refuses.
        """
        client = self._connected()
        with store_errors(client):
            return work(client)

    def close(self) -> None:
        """Close the connections."""
        if self._client is not None:
            self._client.close()

    def _connected(self) -> Client:
        with self._lock:
            if self._client is None:
                client = connect(self.settings, settled=True)
                for name, value in _limits(client).items():
                    client.set_client_setting(name, value)
                self._client = client
            return self._client


def _limits(client: Client) -> dict[str, int]:
    """Return the settings of all statements: read-only, within a time limit. A client that may only read has its own, and may set none."""
    read_only = read_only_settings(client)
    return {**read_only, "max_execution_time": STATEMENT_SECONDS} if read_only else {}
