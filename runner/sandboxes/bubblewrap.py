"""Sandboxes by bubblewrap: own mounts, processes, network and user, and a filter of system calls.

In: a policy. Out: a command line that runs another one in a sandbox of its own. A user's sandboxes have a user namespace, in which
another one cannot be created. Root needs none; its programs run as a user that no other sandbox has, so that the limit on processes, which
Linux never applies to root, holds.
"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from runner.sandboxes import launcher
from runner.sandboxes.images import binds
from runner.sandboxes.policy import PRIVATE_DIRECTORY, SYSTEM, SandboxPolicy, inner_interpreter
from spangrad.agent.command import STARTED_VARIABLE

FIRST_USER = 0x6F000000
"""Smallest user id of sandboxes that root starts; the process id is added, so that no two that live have the same."""
_FILTER_DESCRIPTOR = 9


def shortcoming() -> str | None:
    """Return the reason for which this machine cannot run bubblewrap. None: it may."""
    missing = [name for name in ("bwrap", "prlimit", "setpriv") if shutil.which(name) is None]
    if missing:
        return f"{', '.join(missing)} not in PATH: install the system's packages bubblewrap and util-linux"
    return None


def command(policy: SandboxPolicy, filter_file: Path, control: int | None) -> list[str]:
    """Return the beginning of a command line that runs the rest of it in a sandbox.

    `control` is the descriptor of the relay's socket; a launcher inside hands over the listeners, and records that the command has begun.
    None: there is no launcher, and no service is reached.
    """
    root = os.geteuid() == 0
    inner = ["prlimit", *(f"--{name.lower()}={limit}:{limit}" for name, limit in policy.limits.rlimits().items()), "--"]
    shown = policy.visible()
    if control is not None:
        interpreter, needed = sys.executable, [Path(sys.prefix), Path(sys.base_prefix)]
        if policy.image is not None:
            interpreter, needed = str(inner_interpreter(policy.image)), []
        covered = {*shown, *(map(Path, SYSTEM) if policy.image is None else ())}
        shown += [path for path in (*needed, Path(launcher.__file__)) if not {path, *path.parents} & covered]
        services = {} if policy.host_network else policy.services
        # Programs try the address of IPv4 for `localhost` as well.
        addresses = [f"{host if host == '::1' else '127.0.0.1'}:{port}" for port, (host, _) in services.items()]
        inner += [interpreter, "-I", "-S", launcher.__file__, STARTED_VARIABLE, str(control), ",".join(addresses)]
    switch = 'setpriv --reuid="$user" --regid="$user" --clear-groups --inh-caps=-all -- ' if root else ""
    script = (
        f"{f'user=$(({FIRST_USER} + $$)); ' if root else ''}exec {_FILTER_DESCRIPTOR}<{shlex.quote(str(filter_file.resolve()))}; "
        f'exec {shlex.join(_bubblewrap(policy, shown, root=root))} -- {switch}{shlex.join(inner)} "$@"'
    )
    return ["/bin/sh", "-c", script, "sandbox"]


def _bubblewrap(policy: SandboxPolicy, shown: Sequence[Path], *, root: bool) -> list[str]:
    size = ["--size", str(policy.limits.disk_bytes), "--tmpfs"]
    words = ["bwrap", "--unshare-pid", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try", "--die-with-parent"]
    words += [] if policy.host_network else ["--unshare-net"]
    words += ["--cap-drop", "ALL"]
    words += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"] if root else ["--unshare-user", "--disable-userns"]
    words += binds(policy.image.root, shown) if policy.image is not None else _system()
    words += ["--proc", "/proc", "--dev", "/dev", "--perms", "1777", *size, "/dev/shm", "--remount-ro", "/dev"]
    words += ["--perms", "1777", *size, PRIVATE_DIRECTORY]
    # Directories above what is shown would be closed to all but root.
    for parent in sorted({parent for path in shown for parent in path.parents} - {Path("/"), Path(PRIVATE_DIRECTORY)}):
        words += ["--perms", "0755", "--dir", str(parent)]
    for path in shown:
        words += ["--ro-bind", str(path), str(path)]
    return [*words, "--remount-ro", "/", "--chdir", str(policy.directory), "--seccomp", str(_FILTER_DESCRIPTOR)]


def _system() -> list[str]:
    """Return the words that show this machine's programs and libraries."""
    words = ["--dir", "/var", "--symlink", PRIVATE_DIRECTORY, "/var/tmp"]
    for system in SYSTEM:
        path = Path(system)
        if path.is_symlink():
            words += ["--symlink", str(path.readlink()), system]
        elif path.is_dir():
            words += ["--ro-bind", system, system]
    return words
