"""Bearer tokens of requests.

In: an Authorization header, a token. Out: whether the header bears it. Invariant: tokens are compared in constant time, and appear in no
answer.
"""

from __future__ import annotations

import hmac


def credential(authorization: str, scheme: str = "bearer") -> str | None:
    """Return the credential of an Authorization header. None: the header has another scheme, or is empty."""
    name, _, shown = authorization.partition(" ")
    return shown.strip() if name.lower() == scheme else None


def is_token(shown: str | None, token: str | None) -> bool:
    """Return whether a request shows a token; False where either is missing."""
    if shown is None or token is None:
        return False
    return hmac.compare_digest(shown.encode(errors="surrogateescape"), token.encode(errors="surrogateescape"))
