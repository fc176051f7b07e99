"""What a process holds, as Linux counts it: memory at its height, open files.

In: a process id. Out: numbers. Invariant: the height is since `forget_height`, or since the process began.
"""

from __future__ import annotations

from pathlib import Path


def forget_height(pid: int) -> None:
    """Count the height of memory from now on."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")


def height_mib(pid: int) -> int:
    """The most memory that was resident, in MiB."""
    return _status(pid, "VmHWM")


def resident_mib(pid: int) -> int:
    """The memory that is resident, in MiB."""
    return _status(pid, "VmRSS")


def open_files(pid: int) -> int:
    """How many descriptors are open."""
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def _status(pid: int, name: str) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:")) // 1024
