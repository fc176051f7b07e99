"""Authentication of requests: a write token permits everything, a read token queries only, an agents' token sends only.

In: the credentials of a request. Out: its role, or none. Invariant: tokens are compared in constant time, and appear in no answer.
"""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from spangrad.http.tokens import agent_token, credential, is_token


class TokenRole(StrEnum):
    """Permissions of a request, by the token that it bears."""

    WRITER = "writer"
    """May send spans, query and change tables."""
    READER = "reader"
    """May query, within limits."""


@dataclass(frozen=True, slots=True)
class Guardian:
    """Compares the credentials of requests with the store's tokens."""

    token: str | None
    """Token of writers. None: no token is required."""
    read_token: str | None = None
    """Token of readers. None: there is no such role."""

    def admits_bearer(self, authorization: str) -> bool:
        """Return whether the sender of this Authorization header may send spans: a writer, or an agent that a worker started."""
        shown = credential(authorization)
        return self._role(shown) is TokenRole.WRITER or (self.token is not None and is_token(shown, agent_token(self.token)))

    def clickhouse_role(self, headers: Mapping[str, str], parameters: Mapping[str, str]) -> TokenRole | None:
        """Return the role of a request to ClickHouse's interface, which bears a token as key, bearer, basic password or parameter."""
        authorization = headers.get("Authorization", "")
        return self._role(
            headers.get("X-ClickHouse-Key") or credential(authorization) or _basic_password(authorization) or parameters.get("password")
        )

    def _role(self, shown: str | None) -> TokenRole | None:
        if is_token(shown, self.token):
            return TokenRole.WRITER
        if is_token(shown, self.read_token):
            return TokenRole.READER
        return TokenRole.WRITER if self.token is None else None


def _basic_password(authorization: str) -> str | None:
    packed = credential(authorization, "basic")
    if packed is None:
        return None
    try:
        return b64decode(packed, validate=True).decode(errors="surrogateescape").partition(":")[2]
    # Also of characters that are not ASCII.
    except ValueError:
        return None
