"""What the gateway is asked over HTTP by those who are not agents: its administration.

In: a method, a path and a JSON body. Out: the JSON of its answer. Invariant: the gateway's token goes with every request; in which words
a failure is told is the caller's business.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from spangrad.settings import GatewaySettings


def ask_gateway(gateway: GatewaySettings, method: str, path: str, body: Mapping[str, object] | None, seconds: float) -> dict[str, Any]:
    """Ask, and wait for the answer at most so long.

    Raises:
        HTTPError: it refuses; `refusal` has its words.
        OSError: it does not answer.
        ValueError: it answers with something else than JSON.
    """
    headers = {"Content-Type": "application/json"}
    if gateway.token:
        headers["Authorization"] = f"Bearer {gateway.token.get_secret_value()}"
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(gateway.url.rstrip("/") + path, data, headers, method=method)
    with urllib.request.urlopen(request, timeout=seconds) as answer:
        return json.load(answer)


def refusal(error: urllib.error.HTTPError) -> str:
    """What the gateway says of a request that it refuses."""
    text = error.read().decode(errors="replace")
    try:
        return str(json.loads(text)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return text.strip()[:500] or str(error.reason)
