"""HTTP of every route: the attempt that a URL names, errors in OpenAI's form."""

from __future__ import annotations

from aiohttp import web

from spangrad.http.announcements import AttemptKey
from spangrad.http.server import json_response


def url_attempt(request: web.Request) -> AttemptKey | None:
    """Return the attempt that a URL names. None: it names none."""
    names = request.match_info
    return AttemptKey(names["rollout"], int(names["attempt"])) if "rollout" in names else None


def error_response(status: int, message: str, kind: str = "spangrad_error") -> web.Response:
    """Return an error in OpenAI's form, of which clients show the message."""
    return json_response({"error": {"message": message, "type": kind, "code": status}}, status)
