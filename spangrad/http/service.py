"""A service as its clients see it: address, token, time for retries, and the errors that users read.

In: failed requests. Out: the pause before the next try, or an error with value, place and remedy. Invariant: every client, with or without
an event loop, retries by `Retries` and words its errors by `RemoteService.error_for`; only the standard library, since agents import it.
"""

from __future__ import annotations

import json
import logging
import random
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Self

from spangrad.errors import JSON_ERRORS, GatewayError, QueueError, SpangradError
from spangrad.http.retries import RETRIED_STATUSES, retry_after

if TYPE_CHECKING:
    from pydantic import SecretStr

_FIRST_SECONDS = 0.1
_LONGEST_SECONDS = 1.0
_LOGGED_FAILURE = 5
"""Failure of a request that is logged: a short outage is a restart, and is not."""
_REASON_CHARACTERS = 500
logger = logging.getLogger(__name__)


def in_url(host: str) -> str:
    """Return a host as it stands in a URL: an IPv6 address in brackets."""
    return f"[{host}]" if ":" in host else host


def is_sendable(text: str) -> bool:
    """Return whether every client can send a text in a header: printable ASCII alone, and so no line break."""
    return text.isascii() and text.isprintable()


def without_userinfo(url: str) -> str:
    """Return a URL without user and password, as errors and logs show it; a text that is no URL is left as it is."""
    return re.sub(r"^(\w[\w+.-]*://)?[^/?#\s]*@", r"\1", url)


class RequestError(Exception):
    """A request failed: the server refused it, or sent no whole response."""

    def __init__(self, reason: str, status: int | None = None, after_seconds: float | None = None) -> None:
        """Keep the failure's facts.

        Args:
            reason: message of the server, or of the connection.
            status: HTTP status of the refusal. None: there was no whole response.
            after_seconds: pause that the server asks for, in seconds. None: it asks for none.
        """
        super().__init__(reason if status is None else f"HTTP {status}: {reason}")
        self.reason = reason
        self.status = status
        self.after_seconds = after_seconds

    @classmethod
    def of_response(cls, status: int, body: bytes, retry_after_header: str | None, phrase: str) -> Self:
        """Read a refusal: the message is {"error": sentence}, {"error": {"message": sentence}}, plain text, or else the status's phrase."""
        text = body.decode(errors="replace")
        try:
            message = json.loads(text)["error"]
            reason = str(message["message"] if isinstance(message, dict) else message)
        except (*JSON_ERRORS, KeyError, TypeError):
            reason = text.strip() or phrase
        return cls(reason[:_REASON_CHARACTERS], status, retry_after(retry_after_header))

    @classmethod
    def of_connection(cls, error: BaseException) -> Self:
        """Read the error of a connection, or of a response that is not whole."""
        cause = getattr(error, "reason", error)  # URLError holds the system's error
        return cls(str(cause) or type(cause).__name__)

    @property
    def may_pass(self) -> bool:
        """Return whether a later try may succeed."""
        return self.status is None or self.status in RETRIED_STATUSES


def bearer(token: SecretStr | str | None) -> dict[str, str]:
    """Return the header for a token; empty without one."""
    plain = token if token is None or isinstance(token, str) else token.get_secret_value()
    return {"Authorization": f"Bearer {plain}"} if plain else {}


@dataclass(frozen=True, slots=True)
class RemoteService:
    """A server, and how its clients speak of it."""

    name: str
    """Name at the beginning of a sentence, such as `the queue`."""
    url: str
    token: SecretStr | str | None = field(repr=False)
    """Bearer token. None: the service asks for none."""
    error: type[SpangradError]
    """Class of the errors that users read."""
    remedy: str
    """Sentence that says what to do while it does not answer."""
    retry_seconds: float = 0.0
    """Time for which requests are retried, in seconds. 0: none is."""
    own_headers: Mapping[str, str] = field(default_factory=dict[str, str])
    """Headers of each request, beside or instead of those of `headers`."""

    def address(self, path: str) -> str:
        """Return the URL of a path; that of the service itself for an empty one."""
        return f"{self.url.rstrip('/')}{path}" if path else self.url

    def __post_init__(self) -> None:
        """Refuse a token that no request can carry: the HTTP library would show it in its error.

        Raises:
            SpangradError: of the service's class.
        """
        if not all(map(is_sendable, bearer(self.token).values())):
            raise self.error(
                f"the token for {self.name} at {self.shown_url} has a line break or another character that no header can have. Set it to "
                "one line of printable ASCII characters."
            )

    @property
    def shown_url(self) -> str:
        """URL as errors show it."""
        return without_userinfo(self.url.rstrip("/"))

    @property
    def headers(self) -> dict[str, str]:
        """Headers of each request: the token, JSON as the type of bodies, and the service's own."""
        return {"Content-Type": "application/json", **bearer(self.token), **self.own_headers}

    def error_for(self, failure: RequestError, method: str, path: str) -> SpangradError:
        """Return a failed request as an error for users; its `http_status` is that of a refusal."""
        if failure.status is None:
            reason = failure.reason.replace(self.url, self.shown_url)
            return self.error(f"{self.name} at {self.shown_url} does not answer ({reason}). {self.remedy}")
        error = self.error(f"{self.name} at {self.shown_url} refuses {method} {path} ({failure.status}): {failure.reason}")
        error.http_status = failure.status
        return error


class Retries:
    """Tries of one request: exponential back-off with jitter, unless the server names the pause."""

    def __init__(self, service: RemoteService, method: str, path: str, retry_seconds: float | None = None) -> None:
        """Begin the time for retries of a request: so many seconds. None: those of the service."""
        self._service, self._method, self._path = service, method, path
        self._end = time.monotonic() + (service.retry_seconds if retry_seconds is None else retry_seconds)
        self._failures = 0

    def pause(self, failure: RequestError) -> float:
        """Return the pause before the next try, in seconds.

        Raises:
            RequestError: the failure itself, which no later try improves, or for which no time is left.
        """
        left = self._end - time.monotonic()
        if left <= 0 or not failure.may_pass:
            raise failure
        self._failures += 1
        if self._failures == _LOGGED_FAILURE:
            logger.warning("%s Trying again for %.0f s.", self._service.error_for(failure, self._method, self._path), left)
        if failure.after_seconds:  # 0 would be a loop without pauses
            return min(failure.after_seconds, left)
        return min(random.uniform(0, min(_FIRST_SECONDS * 2.0**self._failures, _LONGEST_SECONDS)), left)


def queue_service(url: str, token: SecretStr | str | None, retry_seconds: float = 0.0) -> RemoteService:
    """Return the queue of rollouts as a service."""
    return RemoteService("the queue", url, token, QueueError, "Start it with `spangrad queue`, or set queue.url.", retry_seconds)


def gateway_service(url: str, token: SecretStr | str | None, retry_seconds: float = 0.0) -> RemoteService:
    """Return the gateway as a service."""
    remedy = "Start it with `spangrad gateway`, or set gateway.url."
    return RemoteService("the gateway", url, token, GatewayError, remedy, retry_seconds)
