"""Access to the page: its token, the hosts by which it may be asked, and the headers under which a browser runs nothing but its own files.

In: requests. Out: whether they may be answered, and the headers of every answer. Invariant: beyond loopback every view needs the token;
without one a request that names another host is refused, so that no foreign site reads the page by a name of its own for this machine.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from urllib.parse import quote, urlsplit

from aiohttp import web
from pydantic import SecretStr

from spangrad.http.tokens import credential, is_token
from spangrad.processes import LOOPBACK

COOKIE = "spangrad_page"
COOKIE_SECONDS = 30 * 86400
"""Time for which a browser that has shown the token is known, in seconds."""
ACTION_HEADER = "X-Spangrad-Action"
NO_ACTIONS = "this page offers no actions. Set page.actions to true."
_OPEN = ("/healthz", "/login")
"""Paths that reveal nothing of the store, beside the files below /static/."""
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; form-action 'self'; base-uri 'none'; "
        "frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}
"""Headers of every answer. Trusted types: no text becomes markup or a script, not even by an error of ours."""


class PageAccess:
    """Decision whether a request may be answered."""

    def __init__(self, token: SecretStr | None) -> None:
        """Store the token. None: requests need none, and must name this machine."""
        self._token = token.get_secret_value() if token else None
        self.action_token = secrets.token_urlsafe(32)
        """Text that the page's own documents have, and that a request for an action shows: no other site can read it."""

    def refusal(self, request: web.Request) -> web.Response | None:
        """Return the answer to a request that may not be answered. None: it may."""
        if self._token is None:
            name = urlsplit(f"//{request.host}").hostname or ""
            if name in LOOPBACK:
                return None
            return _text(
                421, f"this page answers to the names of this machine alone, not to {name!r}. Set page.token to serve it to others."
            )
        if request.path in _OPEN or request.path.startswith("/static/") or self._is_known(request):
            return None
        if request.method == "GET" and "text/html" in request.headers.get("Accept", ""):
            raise web.HTTPSeeOther(f"/login?next={quote(request.path_qs, safe='')}")
        return _text(401, "this page asks for its token: open /login, or send `Authorization: Bearer` with page.token.")

    def action_problem(self, request: web.Request) -> str:
        """Return a sentence on why a request that may be answered may change nothing. Empty: it may."""
        origin = request.headers.get("Origin")
        if request.headers.get("Sec-Fetch-Site", "same-origin") != "same-origin" or (origin and urlsplit(origin).netloc != request.host):
            return "this request comes from another site: nothing was changed."
        if request.content_type != "application/json":
            return "an action is asked for with Content-Type: application/json. Nothing was changed."
        shown = credential(request.headers.get("Authorization", ""))
        if is_token(request.headers.get(ACTION_HEADER), self.action_token) or is_token(shown, self._token):
            return ""
        return (
            "this request lacks the token for actions: nothing was changed. Load the page again, as its server has been restarted; "
            "a program sends page.token as a bearer."
        )

    def accepts(self, shown: str) -> bool:
        """Return whether a text is the token."""
        return is_token(shown, self._token)

    def remember(self, response: web.StreamResponse, *, secure: bool) -> None:
        """Make the browser known: by a cookie that scripts cannot read and other sites cannot send, and that is not the token itself."""
        response.set_cookie(COOKIE, self._proof(), max_age=COOKIE_SECONDS, httponly=True, samesite="Strict", secure=secure, path="/")

    def _is_known(self, request: web.Request) -> bool:
        shown = credential(request.headers.get("Authorization", ""))
        return is_token(shown, self._token) or is_token(request.cookies.get(COOKIE), self._proof())

    def _proof(self) -> str:
        return hmac.new((self._token or "").encode(), b"spangrad page", hashlib.sha256).hexdigest()


def local_target(address: str) -> str:
    """Return an address if it is one of this server's paths, else the start page: a login never leads to another site."""
    path = address if address.startswith("/") and not address.startswith(("//", "/\\")) else "/"
    return path if path.isprintable() and "\\" not in path else "/"


def _text(status: int, sentence: str) -> web.Response:
    return web.Response(status=status, text=f"{sentence}\n")
