"""Facts of this machine: cores, memory, GPUs, free ports, and vLLM's environment.

In: the kernel's files, and nvidia-smi where there is one. Out: `MachineFacts`. Invariant: nothing heavy is imported or started.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from spangrad.errors import SpangradError
from spangrad.processes import free_ports, require_free_port

_SECONDS = 20
VLLM_PYTHON = Path(".venv-vllm/bin/python")
"""Python interpreter of vLLM's environment, as `make setup` makes it, relative to a project's directory."""
CHECKOUT = Path(__file__).resolve().parents[2]
"""Directory of the checkout, or of the installed packages."""
_CONTROL_GROUP = Path("/sys/fs/cgroup")
"""Directory of the control group of a container's processes (version 2)."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU."""

    name: str
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class MachineFacts:
    """Facts of a machine."""

    cores: int
    memory_bytes: int
    """Memory that processes can still use, in bytes."""
    gpus: tuple[Gpu, ...]
    vllm_python: Path | None
    """Python interpreter of vLLM's environment. None: there is no such environment."""


def read_machine(project: Path) -> MachineFacts:
    """Read the facts of this machine; vLLM's environment is searched from the project's directory."""
    return MachineFacts(len(os.sched_getaffinity(0)), available_memory(), _gpus(), find_vllm_python(project))


def find_vllm_python(*starts: Path) -> Path | None:
    """Return the Python of the nearest `.venv-vllm`: in a directory, above it, or in spangrad's checkout. None: there is none."""
    directories = [directory for start in starts for directory in (start.absolute(), *start.absolute().parents)]
    return next((directory / VLLM_PYTHON for directory in (*directories, CHECKOUT) if os.access(directory / VLLM_PYTHON, os.X_OK)), None)


def has_gpu() -> bool:
    """Return whether a GPU's driver is loaded."""
    return any(Path("/dev").glob("nvidia[0-9]*")) or Path("/dev/kfd").exists()


def available_memory() -> int:
    """Return the memory that processes can still use, in bytes: the kernel's estimate, within the limit of the control group."""
    lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    available = int(lines["MemAvailable"].split()[0]) * 1024
    limit, used = (_number(_CONTROL_GROUP / f"memory.{name}") for name in ("max", "current"))
    if limit is None or used is None:
        return available
    return max(min(available, limit - used + _file_cache()), 0)


def choose_ports(preferred: tuple[int, ...]) -> tuple[int, ...]:
    """Return a free port for each preferred one: itself, unless a process listens on it."""
    return tuple(port if is_free("127.0.0.1", port) else free_ports(1)[0] for port in preferred)


def is_free(host: str, port: int) -> bool:
    """Return whether no process listens on a port."""
    try:
        require_free_port(host, port, "the port")
    except SpangradError:
        return False
    return True


def _file_cache() -> int:
    """Return the size of the cached files that the control group counts as used, and that the kernel gives up first, in bytes."""
    try:
        counts = dict(line.split() for line in (_CONTROL_GROUP / "memory.stat").read_text().splitlines())
        return int(counts["inactive_file"])
    except (OSError, ValueError, KeyError):
        return 0


def _number(file: Path) -> int | None:
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return None


def _gpus() -> tuple[Gpu, ...]:
    program = shutil.which("nvidia-smi")
    if program is None:
        return ()
    query = [program, "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError):
        return ()
    rows = [line.rpartition(",") for line in answer.stdout.splitlines() if line.strip()]
    return tuple(Gpu(name.strip(), int(memory) * 2**20) for name, _, memory in rows if memory.strip().isdigit())
