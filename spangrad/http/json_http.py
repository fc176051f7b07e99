"""Blocking requests to services, with the standard library alone: JSON both ways.

In: a `RemoteService`, a method, a path and a JSON body. Out: the JSON of its response. Invariant: every request carries the token, is
retried by `Retries`, and fails as an error of the service.
"""

from __future__ import annotations

import http.client
import json
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from ssl import SSLError
from typing import Any

from spangrad.errors import JSON_ERRORS
from spangrad.http.service import RemoteService, RequestError, Retries, bearer, without_userinfo


def ask(service: RemoteService, method: str, path: str, body: Mapping[str, object] | bytes | None = None, *, seconds: float) -> Any:
    """Send a request until it succeeds or the service's time for retries is over.

    Args:
        service: server of the request.
        method: HTTP method.
        path: path below the service's URL, with its query.
        body: body, as an object or encoded. None: there is none.
        seconds: time limit of one try, in seconds.

    Raises:
        SpangradError: of the service's class: it refuses, or does not answer.
    """
    data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
    retries = Retries(service, method, path)
    try:
        try:
            request = urllib.request.Request(service.address(path), data, service.headers, method=method)
            while True:
                try:
                    return _send(request, seconds)
                except RequestError as failure:
                    time.sleep(retries.pause(failure))
        except http.client.InvalidURL as error:  # its text may hold a part of a password
            raise RequestError("the URL's host or port is not valid") from error
        except ValueError as error:  # not a URL, which no later try improves either
            raise RequestError.of_connection(error) from error
    except RequestError as failure:
        raise service.error_for(failure, method, path) from failure


def status_of(url: str, seconds: float = 2.0) -> int | None:
    """Return the status of a GET without user and password, 0 where TLS fails; waits for no body. None: there is no whole response."""
    return _get(url, seconds)[0]


def answer_of(url: str, seconds: float = 2.0) -> tuple[int | None, str]:
    """Return the status of a GET, as `status_of` does, and the reason with which it is refused; empty: it is not."""
    status, error = _get(url, seconds)
    return status, "" if error is None else RequestError.of_response(error.code, _body(error), None, str(error.reason)).reason


def _get(url: str, seconds: float) -> tuple[int | None, urllib.error.HTTPError | None]:
    try:
        with urllib.request.urlopen(without_userinfo(url), timeout=seconds) as response:
            return response.status, None
    except urllib.error.HTTPError as error:
        return error.code, error
    except (OSError, ValueError, http.client.HTTPException) as error:
        return 0 if isinstance(getattr(error, "reason", None), SSLError) else None, None


def text_of(url: str, seconds: float = 2.0, token: str | None = None) -> str | None:
    """Return the text of a GET, with a token if there is one. None: there is no whole response, or it is none of success."""
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=bearer(token)), timeout=seconds) as response:
            return response.read().decode(errors="replace")
    except (OSError, ValueError, http.client.HTTPException):
        return None


def _send(request: urllib.request.Request, seconds: float) -> Any:
    """Send a request once.

    Raises:
        RequestError: the server refuses, or sends no whole JSON.
        InvalidURL: the URL's host or port is not valid.
    """
    try:
        with urllib.request.urlopen(request, timeout=seconds) as response:
            return json.load(response)
    except urllib.error.HTTPError as error:
        raise RequestError.of_response(error.code, _body(error), error.headers.get("Retry-After"), str(error.reason)) from error
    except http.client.InvalidURL:
        raise
    except http.client.HTTPException as error:
        raise RequestError(repr(error)) from error
    except (OSError, *JSON_ERRORS) as error:
        raise RequestError.of_connection(error) from error


def _body(error: urllib.error.HTTPError) -> bytes:
    """Return the body of a refusal; empty where it breaks off."""
    try:
        return error.read()
    except (OSError, http.client.HTTPException):
        return b""
