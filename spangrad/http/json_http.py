"""Blocking JSON requests to spangrad's own servers: the gateway's administration, the queue's demand.

In: a server's URL, its token, a method, a path and a JSON body. Out: the JSON of its response. Invariant: every request carries the token;
the caller words the errors.
"""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pydantic import SecretStr


def ask(url: str, token: SecretStr | None, method: str, path: str, body: Mapping[str, object] | None, seconds: float) -> Any:
    """Send a request, and wait for the response at most `seconds`.

    Raises:
        HTTPError: the server refuses; `refusal` returns its message.
        OSError: there is no response, or it is cut off.
        ValueError: the response is not JSON.
    """
    headers = {"Content-Type": "application/json"}
    if token:
        headers["Authorization"] = f"Bearer {token.get_secret_value()}"
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url.rstrip("/") + path, data, headers, method=method)
    try:
        with urllib.request.urlopen(request, timeout=seconds) as response:
            return json.load(response)
    except http.client.HTTPException as error:
        raise ConnectionError(repr(error)) from error


def refusal(error: urllib.error.HTTPError) -> str:
    """Return a server's message in a refusal: {"error": sentence}, or in OpenAI's form {"error": {"message": sentence}}."""
    try:
        text = error.read().decode(errors="replace")
    except (OSError, http.client.HTTPException):
        return str(error.reason)
    try:
        message = json.loads(text)["error"]
        return str(message["message"] if isinstance(message, dict) else message)
    except (ValueError, KeyError, TypeError):
        return text.strip()[:500] or str(error.reason)
