"""Retries against the span store and the ledger's database during an outage, so that it costs a trainer only time.

In: a client of the store, a ledger. Out: the same, which wait for an answer. Invariant: only idempotent requests are retried: reads, and
writes of rows that replace themselves, deletions; a transaction of the ledger only before its first statement.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar, cast

from sqlalchemy.exc import OperationalError

from spangrad.errors import LedgerError, StoreError
from spangrad.http.service import without_userinfo
from spangrad.store.clickhouse import store_errors
from trainer.ledger.ledger import Ledger
from trainer.retries import Outage, call_with_retries
from trainer.shutdown import Shutdown

if TYPE_CHECKING:
    from clickhouse_connect.driver.client import Client

T = TypeVar("T")
_PERMANENT = {16, 36, 42, 43, 46, 47, 53, 60, 62, 81, 192, 193, 194, 497, 516}
"""ClickHouse's codes of errors in the statement, the schema or the token, which no retry resolves."""


class RetryingClient:
    """Store client of a training run, which retries each call until the store answers."""

    def __init__(self, client: Client, url: str, outage: Outage, shutdown: Shutdown) -> None:
        """Send requests with `client`; `url` is named when the store fails."""
        self._client = client
        self._url = url
        self._outage = outage
        self._shutdown = shutdown

    def query(self, *arguments: Any, **options: Any) -> Any:
        """Read rows."""
        return self._ask(lambda: self._client.query(*arguments, **options))

    def query_arrow(self, *arguments: Any, **options: Any) -> Any:
        """Read rows as an Arrow table."""
        ask: Callable[..., Any] = self._client.query_arrow
        return self._ask(lambda: ask(*arguments, **options))

    def insert(self, *arguments: Any, **options: Any) -> Any:
        """Write rows that replace themselves."""
        return self._ask(lambda: self._client.insert(*arguments, **options))

    def command(self, *arguments: Any, **options: Any) -> Any:
        """Run a statement that does the same when it is run twice."""
        return self._ask(lambda: self._client.command(*arguments, **options))

    def _ask(self, work: Callable[[], T]) -> T:
        return call_with_retries(lambda: self._call(work), _is_transient, self._outage, self._shutdown)

    def _call(self, work: Callable[[], T]) -> T:
        from urllib3.exceptions import HTTPError

        try:
            with store_errors(self._url):
                return work()
        except (HTTPError, OSError) as error:  # half an answer
            raise StoreError(
                f"the span store at {without_userinfo(self._url)} broke off its answer ({error}). Start it with `spangrad store`."
            ) from error


def retrying_client(client: Client, url: str, outage: Outage, shutdown: Shutdown) -> Client:
    """Return a client whose calls wait while the store does not answer.

    Raises:
        StoreError: from the calls: an error that no retry resolves, or the process was asked to stop.
    """
    return cast("Client", RetryingClient(client, url, outage, shutdown))


def retry_transactions(ledger: Ledger, outage: Outage, shutdown: Shutdown) -> None:
    """Make a ledger's transactions wait before they begin while its database does not answer or is locked, and repeat repeatable ones."""

    def retries(work: Callable[[], T]) -> T:
        return call_with_retries(work, lambda error: _is_unavailable(error, is_file=ledger.database.is_sqlite), outage, shutdown)

    ledger.database.retries = retries


def _is_transient(error: BaseException) -> bool:
    return isinstance(error, StoreError) and getattr(error.__cause__, "code", None) not in _PERMANENT


def _is_unavailable(error: BaseException, *, is_file: bool) -> bool:
    cause = error.__cause__
    return isinstance(error, LedgerError) and isinstance(cause, OperationalError) and (not is_file or "locked" in str(cause))
