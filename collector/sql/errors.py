"""Errors of ClickHouse's HTTP interface, as a ClickHouse server reports them.

In: an exception. Out: ClickHouse's code, an HTTP status and a message. Invariant: every refusal has a code that drivers know.
"""

from __future__ import annotations

from dataclasses import dataclass

from collector.database import UNREADABLE_CODES, EngineRefusedError
from collector.encodings import EncodingError, TooLargeError
from collector.sql.guard import ForbiddenError
from collector.write.ingest import QueueFullError
from spangrad.http.client_timeouts import TooSlowError

# As a ClickHouse server maps them, but for 164 and 516; 500 for the rest.
_HTTP_STATUS = {
    **dict.fromkeys((*UNREADABLE_CODES, 36, 43, 53, 62, 456, 457), 400),
    **dict.fromkeys((46, 47, 50, 56, 60, 63, 73, 81, 115, 372), 404),
    **dict.fromkeys((164, 497), 403),
    48: 501,
    159: 408,
    202: 503,
    241: 503,
    307: 413,
    516: 401,
}


class BadRequestError(ValueError):
    """A request that the interface itself refuses; `code` and `name` are ClickHouse's."""

    def __init__(self, code: int, message: str, name: str) -> None:
        super().__init__(f"Code: {code}. DB::Exception: {message} ({name})")
        self.code = code


REFUSALS = (BadRequestError, EngineRefusedError, ForbiddenError, QueueFullError, TooLargeError, TooSlowError, EncodingError)
"""Exceptions by which a request may be refused."""


@dataclass(frozen=True, slots=True)
class QueryRefusal:
    """An error as it is reported to a client."""

    code: int
    message: str

    @property
    def status(self) -> int:
        """Return the HTTP status, for an answer that has not begun."""
        return _HTTP_STATUS.get(self.code, 500)


def refusal(error: Exception) -> QueryRefusal:
    """Return the code and message for an exception of REFUSALS."""
    match error:
        case BadRequestError() | EngineRefusedError():
            return QueryRefusal(error.code, str(error))
        case ForbiddenError():
            return QueryRefusal(497, f"Code: 497. DB::Exception: {error} (ACCESS_DENIED)")
        case QueueFullError():
            message = "the store holds as much as it may; send again later."
            return QueryRefusal(202, f"Code: 202. DB::Exception: {message} (TOO_MANY_SIMULTANEOUS_QUERIES)")
        case TooLargeError():
            return QueryRefusal(307, f"Code: 307. DB::Exception: {error} (TOO_MANY_BYTES)")
        case TooSlowError():
            return QueryRefusal(159, f"Code: 159. DB::Exception: {error} (TIMEOUT_EXCEEDED)")
        case _:
            return QueryRefusal(117, f"Code: 117. DB::Exception: {error} (INCORRECT_DATA)")
