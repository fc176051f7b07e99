"""Requests to services by aiohttp, for code with an event loop.

In: a `RemoteService`, requests. Out: bodies of responses. Invariant: as `json_http`: one rule of repetition, one mapping of failures.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from types import TracebackType
from typing import Self, TypeVar, cast

import aiohttp
import msgspec

from spangrad.errors import JSON_ERRORS
from spangrad.http.service import RemoteService, RequestError, Retries

T = TypeVar("T")


class AsyncClient:
    """Connections to one service; an async context manager. The first request connects."""

    def __init__(self, service: RemoteService, *, seconds: float | None = None) -> None:
        """Store the arguments.

        Args:
            service: server of all requests.
            seconds: time limit of one try, in seconds. None: only that of `send`.
        """
        self.service = service
        self._seconds = seconds
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        """Return the client."""
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Close the connections."""
        await self.close()

    async def close(self) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.close()

    async def ask(
        self,
        method: str,
        path: str,
        kind: type[T],
        body: msgspec.Struct | Mapping[str, object] | None = None,
        query: Mapping[str, str] | None = None,
    ) -> T:
        """Send a request until it succeeds or the service's time for retries is over; return the decoded body of the response.

        Raises:
            SpangradError: of the service's class: it refuses, or does not answer.
        """
        try:
            return await self.send(method, path, None if body is None else msgspec.json.encode(body), kind, query=query)
        except RequestError as failure:
            raise self.service.error_for(failure, method, path) from failure

    async def send(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        kind: type[T] = bytes,
        *,
        query: Mapping[str, str] | None = None,
        retry_seconds: float | None = None,
        within_seconds: float | None = None,
    ) -> T:
        """Send a request until it succeeds, and return the body of its response.

        Args:
            method: HTTP method.
            path: path below the service's URL.
            body: encoded body. None: there is none.
            kind: type that the response's JSON is decoded to; `bytes` for the body as it is.
            query: parameters of the URL.
            retry_seconds: time for retries, in seconds. None: `within_seconds`, else the service's.
            within_seconds: time limit of all tries together, in seconds. None: there is none, and the time for retries ends between tries.

        Raises:
            RequestError: that of the last try.
        """
        retries = Retries(self.service, method, path, within_seconds if retry_seconds is None else retry_seconds)
        last = RequestError("no response in time")
        try:
            async with asyncio.timeout(within_seconds):
                while True:
                    try:
                        return _decode(await self._once(method, path, body, query), kind)
                    except RequestError as failure:
                        last = failure
                        await asyncio.sleep(retries.pause(failure))
        except TimeoutError:
            raise last from None
        except ValueError as error:  # not a URL, or not a header, which no later try improves
            raise RequestError.of_connection(error) from error

    async def _once(self, method: str, path: str, body: bytes | None, query: Mapping[str, str] | None) -> bytes:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                headers=self.service.headers,
                connector=aiohttp.TCPConnector(limit=0),
                timeout=aiohttp.ClientTimeout(total=self._seconds),
            )
        try:
            async with self._session.request(method, self.service.address(path), data=body, params=query) as response:
                content = await response.read()
        except aiohttp.InvalidURL:
            raise  # a ValueError
        except (aiohttp.ClientError, OSError) as error:
            raise RequestError.of_connection(error) from error
        if response.status >= 300:
            raise RequestError.of_response(response.status, content, response.headers.get("Retry-After"), response.reason or "")
        return content


def _decode(content: bytes, kind: type[T]) -> T:
    if kind is bytes:
        return cast("T", content)
    try:
        return msgspec.json.decode(content, type=kind)
    except JSON_ERRORS as error:
        raise RequestError.of_connection(error) from error
