"""HTTP of every route: the attempt that a URL names, JSON responses, errors in OpenAI's form."""

from __future__ import annotations

import msgspec
from aiohttp import web

from gateway.proxy.context import AttemptKey


def url_attempt(request: web.Request) -> AttemptKey:
    """Return the attempt that a URL names."""
    return AttemptKey(request.match_info["rollout"], int(request.match_info["attempt"]))


def json_response(body: object, status: int = 200) -> web.Response:
    """Return a response with a JSON body."""
    return web.Response(body=msgspec.json.encode(body), status=status, content_type="application/json")


def error_response(status: int, message: str, kind: str = "spangrad_error") -> web.Response:
    """Return an error in OpenAI's form, of which clients show the message."""
    return json_response({"error": {"message": message, "type": kind, "code": status}}, status)
