"""HTTP of every route: the attempt that a URL names, the model that a body names, errors in OpenAI's form."""

from __future__ import annotations

import msgspec
from aiohttp import web

from spangrad.http.announcements import AttemptKey
from spangrad.http.server import json_response


class _NamedModel(msgspec.Struct):
    model: str | None = None


def model_of(body: bytes) -> str | None:
    """Return the model that a request's JSON object names. None: it names none.

    Raises:
        ValueError, RecursionError: it is no such object.
    """
    return msgspec.json.decode(body, type=_NamedModel).model


def url_attempt(request: web.Request) -> AttemptKey | None:
    """Return the attempt that a URL names. None: it names none."""
    names = request.match_info
    return AttemptKey(names["rollout"], int(names["attempt"])) if "rollout" in names else None


def error_response(status: int, message: str, kind: str = "spangrad_error") -> web.Response:
    """Return an error in OpenAI's form, of which clients show the message."""
    return json_response({"error": {"message": message, "type": kind, "code": status}}, status)
