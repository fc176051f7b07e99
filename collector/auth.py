"""Who may speak to the store: everybody, or who knows the token.

In: what a request shows. Out: yes or no. Invariant: tokens are compared in constant time.
"""

from __future__ import annotations

import binascii
import hmac
from base64 import b64decode
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Guardian:
    """Compares what is shown with the store's token."""

    token: str | None
    """None: nothing is asked."""

    def admits(self, shown: str | None) -> bool:
        """Whether somebody who shows this may come in."""
        return self.token is None or (shown is not None and hmac.compare_digest(shown.encode(), self.token.encode()))

    def admits_bearer(self, authorization: str) -> bool:
        """Whether an Authorization header's bearer token is right."""
        return self.admits(_credential(authorization, "bearer"))

    def admits_clickhouse(self, headers: Mapping[str, str], parameters: Mapping[str, str]) -> bool:
        """Whether a request to ClickHouse's interface shows the token: as key, parameter, basic password or bearer token."""
        authorization = headers.get("Authorization", "")
        return self.admits(
            headers.get("X-ClickHouse-Key")
            or _credential(authorization, "bearer")
            or _basic_password(authorization)
            or parameters.get("password")
        )


def _credential(authorization: str, scheme: str) -> str | None:
    name, _, credential = authorization.partition(" ")
    return credential.strip() if name.lower() == scheme else None


def _basic_password(authorization: str) -> str | None:
    packed = _credential(authorization, "basic")
    if packed is None:
        return None
    try:
        return b64decode(packed, validate=True).decode(errors="surrogateescape").partition(":")[2]
    except binascii.Error:
        return None
