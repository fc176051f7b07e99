"""Limits of a request's size and of the time in which its body arrives.

In: requests as they come, settings `gateway.max_request_bytes` and `gateway.body_seconds`. Out: their bodies read, or refusals in OpenAI's
form. Invariant: a body is read whole, in bounded time and bytes, before anything is done with it.
"""

from __future__ import annotations

from aiohttp import web

from gateway.proxy.http import error_response
from spangrad.http.client_timeouts import TooSlowError, UnreadableBodyError, read_in_time
from spangrad.settings import GatewaySettings


async def read_body(request: web.Request, settings: GatewaySettings) -> web.Response | None:
    """Read the body of a request; return a refusal where it is too large, too slow or not as declared."""
    if not request.can_read_body:
        return None
    try:
        if (request.content_length or 0) > settings.max_request_bytes:
            raise web.HTTPRequestEntityTooLarge(settings.max_request_bytes)
        await read_in_time(request, settings.body_seconds)
    except web.HTTPRequestEntityTooLarge:
        sentence = f"the request's body has more than gateway.max_request_bytes = {settings.max_request_bytes} bytes. Send a smaller one."
        return error_response(413, sentence, "request_too_large")
    except TooSlowError as error:
        refusal = error_response(408, f"{error} (gateway.body_seconds). Send it faster.", "request_timeout")
    except UnreadableBodyError as error:
        refusal = error_response(400, str(error), "invalid_request_error")
    else:
        return None
    refusal.force_close()
    return refusal
