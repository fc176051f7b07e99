"""Authentication and authorization of requests to the gateway, limits of their bodies, and its TLS.

In: requests as they come, settings `gateway.token`, `gateway.clients`, `gateway.tls_*`, `gateway.max_request_bytes` and
`gateway.body_seconds`. Out: the same requests, their bodies read, or refusals in OpenAI's form. Invariant: a route that is not classified
requires full access; a body is read whole, in bounded time and bytes, before anything is done with it.
"""

from __future__ import annotations

import hashlib
import ssl
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase

from aiohttp import web
from aiohttp.typedefs import Handler
from pydantic import SecretStr

from gateway.proxy.context import attempt_of, parse_baggage
from gateway.proxy.http import error_response, model_of, url_attempt
from spangrad.errors import JSON_ERRORS, GatewayError, SettingsError
from spangrad.http.client_timeouts import TooSlowError, UnreadableBodyError, read_in_time
from spangrad.http.tokens import agent_token, credential
from spangrad.settings import ClientSettings, GatewaySettings

_OPEN = frozenset({"/healthz", "/readyz"})
STATE_PATH = "/admin/followers/state"
"""Path at which gateways learn of the backends, and of their keys: `gateway.token` alone opens it."""
_UNKNOWN = "/{rest}"
_CALLS = ("/v1/", "/rollout/{rollout}/attempt/{attempt}/v1/")
_ANY_ROLLOUT = "*"
_ASKS_FOR_TOKEN = (
    "this gateway asks for a token. Send gateway.token, or that of one of gateway.clients, as `Authorization: Bearer` or `x-api-key`."
)


# By model_construct, as it has no `token`, which is never read.
FULL_ACCESS = ClientSettings.model_construct(name="gateway.token", may_admin=True)
"""Permissions of `gateway.token`, and of everyone where the settings name no token."""


