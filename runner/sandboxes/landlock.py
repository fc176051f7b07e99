"""Sandboxes by Landlock, a filter of system calls and limits: the rung where the kernel grants no namespaces, as in most containers.

In: a policy. Out: a command line, as of bubblewrap. Files and abstract sockets outside, signals to processes outside and connections to
other ports are refused; the machine's own network is shared, and so is its list of processes, which `/proc` would show: it is not readable.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from pathlib import Path

from runner.sandboxes import confinement
from runner.sandboxes.bubblewrap import FIRST_USER
from runner.sandboxes.policy import SYSTEM, SandboxPolicy, is_open_to_others
from spangrad.agent.command import STARTED_VARIABLE
from spangrad.processes import process_start

_LEAST_ABI = 6
"""Version of Landlock that confines signals and abstract sockets: Linux 6.12."""
_DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom", "/dev/tty")


def shortcoming(policy: SandboxPolicy) -> str | None:
    """Return the reason for which this machine cannot confine by Landlock. None: it may."""
    if sys.platform != "linux" or (version := confinement.abi()) < _LEAST_ABI:
        return f"Landlock's version is {version if sys.platform == 'linux' else 0}, and {_LEAST_ABI} is needed (Linux 6.12)"
    if policy.image is not None:
        return "an image needs mounts of its own, and it has none"
    if os.geteuid() == 0:
        closed = [path for path in policy.visible() if not is_open_to_others(path)]
        if closed:
            return f"a user of its own cannot read {closed[0]}: only root can, and Landlock opens nothing"
    return None


def command(policy: SandboxPolicy, filter_file: Path, scratch: Path) -> list[str]:
    """Return the beginning of a command line that runs the rest of it confined; `scratch` holds private directories."""
    plan = {
        "readable": [*filter(os.path.isdir, SYSTEM), *map(str, policy.visible())],
        "devices": [device for device in _DEVICES if Path(device).exists()],
        "ports": None if policy.host_network else [port for _, port in policy.services.values()],
        "filter": str(filter_file.resolve()),
        "directory": str(policy.directory),
        "scratch": str(scratch.resolve()),
        "first_user": FIRST_USER,
        "started": STARTED_VARIABLE,
        "limits": {f"RLIMIT_{name}": limit for name, limit in policy.limits.rlimits().items()},
    }
    return [sys.executable, "-I", "-S", confinement.__file__, json.dumps(plan)]


def remove_left_behind(scratch: Path) -> None:
    """Remove what confining processes left that were killed: their private directories, and, as root, the processes of their users."""
    for path in scratch.glob("[0-9]*-*"):
        pid = int(path.name.partition("-")[0])
        if process_start(pid):
            continue
        if os.geteuid() == 0:
            _kill_of_user(FIRST_USER + pid)
        shutil.rmtree(path, ignore_errors=True)


def _kill_of_user(user: int) -> None:
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if process.stat().st_uid == user:
                os.kill(int(process.name), signal.SIGKILL)
        except OSError:
            continue  # it has ended meanwhile
