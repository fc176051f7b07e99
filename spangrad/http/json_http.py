"""Asks one of our servers over HTTP, for those who have no event loop: the gateway's administration, the queue's demand.

In: where it is, its token, a method, a path and a JSON body. Out: the JSON of its answer. Invariant: the token goes with every request; in
which words a failure is told is the caller's business.
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
    """Ask, and wait for the answer at most so long.

    Raises:
        HTTPError: it refuses; `refusal` has its words.
        OSError: it does not answer, or not to the end.
        ValueError: it answers with something else than JSON.
    """
    headers = {"Content-Type": "application/json"}
    if token:
        headers["Authorization"] = f"Bearer {token.get_secret_value()}"
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url.rstrip("/") + path, data, headers, method=method)
    try:
        with urllib.request.urlopen(request, timeout=seconds) as answer:
            return json.load(answer)
    except http.client.HTTPException as error:
        raise ConnectionError(repr(error)) from error


def refusal(error: urllib.error.HTTPError) -> str:
    """What a server says of a request that it refuses: {"error": sentence}, or as OpenAI has it {"error": {"message": sentence}}."""
    try:
        text = error.read().decode(errors="replace")
    except (OSError, http.client.HTTPException):
        return str(error.reason)
    try:
        said = json.loads(text)["error"]
        return str(said["message"] if isinstance(said, dict) else said)
    except (ValueError, KeyError, TypeError):
        return text.strip()[:500] or str(error.reason)
