"""Attacks from inside a sandbox, which rungs hold them, and the table of docs/guides/sandboxes.md that says so.

`python -m tests.support.escapes` writes the table; `tests/integration/test_sandbox_escapes.py` runs each attack on each rung.
"""

from __future__ import annotations

import re
from pathlib import Path

from spangrad.types import SandboxRung

BUBBLEWRAP, LANDLOCK = SandboxRung.BUBBLEWRAP, SandboxRung.LANDLOCK
BOTH = frozenset({BUBBLEWRAP, LANDLOCK})
ATTACKS: dict[str, tuple[str, frozenset[SandboxRung]]] = {
    "read_file": ("read a file of this machine that everyone may read", BOTH),
    "write_file": ("write to a directory that everyone may write to", BOTH),
    "change_directory": ("change its own working directory", BOTH),
    "symlink_read": ("read through a symbolic link in its own directory", BOTH),
    "symlink_write": ("write through a symbolic link to a directory outside", BOTH),
    "hard_link": ("make a hard link to a file outside", BOTH),
    "tcp": ("connect to a TCP port of this machine", BOTH),
    "udp": ("send a datagram to this machine", BOTH),
    "unix_socket": ("connect to a socket in the file system", BOTH),
    "abstract_socket": ("connect to an abstract socket", BOTH),
    "list_processes": ("list the command lines of other processes", BOTH),
    "signal_process": ("signal a process outside", BOTH),
    "trace_process": ("trace a process outside", BOTH),
    "unshare_user": ("create a user namespace", BOTH),
    "gain_privileges": ("gain privileges by a program's file (setuid)", BOTH),
    "fork_bomb": ("start more processes than its limit", BOTH),
    "fill_memory": ("allocate more memory than its limit", BOTH),
    "large_file": ("write a file larger than its limit", BOTH),
    "fill_disk": ("write more files than its limit in all", frozenset({BUBBLEWRAP})),
    "outlive": ("leave a process without a parent, session or environment behind", BOTH),
}
"""Attacks by name: what the program tries, and the rungs that hold it."""
PAGE = Path(__file__).parents[2] / "docs/guides/sandboxes.md"
_TABLE = re.compile(r"\| a program tries to \|.*?\n\n", re.DOTALL)


def table() -> str:
    """The table of the page."""
    lines = ["| a program tries to | bubblewrap | landlock |", "| --- | --- | --- |"]
    for text, holding in ATTACKS.values():
        marks = ["held" if rung in holding else "**not held**" for rung in (BUBBLEWRAP, LANDLOCK)]
        lines.append(f"| {text} | {' | '.join(marks)} |")
    return "\n".join(lines) + "\n\n"


def table_of_page() -> str:
    """The table as the page has it."""
    match = _TABLE.search(PAGE.read_text())
    assert match is not None
    return match[0]


if __name__ == "__main__":
    PAGE.write_text(_TABLE.sub(table(), PAGE.read_text()))