class AccessControl:
    """Middleware before every route: authentication, authorization and limits of the request."""

    def __init__(self, settings: GatewaySettings, policy_of: Callable[[str | None], str]) -> None:
        """Read the clients and their permissions; `policy_of` returns the name of the policy that answers for a request's `model`.

        Raises:
            SettingsError: two clients have the same name or token.
        """
        self._callers = _callers(settings)
        self._policy_of = policy_of
        self._settings = settings

    @web.middleware
    async def check(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Refuse a request that is not permitted; read the body of one that is, and pass it on."""
        route = request.match_info.route.resource
        path = route.canonical if route else _UNKNOWN
        if path in _OPEN:
            return await handler(request)
        caller = self._caller(request.headers)
        if caller is None:
            return error_response(401, _ASKS_FOR_TOKEN, "authentication_error")
        calls = path.startswith(_CALLS)
        refusal = _refuse_call(caller, request) if calls else _refuse_admin(caller, path)
        refusal = refusal or await self._read_body(request)
        if refusal is None and calls and caller.policies is not None:
            refusal = await self._refuse_policy(caller.name, caller.policies, request)
        return refusal or await handler(request)

    def _caller(self, headers: Mapping[str, str]) -> ClientSettings | None:
        """Return the caller whose token a request bears; full access where the settings name no token. None: an unknown token, or none."""
        if not self._callers:
            return FULL_ACCESS
        shown = (credential(headers.get("Authorization", "")), headers.get("x-api-key"))
        # By their hashes, so that the time of a look-up reveals nothing of a token.
        return next((caller for token in shown if token and (caller := self._callers.get(_digest(token)))), None)

    async def _read_body(self, request: web.Request) -> web.Response | None:
        """Read the body of a request; return a refusal where it is too large, too slow or not as declared."""
        most = self._settings.max_request_bytes
        if not request.can_read_body:
            return None
        try:
            if (request.content_length or 0) > most:
                raise web.HTTPRequestEntityTooLarge(most)
            await read_in_time(request, self._settings.body_seconds)
            return None
        except web.HTTPRequestEntityTooLarge:
            message = f"the request's body has more than gateway.max_request_bytes = {most} bytes. Send a smaller one."
            return error_response(413, message, "request_too_large")
        except TooSlowError as error:
            refusal = error_response(408, f"{error} (gateway.body_seconds). Send it faster.", "request_timeout")
        except UnreadableBodyError as error:
            refusal = error_response(400, str(error), "invalid_request_error")
        refusal.force_close()
        return refusal

    async def _refuse_policy(self, client: str, policies: Sequence[str], request: web.Request) -> web.Response | None:
        body = await request.read()
        names_no_model = not body and request.method in {"GET", "HEAD"}
        if names_no_model and request.match_info.get("rest") == "models":
            return None
        try:
            model = None if names_no_model else model_of(body)
        except JSON_ERRORS:
            return _forbidden(f"client {client!r} must name its policy as `model` in a JSON object.")
        policy = self._policy_of(model)
        if policy in policies:
            return None
        return _forbidden(f"client {client!r} may not call policy {policy!r}: gateway.clients allows it {sorted(policies)}.")


def tls_context(settings: GatewaySettings) -> ssl.SSLContext | None:
    """Return the TLS context of the gateway's certificate. None: plain HTTP.

    Raises:
        SettingsError: only one of certificate and key is set.
        GatewayError: a file cannot be read, or the two do not belong together.
    """
    certificate, key = settings.tls_cert, settings.tls_key
    if certificate is None and key is None:
        return None
    if certificate is None or key is None:
        lacking = "gateway.tls_cert" if certificate is None else "gateway.tls_key"
        raise SettingsError(f"{lacking} is not set, and TLS needs both a certificate and its key. Set it, or unset the other.")
    for name, file in (("tls_cert", certificate), ("tls_key", key)):
        try:
            file.read_bytes()
        except OSError as error:
            raise GatewayError(f"gateway.{name} = {str(file)!r} cannot be read ({error.strerror}). Name a PEM file that can.") from None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        # An empty password keeps OpenSSL from asking the terminal for that of an encrypted key.
        context.load_cert_chain(certificate, key, password="")
    except (ssl.SSLError, ValueError) as error:
        raise GatewayError(
            f"gateway.tls_cert = {str(certificate)!r} and gateway.tls_key = {str(key)!r} do not make a pair ({error}). "
            "Name a PEM certificate and its own PEM key, not encrypted."
        ) from None
    return context


def _callers(settings: GatewaySettings) -> dict[bytes, ClientSettings]:
    """Return the callers by the hash of their token."""
    callers = _with_agents(settings.token, FULL_ACCESS) if settings.token else {}
    names: set[str] = set()
    for client in settings.clients:
        added = _with_agents(client.token, client)
        for digest in added.keys() & callers.keys():
            raise SettingsError(f"gateway.clients: {client.name!r} has the same token as {callers[digest].name!r}. Give it another one.")
        if client.name in names:
            raise SettingsError(f"gateway.clients names {client.name!r} twice. Give each client a name of its own.")
        names.add(client.name)
        callers |= added
    return callers


def _with_agents(token: SecretStr, caller: ClientSettings) -> dict[bytes, ClientSettings]:
    """Return a caller by the hash of its token, and the agents of a worker that shows the same token by the hash of theirs."""
    plain = token.get_secret_value()
    callers = {_digest(plain): caller}
    if caller.may_admin:  # as a worker needs, which announces attempts
        callers[_digest(agent_token(plain))] = caller.model_copy(update={"name": f"agents of {caller.name}", "may_admin": False})
    return callers


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()


def _refuse_call(caller: ClientSettings, request: web.Request) -> web.Response | None:
    if caller.rollouts == _ANY_ROLLOUT:
        return None
    attempt = attempt_of(url_attempt(request), parse_baggage(request.headers.get("baggage")))
    if attempt is None:
        return _forbidden(f"client {caller.name!r} must name a rollout like {caller.rollouts!r}, in the URL or as baggage.")
    if fnmatchcase(attempt.rollout_id, caller.rollouts):
        return None
    return _forbidden(
        f"client {caller.name!r} may not call under rollout {attempt.rollout_id!r}: gateway.clients allows it {caller.rollouts!r}."
    )


def _refuse_admin(caller: ClientSettings, path: str) -> web.Response | None:
    if path == STATE_PATH and caller is not FULL_ACCESS:
        return _forbidden(f"client {caller.name!r} may not read the backends' keys. A gateway that follows this one needs gateway.token.")
    if caller.may_admin or path == _UNKNOWN:
        return None
    return _forbidden(f"client {caller.name!r} may only call models. Use gateway.token, or the token of a client with may_admin.")


def _forbidden(message: str) -> web.Response:
    return error_response(403, message, "permission_error")
