"""Bearer tokens of requests.

In: an Authorization header, a token. Out: whether the header bears it. Invariants: tokens are compared in constant time, and appear in no
answer; an agent's token does not reveal the server's that it is derived from.
"""

from __future__ import annotations

import hmac


def credential(authorization: str, scheme: str = "bearer") -> str | None:
    """Return the credential of an Authorization header. None: the header has another scheme, or is empty."""
    name, _, shown = authorization.partition(" ")
    return shown.strip() if name.lower() == scheme else None


def agent_token(token: str) -> str:
    """Derive the token of agents from a server's: in hex, the HMAC-SHA256 of `spangrad.agent` with the server's token as key.

    A server that has `token` accepts this one for what agents do, and for nothing else. Every replica of it, and every worker, derives the
    same one.
    """
    return hmac.digest(token.encode(errors="surrogateescape"), b"spangrad.agent", "sha256").hex()


def is_token(shown: str | None, token: str | None) -> bool:
    """Return whether a request shows a token; False where either is missing."""
    if shown is None or token is None:
        return False
    return hmac.compare_digest(shown.encode(errors="surrogateescape"), token.encode(errors="surrogateescape"))
