"""Which process holds a lease, and whether it is dead.

In: /proc. Out: a name that no other process has, nor will have. Invariant: a process is called dead only by one that sees the same table of
processes: of another machine, container or boot nothing is said, and its lease is waited out.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path


def this_process() -> str:
    """HOST PID START TABLE: for people where it runs, and for `is_dead` which process of which table of processes it is."""
    pid = os.getpid()
    return f"{socket.gethostname()} {pid} {_started(pid)} {_process_table()}"


def is_dead(holder: str) -> bool:
    """Whether a holder has ended; False where that cannot be known."""
    _, pid, started, table = holder.split(" ")
    return table == _process_table() and _started(int(pid)) != started


def shown(holder: str) -> str:
    """A holder for people: `process PID on HOST`."""
    host, pid, *_ = holder.split(" ")
    return f"process {pid} on {host}"


def _process_table() -> str:
    """Of this boot of this kernel, in this container."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{Path('/proc/self/ns/pid').readlink()}"


def _started(pid: int) -> str:
    """When a process started, in ticks since boot; empty where there is none, or only its corpse."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    # The name in brackets may hold anything; state is the third field, the start the 22nd.
    fields = text.rpartition(")")[2].split()
    return "" if fields[0] in {"Z", "X"} else fields[19]
