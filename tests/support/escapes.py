"""Attacks from inside a sandbox, which rungs hold them, and the table of docs/guides/sandboxes.md that says so.

`python -m tests.support.escapes` writes the table; `tests/integration/test_sandbox_escapes.py` runs each attack on each rung.
"""

from __future__ import annotations

import ctypes
import os
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
    "signal_worker": ("signal the process that started it", BOTH),
    "memory_of_process": ("read the memory of a process outside (/proc/PID/mem)", BOTH),
    "variables_of_process": ("read the environment of a process outside", BOTH),
    "root_of_process": ("read files through the root of a process outside (/proc/PID/root)", BOTH),
    "symlink_tmp": ("list this machine's /tmp through a symbolic link", BOTH),
    "shared_memory": ("read a segment of System V's shared memory", BOTH),
    "semaphores": ("change a System V semaphore", BOTH),
    "message_queue": ("open a POSIX message queue", BOTH),
    "unshare_user": ("create a user namespace", BOTH),
    "gain_privileges": ("gain privileges by a program's file (setuid)", BOTH),
    "fork_bomb": ("start more processes than its limit", BOTH),
    "fill_memory": ("allocate more memory than its limit", BOTH),
    "large_file": ("write a file larger than its limit", BOTH),
    "fill_disk": ("write more files than its limit in all", frozenset({BUBBLEWRAP})),
    "outlive": ("leave a process without a parent, session or environment behind", BOTH),
}
"""Attacks by name: what the program tries, and the rungs that hold it."""
_libc = ctypes.CDLL(None, use_errno=True)
_SIZE, _IPC_RMID, _CREATE = 4096, 0, 0o1666
"""Bytes of the segment; the order to remove something; IPC_CREAT, for everyone."""


class InterProcess:
    """A segment of shared memory, a semaphore and a message queue that everyone may use, and that programs are to be kept from."""

    def __init__(self, name: str) -> None:
        key = int(name[-7:], 16)
        _libc.shmat.restype = ctypes.c_void_p
        self._segment = _required(_libc.shmget(key, _SIZE, _CREATE))
        address = _libc.shmat(self._segment, None, 0)
        ctypes.memmove(address, b"secret", 6)
        _libc.shmdt(ctypes.c_void_p(address))
        self._semaphore = _required(_libc.semget(key, 1, _CREATE))
        short = f"/{name[-12:]}"  # the whole name would be in the command lines of attacks, where others are looked for
        self._name = short.encode()
        mask = os.umask(0)
        try:
            self._queue = _required(_libc.mq_open(self._name, os.O_CREAT | os.O_RDWR, 0o666, None))
        finally:
            os.umask(mask)
        self.facts = {"key": key, "queue": short}

    def close(self) -> None:
        """Remove all three."""
        _libc.shmctl(self._segment, _IPC_RMID, None)
        _libc.semctl(self._semaphore, 0, _IPC_RMID)
        os.close(self._queue)
        _libc.mq_unlink(self._name)


def _required(result: int) -> int:
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result


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
