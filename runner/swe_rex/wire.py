"""Wire of SWE-ReX 1.4: the bodies of its requests, its refusals, and the names of its errors.

Source: `swerex/runtime/abstract.py` and `swerex/server.py` of the package swe-rex 1.4.0. Times are in seconds; paths are inside.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

ERROR_STATUS = 511
"""HTTP status of a request that raised: the client raises the same error."""
KEY_HEADER = "X-API-Key"
REQUEST_HEADER = "X-Request-ID"
ERRORS = "swerex.exceptions"
"""Module of the errors that are the protocol's own."""


class RexError(Exception):
    """An error that the client raises again."""

    def __init__(self, name: str, message: str, extra: dict[str, Any] | None = None) -> None:
        """Keep the error's class, as `MODULE.NAME` or the name of one of the protocol's own, its message and its further values."""
        super().__init__(message)
        self.class_path = name if "." in name else f"{ERRORS}.{name}"
        self.extra = extra or {}


class RexSession(msgspec.Struct, frozen=True):
    """Request for a shell that stays."""

    session: str = "default"
    session_type: Literal["bash"] = "bash"
    startup_source: list[str] = []
    """Files that the shell reads first."""
    startup_timeout: float = 1.0


class RexClosedSession(msgspec.Struct, frozen=True):
    """Request to end a shell."""

    session: str = "default"
    session_type: Literal["bash"] = "bash"


class RexAction(msgspec.Struct, frozen=True, tag_field="action_type", tag="bash"):
    """Command for a shell."""

    command: str
    session: str = "default"
    timeout: float | None = None
    is_interactive_command: bool = False
    is_interactive_quit: bool = False
    check: Literal["silent", "raise", "ignore"] = "raise"
    """`raise`: another exit code than 0 is an error; `ignore`: no exit code is returned."""
    error_msg: str = ""
    expect: list[str] = []
    """Outputs that end the wait for the command as well."""


class RexInterrupt(msgspec.Struct, frozen=True, tag_field="action_type", tag="bash_interrupt"):
    """Interruption of a shell's command."""

    session: str = "default"
    timeout: float = 0.2
    n_retry: int = 3
    expect: list[str] = []


class RexCommand(msgspec.Struct, frozen=True):
    """Program to run to its end."""

    command: str | list[str]
    timeout: float | None = None
    shell: bool = False
    check: bool = False
    error_msg: str = ""
    env: dict[str, str] | None = None
    cwd: str | None = None
    merge_output_streams: bool = False


class RexRead(msgspec.Struct, frozen=True):
    """Request for a file's text."""

    path: str
    encoding: str | None = None
    errors: str | None = None


class RexWrite(msgspec.Struct, frozen=True):
    """Request to write a file."""

    path: str
    content: str
