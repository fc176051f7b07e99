"""Requests that pages of foreign web sites have a browser of this machine send to its services.

In: the headers Host and Origin. Out: why a request may come from such a page. Invariant: a name that a foreign site can own is refused,
since that site may have it lead to this machine. It imports no packages of servers, as vLLM's middleware uses it.
"""

from __future__ import annotations

import ipaddress
from urllib.parse import urlsplit

from spangrad.processes import LOOPBACK

_OWN_ENDINGS = (".localhost", ".internal")
"""Endings of names that cannot be registered; container engines name this machine by the second one."""


def foreign_problem(host: str | None, origin: str | None) -> str:
    """Return why a request may come from a page of a foreign site. Empty: it does not.

    Args:
        host: header Host. None: there is none, as no browser leaves it out.
        origin: header Origin. None or empty: there is none.
    """
    if host is not None and not _is_own(name := _name(host)):
        return f"it names the host {name!r}, which a foreign site may have led here"
    if origin and (site := origin.partition("://")[2]) != host and _name(site) not in LOOPBACK:
        return f"a page of {origin!r} sends it"
    return ""


def _name(host: str) -> str:
    """Return the name of a host, without its port and the dot of a full name, in lower case; what is malformed stays as it is."""
    try:
        return (urlsplit(f"//{host}").hostname or host).removesuffix(".")
    except ValueError:
        return host


def _is_own(name: str) -> bool:
    """Return whether no foreign site can own a name: it is an address, has no dot, or a reserved ending."""
    if "." not in name or name.endswith(_OWN_ENDINGS):
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
