"""Retries against the span store and the ledger's database during an outage, so that it costs a trainer only time.

In: a client of the store, a ledger. Out: the same, which wait for an answer. Invariant: only idempotent requests are retried: reads, and
writes of rows that replace themselves, deletions; a transaction of the ledger only before its first statement.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeVar, cast

from sqlalchemy.exc import OperationalError

from spangrad.errors import LedgerError, StoreError
from spangrad.store.clickhouse import store_errors, store_url
from trainer.ledger.ledger import Ledger
from trainer.retries import Outage, call_with_retries
from trainer.shutdown import Shutdown

if TYPE_CHECKING:
    from clickhouse_connect.driver.client import Client

T = TypeVar("T")
_REPEATED = ("query", "query_arrow", "insert", "command")
"""Calls of a client that may be repeated: what the trainer writes replaces itself, and its commands do the same when they are run twice."""
_PERMANENT = {16, 36, 42, 43, 46, 47, 53, 60, 62, 81, 192, 193, 194, 497, 516}
"""ClickHouse's codes of errors in the statement, the schema or the token, which no retry resolves."""


def retrying_client(client: Client, outage: Outage, shutdown: Shutdown) -> Client:
    """Return a client whose calls wait while the store does not answer; it has those of `_REPEATED`.

    Raises:
        StoreError: from the calls: an error that no retry resolves, or the process was asked to stop.
    """

    def request(name: str, *arguments: Any, **options: Any) -> Any:
        with store_errors(client):
            return getattr(client, name)(*arguments, **options)

    def repeated(name: str, *arguments: Any, **options: Any) -> Any:
        return call_with_retries(lambda: request(name, *arguments, **options), _is_transient, outage, shutdown)

    return cast("Client", SimpleNamespace(url=store_url(client), **{name: partial(repeated, name) for name in _REPEATED}))


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
