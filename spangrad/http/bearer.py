"""Header with the token that a store, a gateway or a queue requires."""

from __future__ import annotations


def bearer(token: str | None) -> dict[str, str]:
    """Return the header for a token; empty without one."""
    return {} if token is None else {"authorization": f"Bearer {token}"}
